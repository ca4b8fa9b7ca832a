"""Requests to the driver, from an actor's process."""

from __future__ import annotations

import itertools
import os
import pickle
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from conveyor import _core
from conveyor.codec import set_later
from conveyor.exceptions import (
    ActorDiedError,
    ConveyorError,
    RuntimeStateError,
    SessionEndedError,
    SystemLimitError,
)
from conveyor.flag import sleep_for
from conveyor.runtime import threads
from conveyor.runtime.broker import (
    ChannelPeer,
    ClosedWord,
    Joined,
    Membership,
    Side,
    doing,
    enter,
    in_words,
)
from conveyor.runtime.deadlock import Found
from conveyor.runtime.deadlock_detector import Waiting
from conveyor.runtime.messages import PIECE, Message, all_of, receive_message, send_pickled
from conveyor.runtime.process import Process, close_all
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.runtime.wait_graph import FOR_THE_DRIVER, STEPS
from conveyor.system_limits import explained
from conveyor.worker.messages import (
    CloseEnd,
    CloseGroup,
    CreateGroup,
    Done,
    Failed,
    HoldEnd,
    JoinGroup,
    LookForCycle,
    Meet,
    Met,
    Notice,
    Numbered,
    OpenChannel,
    Reply,
    Request,
    WhyDead,
    WhyRefused,
)


class WorkerBroker:
    """An actor's ``runtime.broker.Broker``, which asks the driver."""

    def __init__(self, process: Process, requests: RequestClient) -> None:
        self._process = process
        self._requests = requests

    def open(self, depth: int) -> int:
        number, _ = self._requests.ask(OpenChannel(depth))
        assert isinstance(number, int)
        return number

    def hold(self, number: int, side: Side) -> None:
        self._requests.ask(HoldEnd(number, side))

    def meet(self, number: int, side: Side, alone: bool) -> ChannelPeer | None:
        with explained(f"use channel {number}"):
            met, fds = self._requests.ask(Meet(number, side, alone))
            try:
                return None if met is None else self._met(met, fds)
            except BaseException:
                self._give_up(met, number, side, fds)
                raise
            finally:
                close_all(fds)

    def _met(self, met: Met, fds: list[int]) -> ChannelPeer:
        process = self._process
        if met.actor is None:  # every actor knows the driver from its birth on
            all_of(fds, 1)
            arena = process.arena_of(met.slot, met.incarnation)
        else:
            _, arena_fd, eventfd = all_of(fds, 3)
            arena = process.adopt(met.slot, met.incarnation, arena_fd, eventfd)
        segment = _core.Segment.attach(fds[0])
        return ChannelPeer(segment, met.slot, met.incarnation, met.actor, arena, met.spread)

    def _give_up(self, met: Met, number: int, side: Side, fds: list[int]) -> None:
        """Tell the other end that this process could not open its own, and will not be introduced again."""
        if fds:
            ClosedWord(_core.Segment.attach(fds[0]), side).mark()
            self._process.process_table.notify(met.slot, _core.ATTENTION_BIT)
        if met.spread:
            self._requests.ask(CloseEnd(number, side))

    def awaits(self, number: int, side: Side) -> bool:
        return False  # only the driver knows

    def close(self, number: int, side: Side) -> None:
        self._requests.ask(CloseEnd(number, side))

    def death(self, peer: ChannelPeer) -> ConveyorError:
        if peer.actor is None:
            return SessionEndedError("the session has ended: its driver is gone")
        return self._requests.death(peer.actor, peer.slot, peer.incarnation)


