"""Limits of the system: what is done about them, and what errors say of those that are met."""

import contextlib
import errno
import os
import resource
from concurrent.futures import ThreadPoolExecutor

import inside
import pytest
from integration_helpers import WAIT, hold

import conveyor
from conveyor.exceptions import ConveyorError, SystemLimitError

ACTORS = """
import os, resource, sys, time
import conveyor

@conveyor.remote
class A:
    def f(self, x):
        return x
    def descriptors(self):
        return len(os.listdir("/proc/self/fd"))
"""


def test_the_soft_limit_of_descriptors_is_raised(scripts):
    scripts.run(
        ACTORS
        + """
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
actors = [A.remote() for _ in range(50)]
assert conveyor.get([a.f.remote(1) for a in actors]) == [1] * 50
soft, now = resource.getrlimit(resource.RLIMIT_NOFILE)
assert now == hard and soft == min(hard, 65536), (soft, hard)
"""
    )


def test_it_is_left_alone_where_that_is_requested_for_and_the_error_says_what_to_do(scripts):
    scripts.run(
        ACTORS
        + """
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
conveyor.init(raise_descriptor_limit=False)
first = A.remote()
assert conveyor.get(first.f.remote(1)) == 1
before = len(os.listdir("/proc/self/fd"))
actors = []
try:
    while True:
        actors.append(A.remote())
except conveyor.exceptions.ConveyorError as error:
    said = str(error)
assert "ulimit -n" in said and "may have 100 descriptors" in said, said
# What was there goes on, and what is let go of makes room.
assert conveyor.get(first.f.remote(2)) == 2
for actor in actors:
    conveyor.kill(actor)
actors.clear()
"""
    )


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_a_descriptor_of_a_ref_that_is_refused_says_what_to_do(scripts, engine):
    scripts.run(
        """
import asyncio, os, resource, sys
import conveyor

@conveyor.remote
class Waiter:
    async def wait(self, path):
        while not os.path.exists(path):
            await asyncio.sleep(0.001)
        return 1

conveyor.init(engine=sys.argv[1], raise_descriptor_limit=False)
path = os.path.abspath("go")
waiter = Waiter.remote()
pending, done = waiter.wait.remote(path), conveyor.put(1)

async def awaits():
    # The loop has its own descriptors; the first that is awaited in it needs one more.
    with used_up():
        try:
            await pending
        except conveyor.exceptions.SystemLimitError as error:
            return str(error)

class used_up:
    def __enter__(self):
        self.soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        self.held = []
        try:
            while True:
                self.held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
    def __exit__(self, *_):
        for fd in self.held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.soft, hard))

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for ref in (pending, done):
    with used_up():
        try:
            ref.fileno()
        except conveyor.exceptions.SystemLimitError as error:
            said = str(error)
    assert said.startswith(f"cannot make a descriptor for {ref!r}: Too many open files"), said
    assert "may have 200 descriptors" in said and "ulimit -n" in said, said
said = asyncio.run(awaits())
assert said.startswith("cannot await anything in this event loop: Too many"), said
assert "may have 200 descriptors" in said and "ulimit -n" in said, said
open(path, "w").close()
assert pending.fileno() != done.fileno()
assert conveyor.get(pending, timeout=60) == 1
async def later():
    return await waiter.wait.remote(path)
assert asyncio.run(later()) == 1
conveyor.shutdown()
""",
        engine,
    )


def test_an_actor_takes_seven_descriptors_of_the_driver(scripts):
    # The number stands in the error's text and in the documentation.
    scripts.run(
        ACTORS
        + """
def used():
    return len(os.listdir("/proc/self/fd"))
first = A.remote()
conveyor.get(first.f.remote(1))
before = used()
actors = [A.remote() for _ in range(10)]
conveyor.get([a.f.remote(1) for a in actors])
limit = time.monotonic() + 20
# What was passed on is closed behind it, that of the first one, too.
while round((used() - before) / 10) != 7:
    assert time.monotonic() < limit, (used() - before) / 10
"""
    )


