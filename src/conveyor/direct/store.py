"""Store of the values that stay in this process, where others read them.

The system may forbid processes to read each other's memory: to all (a filter of system calls), but to a
process's parents (Yama), or to who is in another user namespace. Then values do not stay where they were
made: they travel in shared memory, as any other.

With ``debug_writes`` a value's checksum is taken when it is kept, and stands in the process's directory
(``native/directory.h``). Whoever gets all of the value compares it with what he has got.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from conveyor import _core
from conveyor.codec.direct import Located, Route
from conveyor.direct.memory import memory_at
from conveyor.exceptions import SharedWriteError
from conveyor.runtime import context

_YAMA = "/proc/sys/kernel/yama/ptrace_scope"

#: The process that was asked for, and the answer. A forked child asks again.
_known: tuple[int, bool] | None = None


def let_session_read(is_driver: bool) -> bool:
    """Let all processes of the session read this one's memory. Returns whether they can.

    An actor asks whether it may read the fork server, which is to it as it is to another actor.
    """
    global _known
    pid = os.getpid()
    if _known is None or _known[0] != pid:
        # All actors descend from the fork server, which descends from the driver.
        family = pid if is_driver else os.getppid()
        _core.let_read(family)
        _known = pid, _core.may_read(family) and not (is_driver and _is_forbidden())
    return _known[1]


def _is_forbidden() -> bool:
    """Whether only an administrator's processes may read others. The driver has no process to try it on
    that is to it as its actors are."""
    with suppress(OSError, ValueError), open(_YAMA) as file:
        return int(file.read()) >= 2 and not _core.may_read(1)
    return False


_RUNNING = 1


def changed(where: Located, process_table: _core.ProcessTable) -> SharedWriteError:
    """Make the error for a process that has fetched a value that was written to."""
    nbytes = sum(_core.lengths_of(where.ranges))
    method = _method_of(where, process_table)
    return SharedWriteError(in_words(where.number, where.holder, nbytes, method))


def in_words(number: int, holder: str, nbytes: int, method: str) -> str:
    """Say that a value was written to, and how to avoid it."""
    by = f" and that its method {method} has returned" if method else ""
    return (
        f"memory of a value of {nbytes:,} bytes (id {number:016x}) that {holder} keeps{by} was written to "
        "while others could fetch it: call conveyor.experimental.wait_tensor_freed(tensor) before writing, "
        "return a copy, or have a copy stay, with snapshot=True beside tensor_transport="
    )


def holder_and_method() -> tuple[str, str]:
    """Return this process's name, and the method that it runs; the latter is empty where that is not
    known."""
    runtime = context.running()
    if runtime is None:
        return "this process", ""
    process = runtime.process
    state, graph, _, _, _, _, what = process.process_table.status(process.slot)
    return process.process_table.name(process.slot), what if state == _RUNNING and not graph else ""


def _method_of(where: Located, process_table: _core.ProcessTable) -> str:
    with suppress(OSError):
        values, _, _ = _core.read_directory(where.pid, process_table.directory(where.slot))
        for number, _, _, names in values:
            if number == where.number:
                return names.decode(errors="replace").split("\0")[-1]
    return ""


_log = logging.getLogger(__name__)
_RANGE = struct.Struct("<QQ")


class OnRoute(NamedTuple):
    """Tensors of a value that others get by a route instead of by reading.

    route: that way.
    note: what it has said of the tensors.
    tensors: what it offers.
    """

    route: Route
    note: bytes
    tensors: list[Any]


class Stored:
    """A value that stays here, as long as this does.

    number: which no other one has, in any process of any session.
    value: itself.
    ranges: address and length of each part of its memory that others may read.
    beside: what others get in another way.

    What others may want to know of it stands in this process's directory (``native/directory.h``), from where
    ``direct.listing`` has it.
    """

    __slots__ = (
        "__weakref__",
        "_anchor",
        "_buffers",
        "_lingers",
        "_table",
        "number",
        "out_of_band",
        "ranges",
        "value",
    )

    def __init__(
        self,
        table: Table,
        number: int,
        value: Any,
        buffers: list[Any],
        ranges: bytes,
        anchor: _core.Anchor,
        out_of_band: OnRoute | None = None,
    ) -> None:
        self._table = table
        self.number = number
        self.value = value
        self._buffers = buffers  # they keep the memory, whatever becomes of the value
        self.ranges = ranges
        self.out_of_band = out_of_band
        self._anchor: _core.Anchor | None = anchor
        self._lingers: _core.Lingers | None = None

    def __del__(self) -> None:
        # First: who reads the memory meanwhile finds that it may be anybody's.
        self._anchor = None
        if self._lingers is None:
            self._table.forget(self.number, self.out_of_band)
            return
        self._table.hide(self.number)
        self._lingers.end()

    def lies_in(self, arena: _core.Arena, value: Any, *what: Any) -> None:
        """Note that some of the memory of ``value``, which this keeps, is the arena's. Others may read it
        there: it stays until they have let go of it, also if the owner of the reference has died. ``what``:
        see :meth:`Table.names`."""
        rest = _Rest(self._table, self.number, (value, self._buffers), self.out_of_band)
        names = self._table.names(*what)
        self._lingers = _core.Lingers(arena, self.number, self.ranges, names, rest)

    @property
    def anchor(self) -> int:
        """Address of the word that says that the value is here."""
        assert self._anchor is not None
        return self._anchor.address


class _Rest:
    """Keeper of a value's memory after the value itself can no longer be found."""

    __slots__ = ("_memory", "_number", "_out_of_band", "_table")

    def __init__(self, table: Table, number: int, memory: Any, out_of_band: OnRoute | None) -> None:
        self._table = table
        self._number = number
        self._memory = memory
        self._out_of_band = out_of_band

    def __del__(self) -> None:
        self._table.forget(self._number, self._out_of_band)


