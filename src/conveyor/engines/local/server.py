"""The fork server: a small process without user code that forks actors and reaps them.

It is a fresh Python (exec'd, not forked), so actors inherit nothing of the driver: no threads, no
CUDA context, no locks held. It has imported what an actor needs, so a new actor costs a fork.

It outlives nobody: the driver's pidfd tells it when the driver's last thread is gone, whoever else
holds the driver's sockets, and then it kills the actors and leaves. Should the server itself be
killed, the kernel kills its children (``PR_SET_PDEATHSIG``, see ``child``).

The driver and the server exchange messages of one datagram each:

======== ========================= ======================== ============================
kind     direction                 fields                   descriptors
======== ========================= ======================== ============================
SPAWN    to the server             request                  spec, stdout, stderr, fds...
KILL     to the server             pid, signal
HEADLESS to the server             pid
CLOSE    to the server
BORN     to the driver             request, pid             pidfd of the actor
FAILED   to the driver             request, errno
DEAD     to the driver             went on, pid, status
======== ========================= ======================== ============================

HEADLESS says that the main thread of an actor is gone. A process that goes on nevertheless (another
program, after ``os.exec*``) is killed, and its DEAD says so in the field of the request.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypedDict

from conveyor import _core, descriptors
from conveyor.engines.headless import Headless
from conveyor.engines.local.spec import ChildSpec, read_spec
from conveyor.engines.program_end import leave, report
from conveyor.engines.surroundings import HUGE_TENSORS, import_from, main_module
from conveyor.system_limits import FORK_SERVER, PASSING
from conveyor.worker.forked import exit_code

#: glibc's, read when a program is executed, and never again.
TUNABLES = "GLIBC_TUNABLES"

_HUGE_HEAP = "glibc.malloc.hugetlb"
_SINCE = 2, 35
_HUGE_PAGE = 2 << 20
_MOST_PIECES = 32


class _MallInfo(ctypes.Structure):
    """Result of mallinfo(3). ``hblks``: how many pieces have pages of their own. It says nothing where
    another library hands out memory."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def with_huge_heap(environ: Mapping[str, str]) -> dict[str, str]:
    """This environment for a fork server: its heap, and its actors', gets huge pages, as large tensors do,
    unless ``environ`` says otherwise: it has that tunable already, or wants no huge tensors.

    Who fetches many tensors looks up each of their pages, and where they are small that takes longer than to
    copy them. Actors' own environments have nothing of this, and neither have the programs that they start.
    """
    given = environ.get(TUNABLES, "")
    names = {one.partition("=")[0] for one in given.split(":")}
    if environ.get(HUGE_TENSORS, "1") == "0" or _HUGE_HEAP in names or not _knows_huge_pages():
        return dict(environ)
    ours = f"{_HUGE_HEAP}=1"
    return {**environ, TUNABLES: f"{given}:{ours}" if given else ours}


def fill_huge_heap(environ: Mapping[str, str]) -> None:
    """Have what is smaller than a huge page lie in the heap, where that has such pages by ``environ``.

    glibc gives each piece from 128 KiB on pages of its own, until it gets a larger one back: from then on the
    like lie in the heap. So it gets one back here. A tunable would say the same, but then even larger pieces
    would never come to lie there, and each would be mapped and unmapped every time.

    A piece may come out of what is free in the heap: that one says nothing, and others are taken until one
    has pages of its own. Where none of many has, glibc had got such a one back before.
    """
    requested = f"{_HUGE_HEAP}=1" in environ.get(TUNABLES, "").split(":")
    if not requested or not _knows_huge_pages():
        return
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = (ctypes.c_size_t,)
    library.free.argtypes = (ctypes.c_void_p,)
    library.mallinfo2.restype = _MallInfo
    mapped = library.mallinfo2().hblks
    pieces: list[int] = []
    while len(pieces) < _MOST_PIECES:
        piece = library.malloc(_HUGE_PAGE)
        if not piece:  # there is no memory
            break
        pieces.append(piece)
        if library.mallinfo2().hblks > mapped:
            break
    for piece in pieces:
        library.free(piece)  # nothing of it was touched


