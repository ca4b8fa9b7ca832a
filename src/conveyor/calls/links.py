"""A caller's link to an actor: a mailbox ring there, a reply ring back, and the calls on their way."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from conveyor import _core
from conveyor.calls.call import MISSED, START, STOP, Call, count_of, instead_of
from conveyor.calls.constructor import UNSAID, Unmade, unmade
from conveyor.calls.pending import (
    CallRef,
    Pending,
    Pump,
    WaitingCall,
    WaitingCalls,
    await_soon,
    first_lacked,
    lacked,
    lacked_now,
    outcome_of,
    take,
    with_values,
    withdraw,
)
from conveyor.calls.unsendable import blame_call
from conveyor.codec.faults import is_of_value
from conveyor.exceptions import (
    ActorDiedError,
    ArenaFullError,
    ConveyorError,
    SerializationError,
)
from conveyor.refs.ref import (
    EMPTY,
    Ref,
    Source,
    Unseen,
    blockers_of,
    cancelled_error,
    elements_of,
    final,
)
from conveyor.refs.together import get_or_wait
from conveyor.refs.values import RefFailed, refs_among
from conveyor.runtime import ending
from conveyor.runtime.blueprint import Blueprint, LimitsPlan, RingPlan
from conveyor.runtime.deadlock import Wait, sooner
from conveyor.runtime.process import CALL_SLOTS, CALL_STRIDE, MOST_CALL_SLOTS, Process, RingEnd
from conveyor.runtime.shortage import MemoryWait, is_final
from conveyor.runtime.wait_graph import CALLS, Again, Blockers, call_of
from conveyor.runtime.waiting import TimeLimit
from conveyor.user_frames import users_site


def link_depth(max_concurrency: int | None) -> int:
    """How many calls of one caller are with an actor at once, at the most. Never fewer than may run."""
    wanted = min(max(max_concurrency or 0, CALL_SLOTS), MOST_CALL_SLOTS)
    return 1 << (wanted - 1).bit_length()


def link_blueprint(caller: RingEnd, mailbox: RingEnd, depth: int = CALL_SLOTS) -> Blueprint:
    """Memory for a link: the mailbox ring at 0, the reply ring at :func:`reply_offset`, behind it
    the marks of cancelled calls, and the mark of a link that the other side could not accept.

    ``caller``: with the bit that replies ring; ``mailbox``: the actor's process, with the bit that calls
    ring. ``depth``: a power of two. The other side reads it off the mailbox ring."""
    ring = _ring_bytes(depth)
    return Blueprint(
        _refusal_offset(depth) + _core.Limits.bytes(1, 0),
        (
            RingPlan(0, depth, CALL_STRIDE, caller, (mailbox,)),
            RingPlan(ring, depth, CALL_STRIDE, mailbox, (caller,)),
        ),
        (LimitsPlan(2 * ring, depth, 0, caller.slot),),
    )


def reply_offset(segment: _core.Segment) -> int:
    return _ring_bytes(segment.slots(0))


def link_limits(segment: _core.Segment) -> _core.Limits:
    """Open the marks that say which calls of a link are cancelled."""
    depth = segment.slots(0)
    return _core.Limits(segment, 2 * _ring_bytes(depth), depth, 0)


def _ring_bytes(depth: int) -> int:
    return _core.Segment.ring_bytes(depth, CALL_STRIDE, 1)


def _refusal_offset(depth: int) -> int:
    return 2 * _ring_bytes(depth) + _core.Limits.bytes(depth, 0)


class Refusal:
    """A word of a link that says that nobody serves it, and nobody will. The driver writes it."""

    def __init__(self, segment: _core.Segment) -> None:
        self._words = _core.Limits(segment, _refusal_offset(segment.slots(0)), 1, 0)

    def __bool__(self) -> bool:
        return self._words.cancelled(0)

    def mark(self) -> None:
        self._words.cancel(0)


def held_up(queue: Pending) -> str:
    """Describe what the calls that cannot be sent yet wait for, and what the processes that are to make it
    do. Empty, if the calls lack nothing.

    The missing argument may be the result of a call that waits likewise, for another actor. So the last call
    of such a chain is named: it has been sent, and all of the others wait for it.
    """
    lacking, queues = queue.lacks(), [queue]
    while lacking is not None:
        last = next((part for part in lacking.parts() if not part.done()), None)
        if last is None:  # it has come just now
            return ""
        source: Source = last._source
        awaited = source.describe(last)
        # Asked itself, it would say what holds up the link of its last try, which is this one perhaps.
        latest = last._latest_try()
        if latest is not last and not latest.done():
            last, source = latest, latest._source
        further = None
        if isinstance(source, Pending) and source not in queues and last._number < 0:
            queues.append(source)
            further = source.lacks()
        if further is None:
            doing = source.does() if isinstance(source, Pending) else source.doing()
            return f"; calls for {queue.actor_name} wait for {awaited}; {doing}"
        lacking = further
    return ""


logger = logging.getLogger("conveyor")


#: Stands for the arguments by name of a call without any. Nobody changes it.
_NO_NAMES: dict[str, Any] = {}

#: What ranks of the actor's groups are told of one whose arguments have failed, or which was cancelled.
_UNCALLED = "could not be called with its arguments"
_CANCELLED = "was cancelled"


class Link:
    """The caller's side. A call takes a mailbox slot and a reply slot together, so a reply always
    has room; calls beyond that, and calls whose arguments are not there yet, wait in this process."""

    cancel_with_await = True
    get_timeout: float | None = None

    def __init__(
        self,
        process: Process,
        segment: _core.Segment,
        mailbox: RingEnd,
        arena: _core.ArenaView,
        actor_name: str,
        on_death: Callable[[], ActorDiedError],
        pump: Pump,
        kind: int = _core.KIND_CALL,
        label: Callable[[int, int], str | None] | None = None,
        why_refused: Callable[[], ConveyorError] | None = None,
    ) -> None:
        """``mailbox``: the actor's process, with the bit that calls ring there; ``arena``: that process's.
        ``label`` names a (graph, node) that the actor runs. ``why_refused``: of a link that the actor
        still has to accept; asked once it could not."""
        self._process = process
        self.actor_slot, self._incarnation = self._actor = mailbox.process
        # An actor's own: nobody outlives it who would be told of its death.
        self._to_itself = mailbox.process == process.identity
        self._label = label
        self._refusal = Refusal(segment) if why_refused is not None else None
        self._why_refused = why_refused
        self._why: ConveyorError | None = None
        self._is_control = kind == _core.KIND_CONTROL
        self.actor_name = actor_name
        self._on_death = on_death
        self._pump = pump
        #: Guards the calls that wait here, and their order. Reentrant: a finalizer may drop the last handle,
        #: and so call, in the middle of a call.
        self.lock = threading.RLock()
        self._pending = WaitingCalls()
        #: The wait of the first of them, if it lacks memory.
        self._memory_wait: MemoryWait | None = None
        carries = f"arguments of calls of {actor_name}"
        self._writer = process.writer(segment, 0, [mailbox], carries)
        carries = f"results of calls of {actor_name}"
        self._reader = process.reader(
            segment, reply_offset(segment), 0, mailbox, arena, carries, shared=True
        )
        self._depth = depth = segment.slots(0)
        self.window = _core.InFlightWindow(
            [self._writer], [self._reader], depth, kind, process.inbox
        )
        if not self._is_control:
            process.sweeper.start()
        process.reads(self)
        self._limits = link_limits(segment)
        self._mailbox_bit = mailbox.bit
        # This process, as the actor knows it.
        self._caller = process.identity

    def call(self, call: Call, again: bool = False, most_before: int | None = None) -> Any:
        """Start a call; one ref, or a list of them if it has several results. ``again``: it was made before,
        and has failed, and overtakes what waits here. ``most_before``: where more calls are before it, it is
        not made, and ``None`` is returned."""
        method, args, kwargs, result_spec, what = call
        given = call
        had_refs = has_refs = refs_among(args, kwargs or _NO_NAMES)
        with self.lock:
            if most_before is not None and self.outstanding > most_before:
                return None
            sent = None
            gone = not self._pending and self.gone
            if not self._pending and not gone:
                if has_refs and lacked(call) is None:
                    try:
                        call = with_values(call, self._actor, self._process)
                        has_refs = False
                    except RefFailed as failed:
                        if what == START:
                            call, has_refs = unmade(failed.error, self.actor_name), False
                        else:
                            sent = CallRef(self, -1, method)
                            self._fail(sent, failed.error)
                            instead = self._instead_of(call, _UNCALLED)
                            if instead is not None:
                                self._submit_later(instead, False)
                if not has_refs:
                    try:
                        sent = self.window.start(call, self, CallRef)
                    except ArenaFullError as error:
                        if is_final(error):
                            raise
                        call, has_refs = given, had_refs  # it waits
                    except SerializationError as error:
                        raise blame_call(error, self.actor_name, call) from error.__cause__
            if sent is not None:
                sent.method = method
                ref = sent
            elif not gone:
                ref = self._submit_later(call, has_refs, again)
        if gone:  # without the lock: the thread that is told how it has ended may need that
            raise self.why_gone()
        if result_spec == 1:
            return ref
        return elements_of(ref, count_of(result_spec))

    @property
    def gone(self) -> bool:
        """Whether the process at the other end is no more, or the session: nothing can be sent here
        again."""
        if self._process.ended and not self._is_control:
            return True
        if self._to_itself and self._process.loop_over:
            return True
        return bool(self._refusal) or self._is_dead

    @property
    def _is_dead(self) -> bool:
        return self._process.process_table.gone(self.actor_slot, self._incarnation)

    def why_gone(self) -> ConveyorError:
        if self._process.ended and not self._is_control:
            return ending.error()
        if self._to_itself and self._process.loop_over:
            text = (
                f"actor {self.actor_name} is ending, and begins no more calls: nor one of its own"
            )
            return ActorDiedError(text, self.actor_name)
        if self._why_refused is not None and self._refusal:
            with self.lock:
                if self._why is None:
                    self._why = self._why_refused()
            return self._why
        return self._on_death()

    def fail_pending(self) -> None:
        """Fail the calls that wait to be sent: the session is over. If another thread sends just now,
        whoever waits for a call does this instead: the code of a value that is being sent may take its time,
        or wait for somebody."""
        if self.lock.acquire(blocking=False):
            try:
                self.flush()
            finally:
                self.lock.release()

    def leave(self) -> None:
        """Keep the results that have come, for who still asks, and take no more."""
        try:
            self.window.leave()
        except SerializationError as error:  # the ring is broken: nothing is to be had of it
            logger.warning("%s: %s", self.actor_name, str(error))

    def _submit_later(self, call: Call, has_refs: bool, again: bool = False) -> CallRef:
        ref = CallRef.waiting(self, call[0])
        try:
            waits, taken = take(call)
        except SerializationError as error:
            raise blame_call(error, self.actor_name, call) from error.__cause__
        with self.lock:
            site = users_site() if has_refs else None
            self._pending.put(WaitingCall(ref, waits, taken, site), again)
            self.flush()
            waiting = bool(self._pending)
        if waiting:
            try:
                self._pump.add(self)
            except BaseException:
                # Nobody would send it: then it shall not be sent later, by chance, either.
                with self.lock:
                    if withdraw(self._pending, ref):
                        if not self._pending:
                            self._end_memory_wait()
                        raise
            self.flush()  # what it waits for may have come before the pump knew of it
        return ref

    def send(self, take: Callable[[deque[WaitingCall]], Sequence[WaitingCall]]) -> None:
        """Send the calls that ``take(pending)`` moves there, which have waited elsewhere; later what cannot
        be sent."""
        with self.lock:
            entries = take(self._pending)
            self.flush()
            waiting = bool(self._pending)
        if waiting:
            try:
                self._pump.add(self)
            except Exception as error:  # nobody would send them
                with self.lock:
                    for one in entries:
                        if self._pending.take_out(one):
                            one.ref._fail(error)
                self._process.notify()
            self.flush()  # what they wait for may have come before the pump knew of them

    def _fail(self, ref: CallRef, error: BaseException) -> None:
        """Fail the call of ``ref``, which cannot be sent because of ``error``."""
        ref._fail(error)
        if not self.gone:  # of a death its other callers are told
            ref._outcome.unseen = Unseen(error)

    def _instead_of(self, call: Call, why: str) -> Call | None:
        return instead_of(call, self._process.process_table, self.actor_slot, why)

    def _replace(self, entry: WaitingCall, instead: Call | None) -> None:
        if instead is None:
            self._pending.take_out(entry)
        else:
            entry.become(CallRef.waiting(self, instead[0]), instead)

    @property
    def outstanding(self) -> int:
        return len(self._pending) + self.window.submitted - self.window.completed

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def flush(self) -> bool:
        """Submit what can be submitted, in order. True if nothing is pending any more.

        To encode a call may run any code. Where that calls the same actor, what waits behind the call that is
        being sent comes before it, up to what that code calls.
        """
        if self._pending and self.gone:
            self.why_gone()  # which may wait until that is known: not with the lock
        with self.lock:
            while (entry := self._pending.first()) is not None:
                try:
                    if not self._send_first(entry):
                        return False
                finally:
                    entry.sending = False
            if self._pending:
                return False
            self._end_memory_wait()
        self._pump.sent(self)
        return True

    def _send_first(self, entry: WaitingCall) -> bool:
        """Send a call that is pending, or complete it otherwise. False if it has to wait."""
        ref, call, taken = entry.ref, entry.call, entry.taken
        # Another one may lack an argument, and nothing is to overtake it as long as it is only looked at.
        entry.sending = entry.site is None
        if ref._number >= 0:  # it was sent, and an interrupt came before it was taken out
            self._pending.take_out(entry)
            return True
        if ref._outcome is not EMPTY:  # it was cancelled while it was being sent, which had no room
            self._replace(entry, self._instead_of(call, _CANCELLED))
            return True
        if entry.site is not None and lacked(call) is not None:
            self._end_memory_wait()  # it may be another's that was first
            return False
        if self._memory_wait is not None and self._memory_wait.order != ref.order:
            self._end_memory_wait()  # another one was first, and was cancelled
        if self._memory_wait is None and not self._process.shortage.is_next(ref.order):
            self._begin_memory_wait(ref)
        if self._memory_wait is not None and not (self._memory_wait.ready() or self.gone):
            return False
        if not entry.sending:
            entry.sending = True
            if entry.ref is not ref or ref._number >= 0 or ref._outcome is not EMPTY:
                return True  # code that has run meanwhile has sent or cancelled it
        seen = self._process.inbox.count
        try:
            if self.gone:
                raise self.why_gone()
            if entry.site is not None:
                call = with_values(call, self._actor, self._process, entry.site)
                entry.become(ref, call, taken)
                ref.passes_on = True
            if self._memory_wait is not None:
                self._memory_wait.tries()
            number = self._submit(taken.with_later(call) if taken else call, ref)
        except BaseException as error:  # the call's outcome: an argument failed, say
            if not is_of_value(error):
                raise
            if (call is UNSAID or call[4] == STOP) and not self.gone:
                return False  # no memory to say it with: soon
            if isinstance(error, ArenaFullError) and self._awaits_memory(ref, error):
                return True
            outcome = outcome_of(error)
            if isinstance(error, SerializationError):
                outcome = blame_call(error, self.actor_name, call)
            # Its traceback refers to frames that have the arguments: those would keep their memory until
            # garbage is collected.
            outcome = outcome.with_traceback(None)
            _, args, _, _, what = call
            if what == START and not self.gone:
                # Without a constructor's call whoever calls the actor would wait for ever.
                entry.become(
                    ref, UNSAID if type(args[0]) is Unmade else unmade(outcome, self.actor_name)
                )
                return True
            if ref._outcome is EMPTY:
                self._fail(ref, outcome)
            instead = None
            if not (self._is_control or what in (START, MISSED) or self.gone):
                instead = self._instead_of(call, _UNCALLED)
            self._replace(entry, instead)
            # So do those of what has caused it, and this is one.
            del entry, ref, call, taken, args, outcome
            self._process.notify()
            return True
        if number < 0:
            self._end_memory_wait()
            return False
        ref._number = number
        self._pending.take_out(entry)
        if ref._outcome is not EMPTY:  # it was cancelled meanwhile
            self._cancel_sent(ref)
            self._process.process_table.notify(self.actor_slot, self._mailbox_bit)
        if self._process.inbox.count != seen:
            # Whoever was notified of its end may have looked before it could be told whose it is.
            self._process.notify()
        self._end_memory_wait()  # the next one has one of its own
        return True

    def _submit(self, call: Any, ref: CallRef) -> int:
        if not ref.passes_on:
            return self.window.submit(call)
        before = _core.Arena.note_given(_core.Arena.AS_MUCH)
        try:
            return self.window.submit(call)
        finally:
            _core.Arena.note_given(before)

    def _end_memory_wait(self) -> None:
        """End the wait for memory: nothing waits here any more."""
        wait, self._memory_wait = self._memory_wait, None
        if wait is not None:
            wait.end()

    def _awaits_memory(self, ref: CallRef, error: ArenaFullError) -> bool:
        """Whether the call of ``ref``, which could not be sent because of ``error``, waits for memory."""
        wait = self._memory_wait
        if wait is not None and wait.order == ref.order:
            return wait.goes_on(error)
        if is_final(error):
            return False
        self._begin_memory_wait(ref).learn(error)
        return True

    def _begin_memory_wait(self, ref: CallRef) -> MemoryWait:
        wait = self._process.shortage.begin(order=ref.order)
        other, self._memory_wait = self._memory_wait, wait
        if other is not None:
            other.end()
        return wait

    def under_way(self) -> Blockers:
        if self._is_control or self.window.submitted == self.window.completed or self.gone:
            return ()
        text = f"{self.actor_name}, whose calls hold memory that is needed"
        return ((self.actor_slot, CALLS, text),)

    def _cancel_sent(self, ref: Ref) -> None:
        self._limits.cancel(ref._number)
        self.window.drop_cancelled(ref._number, 0)

    # Source protocol

    def cancel(self, ref: Ref) -> bool:
        error = cancelled_error(self.describe(ref))
        with self.lock:
            if ref._outcome is not EMPTY:  # it has come while this waited for the lock
                return False
            entry = self._pending.find(ref) if ref._number < 0 else None
            try:
                if entry is not None and not entry.sending:
                    self._replace(entry, self._instead_of(entry.call, _CANCELLED))
                if ref._number >= 0:
                    self._cancel_sent(ref)
            finally:
                if ref._outcome is EMPTY:
                    ref._fail(error)
                self._process.notify()
        if ref._number >= 0:  # it may be a coroutine that runs
            self._process.process_table.notify(self.actor_slot, self._mailbox_bit)
        else:
            self.flush()  # others may have waited behind it
        return True

    def why_not_run(self, ref: Ref, overdue: bool) -> BaseException:
        return ending.error() if self._process.ended else cancelled_error(self.describe(ref))

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        look = _FIRST_LOOK if timeout is None else min(timeout, _FIRST_LOOK)
        if ref._number < 0 < look:
            # What waits here is sent, if the first argument that is lacking comes soon.
            with self._pump.attending(self, True):
                await_soon(self.lacks(), look)
                self.flush()
        if ref._number >= 0:
            value = self.window.get(ref, look)
            if value is not EMPTY:
                return value
        time_limit, queued = TimeLimit(timeout), ref._number < 0
        waiting = self._process.wait_registry.waiting(
            lambda n: self.blockers(ref, n), queued, time_limit.bounded
        )
        with waiting as wait, self._pump.attending(self, queued) as attending:
            return self._wait(ref, time_limit, wait, attending)

    def lacks(self) -> Ref | None:
        """Return the argument that the first waiting call lacks; all calls behind it wait for it, too."""
        return lacked_now(self._pending, self.lock)

    def _wait(
        self, ref: Ref, time_limit: TimeLimit, wait: Wait | None, attending: _core.Attending
    ) -> Any:
        process_table, inbox = self._process.process_table, self._process.inbox
        while True:
            seen, requested = inbox.count, inbox.requested
            deaths = process_table.deaths
            if wait is not None and wait.serve is not None:
                wait.serve()
            value = self._look(ref)
            if value is not EMPTY or ref._outcome is not EMPTY:
                return value
            step = time_limit.step()
            if wait is not None:
                step = sooner(step, wait.look(requested))
            if ref._number < 0:
                inbox.wait(seen, step)
            else:
                attending.end()
                # A refusal changes nothing that the window looks at: it only rings.
                every_notification = wait is not None or self._refusal is not None
                value = get_or_wait(ref, inbox, seen, step, deaths, every_notification)
                if value is not EMPTY:
                    return value
            time_limit.check(lambda: self.describe(ref), self.doing)

    def _look(self, ref: Ref) -> Any:
        """Return the result, if it is here. Its outcome may be there instead: it has been cancelled."""
        if ref._number < 0:
            # Not submitted yet: its turn comes when others complete, and that rings our doorbell.
            self.flush()
            if ref._number < 0:
                return EMPTY
        # Looked for before the death is: what it had sent before it died is still there.
        gone = self.gone
        value = self.window.take(ref._number, 0)
        if value is EMPTY and gone and ref._outcome is EMPTY:
            if not self._is_dead:  # it may still come, and would be kept as long as a ref is held
                self.window.drop(ref._number, 0)
            raise final(self.why_gone())
        return value

    def blockers(self, ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
        method = ref.method if isinstance(ref, CallRef) else ""
        if ref._number < 0:
            # Who has the lock may wait for what is heard on the thread that asks for another process.
            if not self.lock.acquire(blocking=again is None):
                return ()
            try:
                first = first_lacked(self._pending)
            finally:
                self.lock.release()
            if first is not None:
                return blockers_of(first, question, again)
            wait = self._memory_wait  # another thread may end it
            if wait is not None:
                return wait.causes()
        if self._is_control:
            return ()
        # One that has not been sent comes after others.
        work = CALLS if ref._number < 0 else call_of(*self._caller, ref._number)
        return ((self.actor_slot, work, f"{self.actor_name}.{method}"),)

    def is_ready(self, ref: Ref) -> bool:
        if ref._number < 0:
            # Whoever pumps sends it on. Not here: this is asked while another link is flushed.
            return ref._outcome is not EMPTY
        return self.window.ready(ref._number, 0) or self.gone

    def has_failed(self, ref: Ref) -> bool:
        if ref._number < 0:
            return False
        if self.window.ready(ref._number, 0):
            return self.window.failed(ref._number, 0)
        return self.gone

    def describe(self, ref: Ref) -> str:
        method = ref.method if isinstance(ref, CallRef) else "call"
        if self._is_control:
            return f"{self.actor_name} to take note of {method}"
        number = f" (call {ref._number})" if ref._number >= 0 else " (not sent yet)"
        return f"{self.actor_name}.{method}{number}"

    def doing(self) -> str:
        return f"{self.does()}{held_up(self)}{self._crowd()}"

    def _crowd(self) -> str:
        """Describe why calls that lack nothing wait here."""
        waiting = len(self._pending)
        if not waiting or self.gone or self.lacks() is not None:
            return ""
        calls = "1 call waits" if waiting == 1 else f"{waiting} calls wait"
        wait = self._memory_wait
        if wait is not None:
            return f"; {calls} at the caller for memory: {wait.why}"
        if self.window.has_room:
            return ""
        return (
            f"; {calls} at the caller: at most {self._depth} calls of one caller are with an actor at once, "
            "or as many as its max_concurrency= says"
        )

    def does(self) -> str:
        if self._process.ended:
            return "the session has ended"
        if self._refusal is not None and self._refusal:
            return f"{self.actor_name} does not take calls from here"
        if self.gone:
            return f"{self.actor_name} is dead"
        return f"{self.actor_name} is {self._process.describe(self.actor_slot, self._label)}"


#: How long a wait may last before it is worth preparing to log and describe it.
_FIRST_LOOK = 0.005
