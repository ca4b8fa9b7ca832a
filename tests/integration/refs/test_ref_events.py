"""``done()`` and ``fileno()`` of every kind of ref, on both engines."""

import asyncio
import contextlib
import os
import select
import sys
import threading

import cloudpickle
import pytest
from integration_helpers import INLINE_HOLDING, WAIT, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, DeadlineExceededError, ExecutionCancelledError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Actor:
    def hold(self, x, go):
        hold(go)
        return x

    @conveyor.method(num_returns=2)
    def two(self, go):
        return self.hold((1, 2), go)

    def echo(self, x):
        return x

    def fail(self, x):
        raise ValueError(x)


@conveyor.remote
class Coroutines:
    async def hold(self, x, go):
        while not os.path.exists(go):
            await asyncio.sleep(0.002)
        return x


pytestmark = pytest.mark.usefixtures("session")


def readable(ref, timeout=0.0):
    poll = select.poll()
    poll.register(ref, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def kinds(latches):
    """A ref of each kind, none of them done, and what makes them so."""
    a, b = Actor.remote(), Actor.remote()
    go = latches()
    with InputNode() as inp:
        held = a.hold.bind(inp, go.path)
        dag = MultiOutputNode([b.echo.bind(held), inp], effects=[held])
    graph = dag.compile()
    output, effect = graph.execute(1)
    with InputNode() as inp:
        single = b.hold.bind(inp, go.path).compile()
    part, _ = a.two.remote(go.path)
    refs = {
        "output": output,
        "effect": effect,
        "single": single.execute(2),
        "deadline": single.execute(3, deadline=WAIT),
        "call": a.hold.remote(4, go.path),
        "part": part,
    }
    refs["waiting"] = b.echo.remote(refs["call"])
    return refs, go, (graph, single)


def test_refs_of_all_kinds_tell_when_they_are_done(latches):
    refs, go, graphs = kinds(latches)
    assert not any(ref.done() for ref in refs.values())
    assert not any(readable(ref) for ref in refs.values())
    go.open()
    for name, ref in refs.items():
        assert readable(ref, WAIT), name
        assert ref.done(), name
        ref.get(timeout=0)
        assert readable(ref), name
    del graphs


def test_what_is_done_is_readable_at_once():
    a = Actor.remote()
    call, failed, put = a.echo.remote(1), a.fail.remote(2), conveyor.put(3)
    conveyor.wait([call, failed], num_returns=2, timeout=WAIT)
    assert all(map(readable, (call, failed, put)))
    assert call.fileno() == call.fileno()
    assert call.fileno() != failed.fileno()


def test_select_wakes_up_and_epoll_serves_many(latches):
    a = Actor.remote()
    go = latches()
    refs = [a.hold.remote(i, go.path) for i in range(20)]
    threading.Timer(0.05, go.open).start()
    assert select.select(refs[:1], [], [], WAIT)[0] == refs[:1]
    left = {ref.fileno(): ref for ref in refs}
    with select.epoll() as epoll:
        for fd in left:
            epoll.register(fd, select.EPOLLIN)
        while left:
            events = epoll.poll(WAIT)
            assert events
            for fd, _ in events:
                epoll.unregister(fd)
                left.pop(fd).get(timeout=0)


def test_an_event_loop_of_another_thread_can_watch_it(latches):
    a = Actor.remote()
    go = latches()
    ref = a.hold.remote("there", go.path)

    async def main():
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.add_reader(ref, lambda: future.done() or future.set_result(ref.get(timeout=0)))
        loop.call_later(0.02, go.open)
        value = await asyncio.wait_for(future, WAIT)
        loop.remove_reader(ref)
        return value

    result = []
    thread = threading.Thread(target=lambda: result.append(asyncio.run(main())))
    thread.start()
    thread.join(WAIT)
    assert result == ["there"]


def test_cancelled_overdue_and_dead_are_done_too(latches):
    a, b = Actor.remote(), Actor.remote()
    go = latches()
    with InputNode() as inp:
        graph = b.hold.bind(inp, go.path).compile()
    cancelled, late, dead = (
        graph.execute(1),
        graph.execute(2, deadline=0.1),
        a.hold.remote(3, go.path),
    )
    fds = [ref.fileno() for ref in (cancelled, late, dead)]
    cancelled.cancel()
    assert readable(fds[0], WAIT)
    assert readable(fds[1], WAIT)
    conveyor.kill(a)
    assert readable(fds[2], WAIT)
    for ref, error in (
        (cancelled, ExecutionCancelledError),
        (late, DeadlineExceededError),
        (dead, ActorDiedError),
    ):
        with pytest.raises(error):
            ref.get(timeout=0)
    go.open()


def test_the_descriptor_is_closed_with_the_ref_and_the_thread_ends(latches, wait_until):
    def watchers():
        return [t for t in threading.enumerate() if t.name == "conveyor-watcher"]

    def is_open(fd):
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{fd}").startswith("anon_inode:[eventfd]")
        return False

    wait_until(lambda: not watchers(), WAIT, "the end of that of another test")
    a = Actor.remote()
    go = latches()
    refs = [a.hold.remote(i, go.path) for i in range(50)]
    fds = [ref.fileno() for ref in refs]
    assert len(set(fds)) == 50
    assert len(watchers()) == 1
    assert all(map(is_open, fds))
    refs.clear()
    # The watcher may be asking one just now, and hold it as long as that takes.
    wait_until(lambda: not any(map(is_open, fds)), what="all descriptors to be closed")
    wait_until(lambda: not watchers(), WAIT, "the watcher's end")
    go.open()
    used = set()
    for i in range(1000):
        ref = a.echo.remote(i)
        used.add(ref.fileno())
        assert readable(ref, WAIT)
        assert ref.get() == i
    assert len(used) < 10


def test_a_shutdown_makes_them_readable(scripts):
    program = """
        import select, threading, time
        import conveyor

        @conveyor.remote
        class Actor:
            def hold(self):
                time.sleep(60)

        ref = Actor.remote().hold.remote()
        fd = ref.fileno()
        conveyor.shutdown()
        print(select.select([fd], [], [], 20)[0] == [fd])
        print([t.name for t in threading.enumerate() if t.name.startswith("conveyor")])
        print(conveyor.is_initialized())
    """
    assert scripts.run(program) == "True\n[]\nFalse\n"


def test_inline_refs_have_them(scripts):
    requested = """
ref = a.hold.remote("x")
assert not ref.done()
assert not select.select([ref], [], [], 0)[0]
a.open.remote()
assert select.select([ref], [], [], 20)[0] == [ref]
assert ref.get(timeout=0) == "x"
assert select.select([dag.compile().execute(1)], [], [], 0)[0]
print("fine")
"""
    assert scripts.run(INLINE_HOLDING + requested) == "fine\n"
