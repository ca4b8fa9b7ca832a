"""How actors end: in good order at the session's end, with the last handle, by a graceful kill."""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

import conveyor
from conveyor.exceptions import ActorDiedError, SessionEndedError

# A class that leaves a mark for each thing that the end of a program does.
MARKS = """
    import asyncio, atexit, conveyor, gc, multiprocessing, os, pathlib, sys, tempfile, threading, time

    class Base:
        def __init__(self):
            self.lines = open("lines", "w")
            self.binary = open("binary", "wb")
            self.me = self  # a circle: only a collection finds it
            self.scratch = tempfile.TemporaryDirectory(dir=".")
            atexit.register(pathlib.Path("atexit").touch)
            self.over = threading.Event()
            threading.Thread(target=self.last).start()  # Python waits for it
            global kept
            kept = open("of-a-global", "w")
            kept.write("kept")
        def last(self):
            threading.main_thread().join(0)
            over = self.over
            del self
            over.wait()
            pathlib.Path("thread").touch()
        def log(self, text):
            self.lines.write(text)
            self.binary.write(text.encode())
        def items(self):
            try:
                yield 1
                yield 2
            finally:
                pathlib.Path("generator").touch()
        def leave(self):
            sys.exit(3)

    class Sync(Base):
        def __conveyor_exit__(self):
            self.log("bye")
            print("goodbye from the hook")
            self.over.set()
        def __del__(self):
            pathlib.Path("del").touch()

    class Async(Base):
        def __del__(self):
            pathlib.Path("del").touch()
        async def __conveyor_exit__(self):
            await asyncio.sleep(0)
            self.log("bye")
            print("goodbye from the hook")
            self.over.set()
        async def nap(self):
            try:
                await asyncio.sleep(1000)
            finally:
                pathlib.Path("coroutine").touch()

    class Pooled(Sync):
        pass

    OPTIONS = {"Pooled": {"max_concurrency": 3}}
    cls = globals()[sys.argv[1]]
    actor = conveyor.remote(cls).options(**OPTIONS.get(sys.argv[1], {})).remote()
    conveyor.get([actor.log.remote("x") for _ in range(50)])
    items = actor.items.remote()
    next(items)
    if cls is Async:
        nap = actor.nap.remote()
        conveyor.get(actor.log.remote(""))
"""
ENDS = {
    "program": "",
    "error": "raise SystemExit(4)",
    "shutdown": "conveyor.shutdown()",
    "graceful": "conveyor.kill(actor, graceful=True)\nassert pathlib.Path('del').exists()",
    "sigterm": "os.kill(os.getpid(), 15)",
    "sys.exit": """
from conveyor.driver import actors
actors._EXIT_CODE_WAIT = 60  # as in the tests' own process: on a busy machine it is told late
try:
    conveyor.get(actor.leave.remote())
except conveyor.exceptions.ActorDiedError as error:
    assert error.exit_code == 3, error
""",
}
EVERYTHING = {"lines", "binary", "of-a-global", "atexit", "thread", "del", "generator"}


def _end(scripts, folder, cls, how, **options):
    import textwrap

    source = textwrap.dedent(MARKS) + textwrap.dedent(ENDS[how])
    code = {"error": 4, "sigterm": -signal.SIGTERM}.get(how, 0)
    out = scripts.run(source, cls, code=code, env={"CONVEYOR_GRACE_SECONDS": "20"}, **options)
    assert "goodbye from the hook" in out
    died = "left by sys.exit: it exited with code 3" if how == "sys.exit" else ""
    assert died in scripts.stderr
    assert scripts.stderr.count("\n") == bool(died)
    left = {path.name for path in folder.iterdir()} - {"program.py"}
    expected = EVERYTHING | ({"coroutine"} if cls == "Async" else set())
    assert left == expected  # and no temporary directory
    assert (folder / "lines").read_text() == (folder / "binary").read_text() == 50 * "x" + "bye"
    assert (folder / "of-a-global").read_text() == "kept"


