"""The end of the driver's program: silent, with its own status, whatever its threads do."""

import signal

import psutil
import pytest

_HEAD = """
    import asyncio, atexit, conveyor, os, sys, threading, time
    from conveyor.dag import InputNode
    ENGINE = os.environ.get("CONVEYOR_ENGINE")
    class Plain:
        def echo(self, x):
            return x
        def items(self):
            while True:
                yield 1
    class Naps:
        async def nap(self):
            await asyncio.sleep(1000)
    class Odd:
        def __reduce__(self):
            return list, (list(range(sum(range(1000)) % 7)),)
    plain, naps = conveyor.remote(Plain).remote(), conveyor.remote(Naps).remote()
    turns = threading.Semaphore(0)
    def daemon(work, count=1):
        for _ in range(count):
            threading.Thread(target=work, daemon=True).start()
    def again_and_again(work):
        def run():
            while True:
                work()
                turns.release()
        return run
    def under_way(count=20):
        for _ in range(count):
            assert turns.acquire(timeout=60)
"""
_THREADS = {
    "calls": """
        daemon(again_and_again(lambda: conveyor.get(plain.echo.remote(1))), 3)
        under_way()
    """,
    "python code of the codec": """
        daemon(again_and_again(lambda: conveyor.get(plain.echo.remote(Odd()))), 2)
        daemon(again_and_again(lambda: conveyor.get(conveyor.put([Odd()]))), 2)
        under_way()
    """,
    "large values": """
        big = bytes(1 << 20)
        daemon(again_and_again(lambda: conveyor.get(plain.echo.remote(big))), 2)
        under_way(5)
    """,
    "errors swallowed": """
        def swallow():
            try:
                conveyor.get(plain.echo.remote(1))
            except Exception:
                pass
        daemon(again_and_again(swallow), 2)
        under_way()
    """,
    "waits": """
        refs = [naps.nap.remote() for _ in range(4)]
        works = [
            refs[0].get,
            lambda: conveyor.get(refs[1:3], timeout=500),
            lambda: conveyor.wait(refs[3:]),
            lambda: conveyor.wait(refs[3:], timeout=500),
        ]
        def wait(work):
            turns.release()
            work()
        for work in works:
            daemon(lambda work=work: wait(work))
        under_way(len(works))
    """,
    "a graph without room": """
        with InputNode() as inp:
            graph = plain.echo.bind(inp).compile(depth=1)
        refs = []
        daemon(again_and_again(lambda: refs.append(graph.execute(1))), 2)
        daemon(again_and_again(lambda: graph.execute(1).get()), 2)
        under_way()
    """,
    "streams": """
        stream = plain.items.remote()
        daemon(again_and_again(lambda: next(stream)))
        under_way()
    """,
    "asyncio": """
        async def serve():
            while True:
                await plain.echo.remote(1)
                turns.release()
        async def main():
            tasks = [asyncio.create_task(serve()) for _ in range(3)]
            await naps.nap.remote()
        daemon(lambda: asyncio.run(main()))
        loop = asyncio.new_event_loop()
        loop.call_soon(lambda: loop.create_task(serve()))
        daemon(loop.run_forever)
        under_way()
    """,
    "actors made": """
        daemon(again_and_again(lambda: conveyor.get(conveyor.remote(Plain).remote().echo.remote(1))))
        under_way(2)
    """,
}
_INLINE = ("calls", "errors swallowed", "waits", "a graph without room", "asyncio")