def _knows_huge_pages() -> bool:
    """Whether this C library is a glibc that can ask for huge pages."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # another library
        return False
    version = re.fullmatch(r"glibc (\d+)\.(\d+)", name)
    return version is not None and (int(version[1]), int(version[2])) >= _SINCE


KEEP_CUDA = "CONVEYOR_KEEP_CUDA_VISIBLE_DEVICES"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_PR_SET_PDEATHSIG = 1
_IOLBF = 1

_libc = ctypes.CDLL(None, use_errno=True)


def child_environ(spec: ChildSpec) -> dict[str, str]:
    """The actor's environment: the driver's, its own variables, and what follows from the rest."""
    environ = {**spec.environ, **spec.env_vars}
    threads = str(max(1, int(spec.num_cpus or 1)))
    for variable in THREAD_VARIABLES:
        environ.setdefault(variable, threads)
    environ.setdefault(HUGE_TENSORS, "1")
    if "CUDA_VISIBLE_DEVICES" not in spec.env_vars and (
        spec.gpu_ids or environ.get(KEEP_CUDA) != "1"
    ):
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpu_ids)
    return environ


def prepare_for_forks() -> None:
    """Prepare the fork server, once, for its children: this does what each child would otherwise do for
    itself."""
    # Output of C code (printf in an extension) is line buffered too; the C library would keep it back on a
    # pipe, and lose it when the process is killed.
    with suppress(ValueError, AttributeError):
        stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
        _libc.setvbuf(stdout, None, _IOLBF, ctypes.c_size_t(0))
    # By this process actors see whether they may read each other's memory.
    _core.let_read(os.getpid())


def set_process_title(title: str) -> None:
    """Show ``title`` in ``ps``, ``top`` and ``py-spy``, as far as the system allows it."""
    raw = title.encode("utf-8", "replace")
    with suppress(OSError), open("/proc/self/comm", "wb", buffering=0) as comm:
        comm.write(raw[:15])
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: see proc(5)
        # Through a file, not a pointer: should the addresses be wrong it is an error, not a crash.
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(raw[: end - start - 1].ljust(end - start, b"\0"))


def become_actor(
    server_pid: int, spec_fd: int, stdout: int, stderr: int, fds: Sequence[int]
) -> NoReturn:
    """Turn this process, just forked by the fork server, into the actor of the spec and run it.

    Never returns: the fork server's frames lie below on the stack and must not be unwound.
    """
    status = 1
    try:
        _die_with(server_pid)
        # A process group of the actor's own: processes that it starts (multiprocessing, subprocess) belong to
        # the group too, and the fork server kills the group when the actor has ended.
        os.setpgid(0, 0)
        _reset_signals()
        _set_up_stdio(stdout, stderr)
        spec = read_spec(spec_fd)
        _close_all_but({0, 1, 2, *fds})
        set_process_title(f"cv:{spec.name}")
        _set_up_python(spec)
        gc.enable()
        status = _run(spec, fds)
    except BaseException:
        report()
    finally:
        leave(status)


def _die_with(server_pid: int) -> None:
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"PR_SET_PDEATHSIG: {os.strerror(code)}")
    # The server may have died before the call above: then nobody would ever kill us.
    if os.getppid() != server_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _reset_signals() -> None:
    # Ignored is what the driver was started with (nohup) or what the fork server wants for itself.
    # SIGPIPE and SIGXFSZ are ignored by every Python; handlers of faulthandler stay.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _set_up_stdio(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        # The driver reads lines of UTF-8, whatever the locale.
        with suppress(AttributeError):
            stream.reconfigure(  # type: ignore[union-attr]
                encoding="utf-8", errors=errors, line_buffering=True
            )


def _close_all_but(keep: Collection[int]) -> None:
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in keep:
            try:
                os.close(int(entry))
            except OSError as error:
                # The listing's own descriptor is gone already.
                if error.errno != errno.EBADF:
                    raise


def _set_up_python(spec: ChildSpec) -> None:
    os.chdir(spec.cwd)
    _replace_environ(child_environ(spec))
    _set_thread_count()
    import_from(spec.sys_path)
    sys.argv[:] = spec.argv
    # The server's __main__ is its bootstrap code.
    main_module(spec.main_file, spec.main_module)
    _seed_random_states()


def _seed_random_states() -> None:
    """Seed the global random states of modules that the server has imported; those of `random` are seeded at
    the fork."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        try:
            numpy_random.seed()
        except TypeError:  # a preloaded module has set a bit generator of another kind
            generator = numpy_random.get_bit_generator()
            generator.state = type(generator)().state
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _set_thread_count() -> None:
    """Set torch's number of threads, if the server has imported torch: it was imported without this actor's
    environment."""
    torch = sys.modules.get("torch")
    count = os.environ[THREAD_VARIABLES[0]]
    if torch is not None and count.isdecimal() and int(count) != torch.get_num_threads():
        torch.set_num_threads(int(count))


