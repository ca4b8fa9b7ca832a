"""What an error says about how an actor ended, told apart by cause."""

import os
import pickle
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import cloudpickle
import inside
import pytest
from integration_helpers import WAIT, chain, freeze, get, hold

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, ConstructorError, TaskError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Actor:
    def echo(self, x):
        return x

    def both(self, x, y):
        return x, y

    def pid(self):
        return os.getpid()

    def hold(self, inside, go="/nonexistent"):
        open(inside, "w").close()
        hold(go)
        return "held"

    def end(self, how):
        print(f"about to end by {how}", file=sys.stderr, flush=True)
        if how == "raise":
            raise ValueError("no end at all")
        if how == "sys.exit":
            sys.exit(4)
        if how == "os._exit":
            os._exit(4)
        if how == "SIGABRT":
            os.abort()
        if how.startswith("SIGSEGV"):
            import ctypes
            import resource

            if "core" in how:
                hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
                resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
            ctypes.string_at(0)
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(WAIT)

    def eat(self, group, size):
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
        self.eaten = bytearray(size)


@conveyor.remote
class Failing:
    def __init__(self, how):
        if how == "raise":
            raise RuntimeError("no such luck")
        os._exit(6)

    def echo(self, x):
        return x


@pytest.fixture(autouse=True)
def cores_go_remote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


ENDS = [
    ("sys.exit", "left by sys.exit: it exited with code 4", 4, None),
    ("os._exit", ") exited with code 4", 4, None),
    ("SIGABRT", "signal 6 (SIGABRT)", None, signal.SIGABRT),
    ("SIGSEGV", "signal 11 (SIGSEGV)", None, signal.SIGSEGV),
    ("SIGSEGV, with a core dump", "signal 11 (SIGSEGV)", None, signal.SIGSEGV),
    ("SIGKILL", "signal 9 (SIGKILL)", None, signal.SIGKILL),
]


@pytest.mark.parametrize(("how", "said", "code", "number"), ENDS, ids=[e[0] for e in ENDS])
@pytest.mark.parametrize("where", ["graph", "call"])
def test_how_an_actor_has_ended(where, how, said, code, number):
    victim, other = Actor.remote(), Actor.remote()
    with chain(other.echo, victim.end, other.echo).compile(name="doomed") as graph:
        with pytest.raises(ActorDiedError) as caught:
            get(graph.execute(how) if where == "graph" else victim.end.remote(how))
        error = caught.value
        assert said in str(error)
        assert error.exit_code == code
        assert error.signal == number
        assert "Actor" in error.actor
        assert "end" in error.node
        assert ("execution 0" if where == "graph" else "call 1") in str(error)
        if code is not None:  # a signal is known before the output is read
            assert f"about to end by {how}" in str(error)


def test_an_exception_is_no_end():
    victim = Actor.remote()
    with chain(victim.end).compile() as graph:
        for _ in range(2):
            with pytest.raises(ValueError, match="no end") as caught:
                get(graph.execute("raise"))
            assert isinstance(caught.value, TaskError)
        assert graph.status().state == "ready"


def test_sigkill_is_told_from_the_out_of_memory_killer(wait_until):
    victim = Actor.remote()
    pid = get(victim.pid.remote())
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), what="the burial")
    with pytest.raises(ActorDiedError) as caught:
        get(victim.echo.remote(1))
    text = str(caught.value)
    assert "somebody else killed it" in text or "it may be that" in text


