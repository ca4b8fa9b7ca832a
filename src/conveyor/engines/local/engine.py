"""Engine of actors as processes of this machine, the printing of their output, and the start of a session."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from conveyor import _core, system_limits
from conveyor.driver.driver import Driver
from conveyor.driver.process_engine import DriverCallbacks, PrepareRemote, Spawned
from conveyor.engines.local.launcher import PRINT_TIMEOUT, Launcher
from conveyor.engines.local.resources import GpuClaim, GpuPool
from conveyor.engines.local.spec import ChildSpec, SpawnRequest
from conveyor.engines.options import session_options
from conveyor.engines.program_end import ProgramEnd
from conveyor.engines.surroundings import surroundings
from conveyor.runtime import threads
from conveyor.runtime.events import EventLoop
from conveyor.runtime.process import memory_groups, read_text
from conveyor.runtime.protocol import ProcessOptions
from conveyor.runtime.uninterrupted import uninterrupted

_RECORD_BYTES = 8192  # the kernel's log gives one record for each read, none is longer


class MemoryKills:
    """Tells the out-of-memory killer's victims from others that ended by SIGKILL.

    The kernel's own log names its victims, where it may be read. Otherwise its counters are compared
    with what they were: of this process's memory cgroup, and of the machine.
    """

    def __init__(self, root: str = "/") -> None:
        """``root``: where ``proc``, ``sys`` and ``dev`` are."""
        self._root = root
        self._counter = _cgroup_counter(self._root)
        self._in_cgroup = self._read_cgroup()
        self._on_machine = self._read_machine()

    def killed(self, pid: int) -> bool | None:
        """Whether ``pid``, which has ended by SIGKILL, was a victim; ``None``: it may have been."""
        in_cgroup, on_machine = self._read_cgroup(), self._read_machine()
        if on_machine is not None and on_machine == self._on_machine:
            return False
        more = in_cgroup is not None and self._in_cgroup is not None and in_cgroup > self._in_cgroup
        if not more and not self._logged(pid):
            return None
        # One kill explains one end; others may still have to be explained.
        if self._on_machine is not None:
            self._on_machine += 1
        if more and self._in_cgroup is not None:
            self._in_cgroup += 1
        return True

    def _read_cgroup(self) -> int | None:
        return None if self._counter is None else _count(self._counter)

    def _read_machine(self) -> int | None:
        return _count(os.path.join(self._root, "proc/vmstat"))

    def _logged(self, pid: int) -> bool:
        found = False
        with suppress(OSError):
            log = os.path.join(self._root, "dev/kmsg")
            fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                name = re.compile(rb"[Kk]illed process %d[ ,(]" % pid)
                while not found:
                    try:
                        record = os.read(fd, _RECORD_BYTES)
                    except BrokenPipeError:  # records were overwritten meanwhile
                        continue
                    if not record:
                        break
                    found = name.search(record) is not None
            finally:
                os.close(fd)
        return found


def _count(path: str) -> int | None:
    with suppress(OSError, ValueError):
        for line in read_text(path).splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _cgroup_counter(root: str) -> str | None:
    """The file that counts the kills in this process's memory cgroup."""
    for group in memory_groups(root):
        for name in ("memory.events", "memory.oom_control"):
            counter = os.path.join(group, name)
            if _count(counter) is not None:
                return counter
    return None


# Output of actors on the driver's stdout and stderr, each line with its actor's name.

_LINE_BYTES = 64 << 10  # a longer line is broken
#: Characters that wait to be printed while nobody reads the driver's output. What comes beyond is dropped,
#: and one line says how much.
_WAITING_CHARACTERS = 64 << 20
_TAIL_LINES = 20
_TAIL_LINE_CHARACTERS = 2_000
_PROGRESS_SECONDS = 1.0  # between two lines of one progress bar

# Held while we print. A fork takes it first: a child that inherits the stream's own lock in the
# locked state would wait for ever in its first print().
_printing = threading.Lock()
_forking = threading.local()


def _before_fork() -> None:
    # Not without end: the terminal may be paused, or this thread may be printing itself.
    _forking.holds = _printing.acquire(timeout=1.0)


def _after_fork_in_parent() -> None:
    if _forking.holds:
        _printing.release()


def _after_fork_in_child() -> None:
    global _printing
    _printing = threading.Lock()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