def _program(text):
    import textwrap

    return textwrap.dedent(_HEAD) + textwrap.dedent(text)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Nothing here takes long by itself, but the machine may be busy."""
    monkeypatch.setenv("CONVEYOR_GRACE_SECONDS", "20")


def _nothing_left(children):
    assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize("what", _THREADS)
def test_daemon_threads_make_no_noise(scripts, what):
    for _ in range(2):
        assert scripts.run(_program(_THREADS[what])) == ""
        assert scripts.stderr == ""


@pytest.mark.parametrize("what", _INLINE)
def test_nor_do_they_inline(scripts, what):
    assert scripts.run(_program(_THREADS[what]), env={"CONVEYOR_ENGINE": "inline"}) == ""
    assert scripts.stderr == ""


def test_threads_whose_wait_for_a_submission_times_out_meanwhile(scripts):
    """They come back to an interpreter that ends, which unwinds them: no frame of C++ may lie below."""
    scripts.run(
        _program("""
        held = threading.Event()
        class Held:
            def __reduce__(self):
                held.set()
                threading.Event().wait()
        with InputNode() as inp:
            graph = plain.echo.bind(inp).compile()
        conveyor.get(graph.execute(1))
        daemon(lambda: graph.execute(Held()))
        assert held.wait(60)
        def waits(seconds):
            turns.release()
            try:
                graph.execute(1, timeout=seconds)
            except conveyor.exceptions.ConveyorError:
                pass
        # One of them at any time of the end, however long that takes to come.
        for k in range(400):
            daemon(lambda seconds=0.5 + k / 100: waits(seconds))
        under_way(400)
        """)
    )
    assert scripts.stderr == ""


def test_a_thread_is_told_once_and_then_kept(scripts):
    """Also one that holds what others wait for at the end comes to its own end."""
    out = scripts.run(
        "import atexit\natexit.register(lambda: (thread.join(60), print(told)))\n"
        + _program("""
        told = []
        def calls():
            try:
                while True:
                    conveyor.get(plain.echo.remote(1))
                    turns.release()
            except conveyor.exceptions.SessionEndedError as error:
                told.append(str(error))
        thread = threading.Thread(target=calls, daemon=True)
        thread.start()
        under_way()
        """)
    )
    assert out == "['the session has ended with the program']\n"
    assert scripts.stderr == ""


def test_threads_that_python_waits_for_keep_the_session(scripts):
    out = scripts.run(
        _program("""
        from concurrent.futures import ThreadPoolExecutor
        done = []
        def work(i):
            done.append(conveyor.get(plain.echo.remote(i)))
        pool = ThreadPoolExecutor(4)
        for i in range(100):
            pool.submit(work, i)
        threading.Thread(target=lambda: [work(i) for i in range(100)]).start()
        atexit.register(lambda: print(len(done)))
        """)
    )
    assert out == "200\n"
    assert scripts.stderr == ""


def test_errors_of_its_own_are_still_printed(scripts):
    scripts.run(_program("raise KeyError('mine')"), code=1)
    assert scripts.stderr.splitlines()[-1] == "KeyError: 'mine'"
    assert scripts.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("text", "code"),
    [
        # What the end of a notebook's kernel comes to.
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("loop = asyncio.new_event_loop(); loop.run_until_complete(killed(loop))", -signal.SIGTERM),
        ("conveyor.get(naps.nap.remote())", -signal.SIGTERM),
        ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    ],
    ids=["python", "asyncio", "get", "SIGINT"],
)
def test_signals(scripts, text, code):
    program = scripts.start(
        _program(f"""
        import signal
        async def killed(loop):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(100)
        class Hooked:
            def __conveyor_exit__(self):
                print("hook")
            def ping(self):
                return 1
        hooked = conveyor.remote(Hooked).remote()
        conveyor.get(hooked.ping.remote())
        daemon(again_and_again(lambda: conveyor.get(plain.echo.remote(1))), 2)
        under_way()
        print("go", flush=True)
        {text}
        """),
        env={"CONVEYOR_GRACE_SECONDS": "20"},  # on a busy machine the hook's turn comes late
    )
    assert program.stdout.readline() == "go\n"
    children = psutil.Process(program.pid).children(recursive=True)
    if "naps" in text:
        program.send_signal(signal.SIGTERM)
    # Not communicate(): what readline() has read ahead would be lost.
    out, err = program.stdout.read(), program.stderr.read()
    program.wait(60)
    assert program.returncode == code, err
    assert "hook" in out, err
    if code != -signal.SIGINT:
        assert err == ""
    _nothing_left(children)


def test_a_handler_of_the_users_stays(scripts):
    source = """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: print("mine"))
        conveyor.shutdown(); conveyor.init()
        os.kill(os.getpid(), signal.SIGTERM)
    """
    assert scripts.run(_program(source)) == "mine\n"


def test_the_handler_can_be_refused_and_goes_with_the_session(scripts):
    scripts.run("""
        import conveyor, signal, threading
        default = lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        conveyor.init(handle_sigterm=False)
        assert default()
        conveyor.shutdown()
        for engine in "local", "inline":
            conveyor.init(engine=engine)
            assert not default()
            conveyor.shutdown()
            assert default()
        thread = threading.Thread(target=conveyor.init)
        thread.start()
        thread.join()
        assert default()
    """)


def test_a_second_sigterm_ends_it_at_once(scripts):
    program = scripts.start(
        """
        import conveyor, time
        class Slow:
            def __conveyor_exit__(self):
                print("ending", flush=True)
                time.sleep(1000)
            def ping(self):
                return 1
        conveyor.init(grace_seconds=1000)
        slow = conveyor.remote(Slow).remote()
        conveyor.get(slow.ping.remote())
        print("go", flush=True)
        time.sleep(1000)
        """
    )
    assert program.stdout.readline() == "go\n"
    children = psutil.Process(program.pid).children(recursive=True)
    program.send_signal(signal.SIGTERM)
    assert "ending" in program.stdout.readline()
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == -signal.SIGTERM
    psutil.wait_procs(children, timeout=60)
    _nothing_left(children)


@pytest.mark.parametrize("where", ["call", "step", "nested", "coroutine", "asyncio"])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_signal_inside_of_a_method_of_the_inline_engine(scripts, where, kind):
    """The program's main thread runs the method: the session ends inside of it."""
    get = {
        "call": "conveyor.get(hooked.die.remote())",
        "step": "hooked.die.bind().compile().execute()",
        "nested": "conveyor.get(other.ask.remote(hooked))",
        "coroutine": "conveyor.get(naps.nap.remote())",
        "asyncio": "asyncio.run(awaits())",
    }[where]
    hook = "async def" if kind == "async" else "def"
    out = scripts.run(
        _program(f"""
        import signal
        class Hooked:
            def die(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(100)
            {hook} __conveyor_exit__(self):
                print("hook")
            def ask(self, other):
                return conveyor.get(other.die.remote())
        async def awaits():
            await hooked.die.remote()
        hooked, other = conveyor.remote(Hooked).remote(), conveyor.remote(Hooked).remote()
        if "naps" in {get!r}:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        {get}
        """),
        env={"CONVEYOR_ENGINE": "inline"},
        code=-signal.SIGTERM,
    )
    assert out == "hook\nhook\n"
    assert scripts.stderr == ""


