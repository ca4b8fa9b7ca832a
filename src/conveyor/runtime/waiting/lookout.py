"""What one host says of the waits that its processes have noted."""

from __future__ import annotations

from conveyor import _core
from conveyor.runtime.waiting.inquiry import Frames, LookAtWaits, Row, WaitsThere

#: Conditions of a process that starts or is alive.
_LIVING = (1, 2)


def look_at_waits(board: _core.Board, pump: _core.HostPump | None, look: LookAtWaits) -> WaitsThere:
    """Answer on the host that has that board; on any thread. ``pump``: its own, if it has one."""
    has = pump is None or all(pump.has(host, frames) for host, frames in look.has.items())
    asked = {
        slot: board.ask(slot) for slot, incarnation in look.ask if not board.gone(slot, incarnation)
    }
    processes: dict[int, tuple[int, tuple[Row, ...] | None]] = {}
    for slot in range(board.used):
        if board.elsewhere(slot) or board.condition(slot) not in _LIVING:
            continue
        incarnation, rows = board.incarnation(slot), board.all_waits(slot)
        if rows is None or rows:  # of whom nothing is noted, nothing has to be said
            processes[slot] = incarnation, None if rows is None else tuple(rows)
    # Behind the notes: what was published before a wait is among it.
    due: dict[int, list[tuple[int, int, int]]] = {}
    for host, *frames in pump.due() if pump is not None and not look.has and not look.ask else ():
        due.setdefault(host, []).append((frames[0], frames[1], frames[2]))
    sent: dict[int, Frames] = {host: tuple(frames) for host, frames in due.items()}
    return WaitsThere(has, asked, processes, sent)


def due_to(pump: _core.HostPump, host: int) -> Frames:
    """The frames that ``host`` is to have of what was published where that pump is."""
    return tuple((segment, ring, upto) for to, segment, ring, upto in pump.due() if to == host)
