"""Output of actors on the driver's stdout and stderr, each line with its actor's name."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from conveyor import _core
from conveyor.runtime import threads

LINE_BYTES = 64 << 10  # a longer line is broken
#: Characters that wait to be printed while nobody reads the driver's output. What comes beyond is dropped,
#: and one line says how much.
WAITING_CHARACTERS = 64 << 20
TAIL_LINES = 20
TAIL_LINE_CHARACTERS = 2_000
PROGRESS_SECONDS = 1.0  # between two lines of one progress bar

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
        most_waiting: int = WAITING_CHARACTERS,
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
                actor.tail.extend(line[:TAIL_LINE_CHARACTERS] for line in final)
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
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)


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
            state = _visible(ended)[:LINE_BYTES]
            line = state.decode("utf-8", "replace")
            if state and now >= self._next_progress and line != self._progress_shown:
                shown.append(line)
                self._progress_shown = line
                self._next_progress = now + PROGRESS_SECONDS
            self._partial = state + b"\r" + rest if state else rest
        while len(self._partial) > 2 * LINE_BYTES:
            cut = _boundary(self._partial, LINE_BYTES)
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
    while len(raw) > LINE_BYTES:
        cut = _boundary(raw, LINE_BYTES)
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
