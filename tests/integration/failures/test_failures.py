"""What goes wrong in one actor, and what everybody else sees of it."""

import logging
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from contextlib import suppress

import cloudpickle
import psutil
import pytest
from integration_helpers import WAIT, chain, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, ConveyorError, TaskError, WaitTimeoutError
from conveyor.graph.result_source import GraphSource
from conveyor.worker.messages import Load

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


class OwnError(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class OddError(Exception):
    """Cannot be made from its args, and holds what cannot be pickled."""

    def __init__(self, a, b):
        super().__init__("odd")
        self.lock = threading.Lock()


@conveyor.remote
class Actor:
    def __init__(self):
        self.memory = None

    def echo(self, x):
        return x

    def pid(self):
        return os.getpid()

    def fail(self, x):
        if x == "bad":
            raise ValueError("as told")
        return x

    def fail_own(self, x):
        raise OwnError(code=x)

    def fail_odd(self, x):
        raise OddError(1, 2)

    def fail_in_a_knot(self, x):
        error = OwnError(code=x)
        error.it = []
        error.it += [error.it, error, deque([error])]
        raise error

    def fail_with_cause(self, x):
        try:
            {}[x]
        except KeyError as error:
            raise RuntimeError("outer") from error

    def hold(self, inside, go="/nonexistent"):
        """Say that the method has begun, and stay in it."""
        open(inside, "w").close()
        hold(go)

    def leave(self, x):
        sys.exit(x)

    def interrupt(self, x):
        raise KeyboardInterrupt(x)

    def die(self, how):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        elif how == "exit":
            os._exit(3)
        elif how == "segfault":
            import ctypes
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
            ctypes.string_at(0)
        elif how == "abort":
            os.abort()
        return how

    def die_saying(self, text):
        print(text, file=sys.stderr, flush=True)
        os._exit(5)

    def fill(self, size):
        import mmap

        self.memory = mmap.mmap(-1, size)
        for i in range(0, size, 4096):
            self.memory[i] = 1
        return os.getpid()


@pytest.fixture(autouse=True)
def cores_go_remote(tmp_path, monkeypatch):
    """Actors that a test starts dump their cores in its own folder."""
    monkeypatch.chdir(tmp_path)
    yield
    for core in tmp_path.glob("core*"):
        core.unlink()


@pytest.fixture(scope="module")
def a(session):
    return Actor.remote()


@pytest.fixture(scope="module")
def b(session):
    return Actor.remote()


# Exceptions


def test_an_exception_reaches_get_and_the_graph_goes_on(a, b):
    with chain(a.echo, b.fail, a.echo).compile() as graph:
        refs = [graph.execute("bad" if i % 3 == 0 else i) for i in range(30)]
        for i, ref in enumerate(refs):
            if i % 3:
                assert conveyor.get(ref, timeout=WAIT) == i
                continue
            for _ in range(2):  # also the second time
                with pytest.raises(ValueError, match="as told") as caught:
                    conveyor.get(ref, timeout=WAIT)
                error = caught.value
                assert isinstance(error, TaskError)
                assert type(error.cause) is ValueError
                assert "Actor" in error.actor
                assert "fail" in error.node
                assert 'raise ValueError("as told")' in error.remote_traceback


def test_only_outputs_behind_the_error_fail(a, b):
    with InputNode() as inp:
        good = a.echo.bind(inp)
        bad = b.fail.bind(good)
        dag = MultiOutputNode([good, bad, a.echo.bind(bad)])
    with dag.compile(fail_fast=False) as graph:
        good_ref, bad_ref, behind = graph.execute("bad")
        assert conveyor.get(good_ref, timeout=WAIT) == "bad"
        for ref in (bad_ref, behind):
            with pytest.raises(ValueError, match="as told") as caught:
                conveyor.get(ref, timeout=WAIT)
            assert "fail" in caught.value.node
        assert conveyor.get(graph.execute(1), timeout=WAIT) == [1, 1, 1]


def test_own_exception_classes(a):
    for ref in (a.fail_own.remote(7), chain(a.fail_own).execute(7)):
        with pytest.raises(OwnError) as caught:
            conveyor.get(ref, timeout=WAIT)
        assert isinstance(caught.value, TaskError)
        assert caught.value.code == 7
        assert caught.value.cause.code == 7


def test_odd_exceptions(a):
    with pytest.raises(TaskError, match="odd") as caught:
        conveyor.get(a.fail_odd.remote(1), timeout=WAIT)
    assert "OddError" in caught.value.remote_traceback


def test_an_exception_with_a_list_that_has_both_itself_and_the_exception(a):
    for ref in (a.fail_in_a_knot.remote(7), chain(a.fail_in_a_knot).execute(7)):
        with pytest.raises(OwnError) as caught:
            conveyor.get(ref, timeout=WAIT)
        cause = caught.value.cause
        assert cause.code == 7
        assert cause.it[0] is cause.it is caught.value.it
        assert cause.it[1] is cause.it[2][0] is cause


def test_the_chain_of_causes_is_in_the_traceback(a):
    with pytest.raises(RuntimeError, match="outer") as caught:
        conveyor.get(a.fail_with_cause.remote("key"), timeout=WAIT)
    assert "KeyError" in caught.value.remote_traceback


def test_keyboard_interrupt_in_a_method_is_an_error_like_others(a):
    with pytest.raises(TaskError, match="KeyboardInterrupt"):
        conveyor.get(a.interrupt.remote("now"), timeout=WAIT)
    assert conveyor.get(a.echo.remote(1), timeout=WAIT) == 1


# Deaths


@pytest.mark.parametrize(
    ("how", "said"),
    [("kill", "SIGKILL"), ("exit", "code 3"), ("segfault", "SIGSEGV"), ("abort", "SIGABRT")],
)
def test_death_in_a_graph(a, how, said):
    victim = Actor.remote()
    with chain(a.echo, victim.die).compile(name="doomed") as graph:
        assert conveyor.get(graph.execute("not yet"), timeout=WAIT) == "not yet"
        with pytest.raises(ActorDiedError, match=said) as caught:
            conveyor.get(graph.execute(how), timeout=WAIT)
        assert "Actor" in caught.value.actor
        assert "die" in caught.value.node
        assert "die" in str(caught.value)
        with pytest.raises(ActorDiedError):
            graph.execute("again")
    with pytest.raises(ActorDiedError):
        conveyor.get(victim.echo.remote(1), timeout=WAIT)
    # The others are as they were.
    assert conveyor.get(a.echo.remote(1), timeout=WAIT) == 1
    with chain(a.echo).compile() as graph:
        assert conveyor.get(graph.execute(2), timeout=WAIT) == 2


@pytest.mark.parametrize(
    ("how", "said"), [("kill", "SIGKILL"), ("exit", "code 3"), ("segfault", "SIGSEGV")]
)
def test_death_in_a_call(a, how, said):
    victim = Actor.remote()
    with pytest.raises(ActorDiedError, match=said) as caught:
        conveyor.get(victim.die.remote(how), timeout=WAIT)
    assert "die" in caught.value.node
    assert conveyor.get(a.echo.remote(1), timeout=WAIT) == 1


def test_death_gives_the_exit_code_or_signal_and_the_last_words():
    victim = Actor.remote()
    with pytest.raises(ActorDiedError, match="famous last words") as caught:
        conveyor.get(victim.die_saying.remote("famous last words"), timeout=WAIT)
    assert caught.value.exit_code == 5
    victim = Actor.remote()
    with pytest.raises(ActorDiedError) as caught:
        conveyor.get(victim.die.remote("segfault"), timeout=WAIT)
    assert caught.value.signal == signal.SIGSEGV


@pytest.mark.parametrize("where", ["graph", "call"])
def test_time_from_kill_to_the_exception(a, latches, where):
    took = []
    for _ in range(5):
        inside = latches()
        victim = Actor.remote()
        pid = conveyor.get(victim.pid.remote(), timeout=WAIT)
        with chain(a.echo, victim.hold).compile() as graph:
            ref = (
                graph.execute(inside.path) if where == "graph" else victim.hold.remote(inside.path)
            )
            hold(inside.path)
            times = []

            def kill(pid=pid, times=times):
                time.sleep(0.05)  # so that the wait is a long one
                times.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            with pytest.raises(ActorDiedError):
                conveyor.get(ref, timeout=WAIT)
            times.append(time.monotonic())
            killer.join()
            took.append(times[1] - times[0])
    median = statistics.median(took)
    print(f"from SIGKILL to the exception ({where}): median {median * 1e3:.1f} ms")
    assert median < 1


def test_a_large_actor_killed(a, latches):
    inside = latches()
    victim = Actor.remote()
    pid = conveyor.get(victim.fill.remote(1 << 30), timeout=60)
    assert psutil.Process(pid).memory_info().rss > 1 << 30
    with chain(a.echo, victim.hold).compile() as graph:
        ref = graph.execute(inside.path)
        hold(inside.path)
        start = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="hold"):
            conveyor.get(ref, timeout=WAIT)
        took = time.monotonic() - start
    print(f"1 GiB resident: {took * 1e3:.1f} ms")
    assert took < WAIT / 2  # the kernel frees its memory meanwhile