class ActorCollectives:
    """An actor's ``runtime.broker.Collectives``, which asks the driver."""

    def __init__(
        self,
        process: Process,
        requests: RequestClient,
        label: Callable[[int, int], str | None],
    ) -> None:
        """``label`` names a (graph, node)."""
        self.made: dict[str, Any] = {}
        self.entered: dict[str, Any] = {}
        self._process = process
        self._requests = requests
        self._label = label
        self._joined: list[Joined] = []
        self.until: Callable[[], int] | None = None

    def open(self, actors: Sequence[ActorId], driver: int | None = None) -> int:
        assert driver is None, "only the driver can take part as such"
        number, _ = self._requests.ask(CreateGroup(tuple(actors)), CloseGroup)
        assert isinstance(number, int)
        return number

    def join(self, number: int) -> Joined:
        with explained("join a collective group"):
            membership, fds = self._requests.ask(JoinGroup(number))
            assert isinstance(membership, Membership)
            try:
                joined = self._enter(membership, fds)
            finally:
                close_all(fds)
        self._joined.append(joined)
        return joined

    def _enter(self, membership: Membership, fds: list[int]) -> Joined:
        process, driver = self._process, membership.driver
        actors = len(membership.members) - (driver is not None)
        segment, *ends = all_of(fds, 1 + 2 * actors)
        pairs = iter(zip(ends[::2], ends[1::2], strict=True))
        arenas = []
        for rank, (slot, incarnation) in enumerate(membership.members):
            if rank == driver:  # every actor knows it from its birth on
                arenas.append(process.arena_of(slot, incarnation))
            elif rank == membership.rank:
                arenas.append(process.own_view(next(pairs)[0]))
            else:
                arenas.append(process.adopt(slot, incarnation, *next(pairs)))
        return enter(process, _core.Segment.attach(segment), membership, arenas)

    def leave(self, joined: Joined) -> None:
        if joined in self._joined:
            self._joined.remove(joined)
        joined.leave()

    def close(self, number: int) -> None:
        self._requests.ask(CloseGroup(number))

    def doing(self, joined: Joined, ranks: Sequence[int]) -> list[str]:
        return doing(self._process, joined.membership, ranks, self._label)

    def death(self, joined: Joined, rank: int) -> ConveyorError:
        actor, (slot, incarnation) = joined.membership.actors[rank], joined.membership.members[rank]
        return self._requests.death(actor, slot, incarnation)

    def step_failed(self, error: BaseException) -> None:
        """Break the process's groups: a step of a graph has raised, and other ranks may wait for it."""
        if self._joined:
            self._break(f"its step {in_words(error)}", True)

    def call_failed(self, name: str, why: BaseException | str) -> None:
        """Break the process's groups: a call has failed. ``why``: its error, or what has happened in
        words."""
        if self._joined:
            words = why if isinstance(why, str) else in_words(why)
            self._break(f"its method {name} {words}", False)

    def _break(self, why: str, step: bool) -> None:
        for joined in self._joined:
            joined.group.raised(why, step)


class NotedRequests:
    """Requests to the driver that ``conveyor status`` shows as waits when they take long. The driver waits
    for no actor's work meanwhile, so these waits are part of no cycle."""

    def __init__(self, requests: RequestClient, process: Process, driver: int) -> None:
        """``driver``: the driver's slot."""
        self._requests, self._process, self._driver = requests, process, driver

    def ask(
        self, request: Request, what: str, abandoned: Callable[[Any], Message] | None = None
    ) -> tuple[Any, list[int]]:
        """Ask the driver, as :meth:`RequestClient.ask` does. ``what``: what is waited for, to follow "the
        driver,"."""
        process = self._process
        blockers = ((self._driver, STEPS, f"{FOR_THE_DRIVER}{what}"),)
        with process.wait_registry.waiting(lambda _: blockers) as wait:

            def look(is_over: Callable[[], bool]) -> float | None:
                requested = process.inbox.requested
                return None if wait is None or is_over() else wait.look(requested)

            return self._requests.ask(request, abandoned, look)


#: Milliseconds for which replies are read on when none is awaited any more: another request may come soon.
_LINGER_MS = 1000
#: Seconds after which a wait for a reply is shown as one.
_SAID_AFTER = 0.05