@pytest.mark.parametrize("how", ENDS)
def test_an_actor_ends_as_a_program_does(scripts, tmp_path, how):
    _end(scripts, tmp_path, "Sync", how)


@pytest.mark.parametrize(
    ("cls", "how"), [("Async", "program"), ("Async", "sys.exit"), ("Pooled", "graceful")]
)
def test_so_does_one_with_a_loop_or_a_pool(scripts, tmp_path, cls, how):
    _end(scripts, tmp_path, cls, how)


@pytest.mark.usefixtures("time_to_end")
def test_with_the_last_handle_what_is_queued_is_done_first(scripts, tmp_path):
    scripts.run("""
        import conveyor, pathlib, time
        class Writer:
            def __init__(self):
                self.file = open("lines", "w")
            def log(self, text):
                time.sleep(.01)
                self.file.write(text)
            def __conveyor_exit__(self):
                self.file.write("|")
        a = conveyor.remote(Writer).remote()
        for i in range(10):
            a.log.remote(str(i))
        del a
        end = time.monotonic() + 60
        while not pathlib.Path("lines").exists() or not pathlib.Path("lines").read_text():
            assert time.monotonic() < end
            time.sleep(.01)
        assert pathlib.Path("lines").read_text() == "0123456789|"
    """)


class Busy:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.ran = 0

    def __conveyor_exit__(self):
        (self.folder / "ran").write_text(str(self.ran))

    def work(self, latch):
        self.ran += 1
        Path(self.folder / "begun").touch()
        while not os.path.exists(latch):
            time.sleep(0.005)
        return self.ran

    def ping(self):
        return os.getpid()

    def me(self, handle):
        conveyor.kill(handle, graceful=True)
        return "still here"


@pytest.fixture
def busy(tmp_path):
    conveyor.init(grace_seconds=60)
    yield conveyor.remote(Busy).options(name="busy", max_restarts=1).remote(tmp_path)
    conveyor.shutdown()


def test_what_runs_is_done_and_what_is_queued_is_not_begun(busy, latches, tmp_path, wait_until):
    go = latches()
    running, queued = busy.work.remote(go.path), [busy.work.remote(go.path) for _ in range(40)]
    wait_until((tmp_path / "begun").exists)
    import threading

    killer = threading.Thread(target=conveyor.kill, args=(busy,), kwargs={"graceful": True})
    killer.start()
    record = next(iter(conveyor.runtime.context.running().table))
    wait_until(lambda: record.killed)
    go.open()
    killer.join(60)
    assert not killer.is_alive()
    assert running.get(timeout=60) == 1
    for ref in queued:
        with pytest.raises(ActorDiedError, match=r"was ended by conveyor.kill\(graceful=True\)"):
            ref.get(timeout=60)
    assert (tmp_path / "ran").read_text() == "1"


def test_a_graceful_end_is_no_reason_to_restart_unless_that_is_requested_for(busy):
    before = conveyor.get(busy.ping.remote())
    conveyor.kill(busy, graceful=True, no_restart=False)
    after = conveyor.get(busy.ping.remote())
    assert after != before
    conveyor.kill(busy, graceful=True)
    with pytest.raises(ActorDiedError, match="graceful"):
        conveyor.get(busy.ping.remote())


def test_an_actor_can_end_itself(busy, tmp_path, wait_until):
    assert conveyor.get(busy.me.remote(busy)) == "still here"
    wait_until((tmp_path / "ran").exists)


def test_a_named_actor_needs_no_handle(busy):
    pid = conveyor.get(busy.ping.remote())
    del busy
    # Its name is enough to ask for it.
    assert conveyor.get(conveyor.get_actor("busy").ping.remote()) == pid


GRACE = 2.0
#: Of it those that end in good order have enough on a busy machine, too.
LONG_GRACE = 8.0

