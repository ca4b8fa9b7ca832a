"""Ctrl-C in the midst of a wait for a process holds up no other thread."""

from contextlib import suppress

import pytest
from interrupted import goes_on, interrupted_when_entered

import conveyor


@conveyor.remote
class Echo:
    def it(self, x):
        return x


@pytest.fixture
def echo():
    conveyor.init(engine="local")
    yield Echo.remote()
    assert goes_on(conveyor.shutdown)


def test_the_session_goes_on_behind_the_end_of_an_actor_that_was_broken_off(echo):
    assert conveyor.get(echo.it.remote(1)) == 1
    with suppress(KeyboardInterrupt), interrupted_when_entered():
        conveyor.kill(echo, graceful=True)
    assert goes_on(lambda: conveyor.get(Echo.remote().it.remote(2)))