def test_every_waiter_is_told(a, latches):
    inside = latches()
    victim = Actor.remote()
    pid = conveyor.get(victim.pid.remote(), timeout=WAIT)
    graph = chain(a.echo, victim.hold).compile()
    refs = [graph.execute(inside.path) for _ in range(3)]
    hold(inside.path)
    refs += [victim.echo.remote(i) for i in range(3)]
    told = []

    def wait(ref):
        try:
            conveyor.get(ref, timeout=WAIT)
        except BaseException as error:
            told.append(type(error))

    threads = [threading.Thread(target=wait, args=(ref,)) for ref in refs]
    for thread in threads:
        thread.start()
    os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join(WAIT)
    assert told == [ActorDiedError] * 6
    assert all(ref.done() for ref in refs)
    graph.teardown()


def test_an_actor_that_waits_for_the_dead_is_told(latches):
    class Asker:
        def ask(self, handle, inside):
            try:
                conveyor.get(handle.hold.remote(inside))
            except ActorDiedError as error:
                return str(error)

    inside = latches()
    victim = Actor.remote()
    pid = conveyor.get(victim.pid.remote(), timeout=WAIT)
    asker = conveyor.remote(Asker).remote()
    ref = asker.ask.remote(victim, inside.path)
    hold(inside.path)
    os.kill(pid, signal.SIGKILL)
    said = conveyor.get(ref, timeout=WAIT)
    assert "SIGKILL" in said
    assert "hold" in said