SLOW = """
    import conveyor, logging, sys, threading, time
    logging.basicConfig(format="%(message)s")
    class Slow:
        def sleep(self, latch):
            open(latch, "w").close()
            time.sleep(1000)
        def hook(self, seconds):
            self.seconds = seconds
        def __conveyor_exit__(self):
            time.sleep(getattr(self, "seconds", 0))
    def wait_for(path):
        import os
        while not os.path.exists(path):
            time.sleep(.005)
    conveyor.init(grace_seconds=GRACE)
    actors = [conveyor.remote(Slow).remote() for _ in range(3)]
"""


def test_the_grace_period_ends(scripts):
    out = scripts.run(
        SLOW.replace("GRACE", str(LONG_GRACE))
        + """
    refs = [a.sleep.remote(f"latch{i}") for i, a in enumerate(actors[:2])]
    for i in range(2):
        wait_for(f"latch{i}")
    began = time.monotonic()
    conveyor.shutdown()
    print(time.monotonic() - began)
    """
    )
    assert float(out) >= LONG_GRACE
    lines = scripts.stderr.splitlines()
    assert lines[0] == "not ended within the grace period of 8 s, and killed:"
    told = re.compile(r"  Slow(#2)? \(pid \d+\): running sleep \(call 1\) since [\d.]+ s \(.*\)")
    assert len(lines) == 3
    assert all(told.fullmatch(line) for line in lines[1:])


def test_what_is_known_of_an_actor_that_runs_nothing_is_said(scripts):
    scripts.run(
        SLOW.replace("GRACE", str(LONG_GRACE))
        + """
    class Stays(Slow):
        def stay(self):
            import threading
            threading.Thread(target=time.sleep, args=(1000,)).start()
    stays = conveyor.remote(Stays).remote()
    conveyor.get(stays.stay.remote())
    """
    )
    (line,) = scripts.stderr.splitlines()[1:]
    assert ": idle: its methods and __conveyor_exit__ are done, but its process was not" in line


def test_a_hook_that_does_not_return_is_named(scripts):
    scripts.run(
        SLOW.replace("GRACE", str(GRACE))
        + """
    conveyor.get(actors[0].hook.remote(1000))
    """
    )
    assert "Slow (pid" in scripts.stderr
    assert "running __conveyor_exit__" in scripts.stderr


def test_nor_does_an_actor_outlive_its_last_handle_that_way(scripts):
    scripts.run(
        SLOW.replace("GRACE", str(GRACE))
        + """
    conveyor.get(actors[0].hook.remote(1000))
    record = next(iter(conveyor.runtime.context.running().table))
    del actors
    assert record.cleaned_up.wait(60)
    """
    )
    assert "Slow has not ended within the grace period of 2 s and is killed" in (scripts.stderr)
    assert "time.sleep(getattr" in scripts.stderr


def test_no_grace_is_the_end_at_once(scripts):
    out = scripts.run(
        SLOW.replace("GRACE", "0")
        + """
    ref = actors[0].sleep.remote("latch")
    wait_for("latch")
    began = time.monotonic()
    conveyor.shutdown()
    print(time.monotonic() - began)
    """
    )
    assert float(out) < 60
    assert scripts.stderr == ""


def test_ctrl_c_ends_the_grace_period(scripts):
    program = scripts.start(
        SLOW.replace("GRACE", "100")
        + """
    ref = actors[0].sleep.remote("latch")
    wait_for("latch")
    print("ending", flush=True)
    """
    )
    assert program.stdout.readline() == "ending\n"
    # It is delivered whenever the program is in its end, which may not have begun yet.
    deadline = time.monotonic() + 60
    while program.poll() is None and time.monotonic() < deadline:
        program.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            program.wait(0.2)
    assert program.poll() is not None


