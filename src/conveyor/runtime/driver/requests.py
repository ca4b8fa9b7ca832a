"""Answering what actors ask the driver for while they run: other actors, and links to them.

One socketpair for each actor. Requests are answered on the engine's event thread, which must not
block: everything that waits for another process is done by callbacks or a thread of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.channel.sealed import Sealed
from conveyor.config import Config
from conveyor.exceptions import ActorRestartedError, ConveyorError, SystemLimitError
from conveyor.plan.model import DRIVER, Plan
from conveyor.runtime import threads
from conveyor.runtime.calls.constructor import Constructor, Kept
from conveyor.runtime.driver.record import Actor
from conveyor.runtime.graph.hosting import LaidMember, Member
from conveyor.runtime.graph.layout import RESULT_BIT, Place
from conveyor.runtime.process import close_all
from conveyor.runtime.protocol import ActorId, ProcessOptions
from conveyor.runtime.refs.messages import receive_message, send_message
from conveyor.runtime.refs.ref import Ref
from conveyor.system_limits import explained

if TYPE_CHECKING:
    from conveyor.runtime.driver.driver import Driver
    from conveyor.runtime.driver.engine import Engine
    from conveyor.runtime.driver.laying import Laying
    from conveyor.runtime.driver.record import ActorRecord

logger = logging.getLogger("conveyor")

#: What is said and not asked: it has no answer.
_TOLD = ("disconnect", "refuse")


class RequestServer:
    """The driver's side."""

    def __init__(self, driver: Driver, engine: Engine) -> None:
        self._driver = driver
        self._engine = engine
        self._lock = threading.Lock()
        self._sockets: dict[ActorRecord, socket.socket] = {}
        # Acknowledgements of those who leave a graph, for the actor that takes it down.
        self._leaving: dict[tuple[ActorRecord, int], list[tuple[Member, Ref]]] = {}

    def add(self, record: ActorRecord, sock: socket.socket) -> None:
        with self._lock:
            self._sockets[record] = sock
        self._engine.watch(sock.fileno(), lambda: self._on_request(record, sock))

    def remove(self, record: ActorRecord) -> None:
        with self._lock:
            sock = self._sockets.pop(record, None)
            for key in [key for key in self._leaving if key[0] is record]:
                del self._leaving[key]
        if sock is not None:
            self._engine.unwatch(sock.fileno())
            sock.close()

    def close(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, {}
        for sock in sockets.values():
            self._engine.unwatch(sock.fileno())
            sock.close()

    def _on_request(self, record: ActorRecord, sock: socket.socket) -> None:
        try:
            (operation, args), _ = receive_message(sock)
        except OSError:
            self.remove(record)
            return
        # It may wait for the fork server or for another actor's main loop.
        if operation in _TOLD:
            threads.start_or_run(getattr(self, f"_{operation}"), "request", record, *args)
            return
        try:
            threads.start(self._answer, "request", record, sock, operation, args)
        except SystemLimitError as error:
            self._send(record, sock, False, error)

    def _answer(self, record: ActorRecord, sock: socket.socket, operation: str, args: Any) -> None:
        fds: list[int] = []
        try:
            with explained(f"do what {record.id.name} asks for ({operation})"):
                answer, fds = getattr(self, f"_{operation}")(record, *args)
            ok = True
        except Exception as error:
            answer, ok = error, False
        try:
            self._send(record, sock, ok, answer, fds)
        finally:
            close_all(fds)

    def _send(
        self,
        record: ActorRecord,
        sock: socket.socket,
        ok: bool,
        answer: Any,
        fds: Sequence[int] = (),
    ) -> None:
        try:
            send_message(sock, (ok, answer), list(fds))
        except Exception as error:
            # Who asked is gone; or it gets an error now, as it would wait for an answer for ever.
            if record.alive:
                logger.warning("a request of %s cannot be answered: %s", record.id.name, str(error))
            self.remove(record)

    def _connect(self, caller: ActorRecord, actor: ActorId) -> tuple[Any, list[int]]:
        while True:
            callee = self._driver.actors.current(actor)
            callee.actor.shared = True
            try:
                number, bit, fds = self._driver.actors.introductions.link(caller, callee)
                break
            except ActorRestartedError:  # it has died just now, and is waited for
                continue
        return (number, callee.slot, callee.incarnation, bit), fds

    def _disconnect(self, caller: ActorRecord, number: int) -> None:
        """Link ``number``, which ``caller`` has asked for, could not be opened there."""
        self._driver.actors.introductions.hang_up(caller, number)

    def _refuse(self, callee: ActorRecord, tag: int, error: ConveyorError) -> None:
        self._driver.actors.introductions.refuse(callee, tag, error)

    def _refusal(self, caller: ActorRecord, number: int) -> tuple[Any, list[int]]:
        return caller.refusals.pop(number, None), []

    def _create(
        self,
        caller: ActorRecord,
        class_name: str,
        methods: Any,
        name: str | None,
        options: ProcessOptions,
        max_concurrency: int | None,
        max_restarts: int,
        constructor: Constructor | None,
    ) -> tuple[Any, list[int]]:
        kept = None if constructor is None else Kept.received(constructor)
        actor = Actor(class_name, methods, name, options, max_concurrency, max_restarts, kept)
        actor.shared = True
        if constructor is None:
            return self._driver.actors.start(actor).id, []
        return self._driver.actors.start(actor, constructor.start).id, []

    def _lay(
        self,
        caller: ActorRecord,
        config: Config,
        plan: Plan,
        tasks: Sequence[Sealed],
        labels: Mapping[int, str],
    ) -> tuple[Any, list[int]]:
        executor = Place(caller.slot, RESULT_BIT)
        return self._laid(caller, self._driver.lay_for(executor, config, plan, tasks, labels))

    def _lay_again(self, caller: ActorRecord, number: int, first: int) -> tuple[Any, list[int]]:
        laying = self._driver.laying(number)
        laying.again(first)
        return self._laid(caller, laying)

    def _laid(self, caller: ActorRecord, laying: Laying) -> tuple[Any, list[int]]:
        layout = laying.layout
        members = [LaidMember(r.id, r.pid, r.slot, r.incarnation) for r in laying.records]
        fds = self._driver.actors.introductions.duplicates(laying.records)
        if not caller.alive or len(fds) < 2 * len(members):
            close_all(fds)
            self._driver.drop(laying.number)
            next((r for r in laying.records if not r.alive), caller).check_alive()
        ends = layout.reads.get(DRIVER, ()), layout.writes.get(DRIVER, ())
        rest = (
            layout.offsets,
            *ends,
            layout.limits,
            layout.failures,
            layout.recorders,
            laying.bits,
        )
        segment_fd = os.dup(layout.segment.fd)
        layout.segment.close_fd()
        return (laying.number, members, *rest), [segment_fd, *fds]

    def _comes_back(self, caller: ActorRecord, number: int) -> tuple[Any, list[int]]:
        return self._driver.comes_back(number), []

    def _unlay(self, caller: ActorRecord, number: int, wait: bool) -> tuple[Any, list[int]]:
        acks = self._driver.unlay(number)
        if wait:
            # Not here: who waits must be able to say for whom, and to see that it would be for ever.
            self._leaving[caller, number] = acks
            board, slot = self._driver.process.board, caller.slot
            for _, ack in acks:
                self._driver.watcher.watch(ack, lambda: board.ring(slot, _core.ATTENTION_BIT))
        return None, []

    def _staying(self, caller: ActorRecord, number: int) -> tuple[list[int], list[int]]:
        """The slots of those who have not left graph ``number`` yet, which is being taken down."""
        acks = self._leaving[caller, number]
        staying = [record.slot for record, ack in acks if not ack.done()]
        if not staying:
            del self._leaving[caller, number]
            for record, ack in acks:
                try:
                    ack.get()
                except ConveyorError:
                    if record.alive:
                        raise
        return staying, []

    def _find(self, caller: ActorRecord, name: str) -> tuple[Any, list[int]]:
        found = self._driver.actors.find(name)
        self._driver.actors.share(found[0])
        return found, []

    def _kill(
        self, caller: ActorRecord, actor: ActorId, no_restart: bool, graceful: bool
    ) -> tuple[Any, list[int]]:
        # Who ends itself must not wait for that.
        self._driver.actors.kill(actor, no_restart, graceful, wait=actor != caller.id)
        return None, []

    def _open(self, caller: ActorRecord, what: str, *args: Any) -> tuple[Any, list[int]]:
        """A connection of the caller's own: to the exported refs, or to a graph."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._driver.serve(caller, here, what, *args)
        except BaseException:
            here.close()
            there.close()
            raise
        return None, [there.detach()]

    def _death(
        self,
        caller: ActorRecord,
        actor: ActorId,
        slot: int,
        incarnation: int,
        labels: Mapping[tuple[int, int], str],
    ) -> tuple[Any, list[int]]:
        label = None if not labels else lambda *node: labels.get(node)
        return self._driver.actors.death_of(actor, slot, incarnation, label), []
