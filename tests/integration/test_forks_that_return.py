"""Children that user code forks inside of an actor, and that come back from there: they end at once, with a
message, and the actor goes on as if they had never been. The same on both engines.

In programs of their own: what is not ended would run the rest of the test once more.
"""

import pytest

PROGRAM = """
    import asyncio, os, sys, threading
    import conveyor
    from conveyor.dag import InputNode

    engine, kind, way, how, log = sys.argv[1:]
    WAIT = 20

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

    conveyor.init(engine=engine)
    actor = cls.remote(how)
    pid = conveyor.get(actor.ready.remote(), timeout=WAIT)
    others = [actor.others.remote(log)] if kind == "async" else []
    stream = how in ("items", "ends")
    if how != "constructor":
        method = getattr(actor, how)
        if way == "graph":
            with InputNode() as inp:
                graph = method.bind(inp).compile()
            ask = graph.execute
        else:
            ask = method.remote
        for _ in range(3):
            if stream:
                pids = list(ask(1))
                assert set(pids) == {pid}, (pid, pids)
            else:
                result = conveyor.get(ask(1), timeout=WAIT)
                assert result == pid or how == "pickled", (pid, result)
    assert [conveyor.get(actor.ready.remote(), timeout=WAIT) for _ in range(50)] == [pid] * 50
    conveyor.get(others, timeout=WAIT)
    print(conveyor.get(actor.reap.remote(), timeout=WAIT))
    conveyor.shutdown()
    lines = open(log).read().split()
    assert set(lines) - {"other"} == {str(pid)}, (pid, lines)  # hooks and coroutines of the actor alone
    print("done")
"""

KINDS = ["plain", "threads", "async"]
WAYS = ["call", "graph"]


def run(scripts, tmp_path, *how):
    out = scripts.run(PROGRAM, *how, tmp_path / "log").splitlines()
    assert out[-1] == "done"
    assert "Traceback" not in scripts.stderr, scripts.stderr
    return [int(code) for code in out[0].strip("[]").split(",") if code]


@pytest.mark.parametrize("engine", ["local", "inline"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["returns", "raises", "items", "ends"])
def test_a_child_that_comes_back_ends_there(scripts, tmp_path, engine, kind, way, how):
    codes = run(scripts, tmp_path, engine, kind, way, how)
    children = 2 if how == "returns" and kind != "async" else 1
    assert codes == [1] * (3 * children)
    said = f"which was forked in {'Async' if kind == 'async' else 'Plain'}.{how}, has come back"
    assert scripts.stderr.count(said) >= 3 * children, scripts.stderr
    assert "os._exit" in scripts.stderr


@pytest.mark.parametrize("engine", ["local", "inline"])
@pytest.mark.parametrize("way", WAYS)
def test_a_child_that_goes_on_with_the_event_loop(scripts, tmp_path, engine, way):
    assert run(scripts, tmp_path, engine, "async", way, "awaits") == [1] * 3
    assert scripts.stderr.count("which was forked in a coroutine of Async, has come back") == 3


@pytest.mark.parametrize("engine", ["local", "inline"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_child_that_leaves_by_sys_exit(scripts, tmp_path, engine, kind, way):
    assert run(scripts, tmp_path, engine, kind, way, "exits") == [7] * 3
    assert "has come back" not in scripts.stderr


@pytest.mark.parametrize("engine", ["local", "inline"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_of_the_constructor(scripts, tmp_path, engine, kind):
    assert run(scripts, tmp_path, engine, kind, "call", "constructor") == [1]
    assert scripts.stderr.count(".__init__, has come back") == 1


@pytest.mark.parametrize("engine", ["local", "inline"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_of_a_thread_ends_with_that_thread(scripts, tmp_path, engine, kind):
    codes = run(scripts, tmp_path, engine, kind, "call", "thread")
    assert len(codes) == 3
    assert "has come back" not in scripts.stderr


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_child_that_is_forked_while_a_result_is_encoded(scripts, tmp_path, kind, way):
    codes = run(scripts, tmp_path, "local", kind, way, "pickled")
    assert set(codes) == {1}
    assert "has come back" in scripts.stderr