@pytest.mark.parametrize("last", ["", "raise SystemExit(4)", "conveyor.shutdown()"])
def test_ctrl_c_in_the_grace_period_ends_the_program_as_it_ends_any(
    scripts, tmp_path, wait_until, last
):
    program = scripts.start(
        """
    import atexit, conveyor, pathlib, signal, threading

    class Slow:
        def ping(self):
            pass
        def __conveyor_exit__(self):
            pathlib.Path("ending").touch()
            threading.Event().wait()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(pathlib.Path("other-hooks").touch)
    conveyor.init(grace_seconds=1000)
    actor = conveyor.remote(Slow).remote()
    conveyor.get(actor.ping.remote())
    """
        + last
    )
    wait_until((tmp_path / "ending").exists)
    time.sleep(0.1)  # into the wait for it; a signal that comes before ends it just as well
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGINT, (out, err)
    assert (tmp_path / "other-hooks").exists()
    assert out == ""
    if "shutdown" in last:
        assert err.startswith("Traceback")
        assert err.endswith("\nKeyboardInterrupt\n")
        assert err.count("Traceback") == 1
    else:
        assert err == ""


@pytest.mark.parametrize("seconds", [-1, "soon", True])
def test_a_wrong_grace_period(seconds):
    with pytest.raises(ValueError, match="grace_seconds must be a number of seconds"):
        conveyor.init(grace_seconds=seconds)
    assert not conveyor.is_initialized()


class Hooked:
    marks: ClassVar[list[str]] = []

    def __conveyor_exit__(self):
        self.marks.append("sync")

    def leave(self):
        raise SystemExit(2)


class HookedAsync:
    async def __conveyor_exit__(self):
        Hooked.marks.append("async")

    async def ping(self):
        return 1


class Failing:
    def __conveyor_exit__(self):
        raise ValueError("no end")


def test_inline_the_same_hooks_are_called(capsys):
    Hooked.marks.clear()
    conveyor.init(engine="inline", grace_seconds=10)
    hooked = conveyor.remote(Hooked)
    killed, ended, left, dropped = (hooked.remote() for _ in range(4))
    loop, failing = conveyor.remote(HookedAsync).remote(), conveyor.remote(Failing).remote()
    conveyor.get(loop.ping.remote())
    conveyor.kill(killed)
    assert Hooked.marks == []
    conveyor.kill(ended, graceful=True)
    with pytest.raises(ActorDiedError):
        conveyor.get(left.leave.remote())
    del dropped
    assert Hooked.marks == ["sync"] * 3
    conveyor.kill(failing, graceful=True)
    assert "ValueError: no end" in capsys.readouterr().err
    last = hooked.remote()
    conveyor.shutdown()
    del last
    assert sorted(Hooked.marks) == ["async"] + ["sync"] * 4


def test_who_waits_is_told_that_the_session_has_ended(tmp_path, latches, wait_until):
    import threading

    from conveyor.dag import InputNode

    conveyor.init(grace_seconds=0.2)
    go = latches()
    busy = conveyor.remote(Busy).remote(tmp_path)
    graph_actor = conveyor.remote(Busy).remote(tmp_path)
    with InputNode() as inp:
        graph = graph_actor.work.bind(inp).compile(depth=1)
    call, queued, execution = (
        busy.work.remote(go.path),
        busy.ping.remote(),
        graph.execute(go.path),
    )
    waits = [
        call.get,
        queued.get,
        execution.get,
        lambda: conveyor.get([queued, call]),
        lambda: (conveyor.wait([call]), call.get()),
        lambda: graph.execute(go.path),
    ]
    told, waiting = [], threading.Semaphore(0)

    def wait(work):
        waiting.release()
        try:
            work()
        except Exception as error:
            told.append(error)

    threads = [threading.Thread(target=wait, args=(work,)) for work in waits]
    for thread in threads:
        thread.start()
        waiting.acquire()
    wait_until((tmp_path / "begun").exists)
    conveyor.shutdown()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in told] == [SessionEndedError] * len(waits)
    assert all("the session has ended" in str(error) for error in told)
    for late in (busy.ping.remote, lambda: graph.execute(1), call.get):
        with pytest.raises(conveyor.exceptions.RuntimeStateError):
            late()


