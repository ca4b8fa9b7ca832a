"""Nobody who sleeps is left asleep: by a notifier that knew its slot's former process, by one that is
stopped, or where the kernel cannot wait for deaths."""

import asyncio
import os
import random
import signal
import sys
import threading

import cloudpickle
import pytest
from integration_helpers import WAIT, compiled, get, hold

import conveyor
from conveyor.exceptions import ActorDiedError, ActorRestartedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


class Plain:
    """Sleeps in the futex."""

    def __init__(self, begun=None, go=None):
        if begun is not None and os.path.exists(begun):
            hold(go)
        elif begun is not None:
            open(begun, "w").close()

    def pid(self):
        return os.getpid()

    def echo(self, x):
        return x


class Handling(Plain):
    """Sleeps in ppoll, since it has a signal handler in Python."""

    def __init__(self, *args):
        super().__init__(*args)
        signal.signal(signal.SIGTERM, lambda *_: None)


class Async(Plain):
    """Sleeps in an event loop."""

    async def pid(self):
        return os.getpid()

    async def echo(self, x):
        return x


@conveyor.remote
class Late:
    """Sends its result when it is told to."""

    def __init__(self, other=None):
        self.other = other

    def after(self, x, path):
        hold(path)
        return x

    def ask(self, x):
        return conveyor.get(self.other.echo.remote(x), timeout=WAIT)

    def ping(self):
        return "here"


@pytest.fixture(params=[Plain, Handling, Async])
def kind(request):
    return conveyor.remote(max_restarts=5)(request.param)


def replaced(actor, former):
    """Wait until calls reach another process than ``former``."""
    while True:
        try:
            pid = get(actor.pid.remote())
        except (ActorDiedError, ActorRestartedError):
            continue
        if pid != former:
            return pid


def after(actor, late, path):
    """The graph in which ``actor`` gets what ``late`` sends when there is a file ``path``."""
    return compiled(lambda inp: actor.echo.bind(late.after.bind(inp, path)))


def test_late_frames_to_a_restarted_actor(kind, latches):
    """Of several peers, each of which knew the former process."""
    actor, peers, go = kind.remote(), [Late.remote() for _ in range(3)], latches()
    graphs = [after(actor, peer, go.path) for peer in peers]
    former = get(actor.pid.remote())
    refs = [graph.execute(1) for graph in graphs]
    os.kill(former, signal.SIGKILL)
    replaced(actor, former)
    go.open()
    for peer in peers:
        assert get(peer.ping.remote()) == "here"  # it has sent what it had to
    for i in range(20):
        assert get(actor.echo.remote(i)) == i
    for ref in refs:
        with pytest.raises((ActorDiedError, ActorRestartedError)):
            get(ref)


def test_a_late_frame_while_the_actor_starts_again(kind, latches):
    begun, go_on, go = latches(), latches(), latches()
    actor, peer = kind.remote(begun.path, go_on.path), Late.remote()
    former = get(actor.pid.remote())
    graph = after(actor, peer, go.path)
    graph.execute(1)
    os.kill(former, signal.SIGKILL)
    go.open()
    assert get(peer.ping.remote()) == "here"
    go_on.open()  # its constructor
    replaced(actor, former)
    for i in range(20):
        assert get(actor.echo.remote(i)) == i


def test_a_graph_restarts_while_a_survivor_sends_to_the_former_process(kind, latches):
    actor, peer, go = kind.remote(), Late.remote(), latches()
    graph = after(actor, peer, go.path)
    for _ in range(3):
        former = get(actor.pid.remote())
        graph.execute(1)
        os.kill(former, signal.SIGKILL)
        replaced(actor, former)
        restart = threading.Thread(target=graph.restart)
        restart.start()
        go.open()
        restart.join(WAIT)
        assert not restart.is_alive()
        assert get(graph.execute(2)) == 2
        assert get(actor.echo.remote(3)) == 3
        os.unlink(go.path)


def test_an_actor_that_knew_the_former_process_calls_the_new_one(kind):
    actor = kind.remote()
    callers = [Late.remote(actor) for _ in range(2)]
    for _ in range(3):
        assert [get(caller.ask.remote(i)) for i, caller in enumerate(callers)] == [0, 1]
        former = get(actor.pid.remote())
        os.kill(former, signal.SIGKILL)
        replaced(actor, former)


