"""What actors print, on the driver's stdout and stderr, each line with its actor's name."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from conveyor import _core

LINE_BYTES = 64 << 10  # a longer line is broken
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

    ``feed`` may block as long as the driver's stream does (a paused terminal); nothing else does.
    """

    def __init__(self, clock: Callable[[], float] = _core.monotonic, show: bool = True) -> None:
        """``show=False``: print nothing, only keep the tails."""
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
            _print(stream, "".join(f"{actor.prefix}{line}\n" for line in shown))

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
        """The lines to show now, and the finished lines (those without passing states)."""
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
    """What a terminal would show of ``raw`` in the end: the text after the last return."""
    return raw.rstrip(b"\r").rpartition(b"\r")[2]


def _pieces(raw: bytes) -> list[bytes]:
    pieces = []
    while len(raw) > LINE_BYTES:
        cut = _boundary(raw, LINE_BYTES)
        pieces.append(raw[:cut])
        raw = raw[cut:]
    return [*pieces, raw]


def _boundary(raw: bytes, limit: int) -> int:
    """Where to cut ``raw``, at most at ``limit`` and not inside a UTF-8 character."""
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
        # Whatever the stream does (closed, broken pipe), an actor's output is not worth an error.
        with suppress(Exception):
            try:
                target.write(text)
            except UnicodeEncodeError:
                encoding = target.encoding or "ascii"
                target.write(text.encode(encoding, "replace").decode(encoding))
            target.flush()
