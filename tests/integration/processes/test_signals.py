"""Ctrl-C, and other signals, while the main thread waits."""

import os
import signal

import pytest
from integration_helpers import WAIT

import conveyor

PROGRAM = """
    import os, signal, sys, threading, time
    import conveyor
    from conveyor.dag import InputNode

    @conveyor.remote
    class Actor:
        def echo(self, x):
            return x
        def hold(self, path):
            end = time.monotonic() + 120
            while not os.path.exists(path) and time.monotonic() < end:
                time.sleep(0.002)
            return "held"
        def pid(self):
            return os.getpid()

    latch = "latch"
    a, b = Actor.remote(), Actor.remote()
    conveyor.get([a.pid.remote(), b.pid.remote()])
    with InputNode() as inp:
        graph = b.echo.bind(a.hold.bind(inp)).compile(depth=1)

    def wait_until_it_sleeps():
        # The driver's main thread parks in ppoll, and in nothing else (271 on x86-64, 73 on aarch64).
        end = time.monotonic() + 60
        while open(f"/proc/self/task/{os.getpid()}/syscall").read().split()[0] not in ("271", "73"):
            if time.monotonic() > end:
                os._exit(70)
            time.sleep(0.002)

    def interrupt_later():
        # From outside the main thread, once it is waiting for sure.
        def run():
            wait_until_it_sleeps()
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        threads.append(threading.Thread(target=run))
        threads[-1].start()

    sent, threads = [], []
    BODY
"""


def program(body):
    lines = body.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    body = "\n".join("    " + line[indent:] for line in lines).lstrip()
    return PROGRAM.replace("BODY", body)


@pytest.mark.parametrize(
    "wait",
    [
        "conveyor.get(ref)",
        "conveyor.get(ref, timeout=60)",
        "conveyor.get([done, ref])",
        "conveyor.get(call)",
        "conveyor.wait([ref, call])",
        "graph.execute(latch)",
        "graph.execute(latch, timeout=60)",
    ],
)
def test_ctrl_c_ends_a_wait_at_once_and_it_can_be_repeated(scripts, wait):
    body = f"""
        ref = graph.execute(latch)
        call = a.hold.remote(latch)
        done = b.echo.remote("done")
        for _ in range(3):
            try:
                interrupt_later()
                {wait}
            except KeyboardInterrupt:
                took = time.monotonic() - sent[-1]
                assert took < 30, took
                print("interrupted", file=sys.stderr)
            else:
                raise AssertionError("not interrupted")
            threads[-1].join()
        open(latch, "w").close()
        assert conveyor.get([ref, call, done], timeout=60) == ["held", "held", "done"]
        assert conveyor.get(graph.execute(latch), timeout=60) == "held"
        print("went on")
    """
    assert scripts.run(program(body)) == "went on\n"
    assert scripts.stderr.count("interrupted") == 3


def test_ctrl_c_right_at_the_start_of_a_wait(scripts):
    # Many interrupts at all moments around the beginning of a wait: none may be slept through.
    body = """
        ref = graph.execute(latch)
        slow = 0
        for i in range(300):
            fired = []
            def alarm(number, frame):
                fired.append(time.monotonic())
                raise KeyboardInterrupt
            signal.signal(signal.SIGALRM, alarm)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + (i % 100) * 0.00002)
                conveyor.get(ref, timeout=60)
            except KeyboardInterrupt:
                slow += time.monotonic() - fired[0] > 30
            except conveyor.exceptions.WaitTimeoutError:
                raise AssertionError("slept through the signal")
        open(latch, "w").close()
        assert conveyor.get(ref, timeout=60) == "held"
        print("slow", slow)
    """
    assert scripts.run(program(body)) == "slow 0\n"