def test_results_that_had_arrived_survive_the_death(a):
    victim = Actor.remote()
    with chain(victim.echo).compile() as graph:
        refs = [graph.execute(i) for i in range(5)]
        conveyor.wait(refs, num_returns=5, timeout=WAIT)
        calls = [victim.echo.remote(i) for i in range(5)]
        conveyor.wait(calls, num_returns=5, timeout=WAIT)
        conveyor.kill(victim)
        assert conveyor.get(refs, timeout=WAIT) == list(range(5))
        assert conveyor.get(calls, timeout=WAIT) == list(range(5))


def test_an_idle_actor_that_dies_is_known_at_the_next_use(a, wait_until):
    victim = Actor.remote()
    with chain(victim.echo).compile() as graph:
        pid = conveyor.get(victim.pid.remote(), timeout=WAIT)
        process = psutil.Process(pid)
        wait_until(lambda: process.status() == psutil.STATUS_SLEEPING, what="an idle actor")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError) as caught:
            conveyor.get(graph.execute(1), timeout=WAIT)
        assert caught.value.node is None
    with pytest.raises(ActorDiedError):
        chain(a.echo, victim.echo).compile()


def test_another_graph_of_other_actors_lives_on(a, b):
    victim = Actor.remote()
    doomed, living = chain(victim.die).compile(), chain(a.echo, b.echo).compile()
    with doomed, living:
        refs = [living.execute(i) for i in range(5)]
        with pytest.raises(ActorDiedError):
            conveyor.get(doomed.execute("kill"), timeout=WAIT)
        refs += [living.execute(i) for i in range(5, 10)]
        assert conveyor.get(refs, timeout=WAIT) == list(range(10))