def test_survivors_keep_no_descriptors_of_the_dead(fresh_session, wait_until):
    @conveyor.remote
    class Survivor:
        def call(self, peer):
            return conveyor.get(peer.ping.remote())

        def ping(self):
            return 1

        def descriptors(self):
            import os

            return len(os.listdir("/proc/self/fd"))

    survivor = Survivor.remote()

    def meet():
        peer = Survivor.remote()
        assert conveyor.get(survivor.call.remote(peer), timeout=60) == 1
        conveyor.kill(peer)

    meet()
    before = conveyor.get(survivor.descriptors.remote())
    for _ in range(5):
        meet()
    wait_until(lambda: conveyor.get(survivor.descriptors.remote()) <= before + 2)


@pytest.mark.parametrize(
    ("limit", "said"),
    [("RLIMIT_FSIZE, (1 << 20, -1)", "ulimit -f"), ("RLIMIT_AS, (300 << 20, -1)", "ulimit -v")],
)
def test_a_session_that_cannot_be_started_says_why(scripts, limit, said):
    scripts.run(
        ACTORS
        + f"""
resource.setrlimit(resource.{limit})
try:
    conveyor.init(arena_bytes=1 << 30)
    A.remote()
except (conveyor.exceptions.ConveyorError, MemoryError) as error:
    assert {said!r} in str(error), error
    print("told")
"""
    )


def test_the_error_is_of_both_families():
    error = SystemLimitError(errno.EMFILE, "cannot start actor A: too many; raise it")
    assert isinstance(error, OSError)
    assert isinstance(error, ConveyorError)
    assert error.errno == errno.EMFILE
    assert str(error).startswith("cannot start actor A")


def test_the_first_error_is_what_comes_out_of_with(fresh_session, monkeypatch):
    @conveyor.remote
    class A:
        def f(self, x):
            return x

    with conveyor.dag.InputNode() as inp:
        graph = A.remote().f.bind(inp).compile(name="unlucky")
    teardown = type(graph).teardown
    monkeypatch.setattr(type(graph), "teardown", lambda self, *a: 1 / 0)
    with pytest.raises(KeyError, match="first") as raised, graph:
        raise KeyError("first")
    notes = getattr(raised.value, "__notes__", ["teardown of unlucky failed"])
    assert any("teardown of unlucky failed" in note for note in notes)
    with pytest.raises(ZeroDivisionError), graph:
        pass
    monkeypatch.setattr(type(graph), "teardown", teardown)
    graph.teardown()


def test_a_working_directory_that_is_gone(scripts):
    scripts.run(
        """
import os, tempfile, warnings
import conveyor

@conveyor.remote
class A:
    def cwd(self):
        return os.getcwd()

folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    actor = A.remote()  # here
    assert conveyor.get(actor.cwd.remote()) == "/"
assert "working directory is gone" in str(told[0].message)
with open(told[0].filename) as program:
    assert program.read().splitlines()[told[0].lineno - 1].endswith("# here")
os.chdir("/tmp")
assert conveyor.get(A.remote().cwd.remote()) == "/tmp"
"""
    )


@conveyor.remote
class Tight:
    """An actor that can be short of descriptors."""

    def __init__(self):
        self.fillers = []

    def fill(self, spare):
        """From now on there are ``spare`` descriptors left."""
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 8, hard))
        with contextlib.suppress(OSError):
            while True:
                self.fillers.append(os.dup(0))
        for _ in range(spare):
            os.close(self.fillers.pop())

    def release(self):
        while self.fillers:
            os.close(self.fillers.pop())
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def descriptors(self):
        return len(os.listdir("/proc/self/fd"))

    def echo(self, x):
        return x

    def call(self, other):
        return conveyor.get(other.echo.remote(1))

    def call_in_a_thread(self, other):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.call, other).result()

    def hold(self, path):
        os.mkdir(f"{path}.begun")  # needs no descriptor
        hold(path)

    def compile_and_run(self, other):
        with conveyor.dag.InputNode() as inp:
            dag = other.echo.bind(inp)
        with dag.compile(name="inner") as graph:
            return conveyor.get(graph.execute(3))


def names(error, actor):
    text = str(error)
    return f"actor {actor} (pid " in text and "ulimit -n" in text and "Too many open files" in text


