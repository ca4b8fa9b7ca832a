"""Getting a value from the process that keeps it.

A fetch is part of decoding, which cannot be suspended. So for an event loop, where memory is not there yet,
decoding is broken off, and done once more when it is: what has come until then is taken out of a stock.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeVar, cast

from conveyor import _core
from conveyor.codec.direct import File, Located, OutOfBand, receiving
from conveyor.codec.faults import NotThere
from conveyor.codec.tensors.collected import placing
from conveyor.direct.memory import is_array
from conveyor.direct.store import TABLE, Decode, changed
from conveyor.exceptions import (
    ActorDiedError,
    ArenaFullError,
    InjectedFault,
    ObjectLostError,
    RuntimeStateError,
    TransportError,
    WaitTimeoutError,
)
from conveyor.refs.ref import asyncio_waits
from conveyor.runtime import context
from conveyor.runtime.remote_memory import SMALL, Brought, ReceiveBuffer, Wanted
from conveyor.runtime.threads import start_or_run
from conveyor.runtime.waiting import wait_until

ResultT = TypeVar("ResultT")

# In the order in which they have begun. Single steps change it, so it needs no lock.
_waits: dict[UnderWay, None] = {}


class UnderWay:
    """Wait for a value, from its creation to its end."""

    __slots__ = ("_about", "_process")

    def __init__(self, process: Any, holder: int, number: int, total: int = 0) -> None:
        """``holder``: the slot of the process whose memory it is. ``number``, ``total``: of the value, and
        its bytes; 0: it is held back."""
        self._process = process
        self._about = holder, number, total, _core.monotonic_ns()
        _waits[self] = None
        self._tell()

    def end(self) -> None:
        """End the wait. Nothing happens the second time."""
        if self in _waits:
            _waits.pop(self, None)
            self._tell()

    def _tell(self) -> None:
        process = self._process
        # Those of an earlier session are not this one's.
        waits = [one for one in list(_waits) if one._process is process]
        if not waits:
            process.process_table.note_fetch(process.slot, -1)
            return
        holder, number, total, since = waits[0]._about
        process.process_table.note_fetch(process.slot, holder, number, total, len(waits) - 1, since)


class _Awaited(Protocol):
    """Anything that decoding has to wait for: memory that is on its way, or the end of a hold."""

    def give_up(self) -> None:
        """Stop waiting for this, if it has not come yet."""
        ...


#: By what it is: memory that is ``Wanted``, say.
_Stock = dict[object, _Awaited]


class _Deferral(threading.local):
    """Stock of the values that the current thread has asked for while it decodes for an event loop. Its
    ``stock`` is ``None`` on any other thread."""

    stock: _Stock | None = None


deferral = _Deferral()


class DeferredDecoding:
    """Decoding one value for an event loop, as often as it takes."""

    __slots__ = ("_stock",)

    def __init__(self) -> None:
        self._stock: _Stock = {}

    def of(self, decode: Callable[[], ResultT]) -> ResultT:
        """Run ``decode`` over the memory that has come by now.

        Raises:
            NotThere: something is missing, which is on its way from now on.
        """
        before, deferral.stock = deferral.stock, self._stock
        try:
            return decode()
        finally:
            deferral.stock = before

    def end(self) -> None:
        """End the decoding: memory that is still on its way is not needed."""
        stock, self._stock = self._stock, {}
        for coming in stock.values():
            coming.give_up()


async def when_there(decode: Callable[[], ResultT]) -> ResultT:
    """Return the result of ``decode``, once all that it needs has come. A cancelled caller leaves nothing
    under way."""
    import asyncio  # slow to import, and whoever fetches anything has this module

    try:
        asyncio.get_running_loop()
    except RuntimeError:  # another kind of loop, which cannot wait for the doorbell
        return decode()
    decoding = DeferredDecoding()
    try:
        while True:
            try:
                return decoding.of(decode)
            except NotThere as one:
                ready = one.ready
            await asyncio_waits().wait_until(ready)
    finally:
        decoding.end()


#: To have memory for values of that size may take longer than a turn of an event loop: what nobody has used
#: takes the system about a millisecond for each MiB.
_LARGE = 1 << 20


def is_remote_value(where: Located, process: Any) -> bool:
    """Whether a value's keeper is on another node than this process, and lives."""
    process_table: _core.ProcessTable = process.process_table
    if not process_table.gone(where.slot, where.incarnation):
        return process_table.is_remote(where.slot)
    # It is dead, or of a node that this one has had nothing to do with.
    remote_memory = process.remote_memory
    return remote_memory is not None and bool(
        remote_memory.introduce((where.slot, where.incarnation))
    )