class LogPrinter:
    """Prints the output of many actors as ``(Name pid=123) text``.

    A thread of its own prints. It may block as long as the driver's stream does (a paused terminal, a pager);
    nothing else does, so no actor has to wait for whoever reads the driver's output.
    """

    def __init__(
        self,
        clock: Callable[[], float] = _core.monotonic,
        show: bool = True,
        most_waiting: int = _WAITING_CHARACTERS,
    ) -> None:
        """``show=False``: print nothing, only keep the tails."""
        self._most_waiting = most_waiting
        self._changed = threading.Condition()  # guards all that is to be printed
        self._texts: deque[tuple[str, str]] = deque()  # stream and text; the first is being printed
        self._waiting = 0  # their characters
        self._dropped: dict[str, int] = {}  # characters of each stream
        self._closed = False
        self._thread: threading.Thread | None = None
        self._clock = clock
        self._show = show
        self._lock = threading.Lock()
        self._actors: dict[int, _Actor] = {}

    def add(self, pid: int, name: str) -> None:
        """Process ``pid`` is the actor ``name`` from now on."""
        with self._lock:
            self._actors[pid] = _Actor(f"({name} pid={pid}) ")

    def feed(self, pid: int, stream: str, data: bytes) -> None:
        """Print what process ``pid`` wrote to ``stream`` (``"stdout"`` or ``"stderr"``).

        Only whole lines are printed; empty ``data`` ends the stream and prints the rest.
        """
        with self._lock:
            actor = self._actors.get(pid)
            if actor is None:
                # The fork server, or an actor already forgotten.
                actor = self._actors[pid] = _Actor(f"(conveyor pid={pid}) ")
            lines = actor.stderr if stream == "stderr" else actor.stdout
            shown, final = lines.feed(data, self._clock())
            if stream == "stderr":
                actor.tail.extend(line[:_TAIL_LINE_CHARACTERS] for line in final)
        if shown and self._show:
            self._print_later(stream, "".join([f"{actor.prefix}{line}\n" for line in shown]))

    def flush(self, timeout: float) -> bool:
        """Wait until all that has come is printed: whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._texts, timeout)

    def close(self, timeout: float) -> None:
        """Print what has come, for so many seconds at most, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _print_later(self, stream: str, text: str) -> None:
        with self._changed:
            if self._texts and self._waiting + len(text) > self._most_waiting:
                self._dropped[stream] = self._dropped.get(stream, 0) + len(text)
                return
            if self._thread is None:
                self._thread = threads.start(self._print_all, "printing")
            self._texts.append((stream, text))
            self._waiting += len(text)
            self._changed.notify_all()

    def _print_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts or self._closed)
                if not self._texts:
                    return
                stream, text = self._texts[0]
            _print(stream, text)
            with self._changed:
                dropped = self._dropped.pop(stream, 0)
            if dropped:
                _print(
                    stream,
                    f"(conveyor) {dropped} characters that actors have printed are left out here: nobody has "
                    "read this output for long\n",
                )
            with self._changed:
                self._texts.popleft()
                self._waiting -= len(text)
                self._changed.notify_all()

    def stderr_tail(self, pid: int) -> str:
        """The last lines process ``pid`` wrote to stderr, for an error report."""
        with self._lock:
            actor = self._actors.get(pid)
            return "\n".join(actor.tail) if actor is not None else ""

    def forget(self, pid: int) -> None:
        """Free what is kept of process ``pid``, its stderr tail included."""
        with self._lock:
            self._actors.pop(pid, None)


class _Actor:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.stdout = _Lines()
        self.stderr = _Lines()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)