class Watched(Stored):
    """Stored value whose memory is checked when it is got or let go of: nobody may have written to it
    meanwhile."""

    __slots__ = ("_checksum", "_holder", "_method", "_reported", "_value")

    def __init__(
        self,
        table: Table,
        number: int,
        value: Any,
        buffers: list[Any],
        ranges: bytes,
        memory_ranges: bytes,
        what: tuple[str, str, bool],
        out_of_band: OnRoute | None,
    ) -> None:
        self._checksum = _core.checksum_of(ranges)
        self._holder, self._method = holder_and_method()
        self._reported = False
        names = table.names(*what, self._method)
        anchor = _core.Anchor(number, memory_ranges, names, self._checksum)
        super().__init__(table, number, value, buffers, ranges, anchor, out_of_band)

    @property
    def value(self) -> Any:
        """The value, as of any ``Stored``.

        Raises:
            SharedWriteError: it was written to.
        """
        wrong = self._wrong()
        if wrong:
            raise SharedWriteError(wrong)
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value

    def __del__(self) -> None:
        if self._anchor is not None and not self._reported and (wrong := self._wrong()):
            _log.error("%s", wrong)
        super().__del__()

    def _wrong(self) -> str:
        if _core.checksum_of(self.ranges) == self._checksum:
            return ""
        self._reported = True
        nbytes = sum(length for _, length in _RANGE.iter_unpack(self.ranges))
        return in_words(self.number, self._holder, nbytes, self._method)


