"""What happens to calls when a caller, or what a constructor needs, is gone before its time."""

import os
import signal

import inside
import numpy
import pytest
from integration_helpers import compiled, get, hold

import conveyor

pytestmark = pytest.mark.usefixtures("fresh_session")


@conveyor.remote
class Worker:
    def __init__(self, value=None, *, other=None):
        self.value = value

    def given(self):
        return self.value

    def items(self, n):
        yield from range(n)

    def echo(self, x):
        return x

    def pid(self):
        return os.getpid()

    def fail(self):
        raise ValueError("boo")

    def hold(self, path):
        hold(path)

    def ask(self, other, x):
        return conveyor.get(other.echo.remote(x), timeout=60)

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
        conveyor.wait([bad], timeout=60)
    made = Worker.options(max_restarts=restarts)
    actor = made.remote(other=bad) if how == "keyword" else made.remote(bad)
    for _ in range(2):
        with pytest.raises(expected):
            get(actor.echo.remote(1))
    with compiled(actor.echo.bind) as graph, pytest.raises(expected):
        get(graph.execute(1))


@conveyor.remote
class Maker:
    """Makes workers out of references of its own."""

    def make(self, restarts, kind, go=None):
        made = Worker.options(max_restarts=restarts)
        if kind == "put":
            return made.remote(conveyor.put(numpy.full(200_000, 7)))
        other = Worker.remote()
        if kind == "pending":
            worker = made.remote(other=other.hold.remote(go))
        elif kind == "failed":
            worker = made.remote(other.fail.remote())
        else:
            worker = made.remote(other.items.remote(3))
        self.other = other
        return worker

    def wait_for(self, me):
        return conveyor.get(Worker.remote(me.pid.remote()).echo.remote(1))

    def pid(self):
        return os.getpid()


@pytest.mark.parametrize("restarts", [0, 1])
def test_an_actor_makes_another_of_references_of_its_own(latches, restarts):
    maker, go = Maker.remote(), latches()
    put, failed, streamed = [
        get(maker.make.remote(restarts, kind)) for kind in ("put", "failed", "streamed")
    ]
    pending = get(maker.make.remote(restarts, "pending", go.path))  # nobody has opened it yet
    assert get(put.given.remote()).sum() == 1_400_000
    assert get(streamed.given.remote()) == [0, 1, 2]
    with pytest.raises(ValueError, match="boo"):
        get(failed.echo.remote(1))
    early = pending.echo.remote(5)
    with pytest.raises(conveyor.exceptions.WaitTimeoutError):
        conveyor.get(early, timeout=0.2)
    go.open()
    assert get(early) == 5


def test_an_actor_that_is_made_of_an_actors_reference_comes_back(wait_until):
    maker = Maker.remote()
    made = get(maker.make.remote(2, "put"))
    for _ in range(2):
        pid = get(made.pid.remote())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda before=pid: _pid_of(made) not in (None, before))
        assert get(made.given.remote()).sum() == 1_400_000


def _pid_of(worker):
    try:
        return get(worker.pid.remote())
    except conveyor.exceptions.ActorDiedError:  # and is started again
        return None


def test_a_constructor_that_waits_for_who_waits_for_it_is_found_out():
    maker = Maker.remote()
    with pytest.raises(conveyor.exceptions.DeadlockError, match=r"__init__ waits for Maker.pid"):
        get(maker.wait_for.remote(maker))


def test_a_caller_that_gets_the_bit_of_a_dead_one(latches, wait_until):
    """The dead caller's calls are still being served when the new caller is let in."""
    callee, first = Worker.remote(), Worker.remote()
    record = inside.record_of(first)
    go = latches()
    for _ in range(5):
        pid = get(first.pid.remote())
        held = callee.hold.remote(go.path)
        get(first.ask_and_go_on.remote(callee, 40))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda record=record: record.cleaned_up.is_set() and not record.mailboxes)
        second = Worker.remote()
        ref = second.ask.remote(callee, 7)
        introduced = inside.record_of(second)
        wait_until(lambda introduced=introduced: introduced.mailboxes)
        go.open()
        assert get(ref) == 7
        get(held)
        first, go = Worker.remote(), latches()
        record = inside.record_of(first)


@conveyor.remote
class Caller:
    def call_and_die(self, callee):
        callee.store.remote(numpy.full(200_000, 7))
        os._exit(1)

    def call(self, callee):
        callee.store.remote(numpy.full(200_000, 42))

    def pid(self):
        return os.getpid()


@conveyor.remote
class Storing:
    def __init__(self):
        self.stored = []

    def hold_and_meet(self, path, caller, me):
        hold(path)
        get(caller.call.remote(me))

    def store(self, value):
        self.stored.append(sorted(set(value.tolist())))

    def all(self):
        return self.stored


def test_a_caller_that_is_let_in_after_its_successor_was_met(latches, wait_until):
    """Both have had the same slot, and arguments of each lie in an arena of its own."""
    caller, callee = Caller.options(max_restarts=1).remote(), Storing.remote()
    pid = get(caller.pid.remote())
    go = latches()
    held = callee.hold_and_meet.remote(go.path, caller, callee)
    with pytest.raises(conveyor.exceptions.ActorDiedError):
        get(caller.call_and_die.remote(callee))
    assert get(caller.pid.remote()) != pid
    go.open()
    get(held)
    wait_until(lambda: len(get(callee.all.remote())) == 2, what="both calls")
    assert sorted(get(callee.all.remote())) == [[7], [42]]