# Each step of the end raises what no ordinary error is.
FAILING_STEPS = """
    import asyncio, atexit, conveyor, pathlib, sys
    from conveyor.dag import InputNode

    class Steps:
        def __init__(self, name):
            self.name = name
            self.kept = open(f"{name}-file", "w")
            self.kept.write("kept")
            atexit.register(self.step, "atexit", self.name, raises=False)
        @staticmethod
        def step(what, name, raises=True):
            pathlib.Path(f"{name}-{what}").touch()
            if raises:
                kinds = {"interrupt": KeyboardInterrupt, "exit": SystemExit, "error": ValueError}
                raise kinds[sys.argv[1]](what)
        def items(self):
            name, step = self.name, self.step
            try:
                while True:
                    yield 1
            finally:
                step("generator", name)
        def more(self):
            name, step = self.name, self.step
            try:
                while True:
                    yield 1
            finally:
                step("another", name)
        def __del__(self):
            self.step("del", self.name)
    class Sync(Steps):
        def __conveyor_exit__(self):
            self.step("hook", self.name)
    class Async(Steps):
        async def nap(self, number):
            name, step = self.name, self.step
            try:
                pathlib.Path(f"{name}-sleeps{number}").touch()
                await asyncio.sleep(1000)
            finally:
                step(f"coroutine{number}", name)
        async def __conveyor_exit__(self):
            await asyncio.sleep(0)
            self.step("hook", self.name)

    conveyor.init()
    sync, other = (conveyor.remote(Sync).remote(name) for name in ("sync", "other"))
    loop = conveyor.remote(Async).remote("loop")
    streams = [a.items.remote() for a in (sync, other, loop)] + [a.more.remote() for a in (sync, other, loop)]
    for stream in streams:
        next(stream)
    naps = [loop.nap.remote(i) for i in range(3)]
    conveyor.get(loop.__ray_call__.remote(lambda self: None))
    while not pathlib.Path("loop-sleeps2").exists():
        pass
    try:
        conveyor.shutdown()
    except KeyboardInterrupt:
        assert len(sys.argv) > 2
    assert not conveyor.is_initialized()
"""


@pytest.mark.usefixtures("time_to_end")
@pytest.mark.parametrize("engine", ["local", "inline"])
@pytest.mark.parametrize("what", ["interrupt", "exit", "error"])
def test_each_step_of_the_end_is_tried_whatever_the_one_before_raised(
    scripts, tmp_path, what, engine
):
    told = ["interrupted"] if (engine, what) == ("inline", "interrupt") else []
    scripts.run(FAILING_STEPS, what, *told, env={"CONVEYOR_ENGINE": engine})
    found = {path.name for path in tmp_path.iterdir()}
    for name in ("sync", "other", "loop"):
        steps = ["generator", "another", "hook", "del", "atexit"]
        steps += [f"coroutine{i}" for i in range(3)] if name == "loop" else []
        missing = [step for step in steps if f"{name}-{step}" not in found]
        assert not missing, (name, missing, scripts.stderr)
        assert (tmp_path / f"{name}-file").read_text() == "kept"
    assert "__conveyor_exit__ has failed" in scripts.stderr


# Each is a line with actors `a` and `b` that wait at channels, or for memory, when the program ends.
_WAITING = {
    "at once": [
        "a.read.remote(r); s.send(1)",
        "a.read.remote(r)  # nobody uses the other end",
        "a.write.remote(s); r.receive()",
        "a.write.remote(s)",
        "a = A.options(max_concurrency=2).remote(); a.read.remote(r); s.send(1)",
        "b.keep.remote(s); a.read.remote(r)",
        "b.keep.remote(r); a.write.remote(s)",
        "a.pass_on.remote(r, t); b.read.remote(q); s.send(1)",
    ],
    "at half of the grace period": [
        "a.pass_on.remote(r, t); b.pass_on.remote(q, s)",
        "kept.append(conveyor.get(a.give.remote())); a.wait_freed.remote()",
    ],
}


