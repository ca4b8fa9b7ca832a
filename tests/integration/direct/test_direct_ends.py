"""Values that have stayed, when their session ends."""

import threading
import weakref

import inside
import numpy as np
import pytest
from nodes_apart import APART

import conveyor
from conveyor.exceptions import ObjectLostError, RuntimeStateError, SessionEndedError
from conveyor.experimental import wait_tensor_freed

WHILE_DROPPING = """
import os, time
import numpy as np
import conveyor

here = os.getpid()

class Slow:
    def __init__(self):
        self.array = np.zeros(10)

    def __del__(self):
        if os.getpid() == here:
            print("dropping", flush=True)
            open("dropping", "w").close()
            time.sleep(3)

class User:
    def total(self, value):
        return float(value.array.sum())

conveyor.init()
user = conveyor.remote(User).remote()
ref = conveyor.put(Slow(), tensor_transport="auto")
conveyor.get(user.total.remote(ref))
del ref
end = time.monotonic() + 60
while not os.path.exists("dropping"):
    assert time.monotonic() < end
    time.sleep(0.002)
conveyor.shutdown()
print("ended")
"""


def test_a_session_ends_while_a_value_is_let_go_of(scripts):
    said, errors = scripts.start(WHILE_DROPPING).communicate(timeout=200)
    assert (said.split(), errors) == (["dropping", "ended"], "")


def test_a_value_goes_with_its_last_ref_also_after_its_session(leaves_nothing, wait_until):
    with leaves_nothing():
        conveyor.init()
        array = np.ones(1000)
        alive = weakref.ref(array)
        ref = conveyor.put(array, tensor_transport="auto")
        del array
        conveyor.shutdown()
        assert alive() is not None
        del ref
        wait_until(lambda: alive() is None)
        wait_until(
            lambda: "conveyor-releasing" not in [thread.name for thread in threading.enumerate()]
        )


def test_who_waits_for_memory_to_be_freed_hears_of_the_end(wait_until):
    conveyor.init()
    array, told = np.ones(1000), []
    ref = conveyor.put(array, tensor_transport="auto")

    def wait():
        try:
            wait_tensor_freed(array)
        except SessionEndedError as error:
            told.append(error)

    threading.Thread(target=wait, daemon=True).start()
    wait_until(inside.awaited_ends)
    conveyor.shutdown()
    wait_until(lambda: told)
    with pytest.raises(SessionEndedError):
        wait_tensor_freed(array)
    assert not conveyor.is_initialized()
    del ref


@conveyor.remote
class Maker:
    @conveyor.method(tensor_transport="auto")
    def make(self):
        return np.ones(1000)


def test_a_value_of_an_ended_session_is_told_as_such():
    """In the next one another process has its place, which is no owner that has died."""
    conveyor.init()
    maker = Maker.options(name="ann").remote()
    ref = maker.make.remote()
    assert conveyor.get(ref).sum() == 1000
    conveyor.shutdown()
    with pytest.raises(RuntimeStateError, match="its session has ended"):
        conveyor.get(ref)
    told = "ann kept .* session in which it was made"
    if APART:  # all that it may be is named where somebody on another node has its place
        told += "|ann kept .* or its session has ended"
    conveyor.init()
    try:
        for actors in range(2):
            with pytest.raises(ObjectLostError, match=told):
                conveyor.get(ref)
            if not actors:
                assert conveyor.get(Maker.remote().make.remote()).sum() == 1000
    finally:
        conveyor.shutdown()
