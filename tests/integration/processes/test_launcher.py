"""The launcher of actors' processes, where the system refuses something, and where its line is full."""

import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import warm_start

from conveyor.engines.local import launcher as launcher_module
from conveyor.engines.local.launcher import Launcher
from conveyor.engines.local.spec import ChildSpec
from conveyor.exceptions import ActorStartError
from conveyor.runtime.events import EventLoop

pytestmark = pytest.mark.cold_start

HERE = Path(__file__).parent
WAIT = 60.0  # a bound for what should take milliseconds
NOBODY = 0  # no actor's pid


class Actor:
    """A process that evaluates what it is asked."""

    def __init__(self, pid, link):
        self.pid = pid
        self._link = link
        self._file = link.makefile("rw")
        link.settimeout(WAIT)

    def ask(self, expression, kind="eval"):
        self._file.write(json.dumps([kind, expression]) + "\n")
        self._file.flush()
        return json.loads(self._file.readline())

    def close(self):
        self._file.close()
        self._link.close()


class Host:
    """A launcher that remembers what it was told."""

    def __init__(self, preload=("random",)):
        self.changed = threading.Condition()
        self.exits = {}
        self.output = {}
        self.events = EventLoop()
        self.launcher = Launcher(self.events, self._exited, self._printed, preload=preload)
        self.actors = []

    def _exited(self, pid, status):
        with self.changed:
            self.exits[pid] = os.waitstatus_to_exitcode(status)
            self.changed.notify_all()

    def _printed(self, pid, stream, data):
        with self.changed:
            self.output[pid, stream] = self.output.get((pid, stream), b"") + data
            self.changed.notify_all()

    def spec(self, entry="serve"):
        return ChildSpec(
            name="Test",
            payload=b"",
            cwd=os.getcwd(),
            sys_path=(str(HERE), *sys.path),
            argv=tuple(sys.argv),
            environ=dict(os.environ),
            env_vars={},
            num_cpus=None,
            gpu_ids=(),
            entry=f"test_launcher_entries:{entry}",
        )

    def runs(self):
        """Whether a process runs, and ends as it should."""
        pid = self.launcher.spawn(self.spec("run"), [])
        self.wait(lambda: pid in self.exits)
        return self.exits[pid] == 0

    def actor(self, fds=()):
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self.launcher.spawn(self.spec(), [theirs.fileno(), *fds])
        self.actors.append(Actor(pid, ours))
        return self.actors[-1]

    def wait(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, WAIT)

    def close(self):
        self.launcher.close()
        self.events.close()
        for actor in self.actors:
            actor.close()


@pytest.fixture
def host():
    host = Host()
    yield host
    host.close()


@contextmanager
def fills_its_line(launcher):
    """The fork server is stopped, and so many messages are before the next that there is no room for it.
    The thread that waits with one."""
    launcher.start()
    server = os.pidfd_open(launcher.server_pid)
    signal.pidfd_send_signal(server, signal.SIGSTOP)
    try:
        waiting = []
        while not waiting:
            launcher.end_headless(NOBODY)
            waiting = [t for t in threading.enumerate() if t.name == "conveyor-headless"]
        yield waiting[0]
    finally:
        with suppress(ProcessLookupError):  # a test has ended it
            signal.pidfd_send_signal(server, signal.SIGCONT)
        os.close(server)


def switches_of(thread):
    """How often it has gone to sleep."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def settled(look):
    """What ``look()`` says once it says it twice."""
    seen, before = look(), None
    while seen != before:
        time.sleep(0.02)
        seen, before = look(), seen
    return seen


def children():
    """Those of this process, but for what other tests start their sessions with."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in found if int(pid) not in warm_start.pids]


def test_descriptors_arrive_in_order_and_nothing_else_is_open(host):
    files = [os.memfd_create(f"file{index}") for index in range(20)]
    for index, fd in enumerate(files):
        os.write(fd, b"%d" % index)
    actor = host.actor(fds=files[::-1])
    assert actor.ask("[int(os.pread(fd, 9, 0)) for fd in fds[1:]]") == [*range(20)][::-1]
    listing = "{int(fd) for fd in os.listdir('/proc/self/fd')}"
    others = f"{listing} - {{0, 1, 2, *fds}}"
    # The listing's own descriptor is one of them, and closed afterwards.
    assert actor.ask(f"[os.path.lexists(f'/proc/self/fd/{{fd}}') for fd in {others}]") == [False]
    assert not actor.ask("any(os.get_inheritable(fd) for fd in fds)")
    for fd in files:
        os.fstat(fd)  # the caller keeps its own
        os.close(fd)


