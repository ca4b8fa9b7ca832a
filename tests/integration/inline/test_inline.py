"""What only the inline engine does: everything here and now. What it has in common with processes
is in test_parity.py."""

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from typing import ClassVar

import numpy as np
import psutil
import pytest

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.engines.inline import engine as link
from conveyor.engines.inline.threads import ActorThreads
from conveyor.exceptions import (
    ActorDiedError,
    ArenaFullError,
    DeadlineExceededError,
    DeadlockError,
    ExecutionCancelledError,
    RuntimeStateError,
    SessionEndedError,
    TaskError,
)


@pytest.fixture(scope="module", autouse=True)
def inline(leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine="inline")
        yield
        conveyor.shutdown()


log: list[object] = []


@pytest.fixture(autouse=True)
def empty_log():
    log.clear()


@conveyor.remote
class Plain:
    def __init__(self, name="plain"):
        self.name = name

    def echo(self, x):
        return x

    def note(self, x):
        log.append((self.name, x))
        return x

    def where(self):
        return threading.get_ident(), os.getpid()

    def stack(self):
        return [frame.function for frame in inspect.stack()]

    def fail(self, x):
        local = x * 2  # noqa: F841 - for the debugger
        raise ValueError(x)

    def interrupt(self, kind=KeyboardInterrupt):
        raise kind

    def ask(self, handle, method, *args):
        return conveyor.get(getattr(handle, method).remote(*args))

    def start(self, handle, *args):
        log.append("before")
        ref = handle.note.remote(*args)
        log.append(("pending", not ref.done()))

    def start_and_pass_on(self, me, other):
        return conveyor.get(other.echo.remote(me.echo.remote(1)))

    def run(self, work):
        return work()

    def run_many(self, works, key):
        return works[key]()

    def exit(self):
        sys.exit("goodbye")


@conveyor.remote
class Async:
    def __init__(self):
        self.thread = threading.get_ident()
        self.event = asyncio.Event()
        self.there = 0
        self.all_there = asyncio.Event()

    def plain(self):
        return self.thread == threading.get_ident()

    async def where(self):
        await asyncio.sleep(0)
        return self.thread == threading.get_ident(), threading.current_thread().name

    async def quick(self, x):
        for _ in range(10):
            await asyncio.sleep(0)
        return x

    async def nap(self, seconds):
        await asyncio.sleep(seconds)
        return seconds

    async def for_ever(self):
        while True:
            await asyncio.sleep(0.001)

    async def meet(self, count):
        """Ends once there are so many of these calls."""
        self.there += 1
        if self.there == count:
            self.all_there.set()
        await asyncio.wait_for(self.all_there.wait(), 20)
        return count

    async def wait(self):
        await self.event.wait()
        return "met"

    async def come(self):
        self.event.set()

    async def ask(self, handle, method, *args):
        return await getattr(handle, method).remote(*args)

    async def fail(self, x):
        await asyncio.sleep(0)
        raise ValueError(x)

    async def quit(self):
        import bdb

        await asyncio.sleep(0)
        raise bdb.BdbQuit


class Works:
    """Something with closures that travels as it is: to its own process, by name."""

    known: ClassVar[dict[str, object]] = {}

    def __init__(self, name, work=None):
        self.name = name
        if work is not None:
            self.known[name] = work

    def __call__(self):
        return self.known[self.name]()

    def __reduce__(self):
        return Works, (self.name,)


# Here


def test_a_call_runs_at_once_on_the_thread_of_its_caller():
    before = psutil.Process().children()
    actor = Plain.remote()
    ref = actor.where.remote()
    assert ref.done()
    assert conveyor.get(ref) == (threading.get_ident(), os.getpid())
    assert psutil.Process().children() == before
    here = inspect.currentframe().f_code.co_name
    assert here in conveyor.get(actor.stack.remote())
    assert conveyor.get(actor.ask.remote(Plain.remote(), "where"))[0] == threading.get_ident()