class _Lines:
    """Cuts a stream of bytes into lines of text.

    A carriage return starts a line over, as on a terminal: of a progress bar one state a second
    is shown, and the last.
    """

    def __init__(self) -> None:
        self._partial = b""
        self._progress_shown: str | None = None
        self._next_progress = 0.0

    def feed(self, data: bytes, now: float) -> tuple[list[str], list[str]]:
        """Take ``data`` in. Returns the lines to show now, and the finished lines (those without passing
        states)."""
        shown: list[str] = []
        final: list[str] = []
        *whole, self._partial = (self._partial + data).split(b"\n")
        if not data and self._partial:
            whole.append(self._partial)
            self._partial = b""
        for raw in whole:
            for piece in _pieces(_visible(raw)):
                line = piece.decode("utf-8", "replace")
                final.append(line)
                if line != self._progress_shown:
                    shown.append(line)
            self._progress_shown = None
        if b"\r" in self._partial:
            # All that the last return ended is a whole state; what follows may be cut short.
            ended, _, rest = self._partial.rpartition(b"\r")
            state = _visible(ended)[:_LINE_BYTES]
            line = state.decode("utf-8", "replace")
            if state and now >= self._next_progress and line != self._progress_shown:
                shown.append(line)
                self._progress_shown = line
                self._next_progress = now + _PROGRESS_SECONDS
            self._partial = state + b"\r" + rest if state else rest
        while len(self._partial) > 2 * _LINE_BYTES:
            cut = _boundary(self._partial, _LINE_BYTES)
            line = self._partial[:cut].replace(b"\r", b" ").decode("utf-8", "replace")
            self._partial = self._partial[cut:]
            shown.append(line)
            final.append(line)
        return shown, final


def _visible(raw: bytes) -> bytes:
    """Return the text after the last return in ``raw``: what a terminal would show in the end."""
    return raw.rstrip(b"\r").rpartition(b"\r")[2]


def _pieces(raw: bytes) -> list[bytes]:
    pieces = []
    while len(raw) > _LINE_BYTES:
        cut = _boundary(raw, _LINE_BYTES)
        pieces.append(raw[:cut])
        raw = raw[cut:]
    return [*pieces, raw]


def _boundary(raw: bytes, limit: int) -> int:
    """Return where to cut ``raw``: at most at ``limit``, and not inside a UTF-8 character."""
    for cut in range(limit, limit - 4, -1):
        if raw[cut] & 0xC0 != 0x80:
            return cut
    return limit


def _print(stream: str, text: str) -> None:
    with _printing:
        # Looked up now: pytest, notebooks and redirect_stdout replace them.
        target = sys.stderr if stream == "stderr" else sys.stdout
        if target is None:
            return
        # Output of an actor is not worth an error, whatever the stream does (closed, broken pipe).
        with suppress(Exception):
            try:
                target.write(text)
            except UnicodeEncodeError:
                encoding = target.encoding or "ascii"
                target.write(text.encode(encoding, "replace").decode(encoding))
            target.flush()


#: Seconds for which whoever starts an actor waits for the fork server; then a thread does.
_ANSWER_TIMEOUT = 0.5
#: Dead actors whose last lines of stderr are kept.
_MAX_TAILS = 1000


class LocalProcessEngine:
    """Starts and ends processes for the driver."""

    places = False

    def __init__(
        self, log_to_driver: bool, env_vars: Mapping[str, str], preload: Sequence[str]
    ) -> None:
        self._env_vars = env_vars
        self._events = EventLoop()
        self._printer = LogPrinter(show=log_to_driver)
        self._gpus = GpuPool()
        self._memory_kills = MemoryKills()
        self._out_of_memory: dict[int, bool | None] = {}
        self._dead: deque[int] = deque()
        self._claims: dict[int, GpuClaim] = {}
        self._on_exit: Callable[[int, int], None] = lambda pid, status: None
        self._launcher = Launcher(self._events, self._on_process_exit, self._output, wanted=preload)

    def start(self, on_exit: Callable[[int, int], None], _callbacks: DriverCallbacks) -> None:
        self._on_exit = on_exit
        self._launcher.start()

    def on_thread(self) -> bool:
        return self._events.on_thread()

    def spawn(
        self,
        name: str,
        payload: bytes,
        fds: Sequence[int],
        options: ProcessOptions,
        on_spawned: Callable[[int], object],
        _prepare_remote: PrepareRemote,
    ) -> LocalSpawning:
        return LocalSpawning(self, name, payload, fds, options, on_spawned)

    def kill(self, pid: int) -> None:
        self._launcher.kill(pid)

    def end_headless(self, pid: int) -> None:
        self._launcher.end_headless(pid)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        self._events.add(fd, callback)

    def unwatch(self, fd: int) -> None:
        self._events.remove(fd)

    def hurry(self) -> None:
        self._launcher.hurry()

    def close(self) -> None:
        try:
            self._launcher.close()
        except Exception:
            self._close_events()
            raise
        # Not after Ctrl-C, which has this called again: it still wants to hear of ends.
        self._close_events()

    def _close_events(self) -> None:
        self._printer.close(PRINT_TIMEOUT)
        self._events.close()

    def _on_process_exit(self, pid: int, status: int) -> None:
        claim = self._claims.pop(pid, None)
        if claim is not None:
            claim.release()
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            self._out_of_memory[pid] = self._memory_kills.killed(pid)
        self._on_exit(pid, status)
        # Tails are kept for error reports, of the latest dead only.
        self._dead.append(pid)
        if len(self._dead) > _MAX_TAILS:
            forgotten = self._dead.popleft()
            self._printer.forget(forgotten)
            self._out_of_memory.pop(forgotten, None)
            self._launcher.went_on.discard(forgotten)

    def _output(self, pid: int, stream: str, data: bytes) -> None:
        self._printer.feed(pid, stream, data)


