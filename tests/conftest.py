"""What the tests share: sessions that must leave nothing behind, waiting, scripts."""

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import nodes_apart
import psutil
import pytest
import warm_start

import conveyor
from conveyor.codec.pickling import blame
from conveyor.driver import actors
from conveyor.engines.local import launcher

SOURCE = Path(conveyor.__file__).parents[1]
# Programs that tests start import from where the tests do: pytest's own path is in pyproject.toml.
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (SOURCE, Path(__file__).parent / "support")))

# What an error says of how an actor ended must not depend on how busy this machine is: users' errors do
# not wait for it longer than 50 ms, or a quarter of a second where another host tells.
actors._EXIT_CODE_WAIT = actors._REPORT_WAIT = 10.0
# Nor may what one says of a value that cannot be sent: its part, where that is found in time.
blame._SECONDS = 20.0

# Sessions of tests end while methods wait that nobody will let go on.
os.environ.setdefault("CONVEYOR_GRACE_SECONDS", "2")

# After so many seconds threads lose the interpreter to others that want it; see `make soak-threads`.
sys.setswitchinterval(
    float(os.environ.get("CONVEYOR_TEST_SWITCH_INTERVAL", sys.getswitchinterval()))
)

# The engine of sessions that name none; see `make test-ray`.
_ON_RAY = os.environ.get("CONVEYOR_ENGINE") == "ray"
if _ON_RAY:
    # A cluster that the program itself belongs to, or somebody else's, is not the tests' own.
    os.environ.pop("RAY_ADDRESS", None)
    # On a machine that is busy Ray's processes would come last, and be taken for dead where they are slow.
    os.environ.update(
        {
            "RAY_worker_niceness": "0",
            "RAY_worker_register_timeout_seconds": "600",
            # A node that is gone is noticed in ten seconds, and one that does not answer in minutes.
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "20",
            "RAY_gcs_rpc_server_connect_timeout_s": "60",
        }
    )
    # There an end is known when Ray's daemon has had its turn.
    actors._EXIT_CODE_WAIT = 10.0

# A shell that starts this in the background may have it ignored, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Other programs on this machine, Ray among them, leave files of these names. Where several processes run
# tests, NIXL's and multiprocessing's may be of another one, and names of semaphores that are just being made;
# those that use them most are marked `alone`.
_OTHERS = r"|ucx_|mp-|\w{6}$" if "PYTEST_XDIST_WORKER" in os.environ else ""
_NOT_OURS = re.compile(r"(sem\.)?(obj|hdr|plasma" + _OTHERS + ")")


def _collect():
    """Collect, and if no session is running let no later collection look at what is left: modules that tests
    have imported, their reports. Every test collects, and all of it would take a quarter of their time."""
    gc.collect()
    if not conveyor.is_initialized():
        gc.freeze()


def pytest_collection_modifyitems(items):
    if nodes_apart.APART:
        nodes_apart.skip_limits(items)


def pytest_collection_finish():
    _collect()


#: s; on Ray one order may take a second where the machine is busy.
_TIME_LIMIT = 60.0 if _ON_RAY else 20.0


def _wait_until(condition, timeout=_TIME_LIMIT, what="the condition"):
    """Wait until ``condition()`` is true and return what it gave."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            pytest.fail(f"waited {timeout} s in vain for {what}")
        time.sleep(0.005)


@pytest.fixture(scope="session")
def nurseries():
    made = warm_start.Nurseries()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def warm_starts(request, nurseries):
    """Sessions start warm, but for those of modules that are marked ``cold_start``."""
    if request.node.get_closest_marker("cold_start"):
        yield
        return
    nurseries.have(launcher._PRELOADED)
    preload = getattr(request.module, "PRELOAD", None)
    if preload:
        nurseries.have(launcher._PRELOADED, preload)
    with nurseries.used_by(launcher):
        yield


#: Ray knows within two seconds that a node has gone, and not after a quarter of a minute in which it places
#: actors there.
_NOTICES_SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="session", autouse=_ON_RAY)
def two_nodes():
    """A Ray cluster of two nodes, on this machine."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    failure: Exception | None = None
    for _ in range(3):  # Ray gives up on a process that is not there in time
        cluster = Cluster()
        try:
            resources = {"first": 4}
            cluster.add_node(
                num_cpus=2,
                resources=resources,
                include_dashboard=False,
                _system_config=_NOTICES_SOON,
            )
            cluster.add_node(num_cpus=2, resources={"second": 4, "stage": 4})
            ray.init(address=cluster.address, log_to_driver=False)
            break
        except Exception as error:
            failure = error
            ray.shutdown()
            cluster.shutdown()
    else:
        pytest.skip(f"Ray starts no cluster of two nodes on this machine: {failure}")
    if nodes_apart.APART:
        nodes_apart.spread()
    # Programs of tests that say nothing else connect to this one, and not to whichever is there.
    _Scripts.environ["RAY_ADDRESS"] = cluster.address
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def wait_until():
    return _wait_until


def _open_descriptors():
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def _descriptors():
    # Ray's connections come and go; what is shared and who is watched is ours.
    return {
        fd: what
        for fd, what in _open_descriptors().items()
        if not _ON_RAY or re.search("memfd|pidfd", what)
    }


