"""Listing of the stored values of all processes of the session, and the wait until one is nobody else's.

Every process keeps a directory in its memory (``native/directory.h``), which is read as the values are.
Nobody is asked, so it is told also of a process that computes, or is stopped.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conveyor import _core
from conveyor.checks import check_timeout
from conveyor.codec.direct import Located, OutOfBand, Unfetched
from conveyor.direct.fetching import check_stored, is_remote_value
from conveyor.direct.memory import storage_of
from conveyor.direct.store import TABLE, let_session_read
from conveyor.direct.structure import leaves_of
from conveyor.refs.ref import Ref, located
from conveyor.runtime import context, ending
from conveyor.runtime.stored_values import stores_on
from conveyor.runtime.waiting import wait_until

#: Address and bytes of memory.
_Storage = tuple[int, int]


@dataclass(frozen=True, slots=True)
class KeptObject:
    """A value that stays in the memory of the process that made it, as :func:`conveyor.objects` tells it.

    id: which no other value has, in any process. ``ref.value_id()`` gives it of a reference.
    keeper: the process that keeps it: an actor's name, or ``"driver"``.
    nbytes: of all the memory that others may have.
    transport: the name that was asked for; ``snapshot``: it is a copy that nobody writes to.
    age: seconds since it has been kept.
    route: how this process would get it: ``"here"``, it is the object itself; ``"read"``, from the keeper's
        memory; ``"network"``, from that of a process on another node; or the name of another route, of what
        lies on a device.
    holders: who keeps it from going, in the order of their names: the processes that have a reference to it
        or a call that takes it, those that have passed one on until it has arrived, and those that read it
        where it lies.
    """

    id: str
    holder: str
    nbytes: int
    transport: str
    snapshot: bool
    age: float
    route: str
    holders: tuple[str, ...]


def objects() -> list[KeptObject]:
    """All values that are kept in the session's processes, this one among them, the oldest first.

    No process takes part in it, so it also works while an actor computes. What is kept, or let go of,
    meanwhile may be told or not. Where processes may not read each other's memory no value stays, and only
    this one's are told. Other nodes are asked: nothing is told of one that has not answered in two seconds.
    """
    runtime = context.current()
    process = runtime.process
    let_session_read(runtime.own_actor is None)
    local = stores_on(process.process_table, process.slot)
    remote = [] if process.remote_memory is None else process.remote_memory.stored()
    holders: dict[int, set[str]] = {}
    for one in (*local, *remote):
        for number in one.held:
            holders.setdefault(number, set()).add(one.holder)
        for number, reader in one.sent:
            holders.setdefault(number, set()).add(reader)
    stored = [(one, "read", value) for one in local for value in one.values]
    stored += [(one, "network", value) for one in remote for value in one.values]
    found = []
    for one, route, (number, nbytes, age, names) in sorted(stored, key=lambda of: -of[2][2]):
        # They may be cut off.
        transport, by, snapshot, *_ = [*names.decode(errors="replace").split("\0"), "", ""]
        here = one.slot == process.slot and route == "read" and not snapshot
        found.append(
            KeptObject(
                id_of(number),
                one.holder,
                nbytes,
                transport,
                bool(snapshot),
                age / 1e9,
                "here" if here else by or route,
                tuple(sorted(holders.get(number, ()))),
            )
        )
    return found


def id_of(number: int) -> str:
    """Format the number of a value as its id."""
    return f"{number:016x}"


def wait_tensor_freed(tensor: Any, timeout: float | None = None) -> None:
    """Wait until nobody can fetch what lies in a tensor's memory, so that it can be written to: until all
    references to values that it is part of are gone, and all calls that take such a value have it.

    Args:
        tensor: a torch tensor, or an array; or a list or mapping with some in it, as a ``state_dict``. Each
            stands for all of the memory that it shares with others: a view, a parameter, or an entry of a
            ``state_dict`` for their whole storage.
        timeout: seconds; ``None`` or -1: as long as it takes.

    Raises:
        TypeError: there is neither.
        WaitTimeoutError: the memory is still needed; it is a ``TimeoutError``, which says who holds it.
        SessionEndedError: the session has ended meanwhile, or before.
    """
    found = [leaf for _, leaf in leaves_of(tensor)]
    storages = [storage_of(one) for one in found or [tensor]]
    timeout = check_timeout(timeout)
    if not _values_in(storages):
        return
    runtime = context.running()
    if (
        runtime is None
    ):  # nobody is told of references any more, and no session begins because of them
        raise ending.ended()

    def is_free() -> bool:
        if not _values_in(storages):
            return True
        if runtime.ending or runtime.process.waits_end:
            raise ending.ended()
        return False

    with TABLE.telling(runtime.process.notify):
        wait_until(
            runtime.process.inbox,
            is_free,
            timeout,
            lambda: f"memory of {sum(nbytes for _, nbytes in set(storages)):,} bytes to be freed",
            lambda: _needed(_values_in(storages)),
        )


def _values_in(storages: Sequence[_Storage]) -> set[int]:
    """The numbers of the values that lie there."""
    found: set[int] = set()
    for address, nbytes in storages:
        found |= TABLE.values_in(address, nbytes)
    return found


def _needed(numbers: set[int]) -> str:
    several = f"{len(numbers)} values lie" if len(numbers) > 1 else "a value lies"
    ids = {id_of(number) for number in numbers}
    holders = sorted({who for stored in objects() if stored.id in ids for who in stored.holders})
    by = f" by {', '.join(holders)}" if holders else ""
    return (
        f"{several} there that others may still fetch: a reference to it is held{by}, or a call that takes "
        "it has not begun"
    )


def _where(ref: Ref) -> Located | None:
    found = located(ref.to_send())
    snapshot = ref._outcome
    if found is not None or type(snapshot) is not _core.Snapshot or not snapshot.keeps:
        return found
    # A copy of a ref to one of several results has come as a value that says where its value is.
    value = ref._unfetched()
    return value.where if isinstance(value, Unfetched) else None


def route_of(ref: Ref) -> str:
    """``"frame"``, ``"here"``, ``"read"``, ``"network"``, ``"lost"``, or the name of a route; see
    ``Ref.route``."""
    where = _where(ref)
    if where is None:
        return "frame"
    if not where.snapshot and TABLE.find(where.number) is not None:
        return "here"
    process = context.current().process
    on_other_node = is_remote_value(where, process)
    if not on_other_node and _is_dead(where, process):
        return "lost"
    if where.out_of_band:
        out_of_band = OutOfBand.unpack(where.out_of_band)
        return out_of_band.route.route_name(out_of_band.note)
    return "network" if on_other_node else "read"


def _is_dead(where: Located, process: Any) -> bool:
    if process.process_table.gone(where.slot, where.incarnation):
        return True
    # The session learns of a death a little later than a fetch may have failed by it.
    try:
        check_stored(where)
    except OSError as error:
        # Where reading is refused, or the value is no more, the session knows best.
        return error.errno == errno.ESRCH
    return False


def transport_of(ref: Ref) -> str | None:
    """See ``Ref.tensor_transport``."""
    where = _where(ref)
    return None if where is None else where.transport


def value_id_of(ref: Ref) -> str | None:
    """See ``Ref.value_id``."""
    where = _where(ref)
    return None if where is None else id_of(where.number)