def fetch_remote(where: Located, process: Any) -> _core.Buffer:
    """Fetch all of the value's memory: its ranges, each aligned, or joined.

    Raises:
        OSError: as reading on one node would.
        NotThere: it has not come yet, and this is for an await.
        RuntimeStateError: this process was forked from one of the session's.
        WaitTimeoutError: the ``get`` that needs it has no longer.
    """
    if process.inbox.inherited:
        raise RuntimeStateError(
            f"a value that {where.holder} keeps on another host cannot be fetched by a forked child: get it "
            "before the fork"
        )
    wanted = Wanted(
        (where.slot, where.incarnation), where.number, where.anchor, where.ranges, where.joined
    )
    stock = deferral.stock
    if stock is not None:
        coming = cast("_Fetch | None", stock.get(wanted))
        if coming is None:
            coming = stock[wanted] = _Fetch(wanted, process, in_thread=True)
        if not coming.done():
            raise NotThere(coming.done)
        return coming.memory()
    fetch = _Fetch(wanted, process)
    try:
        wait_until(
            process.inbox,
            fetch.done,
            _core.seconds_to_fetch(),
            lambda: f"a value that {where.holder} keeps, on another host",
            lambda: "it is being fetched",
        )
    finally:
        fetch.give_up()
    return fetch.memory()


class _Fetch:
    """Fetch of one value's memory from another node, under way or done."""

    def __init__(self, wanted: Wanted, process: Any, in_thread: bool = False) -> None:
        """``in_thread``: this thread does nothing that takes time."""
        self._process, self._wanted = process, wanted
        self._brought: Brought | None = None
        self._failed: BaseException | None = None
        self._buffer: ReceiveBuffer | None = None
        self._stop: Callable[[], object] | None = None
        self._given_up = False
        self._size = size = wanted.size
        self._wait = UnderWay(process, wanted.process[0], wanted.number, size)
        try:
            if in_thread and size >= _LARGE:
                start_or_run(self._begin_in_thread, "fetch-buffer")
            else:
                self._begin()
        except BaseException:
            self._wait.end()
            raise

    def _begin(self) -> None:
        process = self._process
        # It is written to until `tell` is called, which has this.
        self._buffer = None if self._size < SMALL else ReceiveBuffer(process.arena, self._size)
        self._stop = stop = process.remote_memory.fetch(self._wanted, self._buffer, self._tell)
        if self._given_up:  # before this was known
            stop()

    def _begin_in_thread(self) -> None:
        try:
            if not self._given_up:
                self._begin()
        except BaseException as error:
            self._failed = error
            self._wait.end()
            self._process.notify()

    def _tell(self, brought: Brought) -> None:
        self._brought = brought
        self._wait.end()
        self._process.notify()

    def done(self) -> bool:
        """Whether the memory has come, or never will."""
        if self._brought is not None or self._failed is not None:
            return True
        gone: bool = self._process.process_table.gone(*self._wanted.process)
        return gone

    def memory(self) -> _core.Buffer:
        """Return the memory that has come. Raises ``OSError`` if it never will, as reading on one node would
        raise it."""
        brought = self._brought
        if self._failed is not None:
            raise self._failed
        if brought is None:
            raise ProcessLookupError(errno.ESRCH, "its keeper has died")
        if brought.error:
            raise OSError(brought.error, brought.why)
        if self._buffer is not None:
            return self._buffer.memory()
        memory = _core.Buffer.own(len(brought.data or b""))
        memoryview(memory)[:] = brought.data or b""
        return memory

    def give_up(self) -> None:
        """Stop the fetch, if the memory has not come yet: nobody waits for it any more."""
        self._wait.end()
        self._given_up = True
        if self._brought is None and self._stop is not None:
            self._stop()