def _processes():
    """Those that this one has started. Of Ray's workers only those that are actors of ours."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if not _ON_RAY or re.match(r"ray::\w+\.run", " ".join(child.cmdline())):
                yield child


def _shared_memory():
    """Names in /dev/shm that no living process of others explains."""
    if _ON_RAY:
        return set()  # Ray's store has names there
    return {name for name in os.listdir("/dev/shm") if not _NOT_OURS.match(name)}


def _still_used(name):
    path = f"/dev/shm/{name}"
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if any(m.path.startswith(path) for m in process.memory_maps()) or any(
                f.path == path for f in process.open_files()
            ):
                return True
        except (psutil.Error, OSError):
            pass
    return False


@contextmanager
def _leaves_nothing():
    """What runs inside must leave no child process, descriptor, thread or shared memory."""
    _collect()
    children = {child.pid for child in _processes()}
    descriptors = _descriptors()
    names = _shared_memory()
    threads = set(threading.enumerate())
    try:
        yield
    except BaseException:
        conveyor.shutdown()  # or every test after this one would fail as well
        raise
    gc.collect()

    def left():
        found = {
            "processes": [c for c in _processes() if c.pid not in children],
            "descriptors": {
                fd: what for fd, what in _descriptors().items() if descriptors.get(fd) != what
            },
            "names in /dev/shm": {n for n in _shared_memory() - names if not _still_used(n)},
            "threads": [t for t in threading.enumerate() if t not in threads],
        }
        return {kind: these for kind, these in found.items() if these}

    # What ends by itself, such as the pipe to a forked child that has ended, may take a moment.
    end = time.monotonic() + 30
    while left() and time.monotonic() < end:
        time.sleep(0.01)
    assert not left()


@pytest.fixture(scope="session")
def leaves_nothing():
    """A context manager that asserts that nothing is left of what happened inside it."""
    return _leaves_nothing


@pytest.fixture
def opened_since():
    """Begins to count: ``opened = opened_since()``, and ``opened()`` are the descriptors of this process that
    have been opened since then, and what they are.

    A number of all of them would be that of tests before this one, too: their garbage and their threads let
    go of some at any time."""

    def begin():
        gc.collect()
        before = _open_descriptors()
        return lambda: {
            fd: what for fd, what in _open_descriptors().items() if before.get(fd) != what
        }

    return begin


@pytest.fixture(scope="module")
def session(request):
    """A session on the local engine for a module's tests, and the proof that nothing is left. ``PRELOAD`` of
    the module is what all of its actors have imported."""
    with _leaves_nothing():
        preload = getattr(request.module, "PRELOAD", None)
        conveyor.init(preload=preload, **nodes_apart.of(request.module))
        yield
        conveyor.shutdown()


@pytest.fixture
def fresh_session():
    """A session for one test."""
    with _leaves_nothing():
        conveyor.init()
        yield
        conveyor.shutdown()


@pytest.fixture
def time_to_end(monkeypatch):
    """Actors have a minute for their end, in sessions that begin in this test and in its programs.

    For tests of what they do then, for which two seconds may be too short on a busy machine."""
    monkeypatch.setenv("CONVEYOR_GRACE_SECONDS", "60")


class _Scripts:
    """Runs programs in processes of their own, and ends what a failed test has left of them."""

    #: What all programs have beside what this process has.
    environ: ClassVar[dict[str, str]] = {}

    def __init__(self, folder):
        self._folder = folder
        self._started = []

    def path(self, source, name="program.py"):
        path = self._folder / name
        path.write_text(textwrap.dedent(source))
        return path

    def start(self, source, *args, name="program.py", **options):
        """Start a program; its stdout and stderr are pipes of text."""
        path = source if isinstance(source, Path) else self.path(source, name)
        env = {**os.environ, **self.environ, **options.pop("env", {})}
        process = subprocess.Popen(
            [sys.executable, "-u", str(path), *map(str, args)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=options.pop("cwd", self._folder),
            **options,
        )
        self._started.append(process)
        return process

    def run(self, source, *args, code=0, timeout=200, **options):
        """Run a program to its end, and return its stdout; it must end with ``code``."""
        process = self.start(source, *args, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"the program hangs; so far\n{out}\n{err}")
        assert process.returncode == code, f"ended with {process.returncode}\n{out}\n{err}"
        self.stderr = err
        return out

    def close(self):
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                pipe.close()


@pytest.fixture
def scripts(tmp_path):
    runner = _Scripts(tmp_path)
    yield runner
    runner.close()


class _Latch:
    """Something to wait for across processes: a file. Actors get its path."""

    def __init__(self, path):
        self.path = str(path)

    def open(self):
        Path(self.path).touch()

    @property
    def is_open(self):
        return os.path.exists(self.path)


@pytest.fixture
def latches(tmp_path):
    """Makes latches: ``go = latches()``, hand ``go.path`` to an actor, then ``go.open()``."""
    made = []

    def make():
        made.append(_Latch(tmp_path / f"latch-{len(made)}"))
        return made[-1]

    yield make
    # Whatever a failed test left waiting.
    for latch in made:
        latch.open()
