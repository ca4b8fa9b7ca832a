"""A caller's link to an actor: a mailbox ring there, a reply ring back, and the calls on their way."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from conveyor import _core
from conveyor.exceptions import ActorDiedError, DeadlockError
from conveyor.runtime.process import CALL_SLOTS, CALL_STRIDE, Process
from conveyor.runtime.refs.ref import EMPTY, ElementRef, Ref, cancelled_error, final
from conveyor.runtime.refs.values import RefFailed, RefNotThere
from conveyor.runtime.status import describe_status
from conveyor.runtime.waiting.deadlock import CycleCheck, waiting
from conveyor.runtime.waiting.patience import Patience

#: A call on the wire: method, positional arguments, keyword arguments or None, number of results.
Call = tuple[str, tuple[Any, ...], dict[str, Any] | None, int]


def link_segment() -> _core.Segment:
    """Memory for a link: the mailbox ring at 0, the reply ring at :func:`reply_offset`, behind it
    the marks of cancelled calls."""
    size = reply_offset()
    segment = _core.Segment.create(2 * size + _core.Limits.bytes(CALL_SLOTS, 0))
    segment.make_ring(0, CALL_SLOTS, CALL_STRIDE, 1)
    segment.make_ring(size, CALL_SLOTS, CALL_STRIDE, 1)
    return segment


def reply_offset() -> int:
    return _core.Segment.ring_bytes(CALL_SLOTS, CALL_STRIDE, 1)


def link_limits(segment: _core.Segment) -> _core.Limits:
    """Which calls of a link are cancelled."""
    return _core.Limits(segment, 2 * reply_offset(), CALL_SLOTS, 0)


class CallRef(Ref):
    """The result of an actor call."""

    __slots__ = ("method",)

    def __init__(self, source: Link, number: int, method: str) -> None:
        super().__init__(source, number)
        self.method = method


class Link:
    """The caller's side. A call takes a mailbox slot and a reply slot together, so a reply always
    has room; calls beyond that, and calls whose arguments are not there yet, wait in this process."""

    def __init__(
        self,
        process: Process,
        segment: _core.Segment,
        actor_slot: int,
        actor_name: str,
        mailbox_bit: int,
        on_death: Callable[[], ActorDiedError],
        keep_going: Callable[[Link], None],
        kind: int = _core.KIND_CALL,
        exclusive: Callable[[], bool] = lambda: False,
        incarnation: int | None = None,
        label: Callable[[int, int], str | None] | None = None,
    ) -> None:
        """``incarnation``: of the actor's process in its slot (default: the one that is there now).
        ``label`` names a (graph, node) that the actor runs."""
        self._process = process
        self.actor_slot = actor_slot
        self._incarnation = (
            process.board.incarnation(actor_slot) if incarnation is None else incarnation
        )
        self._label = label
        self._is_control = kind == _core.KIND_CONTROL
        self.actor_name = actor_name
        self._exclusive = exclusive  # whether waiting here keeps a whole actor from serving
        self._on_death = on_death
        self._keep_going = keep_going
        # Reentrant: a finalizer may drop the last handle, and so call, in the middle of a call.
        self._lock = threading.RLock()
        # Each with the ref that it lacks, if that is known.
        self._pending: deque[tuple[CallRef, Call, Ref | None]] = deque()
        self._then: Callable[[], object] | None = None
        carries = f"arguments of calls of {actor_name}"
        self._writer = process.writer(
            segment, 0, [(actor_slot, mailbox_bit)], carries, arguments=True
        )
        self._reader = process.reader(
            segment, reply_offset(), 0, (actor_slot, mailbox_bit), shared=True
        )
        self.gate = _core.Gate([self._writer], [self._reader], CALL_SLOTS, kind, process.inbox)
        self._limits = link_limits(segment)
        self._mailbox_bit = mailbox_bit

    def call(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_returns: int = 1
    ) -> Any:
        """Start a call; one ref, or a list of them for ``num_returns > 1``."""
        call: Call = (method, args, dict(kwargs) if kwargs else None, num_returns)
        with self._lock:
            sent = lacks = None
            if not self._pending:
                if self.gone:
                    raise self._on_death()
                try:
                    sent = self.gate.start(call, self, CallRef)
                except RefNotThere as missing:
                    lacks = missing.ref
                except RefFailed as failed:
                    sent = CallRef(self, -1, method)
                    sent._fail(failed.error)
            if sent is not None:
                sent.method = method
                ref = sent
            else:
                ref = self._submit_later(call, lacks)
        if num_returns == 1:
            return ref
        return [ElementRef(ref, i) for i in range(num_returns)]

    @property
    def gone(self) -> bool:
        """Whether the process at the other end is no more: nothing can be sent here again."""
        return self._process.board.gone(self.actor_slot, self._incarnation)

    def _submit_later(self, call: Call, lacks: Ref | None) -> CallRef:
        ref = CallRef(self, -1, call[0])
        with self._lock:
            self._pending.append((ref, call, lacks))
            self.flush()
            waiting = bool(self._pending)
        if waiting:
            self._keep_going(self)
        return ref

    @property
    def is_alive(self) -> bool:
        return not self.gone

    @property
    def outstanding(self) -> int:
        return len(self._pending) + self.gate.submitted - self.gate.completed

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def when_all_sent(self, then: Callable[[], object]) -> None:
        """Call ``then`` once no call waits in this process any more: now, or when the last is sent."""
        with self._lock:
            self._then = then
            self.flush()

    def flush(self) -> bool:
        """Submit what can be submitted, in order. True if nothing is pending any more."""
        with self._lock:
            while self._pending:
                ref, call, lacks = self._pending[0]
                if lacks is not None and not lacks.done():
                    return False
                try:
                    if self.gone:
                        raise self._on_death()
                    number = self.gate.submit(call)
                except RefNotThere as missing:
                    self._pending[0] = (ref, call, missing.ref)
                    continue
                except Exception as error:  # the call's outcome: an argument failed, say
                    self._pending.popleft()
                    ref._fail(error.error if isinstance(error, RefFailed) else error)
                    self._process.board.ring(self._process.slot, _core.ATTENTION_BIT)
                    continue
                if number < 0:
                    return False
                self._pending.popleft()
                ref._number = number
            then, self._then = self._then, None
        if then is not None:
            then()
        return True

    # Source protocol

    def cancel(self, ref: Ref) -> bool:
        error = cancelled_error(self.describe(ref))
        with self._lock:
            # By identity: arguments need not be comparable.
            place = next((i for i, (r, _, _) in enumerate(self._pending) if r is ref), None)
            if place is not None:
                del self._pending[place]
            ref._fail(error)
            if ref._number >= 0:
                self._limits.cancel(ref._number)
                self.gate.drop(ref._number, 0)
        self.gate.interrupt()
        if ref._number >= 0:  # it may be a coroutine that runs
            self._process.board.ring(self.actor_slot, self._mailbox_bit)
        else:
            self.flush()  # others may have waited behind it
        return True

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        return cancelled_error(self.describe(ref))

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        if ref._number >= 0:
            value = self.gate.get(ref._number, 0, 0.0 if timeout == 0 else _FIRST_LOOK)
            if value is not EMPTY:
                return value
        if not self._exclusive():
            return self._wait(ref, Patience(timeout), None)
        inbox = self._process.inbox
        with waiting(inbox, self.actor_slot):
            cycle = CycleCheck(self._process.board, self._process.slot, self.actor_slot)
            return self._wait(ref, Patience(timeout), cycle)

    def _wait(self, ref: Ref, patience: Patience, cycle: CycleCheck | None) -> Any:
        board, inbox = self._process.board, self._process.inbox
        while True:
            suspected = cycle is not None and cycle.suspicious()
            step = patience.step()
            if suspected:
                step = _CONFIRM if step is None else min(step, _CONFIRM)
            deaths = board.deaths
            if ref._number < 0:
                # Not submitted yet: its turn comes when others complete, and that rings our bell.
                seen = inbox.count
                self.flush()
                if ref._outcome is not EMPTY:
                    return ref._outcome
                value = EMPTY
                if ref._number < 0:
                    inbox.wait(seen, step)
            else:
                # Looked for before the death is: what it had sent before it died is still there.
                gone = self.gone
                value = self.gate.get(ref._number, 0, 0.0 if gone else step, deaths)
                if value is EMPTY and gone:
                    raise final(self._on_death())
            if value is not EMPTY:
                return value
            if ref._outcome is not EMPTY:  # cancelled
                return EMPTY
            if suspected:
                assert cycle is not None
                members = cycle.confirmed()
                if members is not None:
                    raise self._deadlock(ref, members)
            patience.check(lambda: self.describe(ref), self.doing)

    def _deadlock(self, ref: Ref, members: list[int]) -> DeadlockError:
        names = tuple(self._process.board.name(slot) for slot in members)
        chain = " waits for ".join((*names, names[0]))
        return DeadlockError(
            f"waiting for {self.describe(ref)} would never end: {chain}, and each runs one call at a "
            "time. Make one of them an async actor or give it max_concurrency > 1, or pass the ref on "
            "instead of getting it",
            names,
        )

    def is_ready(self, ref: Ref) -> bool:
        if ref._number < 0:
            # Whoever pumps sends it on. Not here: this is asked while another link is flushed.
            return ref._outcome is not EMPTY
        return self.gate.ready(ref._number, 0) or self.gone

    def describe(self, ref: Ref) -> str:
        method = ref.method if isinstance(ref, CallRef) else "call"
        if self._is_control:
            return f"{self.actor_name} to take note of {method}"
        number = f" (call {ref._number})" if ref._number >= 0 else " (not sent yet)"
        return f"{self.actor_name}.{method}{number}"

    def doing(self) -> str:
        if self.gone:
            return f"{self.actor_name} is dead"
        status = describe_status(self._process.board, self.actor_slot, self._label)
        return f"{self.actor_name} is {status}"


#: How long a wait may last before it is worth preparing to log and describe it.
_FIRST_LOOK = 0.005
#: How long the members of a suspected cycle have to look once more.
_CONFIRM = 0.05