def test_no_thread_of_the_library_is_handed_a_signal(scripts):
    # The main thread lets signals in only while it sleeps: another that took one would not wake it.
    out = scripts.run(
        program("""
        held = graph.execute(latch)
        pending = a.echo.remote(held)  # the pump waits for its argument
        descriptor = held.fileno()  # and the watcher for the result
        names = set()
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                status = open(f"/proc/self/task/{thread.native_id}/status").read()
                blocked = int(status.split("SigBlk:")[1].split()[0], 16)
                assert blocked >> (signal.SIGINT - 1) & 1, thread.name
                names.add(thread.name)
        print(*sorted(names))
        open(latch, "w").close()
        assert conveyor.get(pending, timeout=60) == "held"
        """)
    )
    assert {"conveyor-events", "conveyor-output", "conveyor-pump", "conveyor-watcher"} <= {
        *out.split()
    }


@pytest.mark.parametrize(
    "wait",
    [
        "conveyor.get(ref)",
        "conveyor.get(call, timeout=60)",
        "conveyor.get([ref, call])",
        "conveyor.get(b.echo.remote(call))",
        "conveyor.wait([ref])",
        "graph.execute(latch)",
    ],
)
def test_a_wait_in_which_a_handler_forks_goes_on_in_the_parent_alone(scripts, wait):
    # Nothing happens until the child has ended: what wakes those who wait is the parent's.
    body = f"""
        def handler(*_):
            child = os.fork()
            if child:
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                open(latch, "w").close()
        codes, parent = [], os.getpid()
        signal.signal(signal.SIGINT, handler)
        ref, call = graph.execute(latch), a.hold.remote(latch)
        interrupt_later()
        try:
            {wait}
        except conveyor.exceptions.RuntimeStateError:
            if os.getpid() == parent:
                raise
            os._exit(7)
        finally:
            if os.getpid() != parent:
                os._exit(8)
        threads[-1].join()
        assert conveyor.get([ref, call], timeout=60) == ["held", "held"]
        print(*codes)
    """
    assert scripts.run(program(body)) == "7\n"


def test_a_signal_handler_that_does_not_raise_does_not_disturb(scripts):
    body = """
        count = []
        signal.signal(signal.SIGALRM, lambda *_: count.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        with InputNode() as inp:
            quick = b.echo.bind(a.echo.bind(inp)).compile()
        i = 0
        while i < 2000 or len(count) <= 50:  # on a busy machine several come as one
            assert conveyor.get(quick.execute(i), timeout=60) == i
            i += 1
        ref = graph.execute(latch)
        try:
            conveyor.get(ref, timeout=0.3)
        except conveyor.exceptions.WaitTimeoutError:
            print("timed out")
        signal.setitimer(signal.ITIMER_REAL, 0)
        open(latch, "w").close()
        assert conveyor.get(ref, timeout=60) == "held"
        print("fine")
    """
    assert scripts.run(program(body)) == "timed out\nfine\n"


def test_a_handler_may_use_the_library(scripts):
    body = """
        results = []
        def handler(*_):
            results.append(conveyor.get(b.echo.remote("from the handler"), timeout=60))
            open(latch, "w").close()
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert conveyor.get(graph.execute(latch), timeout=60) == "held"
        print(*results)
    """
    assert scripts.run(program(body)) == "from the handler\n"