def test_sys_exit_ends_the_actor(a):
    victim = Actor.remote()
    with pytest.raises(ActorDiedError, match="code 4") as caught:
        conveyor.get(victim.leave.remote(4), timeout=WAIT)
    assert caught.value.exit_code == 4
    victim = Actor.remote()
    with chain(victim.leave).compile() as graph, pytest.raises(ActorDiedError):
        conveyor.get(graph.execute(4), timeout=WAIT)
    assert conveyor.get(a.echo.remote(1), timeout=WAIT) == 1


def test_kill_of_an_actor_in_a_graph(a, latches):
    inside = latches()
    victim = Actor.remote()
    with chain(a.echo, victim.hold).compile() as graph:
        ref = graph.execute(inside.path)
        hold(inside.path)
        conveyor.kill(victim)
        with pytest.raises(ActorDiedError, match="kill"):
            conveyor.get(ref, timeout=WAIT)
        with pytest.raises(ActorDiedError):
            graph.execute(1)
    assert conveyor.get(a.echo.remote(1), timeout=WAIT) == 1


def test_teardown_with_kill_actors():
    victim = Actor.remote()
    graph = chain(victim.echo).compile()
    graph.teardown(kill_actors=True)
    with pytest.raises(ActorDiedError):
        conveyor.get(victim.echo.remote(1), timeout=WAIT)


def test_many_deaths_leave_the_others_alone(a, b):
    with chain(a.echo, b.echo).compile() as living:
        for i in range(15):
            victim = Actor.remote()
            with chain(a.echo, victim.die, b.echo).compile() as graph:
                ref = graph.execute(("kill", "exit", "segfault")[i % 3])
                assert conveyor.get(living.execute(i), timeout=WAIT) == i
                with pytest.raises(ActorDiedError):
                    conveyor.get(ref, timeout=WAIT)
        assert conveyor.get(living.execute("last"), timeout=WAIT) == "last"


# Timeouts, and the line in the log


@pytest.mark.parametrize("moment", ["between its load and another's", "when all have loaded"])
def test_an_actor_that_dies_while_a_graph_is_compiled(a, monkeypatch, wait_until, moment):
    victim = Actor.remote()
    record = victim._runtime.table.record(victim._id)
    os_pid = conveyor.get(victim.pid.remote(), timeout=WAIT)
    other = a._runtime.table.record(a._id)
    known = a._runtime.process.known_arena

    def kill():
        os.kill(os_pid, signal.SIGKILL)
        wait_until(
            lambda: known(*record.reader) is None,
            WAIT,
            "the end of what the driver had of the actor",
        )

    if moment == "when all have loaded":
        dag = chain(a.echo, victim.echo)
        owner, name = type(a._runtime.process), "writer"
        due = lambda self, *args: True  # noqa: E731
    else:
        dag = chain(victim.echo, a.echo)
        owner, name = type(record), "order"
        due = lambda self, order, *args: self is other and isinstance(order, Load)  # noqa: E731
    original = getattr(owner, name)

    def killing(self, *args, **kwargs):
        if record.arena_fd >= 0 and due(self, *args):
            kill()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, killing)
    with pytest.raises(ActorDiedError) as caught:
        dag.compile()
    assert caught.value.actor == record.id.name
    monkeypatch.undo()
    # The other one has lost nothing by it.
    assert conveyor.get(a.echo.remote(1), timeout=WAIT) == 1
    with chain(a.echo).compile() as graph:
        assert conveyor.get(graph.execute(2), timeout=WAIT) == 2


@pytest.mark.parametrize("effects", [False, True])
def test_no_limit_wins_over_the_graphs_own_however_results_are_got(a, latches, effects):
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = a.hold.bind(inp, go.path)
        if effects:
            dag = MultiOutputNode([inp], effects=[dag])
    waiting = []
    with dag.compile(get_timeout=0.05) as graph:
        result = graph.execute(inside.path)
        ref = result[0] if effects else result
        for refs in (ref, [ref], (ref,), {"a": [ref]}):
            with pytest.raises(WaitTimeoutError):
                conveyor.get(refs)
            outcomes = []

            def get_without_limit(refs=refs, outcomes=outcomes):
                try:
                    outcomes.append(("value", conveyor.get(refs, timeout=-1)))
                except Exception as error:
                    outcomes.append(("error", error))

            thread = threading.Thread(target=get_without_limit)
            thread.start()
            waiting.append((thread, outcomes))
        for thread, outcomes in waiting:
            thread.join(0.1)  # twice as long as the graph says
            assert thread.is_alive(), outcomes
        go.open()
        for thread, outcomes in waiting:
            thread.join(WAIT)
            assert [kind for kind, _ in outcomes] == ["value"], outcomes


