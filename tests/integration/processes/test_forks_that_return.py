"""Children that user code forks inside of an actor, and that come back from there: they end at once, with a
message, and the actor goes on as if they had never been. The same on both engines.

In programs of their own: what is not ended would run the rest of the test once more.
"""

import pytest

PROGRAM = """
    import asyncio, os, sys, threading
    import conveyor
    from conveyor.dag import InputNode

    engine, kind, ways, hows, log = sys.argv[1:]
    WAIT = 60

    class Plain:
        def __init__(self, how=""):
            if how == "constructor":
                os.fork()

        def ready(self):
            return os.getpid()

        def reap(self):
            codes = []
            while True:
                try:
                    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
                except ChildProcessError:
                    return sorted(codes)

        def returns(self, x):
            children = [os.fork(), os.fork()]  # and one of the first child's
            return os.getpid()

        def raises(self, x):
            if os.fork() == 0:
                raise ValueError("in the child")
            return os.getpid()

        def exits(self, x):
            if os.fork() == 0:
                sys.exit(7)
            return os.getpid()

        def items(self, x):
            yield os.getpid()
            os.fork()
            yield os.getpid()

        def ends(self, x):
            yield os.getpid()
            os.fork()

        def thread(self, x):
            thread = threading.Thread(target=os.fork)
            thread.start()
            thread.join()
            return os.getpid()

        def pickled(self, x):
            return Forks()

        def __conveyor_exit__(self):
            with open(log, "a") as file:
                print(os.getpid(), file=file)

    class Forks:
        def __reduce__(self):
            os.fork()
            return os.getpid, ()

    class Async(Plain):
        async def returns(self, x):
            os.fork()
            return os.getpid()

        async def awaits(self, x):
            # What it awaits does not look which process this is.
            future = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.01, future.set_result, None)
            os.fork()
            await future
            return os.getpid()

        async def raises(self, x):
            if os.fork() == 0:
                raise ValueError("in the child")
            return os.getpid()

        async def exits(self, x):
            if os.fork() == 0:
                sys.exit(7)
            return os.getpid()

        async def items(self, x):
            yield os.getpid()
            os.fork()
            yield os.getpid()

        async def ends(self, x):
            yield os.getpid()
            os.fork()

        async def others(self, log):
            for _ in range(20):
                with open(log, "a") as file:
                    print("other", os.getpid(), file=file)
                await asyncio.sleep(0.001)

    cls = conveyor.remote({"plain": Plain, "threads": Plain, "async": Async}[kind])
    if kind == "threads":
        cls = cls.options(max_concurrency=2)

    def check(way, how):
        # Prints the exit codes of the children.
        actor = cls.remote(how)
        pid = conveyor.get(actor.ready.remote(), timeout=WAIT)
        others = [actor.others.remote(log)] if kind == "async" else []
        if how != "constructor":
            method = getattr(actor, how)
            if way == "graph":
                with InputNode() as inp:
                    ask = method.bind(inp).compile().execute
            else:
                ask = method.remote
            for _ in range(3):
                if how in ("items", "ends"):
                    pids = list(ask(1))
                    assert set(pids) == {pid}, (pid, pids)
                else:
                    result = conveyor.get(ask(1), timeout=WAIT)
                    assert result == pid or how == "pickled", (pid, result)
        assert [conveyor.get(actor.ready.remote(), timeout=WAIT) for _ in range(50)] == [pid] * 50
        conveyor.get(others, timeout=WAIT)
        print(way, how, conveyor.get(actor.reap.remote(), timeout=WAIT))
        return pid

    conveyor.init(engine=engine)
    pids = [check(way, how) for way in ways.split(",") for how in hows.split(",")]
    conveyor.shutdown()
    lines = set(open(log).read().split()) - {"other"}
    assert lines == set(map(str, pids)), (pids, lines)  # hooks and coroutines of the actors alone
    print("done")
"""

pytestmark = pytest.mark.usefixtures("time_to_end")

KINDS = ["plain", "threads", "async"]
WAYS = ["call", "graph"]