def test_a_graph_runs_at_execute_in_bind_order():
    a, b, c = Plain.remote("a"), Plain.remote("b"), Plain.remote("c")
    with InputNode() as inp:
        dag = MultiOutputNode(
            [a.note.bind(inp), b.note.bind(c.note.bind(inp)), a.note.bind(b.note.bind(inp))]
        )
    with dag.compile(depth=1) as graph:
        refs = [graph.execute(i) for i in range(3)]
        assert all(ref.done() for some in refs for ref in some)
        order = ["a", "c", "b", "b", "a"]
        assert log == [(name, i) for i in range(3) for name in order]
        assert graph.try_execute(3)[0].get() == 3
        assert "inline" in repr(graph).lower()
        assert "ready" in repr(graph)
    assert "torn down" in repr(graph)


def test_an_error_has_its_live_traceback():
    actor = Plain.remote()
    with InputNode() as inp:
        dag = actor.fail.bind(inp)
    with dag.compile() as graph:
        for ref in (actor.fail.remote(3), graph.execute(3), Async.remote().fail.remote(3)):
            with pytest.raises(ValueError, match="3") as caught:
                conveyor.get(ref)
            error = caught.value
            assert isinstance(error, TaskError)
            assert type(error.__cause__) is ValueError
            assert error.__cause__ is not error.cause
            last = list(traceback.walk_tb(error.__cause__.__traceback__))[-1][0]
            assert last.f_code.co_name == "fail"
            assert last.f_locals["x"] == 3
            assert "in fail" in error.remote_traceback
            assert "engines/inline" not in error.remote_traceback


def test_ctrl_c_reaches_the_program():
    actor, other = Plain.remote(), Plain.remote()
    with InputNode() as inp:
        dag = other.echo.bind(actor.interrupt.bind(inp))
    with dag.compile() as graph:
        with pytest.raises(KeyboardInterrupt):
            actor.interrupt.remote()
        with pytest.raises(KeyboardInterrupt):
            other.ask.remote(actor, "interrupt")
        with pytest.raises(KeyboardInterrupt):
            graph.execute(KeyboardInterrupt)
        for handle in (actor, other):
            assert conveyor.get(handle.echo.remote(1)) == 1
        with pytest.raises(TaskError):
            conveyor.get(graph.execute(ValueError))


def test_the_debuggers_quit_reaches_the_program():
    import bdb

    with pytest.raises(bdb.BdbQuit):
        Plain.remote().interrupt.remote(bdb.BdbQuit)
    with pytest.raises(bdb.BdbQuit):
        conveyor.get(Async.remote().quit.remote())


SCRIPT = """
    import conveyor
    from conveyor.dag import InputNode

    @conveyor.remote
    class Adder:
        def add(self, x):
            secret = x + 41
            breakpoint()
            return secret

    conveyor.init(engine="inline")
    adder = Adder.remote()
    with InputNode() as inp:
        graph = adder.add.bind(inp).compile()
    print("got", graph.execute(1).get())
"""


def _debug(tmp_path, commands, script=SCRIPT):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(script))
    source = os.path.dirname(os.path.dirname(conveyor.__file__))
    return subprocess.run(
        [sys.executable, path],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": source},
    )


def test_breakpoints(tmp_path):
    done = _debug(tmp_path, ["p secret", "bt", "c"])
    assert done.returncode == 0, done.stderr
    assert re.search(r"42\n(.|\n)*<module>(.|\n)*graph.execute\(1\)(.|\n)*got 42", done.stdout)