# A segment and one peer are passed as three descriptors, and two more are kept of the peer.
@pytest.mark.parametrize("spare", range(5))
def test_a_compile_says_which_actor_is_short_of_descriptors(fresh_session, spare):
    tight, other = Tight.options(name="tight").remote(), Tight.remote()
    conveyor.get(tight.fill.remote(spare))
    with conveyor.dag.InputNode() as inp:
        dag = other.echo.bind(tight.echo.bind(inp))
    with pytest.raises(SystemLimitError, match="its part of g") as raised:
        dag.compile(name="g")
    assert names(raised.value, "tight")
    assert raised.value.errno == errno.EMFILE
    conveyor.get(tight.release.remote())
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(2)) == 2


@pytest.mark.parametrize("spare", range(5))
@pytest.mark.parametrize("how", ["call", "compile_and_run"])
def test_an_actor_that_is_short_of_descriptors_says_so_when_it_calls(
    fresh_session, wait_until, spare, how
):
    tight, other = Tight.options(name="tight").remote(), Tight.remote()
    conveyor.get(tight.fill.remote(spare))
    with pytest.raises(SystemLimitError) as raised:
        conveyor.get(getattr(tight, how).remote(other))
    assert names(raised.value, "tight")
    conveyor.get(tight.release.remote())
    before = conveyor.get(tight.descriptors.remote())
    assert conveyor.get(getattr(tight, how).remote(other)) == {"call": 1}.get(how, 3)
    # Two of the peer; neither a link keeps any, nor does a graph.
    wait_until(lambda: conveyor.get(tight.descriptors.remote()) <= before + 2)


@pytest.mark.parametrize("spare", [0, 2, 4])
@pytest.mark.parametrize("how", ["call", "call_in_a_thread"])
def test_who_calls_an_actor_that_cannot_be_introduced_is_told(fresh_session, spare, how):
    full, caller = Tight.options(name="full").remote(), Tight.remote()
    conveyor.get(full.fill.remote(spare))
    for _ in range(2):
        with pytest.raises(SystemLimitError) as raised:
            conveyor.get(getattr(caller, how).remote(full))
        assert names(raised.value, "full")
    assert conveyor.get(full.echo.remote(5)) == 5  # it lives, and serves whom it knows
    conveyor.get(full.release.remote())
    assert conveyor.get(getattr(caller, how).remote(full)) == 1


def test_refused_callers_take_nothing_of_an_actor(fresh_session, wait_until):
    """Neither bits of its doorbell, of which there are 1024, nor descriptors of the driver."""
    full, caller = Tight.options(name="full").remote(), Tight.remote()
    conveyor.get(full.fill.remote(0))

    def refused():
        with pytest.raises(SystemLimitError):
            conveyor.get(caller.call.remote(full))

    refused()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(21):
        refused()
    # The driver may close some once the caller has been told.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    of_full, of_caller = inside.record_of(full), inside.record_of(caller)
    wait_until(lambda: not (of_full.mailboxes or of_caller.mailboxes))
    wait_until(lambda: len(of_full.introduced) <= 1)
    assert of_full.bits._next < 20


def test_who_waits_while_the_actor_is_busy_is_told_in_the_end(fresh_session, tmp_path, wait_until):
    @conveyor.remote
    class Async:
        async def call(self, other):
            return await other.echo.remote(1)

    full, caller, asynchronous = Tight.options(name="full").remote(), Tight.remote(), Async.remote()
    conveyor.get(full.fill.remote(0))
    busy = full.hold.remote(tmp_path / "go")
    wait_until((tmp_path / "go.begun").exists)
    calls = [caller.call.remote(full), asynchronous.call.remote(full)]
    wait_until(lambda: len(inside.record_of(full).introduced) == 2)
    assert conveyor.wait(calls, timeout=0.05)[0] == []
    (tmp_path / "go").touch()
    for call in calls:
        with pytest.raises(SystemLimitError, match="cannot take calls of") as raised:
            conveyor.get(call, timeout=WAIT)
        assert names(raised.value, "full")
    conveyor.get(busy)