def run(scripts, tmp_path, engine, kind, hows, ways=WAYS):
    """For each way and method the exit codes of the children."""
    log = tmp_path / "log"
    *lines, last = scripts.run(
        PROGRAM, engine, kind, ",".join(ways), ",".join(hows), log
    ).splitlines()
    assert last == "done"
    assert "Traceback" not in scripts.stderr, scripts.stderr
    found = {}
    for line in lines:
        way, how, codes = line.split(maxsplit=2)
        found[way, how] = [int(code) for code in codes.strip("[]").split(",") if code]
    return found


@pytest.mark.parametrize("engine", ["local", "inline"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_that_comes_back_ends_there(scripts, tmp_path, engine, kind):
    hows = ["returns", "raises", "items", "ends"]
    found = run(scripts, tmp_path, engine, kind, hows)
    for how in hows:
        children = 2 if how == "returns" and kind != "async" else 1
        assert all(found[way, how] == [1] * (3 * children) for way in WAYS), found
        said = f"which was forked in {'Async' if kind == 'async' else 'Plain'}"
        place = [line for line in scripts.stderr.splitlines() if f".{how}, has come back" in line]
        assert len(place) >= len(WAYS) * 3 * children, scripts.stderr
        assert all(said in line and "os._exit" in line for line in place)


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_a_child_that_goes_on_with_the_event_loop(scripts, tmp_path, engine):
    found = run(scripts, tmp_path, engine, "async", ["awaits"])
    assert all(codes == [1] * 3 for codes in found.values()), found
    said = scripts.stderr.count("which was forked in a coroutine of Async")
    assert said == 3 * len(WAYS), scripts.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_that_leaves_by_sys_exit(scripts, tmp_path, kind):
    found = run(scripts, tmp_path, "local", kind, ["exits"])
    assert all(codes == [7] * 3 for codes in found.values()), found
    assert "has come back" not in scripts.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_of_the_constructor(scripts, tmp_path, kind):
    found = run(scripts, tmp_path, "local", kind, ["constructor"], ["call"])
    assert found == {("call", "constructor"): [1]}
    assert scripts.stderr.count(".__init__, has come back") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_of_a_thread_ends_with_that_thread(scripts, tmp_path, kind):
    found = run(scripts, tmp_path, "local", kind, ["thread"], ["call"])
    assert len(found["call", "thread"]) == 3
    assert "has come back" not in scripts.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_that_is_forked_while_a_result_is_encoded(scripts, tmp_path, kind):
    found = run(scripts, tmp_path, "local", kind, ["pickled"])
    assert all(set(codes) == {1} for codes in found.values()), found
    assert "has come back" in scripts.stderr


COMPILES = """
    import os, select, signal, sys, threading, time
    import conveyor
    from conveyor import flag
    from conveyor.dag import InputNode

    class Busy:
        def hold(self, latch):
            end = time.monotonic() + 120
            while not os.path.exists(latch) and time.monotonic() < end:
                time.sleep(0.002)

        def same(self, x):
            return x

    class Compiles:
        def compile(self, busy, latch):
            codes = []

            def handler(*_):
                child = os.fork()
                if child:
                    poll, ends = select.poll(), os.pidfd_open(child)
                    poll.register(ends, select.POLLIN)
                    poll.poll(60_000)
                    signal.pidfd_send_signal(ends, signal.SIGKILL)
                    os.close(ends)
                    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                    open(latch, "w").close()

            def interrupt():
                while not (asks("deploy") and asks("sleep_for") and flag._slept_for):
                    time.sleep(0.002)
                os.kill(os.getpid(), signal.SIGALRM)

            def asks(name):
                frame = sys._current_frames()[threading.main_thread().ident]
                while frame and frame.f_code.co_name != name:
                    frame = frame.f_back
                return frame

            signal.signal(signal.SIGALRM, handler)
            thread = threading.Thread(target=interrupt)
            thread.start()
            with InputNode() as inp:
                graph = busy.same.bind(inp).compile()
            thread.join()
            return codes, conveyor.get(graph.execute(1))

    busy, compiles = conveyor.remote(Busy).remote(), conveyor.remote(Compiles).remote()
    conveyor.get(busy.same.remote(0))
    held = busy.hold.remote(os.path.abspath("latch"))
    print(*conveyor.get(compiles.compile.remote(busy, os.path.abspath("latch")), timeout=120))
"""


def test_a_child_that_a_handler_forks_while_its_actor_asks_the_driver_ends(scripts):
    assert scripts.run(COMPILES) == "[1] 1\n"