class RequestClient:
    """Client of the driver's request socket. Requests are numbered, and several may be under way: of several
    threads, or of one thread whose signal handler, or whose finalizer, asks for something while the thread
    itself waits.

    A thread of the library's own reads the replies while any are awaited. No signal handler runs there, so
    what a handler raises takes no reply from the socket, and nobody gets another's reply. If no thread is to
    be had, one of the waiters reads until its own reply has come, and then wakes the others, of which one
    reads on. A reply that nobody waits for any more is disposed of, with its descriptors.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._numbers = itertools.count(1)
        # Each dictionary operation is one step, so that neither finalizers nor handlers find a lock taken.
        self._awaited: dict[int, _Awaited] = {}
        #: Held by the thread that reads.
        self._reading = threading.Lock()
        # To be taken last. A handler may find it taken by its own thread, between two messages.
        self._sending = threading.RLock()
        #: Why no reply comes any more.
        self._broken = ""

    def ask(
        self,
        request: Request,
        abandoned: Callable[[Any], Message] | None = None,
        look: Callable[[Callable[[], bool]], float | None] | None = None,
    ) -> tuple[Any, list[int]]:
        """Return the answer, and the descriptors that came with it. If the answer is an error, it is raised.

        If a signal handler raises meanwhile, the request may or may not have been sent. The message
        ``abandoned(answer)``, if that is given, tells the driver to take back what it has done by then.

        ``look(is_over)`` is called when the answer does not come at once. It returns the seconds until it is
        called again; ``None``: it is not.
        """
        awaited, process = _Awaited(abandoned), os.getpid()
        try:
            self._request(request, awaited)
            self._wait(awaited, look)
        except BaseException:
            if os.getpid() == process:  # a child that a handler has forked leaves it to its parent
                self._give_up(awaited)
            raise
        try:
            reply = awaited.reply
            if isinstance(reply, Failed):
                raise reply.error
            if reply is None:
                raise self._no_answer()
            assert isinstance(reply, Done)
            return reply.value, awaited.fds
        finally:
            del awaited, reply  # what is raised refers to this frame

    def ask_later(self, request: Request, then: Callable[[Any], object]) -> None:
        """Have ``then`` called with the answer, or with an error, on the thread that reads the replies.
        Raises if nothing can be asked."""
        awaited = _Later(then)
        self._request(request, awaited)
        if not self._reading.locked():
            try:
                threads.serve(self._read, "answers")
            except BaseException:
                awaited.complete()
                raise

    def look_for_cycle(
        self, waits: Sequence[Waiting], then: Callable[[Found | Exception | None], object]
    ) -> None:
        """Have ``then`` called with the cycle that one of these waits is part of, if there is any."""
        self.ask_later(LookForCycle(tuple(waits)), then)

    def refusal(self, actor: ActorId, number: int) -> ConveyorError:
        """Return why ``actor`` does not take the calls that come over link ``number``."""
        error, _ = self.ask(WhyRefused(number))
        if isinstance(error, ConveyorError):
            return error
        return RuntimeStateError(f"{actor.name} does not take calls from here")

    def tell(self, notice: Notice) -> None:
        """Send a notice, which has no answer. This waits for no request under way: the driver may need the
        notice before it can answer that request."""
        with suppress(ConnectionError):  # the driver is gone, and with it who should know
            self._send(notice)

    def death(
        self,
        actor: ActorId,
        slot: int,
        incarnation: int,
        labels: Mapping[tuple[int, int], str] | None = None,
    ) -> ActorDiedError:
        """Return the death of the actor's process that had this slot as its ``incarnation``-th. ``labels``
        are names for the tasks that it may have run, by (graph, node)."""
        question = WhyDead(actor, slot, incarnation, labels or {})
        return self._death(question) or ActorDiedError(f"actor {actor.name} died", actor.name)

    def _death(self, question: WhyDead) -> ActorDiedError | None:
        try:
            error, _ = self.ask(question)
        except ConveyorError:
            return None
        assert isinstance(error, ActorDiedError)
        if error.exit_code is None and error.signal is None:
            set_later(error, lambda: self._death(question))
        return error

    def close(self) -> None:
        """Break the connection off: the process leaves its session, nothing is asked any more, and no reply
        comes."""
        self._break(ConnectionError("this process has left the session"))
        with self._reading:  # whoever reads finds that out, and is gone then
            self._socket.close()

    # Sending

    def _request(self, request: Request, awaited: _Awaited) -> None:
        number = next(self._numbers)
        content = pickle.dumps(request)
        self._awaited[number] = awaited
        # Noted first: a thread that finds the connection broken looks at the notes afterwards.
        if self._broken:
            raise self._no_answer()
        try:
            self._send(Numbered(number, content))
        except OSError as error:
            if error.errno is None:  # a signal handler's, a TimeoutError say: it may have been sent
                raise
            self._awaited.pop(number, None)
            raise RuntimeStateError(f"the driver does not answer: {error}") from error

    def _send(self, message: Message) -> None:
        data = pickle.dumps(message)
        if len(data) > PIECE:
            uninterrupted(lambda: self._send_pieces(data))
            return
        with self._sending:
            send_pickled(self._socket, data)

    def _send_pieces(self, data: bytes) -> None:
        with self._sending:
            try:
                send_pickled(self._socket, data)
            except BaseException as error:
                self._break(error)  # what comes next would be taken for the rest of it
                raise

    def _no_answer(self) -> RuntimeStateError:
        return RuntimeStateError(f"the driver does not answer: {self._broken}")

    # Replies

    def _wait(
        self, awaited: _Awaited, look: Callable[[Callable[[], bool]], float | None] | None
    ) -> None:
        step = None if look is None else _SAID_AFTER
        while True:
            if not self._reading.locked():
                try:
                    threads.serve(self._read, "answers")
                except SystemLimitError:  # no thread is to be had
                    self._read_until(awaited)
            rung = sleep_for(awaited.doorbell, step)
            if awaited.over:
                return
            if look is not None and not rung:
                step = look(lambda: awaited.over)

    def _read(self) -> None:
        try:
            self._read_all()
        except BaseException as error:  # who waits would wait for ever
            self._break(error)
            raise

    def _read_all(self) -> None:
        # If several threads were started at the same time, one reads. A requester notes its request first and
        # looks for a reader then; a reader that ends looks at the notes last.
        while self._reading.acquire(blocking=False):
            try:
                readable = select.poll()
                readable.register(self._socket, select.POLLIN)
                while not self._broken and (readable.poll(_LINGER_MS) or self._awaited):
                    self._receive()
            finally:
                self._reading.release()
            if self._broken or not self._awaited:
                return

    def _read_until(self, awaited: _Awaited) -> None:
        if self._reading.acquire(blocking=False):
            try:
                while not self._broken and not awaited.over:
                    self._receive()
            finally:
                self._reading.release()
                self._wake_waiters()

    def _wake_waiters(self) -> None:
        """Wake the waiters, since their reader stops: they look whether somebody reads. Later requests look
        by themselves."""
        for awaited in list(self._awaited.values()):
            awaited.notify()

    def _receive(self) -> None:
        try:
            message, fds = receive_message(self._socket)
        except BaseException as error:
            self._break(error)
            if not isinstance(error, OSError):
                raise
            return
        assert isinstance(message, Numbered)
        try:
            reply: Reply = pickle.loads(message.content)
        except Exception as error:
            reply = Failed(error.with_traceback(None))  # its frames refer to this one
        self._arrived(self._awaited.pop(message.number), reply, fds)

    def _arrived(self, awaited: _Awaited, reply: Reply | None, fds: list[int]) -> None:
        awaited.reply, awaited.fds = reply, fds
        if not awaited.complete():
            self._dispose(awaited)
        elif isinstance(awaited, _Later):
            close_all(fds)
            awaited.then(self._no_answer() if reply is None else _outcome(reply))
        else:
            awaited.notify()

    def _give_up(self, awaited: _Awaited) -> None:
        """Stop waiting for a reply. A later reply is disposed of."""
        if not awaited.complete():
            self._dispose(awaited)
        elif not self._reading.locked() and self._awaited:
            try:
                threads.serve(self._read, "answers")
            except (
                SystemLimitError
            ):  # one of those that wait reads this reply, too, or whoever asks next
                self._wake_waiters()

    def _dispose(self, awaited: _Awaited) -> None:
        """Dispose of a reply that has come and that nobody takes."""
        close_all(awaited.fds)
        if awaited.abandoned is None or not isinstance(awaited.reply, Done):
            return
        message = awaited.abandoned(awaited.reply.value)
        with suppress(OSError, RuntimeStateError):  # the driver is gone
            if isinstance(message, Request):
                nobody = _Awaited(None)
                nobody.complete()
                self._request(message, nobody)
            else:
                self._send(message)

    def _break(self, error: BaseException) -> None:
        """End all requests under way: replies cannot be told apart any more."""
        self._broken = self._broken or str(error) or type(error).__name__
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        while self._awaited:
            try:
                _, awaited = self._awaited.popitem()
            except KeyError:  # another thread was faster
                return
            self._arrived(awaited, None, [])


class _Awaited:
    """A request that is under way, and its reply once that is here."""

    def __init__(self, abandoned: Callable[[Any], Message] | None) -> None:
        self.abandoned = abandoned
        #: ``None`` when it is over: no reply will come.
        self.reply: Reply | None = None
        self.fds: list[int] = []
        # Not an event, in which an interrupt may leave a lock locked.
        self.doorbell = threading.Lock()
        self.doorbell.acquire()
        self._completed = threading.Lock()

    def notify(self) -> None:
        """Wake the waiter: the request is over, or the waiter is to look whether anybody reads."""
        with suppress(RuntimeError):  # he has been, and does not know yet
            self.doorbell.release()

    def complete(self) -> bool:
        """Return True to the first caller only: the reader, which has noted the reply before, or the waiter
        that gives up."""
        return self._completed.acquire(blocking=False)

    @property
    def over(self) -> bool:
        return self._completed.locked()


class _Later(_Awaited):
    """A request under way for which no thread waits: ``then`` is called with its outcome."""

    def __init__(self, then: Callable[[Any], object]) -> None:
        super().__init__(None)
        self.then = then


def _outcome(reply: Reply) -> Any:
    """Return the driver's answer, or the error that it answers with."""
    if isinstance(reply, Failed):
        return reply.error
    assert isinstance(reply, Done)
    return reply.value