@pytest.mark.parametrize("when", _WAITING)
def test_actors_that_wait_when_the_program_ends_run_their_hooks(scripts, tmp_path, when):
    made = "a, b, (s, r), (t, q) = A.remote(), A.remote(), conveyor.channel.open(2), conveyor.channel.open(2)"
    lines = [f"{made}; {line}\nkept.append((a, b, s, r, t, q))" for line in _WAITING[when]]
    source = f"""
import conveyor, numpy, os, pathlib, time
class A:
    def __init__(self):
        pathlib.Path(f"made-{{os.getpid()}}").touch()
    def begin(self):
        pathlib.Path(f"begun-{{os.getpid()}}").touch()
    def keep(self, end):
        self.begin()
        self.end = end
    def read(self, receiver):
        self.begin()
        for value in receiver:
            pass
    def write(self, sender):
        self.begin()
        while True:
            sender.send(1)
    def pass_on(self, receiver, sender):
        self.begin()
        for value in receiver:
            sender.send(value)
    def give(self):
        self.array = numpy.ones(1000)
        return conveyor.put(self.array, tensor_transport="auto")
    def wait_freed(self):
        self.begin()
        conveyor.experimental.wait_tensor_freed(self.array)
    def __conveyor_exit__(self):
        pathlib.Path(f"hook-{{os.getpid()}}").touch()
A, kept = conveyor.remote(A), []
{chr(10).join(lines)}
while len(list(pathlib.Path(".").glob("begun-*"))) < {len(_WAITING[when])}:
    time.sleep(0.01)
"""
    grace = "60" if when == "at once" else "3"
    scripts.run(source, env={"CONVEYOR_GRACE_SECONDS": grace})
    assert "killed" not in scripts.stderr
    made, begun, ran = (
        {path.name.partition("-")[2] for path in tmp_path.glob(f"{kind}-*")}
        for kind in ("made", "begun", "hook")
    )
    assert begun
    assert ran == made


def test_the_hook_is_looked_up_on_the_class(scripts):
    """And what an instance makes up for unknown names is not asked."""
    out = scripts.run("""
        import conveyor
        class Proxy:
            def __getattr__(self, name):
                print("requested for", name)
                raise KeyError(name)
            def ping(self):
                return "pong"
        class WithHook(Proxy):
            def __conveyor_exit__(self):
                print("hook")
        class Own(Proxy):
            def __init__(self):
                self.__conveyor_exit__ = lambda: print("of the instance")
        class Off(WithHook):
            __conveyor_exit__ = None
        class Static(Proxy):
            @staticmethod
            def __conveyor_exit__():
                print("static")
        for cls in (Proxy, Own, Off, Static, WithHook):
            actor = conveyor.remote(cls).remote()
            assert conveyor.get(actor.ping.remote()) == "pong"
            conveyor.kill(actor, graceful=True)
        """)
    lines = [line.rpartition(") ")[2] for line in out.splitlines()]
    assert [line for line in lines if "requested" not in line] == ["static", "hook"]
    assert "asked for __conveyor_exit__" not in lines
    assert scripts.stderr == ""


def test_handlers_from_before_the_first_actor_may_use_the_session(scripts):
    out = scripts.run("""
        import atexit, conveyor
        @conveyor.remote
        class Store:
            def save(self):
                return "saved"
        atexit.register(lambda: print(conveyor.get(store.save.remote())))
        store = Store.remote()
        atexit.register(lambda: print("later,", conveyor.get(store.save.remote())))
        """)
    assert out.split("\n")[:2] == ["later, saved", "saved"]