def test_preloading_what_starts_a_thread_is_reported(tmp_path, monkeypatch):
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    host = Host(preload=["threaded"])
    try:
        host.launcher.start()
        key = (host.launcher.server_pid, "stderr")
        host.wait(lambda: b"has 2 threads after importing threaded" in host.output.get(key, b""))
    finally:
        host.close()


def test_too_many_descriptors(host):
    with pytest.raises(ActorStartError, match="at most 250 fit"):
        host.launcher.spawn(host.spec(), [0] * 251)
    actor = host.actor(fds=[0] * 249)
    assert actor.ask("len(fds)") == 250


def test_a_descriptor_that_is_closed(host):
    with pytest.raises(ActorStartError, match="Bad file descriptor") as caught:
        host.launcher.spawn(host.spec(), [1 << 20])
    assert isinstance(caught.value.__cause__, OSError)


def test_a_server_that_cannot_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    host = Host()
    with pytest.raises(ActorStartError, match=r"'Test'.*ended with exit code 1"):
        host.launcher.spawn(host.spec(), [])
    host.close()
    monkeypatch.setattr(sys, "executable", "/there/is/no/python")
    host = Host()
    with pytest.raises(ActorStartError, match="No such file"):
        host.launcher.start()
    host.close()
    assert children() == []


def test_what_a_failing_server_said_is_in_the_error(monkeypatch):
    monkeypatch.setattr(
        "conveyor.engines.local.launcher._BOOTSTRAP", "raise OSError('out of luck')"
    )
    host = Host()
    with pytest.raises(ActorStartError, match="out of luck"):
        host.launcher.spawn(host.spec(), [])
    host.close()


def test_it_starts_after_it_could_not_twice(monkeypatch, opened_since):
    opened, host = opened_since(), Host()

    def refuses(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for owner, name in ((host.events, "add"), (launcher_module, "SendWaiters")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuses)
            with pytest.raises(ActorStartError, match="Too many open files"):
                host.launcher.start()
        assert children() == []
    assert host.runs()
    host.close()
    assert not opened()


def test_spawning_while_the_fork_server_dies():
    for _ in range(5):
        host = Host()
        host.launcher.start()
        failed = threading.Event()

        def keep_spawning(host=host, failed=failed):
            try:
                while True:
                    host.launcher.spawn(host.spec("run"), [])
            except ActorStartError as error:
                if "fork server" in str(error):
                    failed.set()

        thread = threading.Thread(target=keep_spawning, daemon=True)
        thread.start()
        host.wait(lambda host=host: host.exits)
        os.kill(host.launcher.server_pid, signal.SIGKILL)
        assert failed.wait(WAIT)
        host.close()


def test_who_waits_for_a_full_line_sleeps_until_there_is_room(host):
    with fills_its_line(host.launcher) as waiting:
        switches = settled(lambda: switches_of(waiting))
        time.sleep(0.5)  # what would look ten times a second has looked some times by then
        assert switches_of(waiting) == switches
    waiting.join(WAIT)
    assert not waiting.is_alive()
    assert host.runs()


def test_a_spawn_that_a_full_line_holds_up_is_broken_off(host):
    def interrupt():
        while not any(t.name == "conveyor-uninterrupted" for t in threading.enumerate()):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    with fills_its_line(host.launcher):
        thread = threading.Thread(target=interrupt)
        thread.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            host.launcher.spawn(host.spec(), [])
        assert time.monotonic() - begin < launcher_module.SPAWN_TIMEOUT / 2
        thread.join()
    assert host.runs()


def test_who_waits_for_a_full_line_is_told_of_the_fork_servers_end(host):
    with fills_its_line(host.launcher) as waiting:
        os.kill(host.launcher.server_pid, signal.SIGKILL)
        waiting.join(WAIT)
        assert not waiting.is_alive()
        with pytest.raises(ActorStartError, match="was killed by signal 9"):
            host.launcher.spawn(host.spec(), [])
