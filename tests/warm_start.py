"""Fork servers of the tests' sessions, forked from a process that has imported everything before.

Importing what actors need takes most of a session's start, and a run of the tests has hundreds of sessions.
So the first of a kind starts a nursery, which imports what a fork server imports and forks one for each
session. From then on a fork server does what it always does. The programs that tests run in processes of
their own start as users' programs do, and so do the sessions of tests that are marked ``cold_start``.
"""

import gc
import importlib
import marshal
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_BOOTSTRAP = (
    "import sys; sys.path[:] = {path!r}; import warm_start; "
    "warm_start.serve({fd}, {preload!r}, {wanted!r})"
)
_MAX_STATE = 1 << 20
#: Of the nurseries.
pids = set()


class Process:
    """What ``subprocess.Popen`` is for a child: this one is the nursery's."""

    def __init__(self, pid, pidfd, status):
        self.pid = pid
        self.returncode = None
        self._pidfd = pidfd
        self._status = status

    def kill(self):
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self):
        if self.returncode is None:
            told = os.read(self._status, 16)
            self.returncode = int(told) if told else -signal.SIGKILL  # the nursery was killed
            os.close(self._status)
            os.close(self._pidfd)
        return self.returncode


class Nursery:
    """The tests' end of a nursery of one kind of fork server."""

    def __init__(self, preload, wanted):
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in self._control, theirs:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_STATE)
        path = [str(Path(__file__).parent), *map(str, sys.path)]
        code = _BOOTSTRAP.format(path=path, fd=theirs.fileno(), preload=preload, wanted=wanted)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # as a fork server's, since what Python makes of them is inherited
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        pids.add(self._process.pid)

    def fork(self, setup, log, passed):
        """A fork server that reads ``setup``, prints to ``log``, and has ``passed``."""
        limits = [(limit, resource.getrlimit(limit)) for limit in _LIMITS]
        state = pickle.dumps((dict(os.environ), os.getcwd(), limits))
        status, told = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._control, [state], [setup, log, told, *passed])
                pid, pidfds, _, _ = socket.recv_fds(self._control, 16, 1)
            return Process(int(pid), *pidfds, status)
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(told)

    def close(self):
        self._control.close()
        said, _ = self._process.communicate()
        assert not said, f"a nursery of fork servers said:\n{said.decode()}"


class Nurseries:
    """One for each kind of fork server."""

    def __init__(self):
        self._owner = os.getpid()
        self._made = {}

    def have(self, preload, wanted=()):
        """Have one for servers that import these. Those of other kinds are executed."""
        kind = tuple(preload), tuple(wanted)
        if kind not in self._made:
            self._made[kind] = Nursery(*kind)

    def popen(self, arguments, *, stdin, stdout, pass_fds, **others):
        """In place of ``subprocess.Popen`` where a fork server is executed."""
        setup = marshal.loads(os.pread(stdin, _MAX_STATE, 0))
        nursery = self._made.get((tuple(setup["preload"]), tuple(setup["wanted"])))
        if nursery is None or os.getpid() != self._owner:
            return subprocess.Popen(
                arguments, stdin=stdin, stdout=stdout, pass_fds=pass_fds, **others
            )
        return nursery.fork(stdin, stdout, pass_fds)

    @contextmanager
    def used_by(self, boot):
        """Fork servers come from here, until the end of this."""
        boot.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": self.popen})
        try:
            yield
        finally:
            boot.subprocess = subprocess

    def close(self):
        for nursery in self._made.values():
            nursery.close()


def serve(fd, preload, wanted):
    """What a nursery does, until the tests are gone."""
    for module in (*preload, "conveyor.engines.local.server", *wanted):
        with suppress(ImportError):  # the fork server tries again, and says so
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=fd)
    children = {}  # pidfd -> pid, where to tell its status
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                poll.unregister(ready)
                pid, told = children.pop(ready)
                _, status = os.waitpid(pid, 0)
                with suppress(BrokenPipeError):
                    os.write(told, b"%d" % os.waitstatus_to_exitcode(status))
                os.close(told)
                os.close(ready)
                continue
            state, fds, _, _ = socket.recv_fds(control, _MAX_STATE, 8)
            if not state:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                _become_fork_server(pickle.loads(state), fds)
            setup, log, told, *passed = fds
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, told
            poll.register(pidfd, select.POLLIN)
            socket.send_fds(control, [b"%d" % pid], [pidfd])
            for passed_on in (setup, log, *passed):
                os.close(passed_on)


def _become_fork_server(state, fds):
    from conveyor.engines.local import server

    setup_fd, log, _, control, driver = fds
    kept = {0, 1, 2, control, driver}
    setup = {
        **marshal.loads(os.pread(setup_fd, _MAX_STATE, 0)),
        "control": control,
        "driver": driver,
    }
    os.dup2(setup_fd, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept:
            with suppress(OSError):  # the listing's own
                os.close(fd)
    os.setpgid(0, 0)
    environ, directory, limits = state
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    for limit, pair in limits:
        if resource.getrlimit(limit) != pair:
            resource.setrlimit(limit, pair)
    sys.path[:] = setup["path"]
    gc.unfreeze()
    server.main(setup)