def split(where: Located, memory: _core.Buffer) -> list[_core.Buffer]:
    """A buffer for each of the value's ranges, or one for all if they are joined."""
    if where.joined:
        return [memory]
    found, at = [], 0
    for length in _core.lengths_of(where.ranges):
        found.append(memory.part(at, length))
        at += length + 63 & ~63
    return found


_HELD, _FAILING = 1, 2


class _Held:
    """Value that an event loop wants, and that is held back."""

    def __init__(self, wait: UnderWay) -> None:
        self._wait = wait

    def give_up(self) -> None:
        self._wait.end()


def _defer(stock: _Stock, where: Located, process: Any, held: Callable[[], bool]) -> None:
    """Break decoding off as long as ``held()``."""
    key = _Held, where.number
    if held():
        if key not in stock:
            stock[key] = _Held(UnderWay(process, where.slot, where.number))
        raise NotThere(lambda: not held())
    waited = stock.pop(key, None)
    if waited is not None:
        waited.give_up()


def go_on(where: Located, runtime: Any) -> None:
    """Return when the value may be fetched, or its keeper has died.

    Raises:
        NotThere: it is held back, and this is for an await.
        ActorDiedError: its keeper has died while it was held back: its memory may still be there.
        WaitTimeoutError: the ``get`` that needs it has no longer.
        InjectedFault: it is to fail.
    """
    process = runtime.process
    process_table: _core.ProcessTable = process.process_table

    def died() -> bool:
        return process_table.gone(where.slot, where.incarnation)

    def held() -> bool:
        return bool(process_table.transfers(where.slot) & _HELD) and not died()

    if deferral.stock is not None:
        _defer(deferral.stock, where, process, held)
    if held():
        wait = UnderWay(process, where.slot, where.number)
        try:
            wait_until(
                process.inbox,
                lambda: not held(),
                _core.seconds_to_fetch(),
                lambda: f"a value that {where.holder} keeps",
                lambda: "conveyor.testing.hold_transfers holds it back",
            )
        finally:
            wait.end()
    transfers = process_table.transfers(where.slot)
    if transfers & _HELD and died():
        raise ActorDiedError(
            f"{where.holder} has died, and with it a value that it kept", where.holder
        )
    if transfers & _FAILING and not died():
        raise InjectedFault(
            f"conveyor.testing.fail_transfers: a value that {where.holder} keeps cannot be fetched"
        )


_RANGE = struct.Struct("<QQ")


def fetch(where: Located, decode: Decode, sure: _core.InPlace | None = None) -> Any:
    """The value itself where it is kept here, else another one like it: in memory of this process's, or where
    its own lies, if that can be. ``sure``: what is sure to keep it there; without, this process announces
    that it reads it.

    Raises:
        ActorDiedError: the process that kept it has died.
        ObjectLostError: it is kept no more, because whoever owned the reference has died, or its session has
            ended.
        RuntimeStateError: this process belongs to no session.
        WaitTimeoutError, InjectedFault: a test holds it back, or has it fail.
        SharedWriteError: it was written to since it is kept, and the session looks for that.
        OSError: the system refuses for another reason.
        TransportError: a device cannot be opened here, or a transport could not bring it, or the keeper's
            node cannot be reached from here.
    """
    stored = TABLE.find(where.number)
    if stored is not None and not where.joined and not where.snapshot:
        # Other threads of an actor get values of their own meanwhile.
        if receiving.on and threading.current_thread() is threading.main_thread():
            receiving.taken.append(stored)
        return stored.value
    runtime = _running()
    if runtime.process.process_table.transfers(where.slot):
        go_on(where, runtime)
    source = where.pid, where.ranges, where.anchor, where.number
    try:
        if is_remote_value(where, runtime.process):
            buffers = split(where, fetch_remote(where, runtime.process))
        elif where.joined:
            joined = _allocate(sum(_core.lengths_of(where.ranges)))
            _core.read_peer_joined(*source, joined)
            buffers = [joined]
        else:
            here = _in_place(where, sure, runtime.process) if where.arena_ranges else None
            buffers = _fetched(source, runtime.process.arena) if here is None else here
    except WaitTimeoutError:  # an OSError, which the system has not raised
        raise
    except OSError as error:
        raise _why(where, error, runtime) from None
    tensors = _out_of_band(where, runtime) if where.out_of_band else None
    value = decode_with(where.codec, where.meta, buffers, tensors, decode)
    # As indexing gives it: numpy has scalars, which are no arrays.
    return value[()] if where.joined and is_array(value) and value.ndim == 0 else value