def test_an_exception_of_a_handler_at_any_moment_loses_nothing(scripts):
    # Thousands of moments within execute, calls and gets, each cut short by a handler that raises:
    # whatever was started before can still be got, and is right.
    body = """
        import random
        class Interrupted(BaseException):
            pass
        armed = False
        def handler(number, frame):
            global armed
            if armed:
                armed = False
                raise Interrupted
        signal.signal(signal.SIGALRM, handler)
        rng = random.Random(7)
        interrupted = 0
        def attempt(what, most):
            global armed, interrupted
            result = None
            try:
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, rng.random() * most + 1e-6)
                    result = what()
                finally:
                    armed = False
            except Interrupted:
                interrupted += 1
                return None
            return result
        class Local:
            def __init__(self, n):
                self.n = n
            def __eq__(self, other):
                return other.n == self.n
        @conveyor.remote
        class Failing:
            def fail(self, x):
                raise ValueError(x)
        f = Failing.remote()
        with InputNode() as inp:
            quick = b.echo.bind(a.echo.bind(inp)).compile(depth=4)
        end = time.monotonic() + 1.5
        n = 0
        while time.monotonic() < end or interrupted < 100:
            n += 1
            value = rng.choice([n, (n, "x"), b"y" * 100000, Local(n), [n]])
            fails = rng.random() < 0.3
            start = f.fail.remote if fails else rng.choice([quick.execute, a.echo.remote])
            ref = attempt(lambda: start(value), 0.0003)
            if ref is None:
                continue
            try:
                attempt(ref.get, 0.0004)
                assert ref.get(timeout=60) == value, (ref, value)
            except ValueError:
                assert fails
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("nothing lost")
    """
    assert scripts.run(program(body)) == "nothing lost\n"


def test_ctrl_c_at_the_terminal_ends_the_program_and_its_actors(scripts, wait_until):
    # A terminal sends the signal to every process of the foreground group, actors included.
    import os

    import psutil

    body = """
        ref = graph.execute(latch)
        pid = conveyor.get(b.pid.remote())
        def tell():
            wait_until_it_sleeps()
            print(pid, flush=True)
        threading.Thread(target=tell).start()
        conveyor.get(ref)
    """
    process = scripts.start(program(body), start_new_session=True)
    pid = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(WAIT) != 0
    wait_until(lambda: not psutil.pid_exists(pid), WAIT, "the actor's end")
    err = process.stderr.read()
    # One traceback, the driver's own: actors say nothing of a Ctrl-C.
    assert err.count("Traceback") == 1, err
    assert "KeyboardInterrupt" in err


def test_ctrl_c_does_not_harm_actors(scripts):
    body = """
        import threading
        signal.signal(signal.SIGINT, lambda *_: None)
        refs = [a.echo.remote(i) for i in range(100)]
        os.killpg(0, signal.SIGINT)
        ref = graph.execute(latch)
        os.killpg(0, signal.SIGINT)
        open(latch, "w").close()
        assert conveyor.get(refs, timeout=60) == list(range(100))
        assert conveyor.get(ref, timeout=60) == "held"
        print("unharmed")
    """
    assert scripts.run(program(body), start_new_session=True) == "unharmed\n"


class Handling:
    def __init__(self, path):
        self.path = path
        signal.signal(signal.SIGUSR1, self.handle)

    def handle(self, *_):
        with open(self.path, "a") as file:
            file.write("x")

    def pid(self):
        return os.getpid()


def test_a_signal_handler_of_an_idle_actor_runs_at_once(tmp_path, session, wait_until):
    path = tmp_path / "handled"
    path.touch()
    actor = conveyor.remote(Handling).remote(str(path))
    pid = conveyor.get(actor.pid.remote(), timeout=60)
    for i in range(1, 6):
        os.kill(pid, signal.SIGUSR1)
        wait_until(lambda: len(path.read_text()) == i, WAIT, "the handler")  # noqa: B023


def test_a_compile_that_is_interrupted_between_descriptors_and_frame(session, monkeypatch):
    from conveyor.dag import InputNode
    from conveyor.driver.actors import ActorRecord
    from conveyor.worker.messages import Load

    class Echo:
        def echo(self, x):
            return x

    actor = conveyor.remote(Echo).remote()
    assert conveyor.get(actor.echo.remote(0), timeout=60) == 0
    dag = actor.echo.bind(InputNode())

    def interrupted(self, wish, *args, **kwargs):
        if isinstance(wish, Load):
            raise KeyboardInterrupt
        return order(self, wish, *args, **kwargs)

    order = ActorRecord.order
    with monkeypatch.context() as patch:
        patch.setattr(ActorRecord, "order", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                dag.compile()
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(1), timeout=60) == 1