def test_a_graphs_own_limit_holds_for_an_execution_with_a_deadline_too(a, latches):
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = a.hold.bind(inp, go.path)
    with dag.compile(get_timeout=0.05) as graph:
        ref = graph.execute(inside.path, deadline=2 * WAIT)
        with pytest.raises(WaitTimeoutError, match=r"timed out after 0\.05 s"):
            conveyor.get(ref)
        go.open()
        assert conveyor.get(ref, timeout=WAIT) is None


def test_time_that_another_thread_has_had_the_result_for_counts(a, latches, monkeypatch):
    inside, go = latches(), latches()
    limits = {}
    wait_for = GraphSource.wait_for

    def noting(self, ref, timeout):
        limits[threading.current_thread().name] = timeout
        return wait_for(self, ref, timeout)

    monkeypatch.setattr(GraphSource, "wait_for", noting)
    with InputNode() as inp:
        dag = a.hold.bind(inp, go.path)
    with dag.compile() as graph:
        ref = graph.execute(inside.path)

        def get(seconds):
            with suppress(WaitTimeoutError):
                conveyor.get(ref, timeout=seconds)

        first = threading.Thread(target=get, args=(2.0,), name="first")
        first.start()
        while "first" not in limits:
            assert first.is_alive()
        second = threading.Thread(target=get, args=(WAIT,), name="second")
        second.start()
        first.join(WAIT)
        while "second" not in limits:
            assert second.is_alive()
        go.open()
        second.join(WAIT)
    assert limits["first"] == 2.0
    assert limits["second"] < WAIT, "of its own time it has spent some"


def test_get_timeout_says_what_is_waited_for(a, b, latches):
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = b.echo.bind(a.hold.bind(inp, go.path))
    with dag.compile(name="slow one") as graph:
        ref = graph.execute(inside.path)
        hold(inside.path)
        for _ in range(2):
            with pytest.raises(WaitTimeoutError) as caught:
                conveyor.get(ref, timeout=0.05)
            text = str(caught.value)
            assert "slow one" in text
            assert "execution 0" in text
            assert "hold" in text
            assert "running" in text
            assert "idle" in text
            assert "Actor" in text
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, ConveyorError)
        with pytest.raises(WaitTimeoutError):
            conveyor.get(ref, timeout=0)
        go.open()
        assert conveyor.get(ref, timeout=WAIT) is None


def test_timeout_of_a_list_is_for_all_together(a, b, latches):
    go = latches()
    refs = [x.hold.remote(go.path + "-inside", go.path) for x in (a, b) for _ in range(40)]
    start = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        conveyor.get(refs, timeout=0.25)
    assert time.monotonic() - start < 10  # one after the other: 20
    go.open()
    assert conveyor.get(refs, timeout=WAIT) == [None] * 80


def test_execute_timeout_says_what_is_waited_for(a, latches):
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = a.hold.bind(inp, go.path)
    with dag.compile(depth=1, name="full one") as graph:
        ref = graph.execute(inside.path)
        hold(inside.path)
        start = time.monotonic()
        with pytest.raises(WaitTimeoutError) as caught:
            graph.execute(inside.path, timeout=0.1)
        assert 0.09 < time.monotonic() - start < WAIT
        text = str(caught.value)
        assert "full one" in text
        assert "depth 1" in text
        assert "hold" in text
        go.open()
        assert conveyor.get([ref, graph.execute(inside.path, timeout=WAIT)], timeout=WAIT)


def test_a_short_execute_timeout_waits_as_long_as_it_says(a, latches):
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = a.hold.bind(inp, go.path)
    with dag.compile(depth=1) as graph:
        graph.execute(inside.path)
        hold(inside.path)
        opener = threading.Timer(0.2, go.open)
        opener.start()
        # Room comes while it waits: then it must not time out.
        assert conveyor.get(graph.execute(inside.path, timeout=WAIT), timeout=WAIT) is None
        opener.join()


