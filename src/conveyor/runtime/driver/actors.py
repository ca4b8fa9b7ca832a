"""The actors of a session and their processes: started, looked up, let go of, buried."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    ActorStartError,
    RuntimeStateError,
)
from conveyor.runtime import threads
from conveyor.runtime.calls.links import Link
from conveyor.runtime.driver.birth import DRIVER_SLOT, Birth
from conveyor.runtime.driver.deaths import DeathWatches
from conveyor.runtime.driver.goodbye import Goodbye
from conveyor.runtime.driver.introductions import Introductions
from conveyor.runtime.driver.record import Actor, ActorRecord
from conveyor.runtime.driver.restart import Restarts
from conveyor.runtime.protocol import ActorId, MethodInfo
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.system_limits import explained

if TYPE_CHECKING:
    from conveyor.runtime.driver.driver import Driver
    from conveyor.runtime.driver.engine import Engine
    from conveyor.runtime.refs.ref import Ref

#: Processes that one session may have at the same time.
BOARD_SLOTS = 2048

_KILLED = "was killed by conveyor.kill()"
_ENDED = "was ended by conveyor.kill(graceful=True)"


class Actors:
    """The driver's table of them; iterating it gives the process that each has or had last."""

    def __init__(self, driver: Driver, engine: Engine, grace: float, fired: int) -> None:
        """``fired``: an eventfd that is written to when an actor's life word has fired; who watches it
        calls :meth:`on_life_words`."""
        self._driver = driver
        self._engine = engine
        self._board = driver.process.board
        self.lock = threading.RLock()
        self._free_slots = deque(range(DRIVER_SLOT + 1, BOARD_SLOTS))
        self._numbers = itertools.count(1)
        self._records: dict[int, ActorRecord] = {}
        self._by_pid: dict[int, ActorRecord] = {}
        self._names: dict[str, ActorId] = {}
        self._of_class: Counter[str] = Counter()
        self._watches = DeathWatches(self._board, fired)
        self._restarts = Restarts(self)
        self._goodbye = Goodbye(self._board, grace, self._end_at_once, driver.label)
        self.introductions = Introductions(self, self._board, driver.try_again)

    def __iter__(self) -> Iterator[ActorRecord]:
        return iter(list(self._records.values()))

    # Starting

    def start(
        self,
        actor: Actor,
        construct: Callable[[Link], Ref] | None = None,
        replaces: ActorRecord | None = None,
    ) -> ActorRecord:
        """Start an actor's process and lay the driver's links to it. ``construct`` sends the
        constructor's call; without it another actor does. ``replaces``: the actor's process that is
        dead."""
        self._driver.check_open()
        self._driver.tidy()
        if replaces is not None:
            assert actor.kept is not None
            construct = actor.kept.start
        # Noted by who makes them, for whoever is interrupted before he has them.
        entered: list[ActorRecord] = []
        try:
            uninterrupted(lambda: entered.append(self._enter(actor, replaces)))
            (record,) = entered
            with explained(f"start actor {record.id.name}"):
                self._start_process(record, construct)
        except BaseException:
            for failed in entered:
                uninterrupted(partial(self._undo, failed, replaces))
            raise
        with self.lock:
            self._records[record.id.index] = record
            if record.calls is not None:
                self._driver.links[record.id.index] = record.calls
            if actor.ended:  # while it was started
                record.killed = _KILLED
                self._engine.kill(record.pid)
            record.started = True
            early = record.exit_status
        if early is not None:
            self.on_exit(record.pid, early)
        return record

    def _start_process(self, record: ActorRecord, construct: Callable[[Link], Ref] | None) -> None:
        birth = Birth(self._driver, record, self._goodbye.grace)
        try:
            uninterrupted(birth.lay)
            uninterrupted(partial(self._watches.add, record.slot))
            if construct is not None:
                assert record.calls is not None
                # Before anybody else can call it, and before there is a process: what cannot be
                # sent has started nothing. Here, because it runs code of the user's.
                record.start = construct(record.calls)
            record.process = self._engine.spawn(
                record.id.name,
                birth.hello,
                birth.passed(),
                record.actor.options,
                lambda pid: self._on_spawned(record, pid),
            )
        finally:
            uninterrupted(birth.close)

    def _undo(self, record: ActorRecord, replaces: ActorRecord | None) -> None:
        """The start of this process has failed, or was interrupted."""
        with self.lock:
            for pid in [pid for pid, known in self._by_pid.items() if known is record]:
                del self._by_pid[pid]  # its end is nobody's concern
                self._engine.kill(pid)
        self._board.announce_death(record.slot)
        self._driver.on_death(record)
        self._forget_process(record)
        record.exited.set()
        if replaces is None:
            with self.lock:
                self._records.pop(record.id.index, None)

    def _on_spawned(self, record: ActorRecord, pid: int) -> None:
        with self.lock:
            self._by_pid[pid] = record

    def _enter(self, actor: Actor, replaces: ActorRecord | None) -> ActorRecord:
        """Take a name and a slot for the actor's process."""
        with self.lock:
            if replaces is None:
                label = self._new_label(actor)
                identity = ActorId(next(self._numbers), label)
            else:
                identity = replaces.id
                label = identity.name
            if actor.name is not None and self._names.get(actor.name, identity) != identity:
                raise ValueError(f"there is an actor named {actor.name!r} already")
            if replaces is not None and replaces.keeps_slot:
                slot = replaces.slot
                replaces.keeps_slot = False
            elif self._free_slots:
                slot = self._free_slots.popleft()
            else:
                raise ActorStartError(f"more than {BOARD_SLOTS - 1} actors at the same time")
            self._board.prepare(slot, label)
            record = ActorRecord(self._board, identity, slot, actor, self._driver.label)
            if actor.name is not None:
                self._names[actor.name] = identity
            if replaces is None:
                self._records[identity.index] = record
            else:
                record.previous = replaces
                replaces.previous = None
            return record

    def _new_label(self, actor: Actor) -> str:
        # Unnamed actors of one class are told apart, so that every message names exactly one.
        self._of_class[actor.class_name] += 1
        count = self._of_class[actor.class_name]
        return actor.name or (actor.class_name if count == 1 else f"{actor.class_name}#{count}")

    # Looking up

    def record(self, actor: ActorId) -> ActorRecord:
        """The process that the actor has or had last."""
        record = self._records.get(actor.index)
        if record is None:
            raise RuntimeStateError(f"actor {actor.name} belongs to another session")
        return record

    def current(self, actor: ActorId) -> ActorRecord:
        """The process that the actor has now; waits while the actor is being started again."""
        return self._restarts.current(actor)

    def revive(self, actor: ActorId) -> ActorRecord:
        """The actor's living process; a dead actor is started again. ``ActorDiedError`` if that is
        not possible."""
        return self._restarts.revive(actor)

    def link(self, actor: ActorId) -> Link:
        """The driver's link to the process that the actor has now."""
        record = self.current(actor)
        link = record.calls
        if link is None or not record.alive:
            raise record.death()
        return link

    def find(self, name: str) -> tuple[ActorId, str, Mapping[str, MethodInfo]]:
        identity = self._names.get(name)
        record = None if identity is None else self.record(identity)
        if record is None or not (record.alive or record.may_restart() or record.under_way):
            known = ", ".join(sorted(self._names)) or "none"
            raise ValueError(f"there is no actor named {name!r}; named actors: {known}")
        return record.id, record.class_name, record.methods

    def death_of(
        self,
        actor: ActorId,
        slot: int,
        incarnation: int,
        label: Callable[[int, int], str | None] | None = None,
    ) -> ActorDiedError:
        """The error for who needed the actor's process that was the slot's ``incarnation``-th.
        ``label`` names a (graph, node); default: of the driver's graphs."""
        record: ActorRecord | None = self.record(actor)
        while record is not None and (record.slot, record.incarnation) != (slot, incarnation):
            record = record.previous
        if record is None:
            text = f"actor {actor.name} died and has been started again since"
            return ActorRestartedError(text, actor.name)
        return record.death(label or self._driver.label)

    # Who needs them

    def retain(self, actor: ActorId) -> None:
        record = self._records.get(actor.index)
        if record is not None:
            record.actor.handles += 1
            record.actor.held = True

    def share(self, actor: ActorId) -> None:
        record = self._records.get(actor.index)
        if record is not None:
            record.actor.shared = True

    def release(self, actor: ActorId) -> None:
        """One handle, or one graph, less needs the actor; with the last one it ends."""
        with self.lock:
            record = self._records.get(actor.index)
            if record is None:
                return
            known = record.actor
            known.handles -= 1
            self._forget_actor(record)
            if known.handles > 0 or known.name is not None or known.shared or known.stopping:
                return
            known.stopping = True
            if record.calls is None:
                known.ended = True  # should it be on its way back
                return
            calls = record.calls
        calls.when_all_sent(lambda: self._stop(record))

    def _stop(self, record: ActorRecord) -> None:
        """Nobody needs the actor any more: it ends when it has done what was asked of it. One that has
        ended otherwise is left alone, and who lets go of several goes on with the others."""
        try:
            record.control("stop")
        except ActorDiedError:
            pass
        except Exception as error:  # no memory to say it with
            self._driver.try_again(lambda: self._stop(record), error)

    def kill(
        self, actor: ActorId, no_restart: bool = True, graceful: bool = False, wait: bool = True
    ) -> None:
        """``wait``: return from a graceful end only when it is over; else a thread sees to it."""
        with self.lock:
            record = self.record(actor)
            if no_restart:
                record.actor.ended = True
            if not record.alive or record.process is None:
                return
            record.wanted_back = not no_restart
            record.killed = _ENDED if graceful else _KILLED
        if not graceful:
            self._end_at_once(record)
        elif wait:
            self._goodbye.say([record])
        else:
            self._goodbye.ask(record)
            threads.start(self._goodbye.wait, "goodbye", [record])

    def _end_at_once(self, record: ActorRecord) -> None:
        self._engine.kill(record.pid)
        # From now on it is dead for everybody, whatever the kernel still has to do.
        self._board.announce_death(record.slot)

    # Ending

    def on_exit(self, pid: int, status: int) -> None:
        """A process has ended. Called by the engine."""
        ActorRecord.notifier = threading.get_ident()
        with self.lock:
            record = self._by_pid.get(pid)
            if record is None:  # one that could not be started
                return
            if not record.started:  # whoever starts it sees to the rest
                record.exit_status = status
                return
            del self._by_pid[pid]
        self._board.announce_death(record.slot)
        record.bury(status)
        self._restarts.decide(record)
        record.keeps_slot = record.restarting
        self._driver.on_death(record)
        self._forget_process(record)
        record.exited.set()
        self.introductions.hang_up(record)
        if record.restarting:
            self._restarts.begin(record)
        else:
            with self.lock:
                self._forget_actor(record)

    def on_life_words(self) -> None:
        """The main threads of some actors have ended. Their processes most often end with them; those
        that do not are ended, since everybody takes these actors for dead. Called by the engine."""
        with self.lock:
            headless = [
                (pid, record)
                for pid, record in self._by_pid.items()
                if not record.alive and not record.headless
            ]
            for _, record in headless:
                record.headless = True
        for pid, _ in headless:
            self._engine.end_headless(pid)

    def reserve(self, record: ActorRecord) -> None:
        """Give the actor's next process the same slot, if it is free: who knew the old one then lets
        go of what was the old one's."""
        with self.lock, suppress(ValueError):
            self._free_slots.remove(record.slot)
            record.keeps_slot = True

    def give_up(self, record: ActorRecord) -> None:
        """Let go of what was kept for a process that should replace this one, if there is none."""
        with self.lock:
            if record.keeps_slot:
                record.keeps_slot = False
                self._free_slots.append(record.slot)
            if self._records.get(record.id.index) is record:
                self._forget_name(record)

    def end_all(self) -> None:
        """The session ends, and all actors with it: their deaths are nobody's concern."""
        self._restarts.close()
        records = list(self)
        for record in records:
            record.killed = "has ended with its session"
            record.actor.ended = True
        self._goodbye.say(records)

    def hurry(self) -> None:
        """Kill at once whoever is still ending: nobody wants to wait for them."""
        self._goodbye.hurry()
        for record in self:
            if record.process is not None and not record.exited.is_set():
                self._end_at_once(record)

    def close(self) -> None:
        """All processes are gone: let go of what belonged to them."""
        self._restarts.join()
        self._watches.stop()
        for record in self:
            record.actor.kept = None  # refs among it hold on to channels
            if record.arena_fd >= 0:
                self._board.announce_death(record.slot)
                self._forget_process(record)

    def _forget_process(self, record: ActorRecord) -> None:
        """Close what belonged to a process that is gone. The record itself can still be asked."""
        with self.lock:
            self._watches.remove(record.slot)
            self._driver.requests.remove(record)
            if record.control_socket is not None:
                record.control_socket.close()
            record.arena_fd = (
                record.eventfd
            ) = -1  # they are the process's, which forgets the peer below
            self._board.forget_memory(record.slot)
            self._driver.process.forget(record.slot)
            if self._driver.links.get(record.id.index) is record.calls:
                self._driver.links.pop(record.id.index, None)
            # Refs keep what they need of these; the record only keeps what can be asked of the dead.
            record.calls = record.control_link = record.start = None
            record.introduced = []
            if not record.restarting:
                self._forget_name(record)
            if not record.keeps_slot:
                self._free_slots.append(record.slot)

    def _forget_name(self, record: ActorRecord) -> None:
        name = record.actor.name
        if name is not None and self._names.get(name) == record.id:
            del self._names[name]

    def _forget_actor(self, record: ActorRecord) -> None:
        """Nothing is kept of an actor that is dead and that nobody can ask for any more."""
        actor = record.actor
        asked_for = actor.handles > 0 or actor.shared or not actor.held
        if asked_for or not record.exited.is_set() or record.restarting:
            return
        if self._records.get(record.id.index) is record:
            del self._records[record.id.index]
