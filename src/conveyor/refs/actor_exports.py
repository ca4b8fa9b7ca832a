"""Pickled refs as an actor sees them; see ``refs.exports``."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from conveyor import _core
from conveyor.codec import Reader
from conveyor.exceptions import ConveyorError, RuntimeStateError, SystemLimitError
from conveyor.refs.imports import (
    Answer,
    Arrived,
    Ask,
    Confirm,
    Confirmed,
    Drop,
    Dry,
    Export,
    ExportId,
    Forget,
    FromRendezvous,
    GiveUp,
    ImportedRef,
    Imports,
    Load,
    Made,
    Outcome,
    Refused,
    Tell,
    ToRendezvous,
    Whom,
    tell_of,
)
from conveyor.refs.ref import Ref
from conveyor.refs.watcher import Watcher
from conveyor.runtime import threads
from conveyor.runtime.messages import Connection
from conveyor.runtime.sources import Sources
from conveyor.runtime.waiting import wait_until
from conveyor.weak import WeakKeys

if TYPE_CHECKING:
    from conveyor.runtime.cleanup import Cleanup


class ActorExports(Imports):
    """Directory of exported refs in an actor's process."""

    def __init__(
        self,
        session: str,
        number: int,
        inbox: _core.Inbox,
        ring: Callable[[], object],
        watcher: Callable[[], Watcher],
        connect: Callable[[], Any],
        is_remote_rank: Callable[[], bool],
        sources: Sources,
    ) -> None:
        """``connect()`` gives the socket of a new connection to the driver; ``is_remote_rank()``: whether
        that is on another host. ``sources``: of this process."""
        super().__init__(session, inbox, ring)
        self._process = number
        # The process of the same actor before this one has numbered refs, too, which others may still have.
        self._numbers = itertools.count(int.from_bytes(os.urandom(6), "little") + 1)
        self._watcher = watcher
        self._connect = connect
        self._is_remote = is_remote_rank
        self._sources = sources
        self._connection: Connection | None = None
        # Reentrant: a signal handler may pickle a ref while its thread waits for the connection.
        self._connecting = threading.RLock()
        # Own refs that others may wait for, until the driver has their outcome or forgets them.
        self._needed: dict[ExportId, Ref] = {}
        # Outcomes of own refs that are kept as long as anybody has them; until the driver forgets them.
        self._stored: dict[ExportId, Outcome] = {}
        # Connection over which the driver hears the outcome of each own ref.
        self._announced: WeakKeys[Ref, Connection] = WeakKeys()
        #: Above all that the driver gives out, and other than those of any process before this one.
        self._borrow_ids = itertools.count((1 << 62) + int.from_bytes(os.urandom(7), "little"))
        # Borrows of pickles that are not finished, with the connection over which the driver is told.
        self._unconfirmed: dict[int, Connection] = {}
        self._refused: dict[int, RuntimeStateError] = {}
        # Answers of the driver, by the number of the request.
        self._confirmed: dict[int, list[Confirmed]] = {}
        self._requests = itertools.count(1)
        # Borrows that the driver has not been told of yet: what cannot be told goes over the next connection.
        self._to_give_up: deque[tuple[list[tuple[ExportId, int]], tuple[Reader, ...] | None]] = (
            deque()
        )

    def export(self, ref: Ref, readers: Sequence[Reader]) -> tuple[ExportId, int]:
        connection = self._open()
        with self.lock:
            export = self.identify(ref)
            # What was told over a connection that has ended is forgotten with it.
            untold = not isinstance(ref, ImportedRef) and self._announced.get(ref) is not connection
            if untold:
                self._finalizers[ref] = connection.finalizer(partial(self._tell_dropped, export))
                self._needed[export] = ref
        borrow_id = next(self._borrow_ids)
        try:
            self._unconfirmed[borrow_id] = connection
            connection.send(Export(export, borrow_id, tuple(readers)))
            if untold:
                self._watcher().watch(
                    ref, lambda: threads.start_or_run(self._tell, "export", export)
                )
                with self.lock:
                    self._announced[ref] = connection
            return export, borrow_id
        except BaseException:  # of a signal handler, say: nobody knows the borrow
            self.give_up([(export, borrow_id)], readers)
            raise

    def _tell(self, export: ExportId) -> None:
        ref = self._needed.pop(export, None)
        if ref is None:  # nobody wants it
            return
        outcome = Outcome.of(ref)
        if self._is_remote():
            outcome = outcome.whole()
        if outcome.snapshot.keeps:
            self._stored[export] = outcome  # before the driver can forget it
        outcome.send(self._open(), Made, export)

    def load(self, export: ExportId, borrow_id: int) -> Ref:
        connection = self._open()
        with self.lock:
            ref = self.known(export)
            # In one go: messages about one export leave in the order of what happens to it.
            if ref is not None:
                connection.send(Load(export, borrow_id, True))
                return ref
            ref = self.copy(export)
            connection.send(Load(export, borrow_id, False))
            return ref

    def see_out(self) -> None:
        connection = self._connection
        if connection is None:
            return
        gone: list[bool] = []

        def note() -> None:
            gone.append(True)
            self.notify()

        connection.soon(note)
        wait_until(
            self._inbox,
            lambda: bool(gone) or connection.ended,
            None,
            lambda: "the news of a loaded ref to leave for the driver",
            lambda: "it takes no messages",
        )

    def finalizer(self, export: ExportId) -> _core.Finalizer:
        connection = self._connection
        assert connection is not None  # over which it has come, or is about to be told of
        return connection.finalizer(partial(self._tell_dropped, export))

    def _tell_dropped(self, export: ExportId) -> None:
        with self.lock:
            if self._connection is not None and not self.is_held(export):
                self._connection.send(Drop(export))

    def give_up(
        self, borrows: list[tuple[ExportId, int]], readers: Sequence[Reader] | None = None
    ) -> None:
        if not borrows:
            return
        for _, borrow_id in borrows:
            self._unconfirmed.pop(borrow_id, None)
            self._refused.pop(borrow_id, None)
        # First: a connection that ends meanwhile does not take it along.
        self._to_give_up.append((borrows, None if readers is None else tuple(readers)))
        connection = self._connection
        if connection is not None and not connection.ended:
            connection.soon(lambda: self._say_given_up(connection))
            return
        with suppress(SystemLimitError):  # whoever opens a connection tells it
            # Connecting is nothing for a finalizer.
            threads.start(self._tell_given_up, "refs-given-up")

    def _tell_given_up(self) -> None:
        with suppress(ConveyorError, OSError):  # the driver is gone, or hears of it later
            self._say_given_up(self._open())

    def _say_given_up(self, connection: Connection) -> None:
        with suppress(IndexError):  # all of it has been said
            while not connection.ended:
                borrows, readers = self._to_give_up.popleft()
                for _, borrow_id in borrows:
                    connection.send(GiveUp(borrow_id, readers))

    def confirm(self, borrow_ids: Sequence[int]) -> None:
        over = {
            connection for t in borrow_ids if (connection := self._unconfirmed.get(t)) is not None
        }
        try:
            for connection in over:
                self._wait_until_noted(connection)
            for borrow_id in borrow_ids:
                if borrow_id in self._refused:
                    raise self._refused[borrow_id]
        finally:
            for borrow_id in borrow_ids:
                self._unconfirmed.pop(borrow_id, None)
                self._refused.pop(borrow_id, None)

    def _wait_until_noted(self, connection: Connection) -> None:
        """Wait until the driver has noted all that was said over ``connection``."""
        number, answers = next(self._requests), list[Confirmed]()
        self._confirmed[number] = answers
        try:
            connection.send(Confirm(number))
            wait_until(
                self._inbox,
                lambda: bool(answers) or connection.ended,
                None,
                lambda: "the driver to take note of a pickled ref",
                lambda: "it does not answer",
            )
        finally:
            del self._confirmed[number]
        if not answers:
            raise RuntimeStateError(f"a ref cannot be pickled: {_gone(connection)}")

    def drain(self, question: int, writers: Sequence[Reader], cleanup: Cleanup) -> None:
        """Have the driver told when nothing is left here of the frames that these dead processes have sent.
        Reports of refs that were loaded from them go ahead of that."""
        connection = self._open()
        self._sources.when_dry(writers, lambda: connection.send(Dry(question)), cleanup)

    def ask(self, export: ExportId, question: int) -> None:
        self._send(Ask(export, question))

    def _open(self) -> Connection:
        with self._connecting:
            connection = self._connection
            if connection is not None and not connection.ended:
                return connection
            if connection is not None:
                connection.close()  # until what waited for it has been told
            sock = self._connect()
            opened = self._connection
            if opened is not None and opened is not connection:
                sock.close()  # a signal handler has opened one meanwhile
                return opened
            self._connection = opened = Connection(sock, "refs", self._on_message, self._on_end)
            self._say_given_up(opened)
            return opened

    def close(self) -> None:
        """Close the connection: the process leaves its session."""
        if self._connection is not None:
            self._connection.close()

    def _send(self, message: ToRendezvous) -> None:
        """Over the connection that there is; nothing happens if it has ended."""
        if self._connection is not None:
            self._connection.send(message)

    def _on_message(self, message: FromRendezvous, fds: list[int]) -> None:
        self.handlers[type(message)](self, message, fds)

    def _on_refused(self, message: Refused, _fds: list[int]) -> None:
        if message.borrow_id in self._unconfirmed:
            self._refused[message.borrow_id] = message.error

    def _on_confirmed(self, message: Confirmed, _fds: list[int]) -> None:
        answers = self._confirmed.get(message.number)
        if answers is not None:
            answers.append(message)
            self.notify()

    def _forget(self, message: Forget, _fds: list[int]) -> None:
        self._needed.pop(message.export, None)
        self._stored.pop(message.export, None)

    def _whom(self, message: Whom, _fds: list[int]) -> None:
        requested = message.export, message.question, message.asker
        tell_of(self._needed.get(message.export), lambda said: self._send(Tell(*requested, said)))

    def _answer(self, message: Answer, _fds: list[int]) -> None:
        self.answered(message.export, message.question, message.blockers)

    def _outcome(self, message: Arrived, fds: list[int]) -> None:
        self.arrived(message.export, Outcome.received(message, fds))

    def _on_end(self) -> None:
        self.all_fail(RuntimeStateError(_gone(self._connection)))
        self.notify()

    #: Handler for each kind of message.
    handlers: ClassVar[
        Mapping[type[FromRendezvous], Callable[[ActorExports, Any, list[int]], None]]
    ] = {
        Refused: _on_refused,
        Confirmed: _on_confirmed,
        Forget: _forget,
        Whom: _whom,
        Answer: _answer,
        Arrived: _outcome,
    }


def _gone(connection: Connection | None) -> str:
    if connection is not None and connection.broken:
        return f"the connection to the driver has broken: {connection.broken}"
    return "the driver is gone, or has ended the connection"