def check_stored(where: Located) -> None:
    """Look whether a value of a process of this node is kept still: nothing but its anchor is read.

    Raises:
        OSError: it is not (``ESTALE``, ``EFAULT``), its process is no more (``ESRCH``), or the system
            refuses.
    """
    _core.read_peer_joined(where.pid, b"", where.anchor, where.number, _core.Buffer.own(0))


def decode_with(
    codec: int,
    meta: bytes,
    buffers: list[Any],
    tensors: Sequence[Any] | None,
    decode: Decode,
) -> Any:
    """Decode a value some of whose ``tensors`` have come in another way."""
    if not tensors:
        return decode(codec, meta, buffers)
    with placing(tensors):
        return decode(codec, meta, buffers)


def _out_of_band(where: Located, runtime: Any) -> Sequence[Any]:
    """Get the tensors of a value that come by a route instead of by reading."""
    route, specs, note = OutOfBand.unpack(where.out_of_band)
    failed: Exception | None = None
    tensors: Sequence[Any] = ()
    try:
        tensors = route.fetch(where, specs, note)
    except Exception as error:  # also of libraries that a device or a transport is made of
        failed = error
    try:  # whatever has come may be anything if it is kept no more
        check_stored(where)
    except OSError as error:
        raise _why(where, error, runtime) from failed
    if failed is not None:
        raise failed
    return tensors


def _in_place(
    where: Located, sure: _core.InPlace | None, process: Any
) -> list[_core.Buffer] | None:
    """The memory of a value: where it lies, as far as that is an arena. ``None``: all is to be copied.

    Raises ``OSError`` as reading does."""
    if _core.checks_writes() or process.process_table.gone(where.slot, where.incarnation):
        return None  # what is compared is what has been copied; and of the dead nothing is got any more
    file, arena_ranges = File.split(where.arena_ranges)
    view = process.arenas.of(where.slot, where.incarnation, where.pid, *file)
    if view is None:
        return None
    if sure is None:
        named = where.pid, where.anchor, where.number
        sure = _core.hazard(process.process_table, process.slot, view, *named)
    found = None if sure is None else sure.buffers(view, where.ranges, arena_ranges)
    if found is None or None not in found:
        return cast("list[_core.Buffer] | None", found)
    # The anchor says whether what is copied is the value's.
    size = _RANGE.size
    is_remote = [at * size for at, one in enumerate(found) if one is None]
    ranges = b"".join([where.ranges[at : at + size] for at in is_remote])
    fetched = iter(_fetched((where.pid, ranges, where.anchor, where.number), process.arena))
    return [next(fetched) if one is None else one for one in found]


def _fetched(source: tuple[int, bytes, int, int], arena: _core.Arena) -> list[_core.Buffer]:
    try:
        return _core.fetch_peer(*source, arena)
    except ArenaFullError:  # memory of this process alone is as good
        return _core.read_peer(*source, _core.Buffer.own(_core.packed_size(source[1])))