def test_breakpoints_in_coroutines(tmp_path):
    done = _debug(tmp_path, ["p secret", "c"], SCRIPT.replace("def add", "async def add"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"42\n(.|\n)*got 42", done.stdout)


@pytest.mark.parametrize("definition", ["def add", "async def add"])
def test_quitting_the_debugger_ends_the_program(tmp_path, definition):
    done = _debug(tmp_path, ["q"], SCRIPT.replace("def add", definition))
    assert done.returncode != 0
    assert "got" not in done.stdout
    assert "BdbQuit" in done.stderr


# Async actors


def test_an_actor_with_async_methods_has_a_thread_of_its_own():
    actor = Async.remote()
    assert conveyor.get(actor.plain.remote())
    assert conveyor.get(actor.where.remote()) == (True, f"inline {actor._id.name}")


def test_an_async_call_is_done_if_it_can_be():
    actor, other = Async.remote(), Plain.remote()
    assert all(actor.quick.remote(i).done() for i in range(100))
    assert all(actor.ask.remote(other, "echo", i).done() for i in range(100))


def test_an_async_call_that_sleeps_lets_its_caller_go_on():
    actor, other = Async.remote(), Async.remote()
    background = actor.for_ever.remote()
    together = [actor.meet.remote(20) for _ in range(20)]
    requested = other.ask.remote(actor, "wait")
    assert not requested.done()
    assert conveyor.get(together) == [20] * 20
    actor.come.remote()
    assert conveyor.get(requested, timeout=60) == "met"
    assert not background.done()
    conveyor.kill(actor)
    with pytest.raises(ActorDiedError, match="kill"):
        conveyor.get(background)


def test_calls_that_lack_arguments_wait_for_each_other():
    here, there = Async.remote(), Async.remote()
    refs = [there.quick.remote(here.quick.remote(there.nap.remote(0.02))) for _ in range(3)]
    assert conveyor.get(refs, timeout=20) == [0.02] * 3


def test_calls_and_graphs_within_a_running_loop():
    actor, other = Async.remote(), Plain.remote()
    with InputNode() as inp:
        dag = actor.quick.bind(other.echo.bind(inp))

    async def main():
        with dag.compile() as graph:
            ref = await graph.execute_async(1)
            assert ref.done()
            waits = actor.wait.remote()

            async def later():
                await asyncio.sleep(0.01)
                actor.come.remote()

            task = asyncio.create_task(later())
            met = await waits
            await task
            return await ref, met, conveyor.get(actor.quick.remote(2))

    assert asyncio.run(main()) == (1, "met", 2)


def test_a_graph_waits_for_its_coroutines():
    actor = Async.remote()
    with InputNode() as inp:
        dag = actor.nap.bind(inp)
    with dag.compile() as graph:
        ref = graph.execute(0.02)
        assert ref.done()
        threading.Timer(0.05, lambda: actor.come.remote()).start()
    with InputNode() as inp:
        dag = actor.ask.bind(actor.plain._handle, inp)
    with dag.compile() as graph:
        assert graph.execute("wait").get() == "met"


# Waiting for each other


def test_a_call_to_a_busy_actor_runs_when_it_comes_free():
    actor = Plain.remote("a")
    conveyor.get(actor.start.remote(actor, 1))
    assert log == ["before", ("pending", True), ("a", 1)]


def test_a_cycle_is_refused_by_name():
    a, b = Plain.options(name="left").remote(), Plain.options(name="right").remote()
    with pytest.raises(DeadlockError, match="right waits for left waits for right") as caught:
        conveyor.get(a.ask.remote(b, "ask", a, "echo", 1))
    assert caught.value.cause.cycle == ("right", "left")
    with pytest.raises(DeadlockError, match="left waits for left, and"):
        conveyor.get(a.ask.remote(a, "echo", 1))
    with pytest.raises(DeadlockError, match="left waits for left"):
        conveyor.get(a.start_and_pass_on.remote(a, b))
    # What could not be waited for was done all the same, and nobody is stuck.
    assert conveyor.get([a.echo.remote(1), b.echo.remote(2)]) == [1, 2]
    for actor in (a, b):
        conveyor.kill(actor)


def test_a_cycle_over_two_threads_is_refused():
    a, b = Plain.remote(), Plain.remote()
    meet = threading.Barrier(2, timeout=60)
    outcomes = []

    def ask(other):
        meet.wait()
        return conveyor.get(other.echo.remote("through"))

    def drive(mine, other):
        with contextlib.suppress(DeadlockError):
            outcomes.append(conveyor.get(mine.run.remote(Works(str(id(mine)), lambda: ask(other)))))

    threads = [threading.Thread(target=drive, args=pair) for pair in ((a, b), (b, a))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    # One of the two is refused; the other one then gets through.
    assert outcomes == ["through"]
    assert conveyor.get([a.echo.remote(1), b.echo.remote(2)]) == [1, 2]


def test_a_graph_that_needs_the_actor_that_executes_it_is_refused():
    actor = Plain.options(name="busy").remote()
    with InputNode() as inp:
        dag = actor.echo.bind(inp)
    with dag.compile(name="inner") as graph:
        work = Works("execute", lambda: graph.execute(1).get())
        with pytest.raises(DeadlockError, match="inner waits for busy waits for inner"):
            conveyor.get(actor.run.remote(work))
        assert graph.execute(2).get() == 2
    conveyor.kill(actor)


def test_max_concurrency_leaves_room_for_a_call_back():
    actor, other = Plain.options(max_concurrency=2).remote(), Plain.remote()
    assert conveyor.get(actor.ask.remote(other, "ask", actor, "echo", 1)) == 1
    with pytest.raises(DeadlockError):
        conveyor.get(actor.ask.remote(other, "ask", actor, "ask", actor, "echo", 1))


def test_an_async_actor_is_not_blocked_by_what_it_awaits():
    actor, other = Async.remote(), Plain.remote()
    assert conveyor.get(actor.ask.remote(other, "ask", actor, "quick", 1)) == 1


def test_a_long_wait_is_logged_by_name(caplog, monkeypatch, wait_until):
    monkeypatch.setattr("conveyor.runtime.waiting.LOG_AFTER", 0.05)
    actor, other = Async.options(name="sleeper").remote(), Plain.remote()

    def come():
        wait_until(lambda: "sleeper.wait" in caplog.text, what="a line in the log")
        actor.come.remote()

    with caplog.at_level(logging.WARNING, "conveyor"):
        thread = threading.Thread(target=come)
        thread.start()
        assert conveyor.get(other.ask.remote(actor, "wait")) == "met"
        thread.join()
    assert "waiting for sleeper.wait (call 1)" in caplog.text
    conveyor.kill(actor)


# Threads


def test_one_call_at_a_time_on_one_actor():
    actor = Plain.remote()
    running, most = [], []

    def work():
        running.append(1)
        most.append(len(running))
        time.sleep(0.001)
        running.pop()
        return threading.get_ident()

    mine = []

    def drive():
        for _ in range(20):
            mine.append(conveyor.get(actor.run.remote(Works("exclusive"))) == threading.get_ident())

    Works("exclusive", work)
    threads = [threading.Thread(target=drive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1] * 80
    assert mine == [True] * 80


def test_different_actors_run_side_by_side():
    actors = [Plain.remote() for _ in range(3)]
    meet = Works("meet", threading.Barrier(3, timeout=60).wait)
    found = []

    def drive(actor):
        found.append(conveyor.get(actor.run.remote(meet)))

    threads = [threading.Thread(target=drive, args=(actor,)) for actor in actors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == [0, 1, 2]


def test_executions_of_threads_and_calls_meanwhile():
    a, b = Plain.remote(), Async.remote()
    with InputNode() as inp:
        dag = b.quick.bind(a.echo.bind(inp))
    right = []

    def execute(graph, k):
        right.append(all(graph.execute((k, i)).get() == (k, i) for i in range(50)))

    def call(k):
        right.append(all(conveyor.get(a.ask.remote(b, "quick", i)) == i for i in range(50)))

    with dag.compile() as graph:
        threads = [threading.Thread(target=execute, args=(graph, k)) for k in range(2)]
        threads += [threading.Thread(target=call, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert right == [True] * 4


# Ends


class Heavy:
    made: weakref.ref

    def __init__(self):
        Heavy.made = weakref.ref(self)

    def echo(self, x):
        return x

    def drop(self):
        Heavy.handle = None
        return "still here"


def test_an_instance_goes_with_the_last_handle():
    actor = conveyor.remote(Heavy).remote()
    conveyor.get(actor.echo.remote(1))
    made = Heavy.made
    del actor
    assert made() is None


def test_an_instance_stays_while_a_graph_has_it():
    actor = conveyor.remote(Heavy).remote()
    made = Heavy.made
    with InputNode() as inp:
        graph = actor.echo.bind(inp).compile()
    del actor, inp
    gc.collect()
    assert graph.execute(1).get() == 1
    graph.teardown()
    del graph
    gc.collect()
    assert made() is None


def test_a_call_that_drops_the_last_handle_is_answered():
    Heavy.handle = conveyor.remote(Heavy).remote()
    assert conveyor.get(Heavy.handle.drop.remote()) == "still here"
    assert Heavy.made() is None


def test_kill_frees_the_instance_and_stops_nothing_that_runs():
    actor = conveyor.remote(Heavy).remote()
    conveyor.kill(actor)
    assert Heavy.made() is None

    busy = Plain.remote()
    inside, go = threading.Event(), threading.Event()

    def work():
        inside.set()
        return go.wait(20)

    refs = []
    thread = threading.Thread(target=lambda: refs.append(busy.run.remote(Works("busy", work))))
    thread.start()
    inside.wait(20)
    conveyor.kill(busy)
    go.set()
    thread.join(20)
    with pytest.raises(ActorDiedError, match=r"inline.*kill"):
        conveyor.get(refs[0])


def test_sys_exit_ends_the_actor_only(capsys):
    actor = Plain.options(name="leaver").remote()
    with pytest.raises(ActorDiedError, match="exited with code 1 while running exit") as caught:
        conveyor.get(actor.exit.remote())
    assert (caught.value.exit_code, caught.value.node) == (1, "exit")
    assert capsys.readouterr().err == "goodbye\n"
    with pytest.raises(ActorDiedError):
        actor.echo.remote(1)
    with pytest.raises(ValueError, match="no actor named 'leaver'; named actors: none"):
        conveyor.get_actor("leaver")
    conveyor.kill(Plain.options(name="leaver").remote())


# The session


def test_options(caplog):
    with pytest.raises(RuntimeStateError, match="running already"):
        conveyor.init(engine="inline")
    from conveyor.engines.inline.engine import start

    with pytest.raises(TypeError, match="inline engine has no option 'colour'"):
        start(colour="red")
    with caplog.at_level(logging.WARNING, "conveyor"):
        Plain.options(env_vars={"A": "1"}).remote()
    assert "env_vars have no effect" in caplog.text


def test_sessions_one_after_the_other(leaves_nothing):
    conveyor.shutdown()
    with leaves_nothing():
        conveyor.init(engine="inline", log_to_driver=False, arena_bytes=4 << 20)
        old = Plain.remote()
        pending = Async.remote().wait.remote()
        with InputNode() as inp:
            graph = old.echo.bind(inp).compile()
        ref = graph.execute([1])
        assert conveyor.get(old.echo.remote(np.ones(1 << 16))).sum() == 1 << 16
        for use in (old.echo.remote, graph.execute, conveyor.empty):
            with pytest.raises(ArenaFullError):
                use(np.ones(1 << 20) if use is not conveyor.empty else 1 << 20)
        with pytest.raises(ArenaFullError) as caught:
            conveyor.get(old.run.remote(Works("big", lambda: np.ones(1 << 20))))
        assert isinstance(caught.value, TaskError)
        del caught
        conveyor.shutdown()
        assert ref.get() == [1]
        with pytest.raises(SessionEndedError):
            pending.get()
        with pytest.raises(RuntimeStateError, match="shut down"):
            graph.execute(1)
        with pytest.raises(RuntimeStateError, match="shut down"):
            old.echo.remote(1)
        conveyor.init(engine="inline")
        assert conveyor.get(Plain.remote().echo.remote(1)) == 1
        conveyor.shutdown()
        del old, pending, graph, ref, inp, use
    conveyor.init(engine="inline")


def test_ten_thousand_calls_leave_nothing():
    actor = Plain.remote()
    for i in range(1000):
        actor.echo.remote(i)
    gc.collect()
    before = len(gc.get_objects())
    for i in range(10_000):
        actor.echo.remote(i)
    gc.collect()
    assert len(gc.get_objects()) - before < 100


# Cancelling and deadlines


class Slow:
    def __init__(self):
        self.seen = []

    def sleep(self, seconds):
        time.sleep(seconds)
        self.seen.append(seconds)
        return seconds

    def noted(self):
        return self.seen


class Waiting:
    def __init__(self):
        self.seen = []

    async def hold(self, x):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.seen.append(x)
            raise

    async def noted(self):
        return self.seen


def test_a_call_is_cancelled(inline, wait_until):
    actor, other = conveyor.remote(Waiting).remote(), conveyor.remote(Slow).remote()
    pending = actor.hold.remote("x")
    behind = other.sleep.remote(pending)
    assert not pending.done()
    assert behind.cancel()
    assert pending.cancel()
    for ref in (pending, behind):
        assert ref.done()
        assert ref.cancelled()
        assert not ref.cancel()
        with pytest.raises(ExecutionCancelledError):
            conveyor.get(ref)
    wait_until(lambda: conveyor.get(actor.noted.remote()) == ["x"])
    assert conveyor.get(other.noted.remote()) == []
    done = other.sleep.remote(0)
    assert not done.cancel()
    assert conveyor.get(done) == 0


def test_deadlines_are_looked_at_before_each_task(inline):
    a, b = conveyor.remote(Slow).remote(), conveyor.remote(Slow).remote()
    with InputNode() as inp:
        graph = b.sleep.bind(a.sleep.bind(inp)).compile(name="late")
    ref = graph.execute(0.05, deadline=0.02)
    assert not ref.cancel()
    with pytest.raises(
        DeadlineExceededError,
        match=r"late, execution 0: its deadline of 0\.02 s has passed; tasks that had run: none; "
        r"not in time: (Slow\S*\.sleep), Slow\S*\.sleep; the first of them was \1",
    ):
        ref.get()
    assert conveyor.get(b.noted.remote()) == []
    assert conveyor.get(graph.execute(0.0, deadline=60)) == 0.0


def test_a_deadline_cancels_a_coroutine(inline, wait_until):
    actor = conveyor.remote(Waiting).remote()
    with InputNode() as inp:
        graph = actor.hold.bind(inp).compile()
    for seconds in (0.05, 1, 20):  # which may be over before it could begin
        with pytest.raises(DeadlineExceededError):
            graph.execute("x", deadline=seconds).get()
        if noted := conveyor.get(actor.noted.remote()):
            break
    assert noted == ["x"]


def test_an_actor_that_ends_while_a_call_is_made(monkeypatch):
    actor = Plain.remote()
    make = link.CallJob

    def make_and_kill(*args):
        call = make(*args)
        conveyor.kill(actor)
        return call

    monkeypatch.setattr(link, "CallJob", make_and_kill)
    with pytest.raises(ActorDiedError, match=r"conveyor\.kill"):
        conveyor.get(actor.echo.remote(1))


def test_an_actor_that_ends_when_the_turn_of_a_call_has_come(monkeypatch):
    actor = Plain.remote()
    start = link.CallJob.start

    def kill_and_start(call):
        conveyor.kill(actor, graceful=True)
        return start(call)

    monkeypatch.setattr(link.CallJob, "start", kill_and_start)
    with pytest.raises(ActorDiedError, match="graceful=True"):
        conveyor.get(actor.echo.remote(1))


def test_a_call_that_is_ended_between_its_turn_and_its_start(monkeypatch):
    """By another thread: the turn is given back, or nobody would ever have one again."""
    actor = Plain.remote()
    assert conveyor.get(actor.echo.remote(1)) == 1
    block = ActorThreads.block

    def block_and_cancel(lines, job, ready, timeout=None):
        block(lines, job, ready, timeout)
        if not job.done:
            other = threading.Thread(target=job.cancel, args=(None,))
            other.start()
            other.join()

    with monkeypatch.context() as patched:
        patched.setattr(ActorThreads, "block", block_and_cancel)
        cancelled = actor.echo.remote(2)
    with pytest.raises(ExecutionCancelledError):
        conveyor.get(cancelled)
    assert conveyor.get(actor.echo.remote(3)) == 3


def test_a_turn_that_is_interrupted_before_its_call_starts(monkeypatch):
    actor = Plain.remote()
    block = ActorThreads.block

    def block_and_interrupt(lines, job, ready, timeout=None):
        block(lines, job, ready, timeout)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ActorThreads, "block", block_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            actor.echo.remote(2)
    assert conveyor.get(actor.echo.remote(3)) == 3