def test_children_of_fork_do_not_end_the_session(scripts):
    out = scripts.run(
        _program("""
        import signal, warnings
        # Python 3.12 and later warn of each fork of a process with threads.
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print(conveyor.get(plain.echo.remote(1)))
        """)
    )
    assert out == "1\n"
    assert scripts.stderr == ""


def test_a_forked_child_ends_by_sigterm_at_once(scripts):
    # A handler in Python would have to wait for the end of the call that the child is in.
    scripts.run(
        """
        import os, signal, threading, conveyor

        def of_child(expected):
            child = os.fork()
            if child == 0:
                os._exit(signal.getsignal(signal.SIGTERM) is not expected)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        conveyor.init()
        handler = signal.getsignal(signal.SIGTERM)
        assert handler is not signal.SIG_DFL
        assert of_child(signal.SIG_DFL) == 0
        found = []
        thread = threading.Thread(target=lambda: found.append(of_child(signal.SIG_DFL)))
        thread.start()
        thread.join()
        assert found == [0]
        assert signal.getsignal(signal.SIGTERM) is handler
        mine = lambda *_: None
        signal.signal(signal.SIGTERM, mine)
        assert of_child(mine) == 0
        """
    )


def test_a_thread_that_sends_a_value_which_waits_does_not_keep_the_session(scripts):
    out = scripts.run(
        """
        import threading, time
        import conveyor

        class Waits:
            def __reduce__(self):
                sends.set()
                return int, (conveyor.get(never),)

        @conveyor.remote
        class Actor:
            def echo(self, x):
                return x
            def sleep(self):
                time.sleep(1000)

        def call():
            try:
                actor.echo.remote(Waits())
            except conveyor.exceptions.ConveyorError as error:
                print(type(error).__name__)

        conveyor.init(grace_seconds=0.1)
        sends, actor = threading.Event(), Actor.remote()
        assert conveyor.get(actor.echo.remote(1)) == 1
        never = Actor.remote().sleep.remote()
        thread = threading.Thread(target=call)
        thread.start()
        sends.wait()
        begun = time.monotonic()
        conveyor.shutdown()
        assert time.monotonic() - begun < 8, time.monotonic() - begun
        thread.join()
        print("DONE")
        """
    )
    assert "Error" in out
    assert "DONE" in out