class Table:
    """Object store of this process: all values that are kept here."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start with nothing kept."""
        # Each process counts from a random number: who reads another one's memory finds none that it knows.
        self._numbers: Iterator[int] = itertools.count(_first_number())
        # Each value takes itself out. A dictionary of the standard library's that does so costs more than all
        # else here.
        self._stored: dict[int, weakref.ref[Stored]] = {}
        self._names: dict[tuple[Any, ...], _core.LastingText] = {}
        #: Of each value where its memory lies, on devices too.
        self._memory_ranges: dict[int, bytes] = {}
        #: Whom it tells that a value has gone.
        self._observers: list[Callable[[], object]] = []

    def keep(
        self,
        value: Any,
        buffers: list[Any],
        transport: str,
        route: Route | None = None,
        tensors: Sequence[Any] = (),
        snapshot: bool = False,
    ) -> Stored | None:
        """Keep a value; ``buffers`` is the memory that others may read, and ``tensors`` what they get by
        ``route``. ``None``: they cannot get those."""
        number, ranges = next(self._numbers), _core.ranges_of(buffers)
        out_of_band = None
        if route is not None and tensors:
            note = route.offer(number, list(tensors))
            if note is None:
                return None
            out_of_band = OnRoute(route, note, list(tensors))
        try:
            memory_ranges = ranges
            if tensors:
                memory_ranges += b"".join([_RANGE.pack(*memory_at(one)) for one in tensors])
            self._memory_ranges[number] = memory_ranges
            on = "" if out_of_band is None else out_of_band.route.name
            if _core.checks_writes():
                stored: Stored = Watched(
                    self,
                    number,
                    value,
                    buffers,
                    ranges,
                    memory_ranges,
                    (transport, on, snapshot),
                    out_of_band,
                )
            else:
                names = self._names.get((transport, on, snapshot))
                if names is None:
                    names = self.names(transport, on, snapshot)
                anchor = _core.Anchor(number, memory_ranges, names)
                stored = Stored(self, number, value, buffers, ranges, anchor, out_of_band)
        except BaseException:
            self._memory_ranges.pop(number, None)
            if out_of_band is not None:
                out_of_band.route.forget(number, out_of_band.note, out_of_band.tensors)
            raise
        self._stored[number] = weakref.ref(stored)
        return stored

    def names(self, *what: Any) -> _core.LastingText:
        """Return the directory's text about a value: its transport, its route, whether it is a snapshot, and
        the method that has returned it, if that is known."""
        found = self._names.get(what)
        if found is None:
            transport, route, snapshot, *method = what
            text = "\0".join([transport, route, "snapshot" * snapshot, *method])
            found = self._names[what] = _core.LastingText(text.encode())
        return found

    def hide(self, number: int) -> None:
        """Make the value of that number impossible to find. Its memory may still be read."""
        self._stored.pop(number, None)

    def forget(self, number: int, out_of_band: OnRoute | None = None) -> None:
        """Forget the value of that number, which is garbage, with all that others have got of it
        ``out_of_band``."""
        self.hide(number)
        self._memory_ranges.pop(number, None)
        # Any thread may have had it last: one that sends it, or that runs a method which took it.
        if self._observers:
            for tell in self._observers.copy():
                tell()
        if out_of_band is not None:
            out_of_band.route.forget(number, out_of_band.note, out_of_band.tensors)

    @contextmanager
    def telling(self, tell: Callable[[], object]) -> Iterator[None]:
        """Have ``tell`` called when a value has gone, in a finalizer, by whatever thread has had it last."""
        observers = self._observers  # a forked child has another one
        observers.append(tell)
        try:
            yield
        finally:
            observers.remove(tell)

    def find(self, number: int) -> Stored | None:
        """The value of that number, if it is kept here."""
        found = self._stored.get(number)
        return None if found is None else found()

    def all(self) -> list[Stored]:
        """All of them, the oldest first."""
        found = [
            ref() for ref in list(self._stored.values())
        ]  # one step, whatever other threads do
        return sorted([one for one in found if one is not None], key=lambda one: one.number)

    def values_in(self, address: int, nbytes: int) -> set[int]:
        """Return the numbers of the values that have some of their memory among these bytes. The caller must
        keep none of them meanwhile. Otherwise another waiter would find them here, and hear of nothing
        afterwards."""
        found = list(self._memory_ranges.items())  # one step, whatever other threads do
        return {number for number, ranges in found if _lies_in(ranges, address, nbytes)}


def _lies_in(ranges: bytes, address: int, nbytes: int) -> bool:
    end = address + nbytes
    return any(
        start < end and address < start + length for start, length in _RANGE.iter_unpack(ranges)
    )


def _first_number() -> int:
    return int.from_bytes(os.urandom(7), "little") + 1


def _forget_in_child() -> None:
    """Empty the table in a forked child: the values are its parent's."""
    TABLE.clear()


#: This process's.
TABLE = Table()
os.register_at_fork(after_in_child=_forget_in_child)

Decode = Callable[[int, bytes, "list[Any] | None"], Any]
