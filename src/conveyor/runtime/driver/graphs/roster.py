"""What those who look at a session from outside (``conveyor status``) do not find on its board: what its
graphs and their tasks are called.

It lies in a memory file of the driver's, which is there while a graph is laid. A line is a graph that has
been laid, or one that has been taken down; a reader takes what has an end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from io import FileIO

from msgspec import Struct, json

from conveyor import descriptors

#: What the file is called among the driver's descriptors.
FILE = "conveyor-roster"
#: A file of more bytes is written anew, once it has twice as many as the graphs need that are laid now.
_SMALL = 1 << 16


class LaidGraph(Struct, frozen=True):
    """A graph of the session. tasks: what they are called, by their number; ``None``: it is down."""

    number: int
    name: str = ""
    tasks: dict[int, str] | None = None


class Roster:
    """The driver's end."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lines: dict[int, bytes] = {}
        self._file: FileIO | None = (
            None  # an object: what a signal handler breaks off leaves no descriptor
        )
        self._size = 0

    def note(self, number: int, name: str, tasks: Mapping[int, str]) -> None:
        """A graph has been laid. Raises ``OSError`` where there is no memory or descriptor for it."""
        line = json.encode(LaidGraph(number, name, dict(tasks))) + b"\n"
        with self._lock:
            self._lines[number] = line
            self._add(line)

    def forget(self, number: int) -> None:
        """It has been taken down; may be said more than once."""
        with self._lock:
            if self._lines.pop(number, None) is None:
                return
            if not self._lines:
                self._replace(None)  # a session has no descriptor more for graphs that it had
                return
            try:
                self._add(json.encode(LaidGraph(number)) + b"\n")
            except (
                OSError
            ):  # a teardown goes on: tasks have numbers for names until a graph is laid
                self._replace(None)

    def close(self) -> None:
        """The session is over."""
        with self._lock:
            self._lines.clear()
            self._replace(None)

    def _add(self, line: bytes) -> None:
        needed = sum(map(len, self._lines.values()))
        if self._file is None or self._size > max(_SMALL, 2 * needed):
            # Whoever looks finds the one or the other.
            file = FileIO(FILE, "w", opener=_memory_file)
            line = b"".join(self._lines.values())
            _write(file, line)
            self._replace(file)
            self._size = len(line)
            return
        try:
            _write(self._file, line)
        except BaseException:
            self._replace(None)  # what comes next would be taken for the rest of this line
            raise
        self._size += len(line)

    def _replace(self, file: FileIO | None) -> None:
        former, self._file = self._file, file
        if former is not None:
            former.close()


def _write(file: FileIO, data: bytes) -> None:
    """All of it: the kernel may take a part, and say only the next time what keeps it from taking more."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _memory_file(name: str, _flags: int) -> int:
    return descriptors.memory_file(name)


def read_roster(lines: Iterable[bytes]) -> dict[int, LaidGraph]:
    """The graphs that are laid now, by their number, given the file."""
    graphs: dict[int, LaidGraph] = {}
    for line in lines:
        if not line.endswith(b"\n"):
            break  # it is being written
        graph = json.decode(line, type=LaidGraph)
        if graph.tasks is None:
            graphs.pop(graph.number, None)
        else:
            graphs[graph.number] = graph
    return graphs