def _replace_environ(environ: Mapping[str, str]) -> None:
    time_zone = os.environ.get("TZ")
    for key in [key for key in os.environ if key not in environ]:
        del os.environ[key]
    for key, value in environ.items():
        if os.environ.get(key) != value:
            os.environ[key] = value
    if os.environ.get("TZ") != time_zone:
        time.tzset()


def _run(spec: ChildSpec, fds: Sequence[int]) -> int:
    try:
        module, _, function = spec.entry.partition(":")
        entry: Any = getattr(importlib.import_module(module), function)
        entry(spec.payload, list(fds))
    except SystemExit as error:
        return exit_code(error)
    return 0


SPAWN, KILL, CLOSE, BORN, FAILED, DEAD, HEADLESS = range(7)
MESSAGE = struct.Struct("=BQiI")  # kind, request, pid or errno, wait status or signal
MAX_FDS = 253  # the kernel's limit for one message (SCM_MAX_FD)


class Setup(TypedDict):
    """Setup of the fork server, which the launcher leaves on its stdin."""

    path: list[str]  # sys.path
    control: int  # socket to the driver
    driver: int  # pidfd of the driver
    preload: list[str]  # modules to import before the first fork
    wanted: list[str]  # and those that the user has named


def send(control: socket.socket, message: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message with descriptors, or raise ``BlockingIOError`` at once."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    control.sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(control: socket.socket, max_fds: int) -> tuple[bytes, list[int], bool]:
    """Receive one message: its data, its descriptors, and whether no descriptor was lost. Raises
    ``BlockingIOError`` at once if there is no message.

    Not ``socket.recv_fds``, which ignores the flags it is given (seen up to Python 3.13).
    """
    item = array("i").itemsize
    data, ancillary, flags, _ = control.recvmsg(
        MESSAGE.size,
        socket.CMSG_SPACE(max_fds * item),
        socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
    )
    fds = array("i")
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(rights[: len(rights) - len(rights) % item])
    return data, [descriptors.own(fd) for fd in fds], not flags & socket.MSG_CTRUNC


def main(setup: Setup) -> NoReturn:
    """Serve until the driver is gone or says so."""
    status = 1
    try:
        _isolate()
        set_process_title(FORK_SERVER)
        _preload(setup["preload"], setup["wanted"])
        prepare_for_forks()
        server = _Server(setup["control"], setup["driver"])
        # Objects that exist now stay for good. The collector must not write to their pages, which all actors
        # share.
        gc.collect()
        gc.freeze()
        server.serve()
        status = 0
    except BaseException:
        with suppress(BaseException):
            sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


def _isolate() -> None:
    gc.disable()
    # Inherited from whichever thread started us.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # With SIGCHLD ignored the kernel would reap our children itself.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Ending is the driver's decision. Batch systems send SIGTERM to every process of a job, and a
    # driver that saves its actors' state then needs them alive.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)


def _preload(modules: Sequence[str], wanted: Sequence[str]) -> None:
    for module in modules:
        # Only for speed. An actor that cannot import it either says so itself, with a traceback.
        with suppress(Exception):
            importlib.import_module(module)
    # Numeric libraries read this when they are imported, and with more they would start threads here, which
    # actors do not inherit.
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, "1")
    fill_huge_heap(os.environ)
    os.environ.setdefault(HUGE_TENSORS, "1")  # torch looks when it first allocates anything
    for module in wanted:
        try:
            importlib.import_module(module)
        except Exception as error:
            print(
                f"Conveyor: init(preload=) names {module!r}, which cannot be imported before actors start "
                f"({type(error).__name__}: {error}): each actor that needs it will try for itself",
                file=sys.stderr,
            )
    modules = *modules, *wanted
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        print(
            f"Conveyor's fork server has {threads} threads after importing {', '.join(modules)}: "
            "actors forked from it may deadlock. Something starts a thread when imported.",
            file=sys.stderr,
        )
    # A server in the driver's directory would keep a file system from being unmounted.
    os.chdir("/")