def test_a_driver_in_asyncio(kind, latches):
    """Both ends sleep in event loops, or nearly so."""
    actor, peer, go = kind.remote(), Late.remote(), latches()
    graph = after(actor, peer, go.path)
    former = get(actor.pid.remote())

    async def use():
        ref = graph.execute(1)
        os.kill(former, signal.SIGKILL)
        await asyncio.to_thread(replaced, actor, former)
        go.open()
        assert await asyncio.wait_for(peer.ping.remote(), WAIT) == "here"
        calls = [asyncio.wait_for(actor.echo.remote(i), WAIT) for i in range(20)]
        assert await asyncio.gather(*calls) == list(range(20))
        with pytest.raises((ActorDiedError, ActorRestartedError)):
            await asyncio.wait_for(ref, WAIT)

    asyncio.run(use())


@pytest.mark.parametrize("driver", ["main thread", "event loop"])
def test_a_peer_that_is_stopped_at_random_moments_silences_no_other(driver):
    """All actors ring the driver; one of them is stopped again and again, in the midst of it."""
    stopped, *others = [conveyor.remote(Plain).remote() for _ in range(3)]
    pid = get(stopped.pid.remote())
    chance = random.Random(7)
    busy = []

    def stop():
        busy[:] = [stopped.echo.remote(i) for i in range(20)]
        for _ in range(chance.randrange(3000)):
            pass
        os.kill(pid, signal.SIGSTOP)

    async def use_asyncio():
        for i in range(60):
            stop()
            refs = [other.echo.remote(i) for other in others for _ in range(3)]
            assert await asyncio.wait_for(asyncio.gather(*refs), WAIT) == [i] * 6
            os.kill(pid, signal.SIGCONT)
            assert await asyncio.wait_for(asyncio.gather(*busy), WAIT) == list(range(20))

    def use():
        for i in range(60):
            stop()
            refs = [other.echo.remote(i) for other in others for _ in range(3)]
            assert conveyor.get(refs, timeout=WAIT) == [i] * 6
            os.kill(pid, signal.SIGCONT)
            assert conveyor.get(busy, timeout=WAIT) == list(range(20))

    try:
        asyncio.run(use_asyncio()) if driver == "event loop" else use()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_where_the_kernel_may_not_wait_for_many_futexes(scripts):
    """Old container runtimes answer EPERM to system calls they do not know. The driver sleeps when it
    is idle, and hears of deaths from the fork server."""
    scripts.run(
        """
        import ctypes, os, signal, struct, time

        libc = ctypes.CDLL(None, use_errno=True)
        # If the call is futex_waitv (449): EPERM; else: allowed.
        code = [(0x20, 0, 0, 0), (0x15, 0, 1, 449), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
        filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))

        class Program(ctypes.Structure):
            _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.c_void_p))

        program = Program(len(code), ctypes.addressof(filters))
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0

        import conveyor
        from conveyor import _core
        from conveyor.exceptions import ActorDiedError

        assert not _core.DeathWatch.supported()

        @conveyor.remote
        class A:
            def f(self, x):
                return x

            def pid(self):
                return os.getpid()

            def sleep(self):
                signal.pause()

        a, b = A.remote(), A.remote()
        assert conveyor.get([a.f.remote(1), b.f.remote(2)], timeout=60) == [1, 2]
        cpu = time.process_time()
        time.sleep(0.5)  # idle: nothing is waited for
        used = time.process_time() - cpu
        assert used < 0.25, f"an idle driver has used {used} s of 0.5"

        pid = conveyor.get(a.pid.remote(), timeout=60)
        waiting = a.sleep.remote()
        os.kill(pid, signal.SIGKILL)
        try:
            conveyor.get(waiting, timeout=60)
        except ActorDiedError as error:
            assert "SIGKILL" in str(error), error
        else:
            raise AssertionError("no error")
        assert conveyor.get(b.f.remote(3), timeout=60) == 3
        conveyor.shutdown()
        """
    )
