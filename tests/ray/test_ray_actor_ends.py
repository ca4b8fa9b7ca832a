"""How an actor's process ends that Ray has started: with all that is the user's, and little that is not."""

import atexit
import gc
import json
import os
import sys
import threading
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
from ray_nodes import get

import conveyor

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("time_to_end")


class Marks:
    """Each of its methods leaves a file for what has happened at the end."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def register(self):
        atexit.register(self.in_thread)
        atexit.register((self.folder / "atexit").touch)

    def in_thread(self):
        """Threads that handlers start are theirs to wait for."""
        thread = threading.Thread(target=(self.folder / "thread").touch)
        thread.start()
        thread.join()

    def open(self):
        """Files, of a global and in a circle, whose text is still to be written."""
        sys.left_open = (self.folder / "of-a-global").open("w")
        sys.left_open.write("kept")
        circle = [(self.folder / "in-a-circle").open("w")]
        circle.append(circle)
        circle[0].write("kept")

    def leave_in_a_module(self):
        json.left_there = Left(self.folder / "destroyed")

    def found(self):
        """How many objects a collection looks through, and how many it does not."""
        return len(gc.get_objects()), gc.get_freeze_count()


class Left:
    def __init__(self, path):
        # Modules may be gone when it is destroyed.
        self.leave_mark = partial(os.open, str(path), os.O_CREAT)

    def __del__(self):
        self.leave_mark()


def test_the_users_end_is_whole(rt, tmp_path):
    marks = conveyor.remote(Marks).remote(str(tmp_path))
    get([marks.register.remote(), marks.open.remote()])
    conveyor.kill(marks, graceful=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "atexit": "",
        "thread": "",
        "of-a-global": "kept",
        "in-a-circle": "kept",
    }


def test_what_modules_hold_is_not_destroyed_as_on_the_local_engine(rt, tmp_path):
    marks = conveyor.remote(Marks).remote(str(tmp_path))
    get([marks.leave_in_a_module.remote(), marks.register.remote()])
    conveyor.kill(marks, graceful=True)
    assert {path.name for path in tmp_path.iterdir()} == {"atexit", "thread"}


def test_an_end_does_not_look_through_what_ray_has_loaded(rt, tmp_path):
    marks = conveyor.remote(Marks).remote(str(tmp_path))
    found, frozen = get(marks.found.remote())
    assert found < frozen
