"""Ctrl-C in the midst of what the inline engine does holds up no other thread."""

from contextlib import suppress

import pytest
from interrupted import goes_on, interrupted_when_entered

import conveyor
from conveyor.dag import InputNode


@conveyor.remote
class Echo:
    def it(self, x):
        return x


@pytest.fixture
def echo():
    conveyor.init(engine="inline")
    try:
        yield Echo.remote()
    finally:
        conveyor.shutdown()


def test_others_call_behind_a_call_that_was_broken_off(echo):
    with suppress(KeyboardInterrupt), interrupted_when_entered():
        conveyor.get(echo.it.remote(1))
    assert goes_on(lambda: conveyor.get(echo.it.remote(2)))


def test_others_execute_behind_an_execution_that_was_broken_off(echo):
    with InputNode() as inp:
        dag = echo.it.bind(inp)
    with dag.compile() as graph:
        with suppress(KeyboardInterrupt), interrupted_when_entered():
            conveyor.get(graph.execute(1))
        assert goes_on(lambda: conveyor.get(graph.execute(2)))
