"""What happens to calls when a caller, or what a constructor needs, is gone before its time."""

import os
import signal

import pytest
from integration_helpers import compiled, get, hold

import conveyor
from conveyor.runtime import context

pytestmark = pytest.mark.usefixtures("fresh_session")


@conveyor.remote
class Worker:
    def __init__(self, value=None, *, other=None):
        self.value = value

    def echo(self, x):
        return x

    def pid(self):
        return os.getpid()

    def fail(self):
        raise ValueError("boo")

    def hold(self, path):
        hold(path)

    def ask(self, other, x):
        return conveyor.get(other.echo.remote(x), timeout=20)

    def ask_and_go_on(self, other, times):
        self.refs = [other.echo.remote(i) for i in range(times)]


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("how", ["positional", "keyword", "of an actor that has died"])
def test_a_constructor_that_gets_a_ref_that_fails(how, done, restarts):
    source = Worker.remote()
    if how == "of an actor that has died":
        bad, expected = source.hold.remote("/nowhere"), conveyor.exceptions.ActorDiedError
        get(conveyor.wait([Worker.remote().echo.remote(1)])[0][0])
        conveyor.kill(source)
    else:
        bad, expected = source.fail.remote(), ValueError
    if done:
        conveyor.wait([bad], timeout=20)
    made = Worker.options(max_restarts=restarts)
    actor = made.remote(other=bad) if how == "keyword" else made.remote(bad)
    for _ in range(2):
        with pytest.raises(expected):
            get(actor.echo.remote(1))
    with compiled(actor.echo.bind) as graph, pytest.raises(expected):
        get(graph.execute(1))


def test_a_caller_that_gets_the_bit_of_a_dead_one(latches, wait_until):
    """The dead caller's calls are still being served when the new caller is let in."""
    callee, first = Worker.remote(), Worker.remote()
    record = context.running().table.record(first._id)
    go = latches()
    for _ in range(5):
        pid = get(first.pid.remote())
        held = callee.hold.remote(go.path)
        get(first.ask_and_go_on.remote(callee, 40))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda record=record: record.exited.is_set() and not record.mailboxes)
        second = Worker.remote()
        ref = second.ask.remote(callee, 7)
        introduced = context.running().table.record(second._id)
        wait_until(lambda introduced=introduced: introduced.mailboxes)
        go.open()
        assert get(ref) == 7
        get(held)
        first, go = Worker.remote(), latches()
        record = context.running().table.record(first._id)