def read_into(where: Located, targets: bytes) -> None:
    """Fetch the memory of a value of another process into memory that is there: a range of ``targets`` for
    each of its own, or one for all of them if they are joined.

    Raises as :func:`fetch`.
    """
    runtime = _running()
    if runtime.process.process_table.transfers(where.slot):
        go_on(where, runtime)
    try:
        if is_remote_value(where, runtime.process):
            _core.copy_into(split(where, fetch_remote(where, runtime.process)), targets)
            return
        targets = _cut(where, targets) if where.joined else targets
        _core.read_peer_into(where.pid, where.ranges, where.anchor, where.number, targets)
    except WaitTimeoutError:  # an OSError, which the system has not raised
        raise
    except OSError as error:
        raise _why(where, error, runtime) from None


def _cut(where: Located, targets: bytes) -> bytes:
    """Cut the only range of the targets into one for each of the value's ranges, which lie there one behind
    the other."""
    start, size = _RANGE.unpack(targets)
    lengths = _core.lengths_of(where.ranges)
    if sum(lengths) != size:
        raise ValueError("the ranges are not as long as the room for them")
    return b"".join(map(_RANGE.pack, accumulate(lengths, initial=start), lengths))


def _running() -> Any:
    runtime = context.running()
    if runtime is None:
        raise RuntimeStateError(
            "a value that has stayed in another process can only be fetched in its session, and this "
            "process belongs to none: its session has ended, or is another program's"
        )
    return runtime


def _allocate(size: int) -> _core.Buffer:
    try:
        return context.current().process.arena.allocate(size)
    except ArenaFullError:  # memory of this process alone is as good
        return _core.Buffer.own(size)


def _why(where: Located, error: OSError, runtime: Any) -> BaseException:
    if _is_of_another_session(where, runtime.process):
        return ObjectLostError(
            f"a value{_size(where)} that {where.holder} kept is kept no more: the session in which it was "
            "made has ended, and this one is another"
        )
    if (
        runtime.process.process_table.gone(where.slot, where.incarnation)
        or error.errno == errno.ESRCH
    ):
        return ActorDiedError(
            f"{where.holder} has died, and with it a value{_size(where)} that it kept",
            where.holder,
        )
    if error.errno in (errno.EPERM, errno.EACCES):
        return TransportError(
            f"a value{_size(where)} that {where.holder} keeps cannot be read: the system does not let this "
            f"process (user {os.geteuid()}) read the memory of {where.holder} ({error.strerror}). It has "
            "changed its user, or made itself unreadable (PR_SET_DUMPABLE), after it returned the value"
        )
    if error.errno == errno.EFAULT and _is_stored(where, runtime.process):
        return TransportError(
            f"a value{_size(where)} that {where.holder} keeps cannot be read: the kernel lets no other "
            "process read the memory that it lies in"
        )
    if error.errno in (errno.ESTALE, errno.EFAULT):
        return ObjectLostError(
            f"a value{_size(where)} that {where.holder} kept is kept no more: the process that owned the "
            "reference to it has died, or has let go of it while it was under way, or its session has ended"
        )
    if error.errno == errno.EBADMSG:
        return changed(where, runtime.process.process_table)
    if runtime.process.process_table.is_remote(where.slot):
        return TransportError(
            f"a value{_size(where)} that {where.holder} keeps on another host could not be fetched: "
            f"{error.strerror or error}"
        )
    return error


def _is_stored(where: Located, process: Any) -> bool:
    if is_remote_value(where, process):
        return False
    try:
        check_stored(where)
    except OSError:
        return False
    return True


def _is_of_another_session(where: Located, process: Any) -> bool:
    """Whether the place of the value belongs to another process in this session, or to nobody."""
    process_table, slot = process.process_table, where.slot
    if slot >= process_table.used:
        # Of processes of other nodes an actor's node may never have heard. The driver's has.
        return process.remote_memory is None or process.serve_memory is not None
    if process_table.is_remote(slot) or process_table.incarnation(slot) != where.incarnation:
        return False
    return bool(process_table.pid(slot) not in (0, where.pid))


def _size(where: Located) -> str:
    nbytes = sum(_core.lengths_of(where.ranges))
    if not where.out_of_band:
        return f" of {nbytes:,} bytes"
    return f" of {nbytes:,} bytes, and what goes by a route," if nbytes else ""