class LocalSpawning:
    """A process that the fork server is asked for.
    :class:`conveyor.driver.process_engine.Spawning`."""

    def __init__(
        self,
        engine: LocalProcessEngine,
        name: str,
        payload: bytes,
        fds: Sequence[int],
        options: ProcessOptions,
        on_spawned: Callable[[int], object],
    ) -> None:
        self._engine, self._name, self._on_spawned = engine, name, on_spawned
        self._payload, self._fds, self._options = payload, fds, options
        self._claim = GpuClaim(engine._gpus, options.num_gpus)
        self._request: SpawnRequest | None = None
        self._forked = False
        self._abandoned = ""

    def ask(self) -> bool:
        """Ask the fork server for the process, and return whether it has answered. It answers within
        milliseconds unless it is stopped."""
        if self._options.num_gpus:
            # An interrupt of this thread must not lose GPUs between their being taken and noted.
            uninterrupted(self._claim.take)
        launcher = self._engine._launcher
        self._request = launcher.request(self._spec(), self._fds, self._spawned)
        if self._abandoned:  # in this order: whoever gives up just now notes it before looking
            launcher.give_up(self._request, self._abandoned)
        return launcher.ask(self._request, 0.0 if launcher.is_silent else _ANSWER_TIMEOUT)

    def wait(self) -> Spawned:
        """Return the process, once the fork server has answered."""
        assert self._request is not None
        engine, pid = self._engine, self._engine._launcher.wait(self._request)
        return Spawned(
            pid,
            lambda: engine._printer.stderr_tail(pid),
            lambda: engine._out_of_memory.get(pid),
            lambda: engine.end_headless(pid),
            lambda: pid in engine._launcher.went_on,
        )

    def give_up(self, why: str) -> None:
        """Give the process up, and give its GPUs back."""
        uninterrupted(partial(self._give_up, f"it {why}"))

    def _give_up(self, why: str) -> None:
        self._abandoned = why
        if self._request is not None:
            self._engine._launcher.give_up(self._request, why)
        if not self._forked:
            self._claim.release()

    def _spawned(self, pid: int) -> None:
        """Note that the process is there; on the engine's thread."""
        self._forked = True  # from now on the GPUs are given back by its exit
        self._engine._printer.add(pid, self._name)
        self._engine._claims[pid] = self._claim
        self._on_spawned(pid)

    def _spec(self) -> ChildSpec:
        around = surroundings()
        return ChildSpec(
            name=self._name,
            payload=self._payload,
            cwd=around.cwd,
            sys_path=around.sys_path,
            argv=around.argv,
            environ=dict(os.environ),
            env_vars={**self._engine._env_vars, **self._options.env_vars},
            num_cpus=self._options.num_cpus,
            gpu_ids=self._claim.ids,
            main_file=around.main_file,
            main_module=around.main_module,
        )


def start(**given: Any) -> Driver:
    """Start a session of local processes, with the options of ``engines.options``."""
    options = session_options("local", **given)
    if options.raise_descriptor_limit:
        system_limits.raise_descriptor_limit()
    engine = LocalProcessEngine(options.log_to_driver, options.env_vars, options.preload)
    driver = Driver(engine, options.arena, options.grace)
    driver.at_shutdown = ProgramEnd(driver, options.grace, options.handle_sigterm).cancel
    return driver
