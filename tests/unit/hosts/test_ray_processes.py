"""How the ends of processes that Ray has started are learned of."""

import errno
import os
import subprocess
import sys
import threading

import pytest

from conveyor import descriptors
from conveyor.engines.ray import processes
from conveyor.engines.ray import processes as ends
from conveyor.engines.ray.processes import Processes, Resident
from conveyor.runtime.events import EventLoop


@pytest.fixture
def events(leaves_nothing):
    with leaves_nothing():
        made = EventLoop("processes-test")
        yield made
        made.close()


def test_an_end_is_told_where_no_descriptor_is_left(events, monkeypatch):
    """Before Linux 6.15 nobody but its parent knows how it was, and that may look late."""

    def refused(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for module in ends, processes:
        monkeypatch.setattr(module, "exit_status", lambda pidfd: None)
    told = threading.Event()
    one = Resident(on_end=told.set, word="exit code 3")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        Processes(events).add(one, child.pid)
        with monkeypatch.context() as patch:
            patch.setattr(descriptors, "duplicate", refused)
            child.communicate(b"\n")
            assert told.wait(60)
    finally:
        child.kill()
        child.wait()
    assert one.pidfd == -1
    assert one.wait_status() == 3 << 8