@pytest.mark.parametrize("what", ["graph", "call", "execute", "wait"])
def test_a_long_wait_is_logged_once(a, latches, monkeypatch, caplog, wait_until, what):
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = a.hold.bind(inp, go.path)
    with caplog.at_level(logging.WARNING, "conveyor"), dag.compile(depth=1, name="long") as graph:
        ref = graph.execute(inside.path) if what != "call" else a.hold.remote(inside.path, go.path)
        hold(inside.path)

        def open_later():
            wait_until(lambda: caplog.records, what="a line in the log")
            time.sleep(0.3)  # several times as long as makes a wait a long one
            go.open()

        # For this wait alone: on a busy machine any other may be as long.
        with monkeypatch.context() as patched:
            patched.setattr("conveyor.runtime.waiting.LOG_AFTER", 0.05)
            opener = threading.Thread(target=open_later)
            opener.start()
            if what == "execute":
                graph.execute(inside.path)
            elif what == "wait":
                conveyor.wait([ref])
            else:
                conveyor.get(ref)
        opener.join()
        conveyor.get(ref)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("conveyor")]
    assert len(lines) == 1, lines
    if what != "wait":
        assert "hold" in lines[0]
        assert "running" in lines[0]
    if what in ("graph", "execute"):
        assert "long" in lines[0]


def test_short_waits_log_nothing(a, caplog):
    with caplog.at_level(logging.DEBUG, "conveyor"):
        assert conveyor.get(a.echo.remote(1), timeout=WAIT) == 1
    assert not caplog.records


# The driver dies


DRIVER = """
    import os, sys, time
    import conveyor
    from conveyor.dag import InputNode

    @conveyor.remote
    class Actor:
        def pid(self):
            return os.getpid()
        def child(self):
            import subprocess
            return subprocess.Popen(["sleep", "60"]).pid
        def hold(self, x):
            time.sleep(60)
        def make(self):
            child = Actor.remote()
            self.child_actor = child
            return conveyor.get(child.pid.remote())

    actors = [Actor.remote() for _ in range(3)]
    pids = conveyor.get([a.pid.remote() for a in actors])
    pids.append(conveyor.get(actors[0].make.remote()))
    with InputNode() as inp:
        graph = actors[1].hold.bind(inp).compile()
    ref = graph.execute(1)
    busy = actors[2].hold.remote(1)
    print(*pids, flush=True)
    if len(sys.argv) > 1 and sys.argv[1] == "exit":
        sys.exit()
    if len(sys.argv) > 1 and sys.argv[1] == "_exit":
        os._exit(1)
    if len(sys.argv) > 1 and sys.argv[1] == "raise":
        raise RuntimeError("the driver fails")
    conveyor.get(ref)
"""


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "exit", "_exit", "raise"])
def test_actors_end_with_the_driver(scripts, wait_until, how):
    driver = scripts.start(DRIVER, how)
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 4
    if how.startswith("SIG"):
        assert not any(map(gone, pids))
        os.kill(driver.pid, getattr(signal, how))
    driver.wait(WAIT)
    wait_until(lambda: all(map(gone, pids)), WAIT, "the end of the actors")


def test_actors_end_with_the_driver_though_a_grandchild_lives(scripts, wait_until):
    source = DRIVER.replace("print(*pids", "print(conveyor.get(actors[0].child.remote()), *pids")
    driver = scripts.start(source)
    grandchild, *pids = [int(pid) for pid in driver.stdout.readline().split()]
    try:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(WAIT)
        wait_until(lambda: all(map(gone, pids)), WAIT, "the end of the actors")
    finally:
        with suppress(ProcessLookupError):
            os.kill(grandchild, signal.SIGKILL)


def test_actors_outlive_the_thread_that_started_them():
    made = []
    thread = threading.Thread(target=lambda: made.append(Actor.remote()))
    thread.start()
    thread.join(WAIT)
    for _ in range(3):
        assert conveyor.get(made[0].echo.remote(1), timeout=WAIT) == 1
