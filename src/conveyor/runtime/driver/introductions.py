"""Making processes known to each other: whoever is to write to another needs its arena and its bell."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from conveyor.exceptions import ConveyorError
from conveyor.runtime.actor.hello import Caller
from conveyor.runtime.calls.links import link_segment
from conveyor.runtime.graph.layout import RESULT_BIT, Assignment
from conveyor.runtime.process import close_all, dup_all

if TYPE_CHECKING:
    from conveyor.runtime.driver.actors import Actors
    from conveyor.runtime.driver.record import ActorRecord


class Introductions:
    """The driver's: it has the descriptors of all actors' processes."""

    def __init__(self, actors: Actors) -> None:
        self._actors = actors

    def load(self, record: ActorRecord, assignment: Assignment, segment_fd: int) -> Any:
        """Give an actor its part of a graph; the ref of its acknowledgement."""
        with record.control_lock:
            new, fds = self._new_peers(record, assignment.peers)
            try:
                ticket = record.send_fds([segment_fd, *fds])
                purpose = f"its part of {assignment.name}, which is being compiled"
                ack = record.control(
                    "load", assignment, tuple(new.items()), ticket, purpose=purpose
                )
            finally:
                close_all(fds)
            record.known_peers.update(new)
            return ack

    def link(self, caller: ActorRecord, callee: ActorRecord) -> tuple[int, list[int], Any]:
        """Lay a link between two actors: the mailbox bit, the descriptors for the caller (segment,
        and the callee's arena and eventfd), which are the caller's to close, and the ref of the
        callee's acknowledgement."""
        callee.check_alive()
        segment = link_segment()
        with callee.control_lock:
            bit = callee.bits.take()
            new, fds = self._new_peers(callee, (caller.slot,))
            try:
                ticket = callee.send_fds([segment.fd, *fds])
                caller_end = Caller(caller.slot, RESULT_BIT)
                ack = callee.control("accept", caller_end, tuple(new.items()), bit, ticket)
            finally:
                close_all(fds)
            callee.known_peers.update(new)
        caller.mailboxes.append((callee, bit))
        if caller.exited.is_set():  # meanwhile
            self.hang_up(caller)
        own = self.duplicates([callee])
        if not own:
            raise callee.death()
        # Not noted as a peer of the caller: a graph's assignment may overtake the answer.
        try:
            return bit, [os.dup(segment.fd), *own], ack
        except OSError:
            close_all(own)
            raise

    def hang_up(self, caller: ActorRecord) -> None:
        """A caller is dead: whom it has called need not keep room for it."""
        while caller.mailboxes:
            callee, bit = caller.mailboxes.pop()
            with suppress(ConveyorError):
                if callee.alive:
                    callee.control("hang_up", bit)
                    callee.bits.give_back(bit)  # what takes it next is told after this

    def duplicates(self, records: Iterable[ActorRecord]) -> list[int]:
        """Arena and eventfd of those who still have them. Duplicates, because an actor may die and
        its descriptors be closed before they are sent: then others may have their numbers."""
        with self._actors.lock:
            alive = [record for record in records if record.arena_fd >= 0]
            return dup_all(fd for record in alive for fd in (record.arena_fd, record.eventfd))

    def _new_peers(
        self, record: ActorRecord, slots: Sequence[int]
    ) -> tuple[dict[int, int], list[int]]:
        """Those of ``slots`` whose processes it has not been introduced to, with their incarnations,
        and duplicates of the descriptors that introduce them."""
        with self._actors.lock:
            by_slot = {r.slot: r for r in self._actors if r.arena_fd >= 0}
            new = {
                s: by_slot[s].incarnation
                for s in slots
                if s in by_slot and record.known_peers.get(s) != by_slot[s].incarnation
            }
            return new, self.duplicates(by_slot[s] for s in new)