class _Server:
    def __init__(self, control: int, driver: int) -> None:
        self._pid = os.getpid()
        self._control = socket.socket(fileno=control)
        self._control.setblocking(False)
        self._driver = driver
        self._actors: dict[int, int] = {}  # pidfd -> pid
        self._headless = Headless()
        self._outbox: deque[tuple[bytes, int]] = deque()  # message, descriptor to pass or -1
        self._closing = False
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(driver, select.POLLIN)

    def serve(self) -> None:
        while not (self._closing and not self._actors and not self._outbox):
            for fd, _ in self._poll.poll(self._headless.due()):
                if fd == self._driver:
                    self._lose_driver()
                elif fd in self._actors:
                    self._reap(fd)
                elif fd == self._control.fileno():
                    self._receive()
            self._headless.look_again()
            self._send()

    def _receive(self) -> None:
        while True:
            try:
                data, fds, whole = receive(self._control, MAX_FDS)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in PASSING:
                    return  # and asked to again at once
                data = b""
            if not data:
                self._lose_driver()
                return
            kind, request, pid, number = MESSAGE.unpack(data)
            if kind == SPAWN:
                self._spawn(request, fds, whole)
            elif kind == KILL:
                if pid in self._actors.values():
                    os.kill(pid, number)
            elif kind == HEADLESS:
                for pidfd in [fd for fd, actor in self._actors.items() if actor == pid]:
                    self._headless.look(pidfd, pid)
            elif kind == CLOSE:
                self._close()

    def _spawn(self, request: int, fds: list[int], whole: bool) -> None:
        try:
            if not whole:
                raise OSError(errno.EMFILE, "descriptors were lost on the way")
            if self._closing:
                raise OSError(errno.ESHUTDOWN, "the fork server is closing")
            spec, stdout, stderr, *handed = fds
            # Both processes would write the contents of a buffer.
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                # The number is closed with all others; the object must not close it once more.
                self._control.detach()
                become_actor(self._pid, spec, stdout, stderr, handed)
            pidfds: list[int] = []
            try:
                pidfds.append(descriptors.own(os.pidfd_open(pid)))
                pidfds.append(descriptors.duplicate(pidfds[0]))
            except OSError:
                # An actor that cannot be watched must not be.
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                for fd in pidfds:
                    os.close(fd)
                raise
        except OSError as error:
            self._outbox.append((MESSAGE.pack(FAILED, request, error.errno or 0, 0), -1))
        else:
            watched, answer = pidfds
            self._actors[watched] = pid
            self._poll.register(watched, select.POLLIN)
            self._outbox.append((MESSAGE.pack(BORN, request, pid, 0), answer))
        finally:
            for fd in fds:
                os.close(fd)
        self._send()

    def _reap(self, pidfd: int) -> None:
        pid = self._actors.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        # Before it is reaped: so long its number, which is its group's as well, is not given away.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        went_on = self._headless.forget(pidfd, status)
        self._outbox.append((MESSAGE.pack(DEAD, went_on, pid, status), -1))

    def _send(self) -> None:
        # Never blocks: a driver that does not read may be dead, and that is for us to notice.
        if self._control.fileno() < 0:
            self._outbox.clear()
            return
        while self._outbox:
            data, fd = self._outbox[0]
            try:
                send(self._control, data, [fd] if fd >= 0 else [])
            except OSError as error:
                if isinstance(error, BlockingIOError) or error.errno in PASSING:
                    self._poll.modify(self._control, select.POLLIN | select.POLLOUT)
                else:
                    self._lose_driver()
                return
            self._outbox.popleft()
            if fd >= 0:
                os.close(fd)
        self._poll.modify(self._control, select.POLLIN)

    def _lose_driver(self) -> None:
        """Close, since the driver is dead or has closed its socket: nobody listens any more."""
        self._outbox.clear()
        if self._control.fileno() >= 0:
            self._poll.unregister(self._control)
            self._control.close()
        if self._driver >= 0:
            self._poll.unregister(self._driver)
            os.close(self._driver)
            self._driver = -1
        self._close()

    def _close(self) -> None:
        self._closing = True
        for pidfd, pid in self._actors.items():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            # Newborn, it may not have its group yet.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
