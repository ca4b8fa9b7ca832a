"""An actor's ends of what goes beside the frames of a graph: tensors, by the transports of their edges."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from conveyor import _core
from conveyor.codec import decode_error, encode_error
from conveyor.codec.parcels import Head, Parcel
from conveyor.exceptions import GraphTornDownError, TransportError
from conveyor.runtime.actor.wire import Wire
from conveyor.runtime.calls.last_steps import try_each
from conveyor.runtime.graph.beside import ConduitEnd
from conveyor.runtime.graph.layout import Assignment
from conveyor.runtime.process import Process

if TYPE_CHECKING:
    from concurrent.futures import Future

    from conveyor.transport.base import Conduit, Sending


class Conduits:
    """All of one actor's part of a graph. Used on the thread that runs its program.

    outbound, inbound: by the number of the edge, where this actor writes and where it reads.
    """

    def __init__(
        self,
        process: Process,
        segment: _core.Segment,
        assignment: Assignment,
        program: _core.Program,
        recorder: _core.Recorder,
        budget: _core.MemoryBudget | None,
    ) -> None:
        self.outbound: dict[int, Outbound] = {}
        self.inbound: dict[int, Inbound] = {}
        self._name = assignment.name

        def ring() -> None:
            process.board.ring(process.slot, assignment.bit)

        try:
            for end in assignment.conduits:
                wire = Wire(process, segment, assignment, end, budget)
                if end.rank == 0:
                    label = assignment.sources[end.edge]
                    sender = assignment.actor_name, label
                    place = assignment.recorder.sends.index(end.edge)
                    sent = functools.partial(recorder.count_beside, place)
                    outbound = Outbound(wire, end, ring, program, sender, sent)
                    self.outbound[end.edge] = outbound
                else:
                    self.inbound[end.edge] = Inbound(wire, end, ring)
        except BaseException:
            self.close()
            raise

    def progress(self) -> None:
        """Do what can be done without waiting. It raises no error: what fails is a transfer's."""
        for link in (*self.outbound.values(), *self.inbound.values()):
            link.progress()

    def close(self) -> None:
        """Have all that is under way end, and let go of it. It does nothing the second time."""
        reason = GraphTornDownError(f"{self._name} has been torn down")
        while self.outbound or self.inbound:
            _, link = (self.outbound or self.inbound).popitem()
            try_each(lambda link=link: link.abort(reason), link.conduit.close, link.wire.close)  # type: ignore[misc]


class _Link:
    """What both ends of a conduit have."""

    def __init__(self, wire: Wire, end: ConduitEnd, ring: Callable[[], None]) -> None:
        """``ring`` has the program look again, from any thread."""
        self.wire = wire
        self.transport = end.transport
        self._ring = ring
        self._broken: BaseException | None = None
        try:
            self.conduit: Conduit = end.transport.open(wire)
        except Exception as error:
            raise self.error(
                f"{wire.members[wire.rank]}'s end could not be opened", error
            ) from error

    def progress(self) -> None:
        try:
            self.wire.pump()
            self.conduit.progress()
        except Exception as error:
            self.abort(error)

    def abort(self, reason: BaseException) -> None:
        """Nothing can be moved any more."""
        if self._broken is None:
            self._broken = reason
            self.conduit.abort(reason)

    def error(self, what: str, cause: BaseException) -> TransportError:
        """Say what has failed, and on which edge."""
        told = TransportError(
            f"{self.wire.edge}: {what} by the transport {self.transport.name!r}: "
            f"{type(cause).__name__}: {cause}"
        )
        told.__cause__ = cause
        return told


class Outbound(_Link):
    """The writer's end."""

    def __init__(
        self,
        wire: Wire,
        end: ConduitEnd,
        ring: Callable[[], None],
        program: _core.Program,
        sender: tuple[str, str],
        sent: Callable[[int], None],
    ) -> None:
        """``sender`` is who sends, for errors: the actor, and what the edge carries. ``sent(bytes)``
        counts."""
        super().__init__(wire, end, ring)
        self._program = program
        self._sender = sender
        self._sent = sent
        #: What was not published yet, with its transfer and its size in bytes.
        self._offered: tuple[Sending, int, int] | None = None
        #: Transfers that have failed since their frames were published, put here by any thread.
        self._failed: deque[tuple[int, BaseException]] = deque()

    def pack(self, value: Any) -> Parcel:
        """Make what is sent in place of ``value``."""
        if self._offered is not None:  # the last one could not be published
            sending, *_ = self._offered
            self._offered = None
            sending.withdraw()
        return Parcel(value, self._accepts, self._offer)

    def posted(self) -> None:
        """The frame is published: its tensors may go. It raises no error."""
        if self._offered is None:
            return
        sending, transfer, size = self._offered
        self._offered = None
        self._sent(size)

        def ended(future: Future[None]) -> None:
            error = future.exception()
            if error is not None:
                self._failed.append((transfer, error))
                self._ring()

        try:
            sending.begin().add_done_callback(ended)
        except Exception as error:
            self._failed.append((transfer, error))
            self.progress()

    def progress(self) -> None:
        """Go on, and tell the readers of what has failed."""
        super().progress()
        while self._failed:
            transfer, cause = self._failed.popleft()
            meta = encode_error(self.error("tensors could not be sent", cause), *self._sender)
            try:
                self.wire.tell_failure(transfer, meta)
            except Exception:
                self.wire.tell_failure(transfer, _core.UNSAID)

    def _accepts(self, tensor: Any) -> str | None:
        why_not = self.transport.accepts(tensor)
        return None if why_not is None else f"cannot go by {self.transport.name!r}: it {why_not}"

    def _offer(self, tensors: list[Any]) -> bytes:
        if not tensors:
            return b""
        if self._broken is not None:
            raise self.error("tensors could not be sent", self._broken)
        transfer = self._program.execution
        try:
            sending = self.conduit.send(tensors, transfer)
        except Exception as error:
            raise self.error("tensors could not be sent", error) from error
        size = sum([tensor.numel() * tensor.element_size() for tensor in tensors])
        self._offered = sending, transfer, size
        return sending.note


class Coming(NamedTuple):
    """A value whose tensors are on their way.

    head: what its frame held.
    transfer: the number of the transfer.
    tensors: what the transport will give; ``None``: there are none.
    """

    head: Head
    transfer: int
    tensors: Future[list[Any]] | None


class Inbound(_Link):
    """A reader's end."""

    def arrived(self, head: Head, execution: int) -> Coming:
        """A frame has come: its tensors are asked for."""
        if not head.tensors:
            return Coming(head, execution, None)
        try:
            if self._broken is not None:
                raise self._broken
            tensors = self.conduit.receive(head.tensors, head.note, execution)
        except Exception as error:
            head.give_up()
            raise self.error("tensors could not be received", error) from error
        tensors.add_done_callback(lambda _: self._ring())
        return Coming(head, execution, tensors)

    def take(self, coming: Coming) -> Any:
        """Give the value, or ``NotImplemented`` while its tensors are on their way."""
        head, transfer, tensors = coming
        meta = self.wire.failures.get(transfer)
        if meta is not None:
            # Nobody asks for older ones.
            self.wire.failures = {t: m for t, m in self.wire.failures.items() if t > transfer}
            head.give_up()
            raise decode_error(meta)
        if tensors is None:
            return head.open(())
        if not tensors.done():
            return NotImplemented
        error = tensors.exception()
        if error is not None:
            head.give_up()
            raise self.error("tensors could not be received", error) from error
        return head.open(tensors.result())
