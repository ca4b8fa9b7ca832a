"""``sys.exit`` in user code of an actor: it ends the actor, whatever it was called in, and every error says
what that was. The same on both engines."""

import asyncio
import os
import sys

import cloudpickle
import pytest
from integration_helpers import compiled, get

import conveyor
from conveyor.exceptions import ActorDiedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Plain:
    def ready(self):
        return os.getpid()

    def leave(self, x=0):
        sys.exit(3)

    def items(self, x=0):
        yield 1
        sys.exit(3)


class Async(Plain):
    async def later(self, x=0):
        await asyncio.sleep(0)
        sys.exit(3)

    async def later_items(self, x=0):
        yield 1
        sys.exit(3)

    async def wait(self, started):
        open(started, "w").close()
        await asyncio.sleep(600)

    async def leave_after(self, go):
        while not os.path.exists(go):
            await asyncio.sleep(0.001)
        sys.exit(3)


KINDS = [
    (Plain, {}, "leave"),
    (Plain, {}, "items"),
    (Plain, {"max_concurrency": 3}, "leave"),  # a thread of its own
    (Plain, {"max_concurrency": 3}, "items"),
    (Async, {}, "leave"),
    (Async, {}, "later"),
    (Async, {}, "later_items"),
]


def death_of(take):
    with pytest.raises(ActorDiedError) as raised:
        take()
    error = raised.value
    assert "left by sys.exit: it exited with code 3 while running " in str(error)
    assert error.exit_code == 3
    return error


@pytest.mark.parametrize(("cls", "options", "method"), KINDS)
def test_a_call(engine, cls, options, method):
    actor = conveyor.remote(cls).options(name="leaver", **options).remote()
    call = getattr(actor, method)

    def take():
        return list(call.remote()) if "items" in method else get(call.remote())

    error = death_of(take)
    assert error.node == method
    assert f"while running {method} (call " in str(error)
    assert error.actor == "leaver"


@pytest.mark.parametrize(("cls", "options", "method"), KINDS)
def test_a_step(engine, cls, options, method):
    actor = conveyor.remote(cls).options(name="leaver", **options).remote()
    graph = compiled(getattr(actor, method).bind)

    def take():
        result = graph.execute(1)
        return list(result) if "items" in method else get(result)

    error = death_of(take)
    assert error.node == f"leaver.{method}"
    assert f"while running leaver.{method}" in str(error)
    if engine == "local":
        assert "(execution 0)" in str(error)


@pytest.mark.parametrize("first", ["wait", "leave_after"])
def test_of_several_coroutines_it_is_the_one_that_has_left(engine, latches, wait_until, first):
    go, started = latches(), latches()
    actor = conveyor.remote(Async).options(name="leaver").remote()
    refs = {}
    for name in sorted(["wait", "leave_after"], key=lambda name: name != first):
        refs[name] = getattr(actor, name).remote(started.path if name == "wait" else go.path)
    wait_until(lambda: started.is_open)
    go.open()
    for ref in refs.values():
        error = death_of(lambda ref=ref: get(ref))
        assert error.node == "leave_after"


@pytest.mark.usefixtures("time_to_end")
def test_what_else_runs_on_threads_is_done_first(local, latches, wait_until, tmp_path):
    """As the end of the main thread of a program waits for its threads."""
    go, started = latches(), latches()
    done = tmp_path / "done"

    class Busy(Plain):
        def work(self, started, go):
            open(started, "w").close()
            while not os.path.exists(go):
                pass
            done.touch()

        def __conveyor_exit__(self):
            assert done.exists()
            (tmp_path / "hook").touch()

    busy = conveyor.remote(Busy).options(name="leaver", max_concurrency=2).remote()
    pid = get(busy.ready.remote())
    work = busy.work.remote(started.path, go.path)
    wait_until(lambda: started.is_open)
    left = busy.leave.remote()
    never = busy.ready.remote()
    go.open()
    assert death_of(lambda: get(left)).node == "leave"
    with pytest.raises(ActorDiedError):
        get(never)
    assert get(work) is None
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert (tmp_path / "hook").exists()


def test_a_restart_follows(engine):
    actor = conveyor.remote(Plain).options(max_concurrency=2, max_restarts=1).remote()
    with pytest.raises(conveyor.exceptions.ActorRestartedError, match="while running leave"):
        get(actor.leave.remote())
    assert get(actor.ready.remote())