@contextmanager
def _memory_group(limit):
    """A memory cgroup with room for ``limit`` bytes, where this user may make one."""
    for root, name in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(root, f"conveyor-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            try:
                (group / name).write_text(str(limit))
            except OSError:
                continue
            yield str(group)
            return
        finally:
            end = time.monotonic() + 5
            while group.exists() and time.monotonic() < end:
                with suppress(OSError):
                    group.rmdir()
    pytest.skip("memory cgroups cannot be made here")


def test_the_out_of_memory_killer_is_named():
    victim = Actor.remote()
    with _memory_group(64 << 20) as group:
        ref = victim.eat.remote(group, 1 << 30)
        with pytest.raises(ActorDiedError, match="out-of-memory killer") as caught:
            get(ref)
        assert caught.value.signal == signal.SIGKILL
        assert "has not been at work" not in str(caught.value)


@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_failed_constructor(how):
    actor = Failing.remote(how)
    if how == "raise":
        with chain(actor.echo).compile() as graph:
            refs = [graph.execute(1), actor.echo.remote(1)]
            assert conveyor.wait(refs, num_returns=2, timeout=60) == (refs, [])
            for ref in refs:
                for kind in (RuntimeError, TaskError, ActorDiedError, ConstructorError):
                    with pytest.raises(kind, match="no such luck") as caught:
                        get(ref)
                assert "__init__" in caught.value.node
                assert type(caught.value.cause) is RuntimeError
                assert (caught.value.exit_code, caught.value.signal) == (None, None)
                assert caught.value.actor == actor._id.name
            # As it travels: through another actor, and pickled.
            with pytest.raises(ConstructorError, match="no such luck"):
                get(Actor.remote().echo.remote(refs[1]))
            with pytest.raises(ConstructorError, match="no such luck"):
                raise pickle.loads(pickle.dumps(caught.value))
        return
    with pytest.raises(ActorDiedError, match="__init__") as caught:
        get(actor.echo.remote(1))
    assert caught.value.exit_code == 6


def test_the_first_of_several_is_named_by_all(latches, wait_until):
    actors = [Actor.remote() for _ in range(4)]
    pids = [get(actor.pid.remote()) for actor in actors]
    known = {
        pid: inside.record_of(actor) for pid, actor in zip(pids, actors, strict=True)
    }  # the number of one on another node is not its pid
    begun = latches()
    # Plans name them in the order of the chain: the first to die is none of its ends.
    with chain(*(actor.echo for actor in actors[:-1]), actors[-1].hold).compile() as graph:
        refs = [graph.execute(begun.path) for _ in range(3)]
        hold(begun.path)
        for victim in (2, 0, 3):
            os.kill(pids[victim], signal.SIGKILL)
            # Who hears of two deaths at once cannot tell which was first.
            wait_until(lambda v=victim: not known[pids[v]].alive, what="a death to be known")
        name = graph.status().actors[2].name
        for ref in refs:
            with pytest.raises(ActorDiedError) as caught:
                get(ref)
            assert caught.value.actor == name
        with pytest.raises(ActorDiedError) as caught:
            graph.execute(1)
        assert caught.value.actor == name
        assert name in graph.status().error


@pytest.mark.parametrize("where", ["graph", "call"])
def test_a_stopped_actor_is_not_dead(latches, caplog, monkeypatch, where):
    inside, go = latches(), latches()
    actor = Actor.remote()
    pid = get(actor.pid.remote())
    with InputNode() as inp:
        dag = actor.hold.bind(inp, go.path)
    with dag.compile(name="frozen") as graph:
        ref = (
            graph.execute(inside.path)
            if where == "graph"
            else actor.hold.remote(inside.path, go.path)
        )
        hold(inside.path)
        freeze(pid)
        try:
            with pytest.raises(WaitTimeoutError, match="stopped") as caught:
                conveyor.get(ref, timeout=0.1)
            text = str(caught.value)
            assert "hold" in text
            assert ("execution 0" if where == "graph" else "call 2") in text
            assert "since" in text
            (status,) = graph.status().actors
            assert status.state == "stopped"
            assert "hold" in status.method
            assert status.execution == (0 if where == "graph" else None)
            assert abs(status.since - time.time()) < WAIT
            monkeypatch.setattr("conveyor.runtime.waiting.LOG_AFTER", 0.02)
            with pytest.raises(WaitTimeoutError):
                conveyor.get(ref, timeout=1)
            assert any("stopped" in record.getMessage() for record in caplog.records)
            assert graph.status().state == "ready"
        finally:
            go.open()
            os.kill(pid, signal.SIGCONT)
        # Nothing is lost.
        assert get(ref) == "held"
        assert get(actor.echo.remote(1)) == 1
        assert get(graph.execute(inside.path)) == "held"


class DeadlyToLoad:
    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        return _die, (self.seconds,)


def _die(seconds):
    if seconds:  # when it has answered
        threading.Timer(seconds, _die, (0,)).start()
        return
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(WAIT)


@pytest.mark.parametrize("seconds", [0, 0.2], ids=["instead of an answer", "behind its answer"])
def test_a_death_ends_a_compile_that_another_holds_up(tmp_path, wait_until, seconds):
    """Who is busy takes its part of the graph later, and nobody waits for that once there can be none."""
    busy, struck = Actor.remote(), Actor.remote()
    inside, go = tmp_path / "inside", tmp_path / "go"
    held = busy.hold.remote(str(inside), str(go))
    wait_until(inside.exists)
    with InputNode() as inp:
        root = struck.both.bind(busy.echo.bind(inp), DeadlyToLoad(seconds))
    too_late = threading.Timer(WAIT / 2, go.touch)
    too_late.start()
    with pytest.raises(ActorDiedError) as died:
        root.compile()
    too_late.cancel()
    assert died.value.signal == signal.SIGKILL
    assert not go.exists()
    go.touch()
    assert get(held) == "held"
    assert get(busy.echo.remote(1)) == 1
