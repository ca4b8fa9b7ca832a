"""Looks into the library where no public call tells: what is held, who runs where, connections to cut.

Tests of behaviour ask here, and import nothing else from inside for it: a room of the library that moves is
mended in this one file. What users turn out to want themselves goes into the public API from here.
"""

from __future__ import annotations

import gc
from typing import Any

from conveyor import _core
from conveyor.direct.store import TABLE
from conveyor.graph.compiled import parts_of
from conveyor.runtime import context
from conveyor.runtime.process import CALL_SLOTS as CALL_SLOTS


def _runtime() -> Any:
    """Return the runtime of this process: the driver's, or that of the actor that it is."""
    return context.running()


# What is held


def kept() -> Any:
    """Count the references to values, and pickles of them, that others may still come with."""
    gc.collect()
    exports = _runtime().exports
    exports.tidy()
    return exports.entry_count


def known_refs() -> Any:
    """Count the references of other processes that this one has."""
    return _runtime().exports.known_count


def kept_values() -> int:
    """Count the values that stay in this process's memory."""
    return len(TABLE.all())


def session_memory() -> Any:
    """Return the bytes that all processes of the session have touched for values."""
    return _runtime().process.process_table.session_memory


def arena() -> Any:
    """Return the arena of this process, with what is idle given back."""
    made = _runtime().process.arena
    made.give_back()
    return made


def waits_for_memory() -> int:
    """Count the threads of this process that wait for memory for a value."""
    return len(_runtime().process.shortage.waits)


def results_wait_for_memory() -> bool:
    """Return whether the result of some process waits for memory."""
    process_table = _runtime().process.process_table
    return any(process_table.starving(slot) == 2 for slot in range(process_table.used))


def do_cleanup() -> None:
    """Have the driver do what finalizers have noted for it, and return when that is done."""
    _runtime().cleanup.do()


def channels_known() -> int:
    """Count the channels that the driver would still introduce somebody to."""
    return len(_runtime().broker._channels)


def groups_known() -> int:
    """Count the groups of collectives that the driver has."""
    return len(_runtime().collectives._groups)


def awaited_ends() -> int:
    """Count the calls that wait for memory of kept values to be freed."""
    return len(TABLE._observers)


# Who runs where


def record_of(actor: Any) -> Any:
    """Return what the driver knows of the actor's process."""
    return _runtime().table.record(actor._id)


def status_of(name: str) -> Any:
    """Return the status of the process that is called so."""
    process = _runtime().process
    slot = next(
        s for s in range(process.process_table.used) if process.process_table.name(s) == name
    )
    (status,) = process.statuses([(slot, None)])
    return status


def statuses() -> Any:
    """Return the status of each process that the session has had."""
    process = _runtime().process
    return process.statuses([(slot, None) for slot in range(process.process_table.used)])


def sleeping() -> list[Any]:
    """Return who sleeps in a collective operation for another rank: actors, and ``None`` for the driver."""
    return [
        None if rank == group.driver else group.actors[rank]
        for group in list(_runtime().collectives._groups.values())
        if group.segment is not None  # else no rank is on the driver's node
        for rank, (_, absent) in enumerate(_core.CollectiveGroup.waits(group.segment))
        if absent
    ]


def announce_death(name: str) -> None:
    """Tell all processes that the one of that name has died, as the driver does when it has."""
    process_table = _runtime().process.process_table
    process_table.announce_death(
        next(s for s in range(process_table.used) if process_table.name(s) == name)
    )


def link_to(actor: Any) -> Any:
    """Return what carries this process's calls of the actor."""
    return _runtime().links[actor._id.index]


def rays_actor(pid: int) -> Any:
    """Return the handle that Ray has given for the process with that number."""
    (known,) = [one for one in _runtime()._engine._living.values() if one.pid == pid]
    return known.handle


# Compiled graphs


def number_of(graph: Any) -> int:
    """Return the graph's number among those of its session."""
    return parts_of(graph).number


def supervision_of(graph: Any) -> Any:
    """Return what holds the channels of a graph over processes, in the process that compiled it."""
    control: Any = parts_of(graph).control
    return control._graph_info.lifecycle


def window_of(graph: Any) -> Any:
    """Return what such a graph's results come out of."""
    return supervision_of(graph).epoch.window


# Other nodes


def pump() -> Any:
    """Return what carries messages to other nodes' hosts: it counts them, and can cut a connection."""
    return _runtime().remote_nodes.pump


def agents() -> list[Any]:
    """Return the hosts of other nodes that the session knows, as the driver has them."""
    return list(_runtime()._engine._agents._by_node.values())


def spread_segments() -> set[Any]:
    """Return the numbers of the segments that the driver has had other hosts make."""
    return set(_runtime().remote_nodes._segments)


def kept_files() -> int:
    """Count the files with values that the driver's node keeps for others to fetch."""
    return len(_runtime()._engine._agents._shared_files)


def hosts_memory() -> Any:
    """Return what fetches values from other nodes for all processes of the driver's."""
    return _runtime().process.remote_memory
