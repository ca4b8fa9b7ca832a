"""Waiting at a memory cap for what others are about to let go of."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from conveyor import _core
from conveyor.exceptions import ArenaFullError, SystemLimitError
from conveyor.pauses import Pauses
from conveyor.runtime.deadlock import WaitRegistry
from conveyor.runtime.threads import Background
from conveyor.runtime.wait_graph import CALLS, STEPS, Blockers
from conveyor.runtime.waiting import Alarm, TimeLimit, wait_within

#: How long those who hold memory are given to let go of it once they have nothing to do any more: a value may
#: be held a moment longer than its call takes.
_RELEASE_NS = 500_000_000
#: How long a value waits, since memory came back last, where nobody runs but the program, which may let go of
#: what it holds at any time; and where that waits for this library, as in ``get``.
_PROGRAM_NS = 60_000_000_000
_WAITING_NS = 3_000_000_000
#: How long a result waits, while the program does, before it may cross the cap.
_CROSSES_NS = 200_000_000
#: Each that has waited in vain has the next one wait half as long, at most so often, until one is sent.
_MOST_IN_VAIN = 5
#: Between two looks at who holds memory, at most and at least.
_LOOK_NS = 2_000_000_000
_LEAST_NS = 50_000_000

#: The slot of the driver, and of all actors of the inline engine.
DRIVER = 0

#: Kinds of waits for memory in a process: none; among others, work that is to be begun; results alone.
_NOTHING, _BEGINS, _RESULTS = range(3)

#: Cap that has been reached (``ArenaFullError._cap``): none that could leave room, or a graph's.
_NONE, _GRAPH = 0, 1


def is_final(error: ArenaFullError) -> bool:
    """Whether the value is too large, whatever others let go of."""
    return error._cap == _NONE


class Shortage:
    """Values of one process that wait for memory.

    A result crosses the cap where arguments fill it (``Arena::given``). So it waits for nothing but results,
    and values that methods keep.
    """

    def __init__(
        self,
        process_table: _core.ProcessTable,
        inbox: _core.Inbox,
        arena: _core.Arena,
        alarm: Alarm,
        wait_registry: WaitRegistry,
        under_way: Callable[[], Sequence[tuple[int, int, str]]],
    ) -> None:
        """``under_way()``: the works that this process has given to actors."""
        self._process_table = process_table
        self._inbox = inbox
        self._arena = arena
        self._alarm = alarm
        self._wait_registry = wait_registry
        self._under_way = under_way
        self._lock = threading.RLock()  # a signal handler may send, too
        self.waits: set[MemoryWait] = set()
        # Numbers of waits for results, and of waits with an order. They are counted: with the lock nothing is
        # allocated, which might collect garbage, whose finalizers may wait for a link's lock.
        self._results = 0
        self._ordered = 0
        #: How many have waited in vain since one was sent.
        self.in_vain = 0

    def begin(
        self,
        budget: Callable[[], _core.MemoryBudget | None] = lambda: None,
        order: int | None = None,
        blocks: bool = False,
    ) -> MemoryWait:
        """Begin to wait for memory. Until the wait has ended all processes give back what is free. The send
        is to be tried once more now. ``budget()``: the graph's, if it is one's. ``order``: of those that have
        one, the least goes first. ``blocks``: the calling thread does nothing else meanwhile."""
        return self._add(MemoryWait(self, budget, order=order, blocks=blocks))

    def _add(self, wait: MemoryWait) -> MemoryWait:
        with self._lock:
            self.waits.add(wait)
            self._results += wait.is_result
            self._ordered += wait.order is not None
            self._tell()
        return wait

    def end(self, wait: MemoryWait) -> None:
        with self._lock:
            if wait not in self.waits:
                return
            self.waits.discard(wait)
            self._results -= wait.is_result
            self._ordered -= wait.order is not None
            self._tell()
            others = self._ordered
        if wait.order is not None and others:
            self.notify()  # another one's turn has come

    def _tell(self) -> None:
        """Tell the other processes what waits here."""
        reported = None
        # Again if a signal handler has begun or ended a wait meanwhile.
        while reported != (what := self._what()) and not self._inbox.inherited:
            self._process_table.starve(self._inbox.slot, what)
            reported = what

    def _what(self) -> int:
        if not self.waits:
            return _NOTHING
        return _RESULTS if self._results == len(self.waits) else _BEGINS

    def result(
        self, budget: Callable[[], _core.MemoryBudget | None], until: Callable[[], int]
    ) -> MemoryWait:
        """Begin to wait for memory for a result. ``until()``: see ``instance.until``."""
        return self._add(MemoryWait(self, budget, until, is_result=True))

    def made(self, blocks: bool) -> MemoryWait:
        """Begin to wait for memory for something that the program makes, or a method of an actor. ``blocks``:
        see :meth:`begin`."""
        if self._inbox.slot == DRIVER:
            return self.begin(blocks=blocks)
        return self.result(lambda: None, lambda: 0)

    def allocate(self, size: int) -> _core.Buffer:
        """Return memory of so many bytes, as soon as there is some."""
        if _in_event_loop():  # which would stand still
            return self._arena.allocate(size)
        found: list[_core.Buffer] = []

        def allocate() -> None:
            found.append(self._arena.allocate(size))

        with Sending(allocate, lambda: self.made(True)) as sending:
            self.finish(sending)
        return found[0]

    def finish(self, sending: Sending) -> None:
        """Send; this thread sleeps until there is memory."""
        if not sending.try_once():
            self._sleep(sending, sending.try_once)

    def pause(
        self, error: ArenaFullError, before: MemoryWait | None, begin: Callable[[], MemoryWait]
    ) -> MemoryWait:
        """Return when what had no memory, because of ``error``, is to be tried again, with what is passed as
        ``before`` next time, and to be ended at last. Raises ``ArenaFullError`` where nobody lets go of any,
        and ``DeadlockError``."""
        if before is None:
            return begun(error, begin)
        before.note(error)
        self._sleep(before, before.ready)
        before.tries()
        return before

    def _sleep(self, what: Sending | MemoryWait, ready: Callable[[], bool]) -> None:
        with self._wait_registry.waiting(lambda _: what.causes(), True) as noted:
            wait_within(
                self._inbox, ready, TimeLimit(None), lambda: "memory", lambda: what.why, noted
            )

    def is_next(self, order: int) -> bool:
        """Whether nothing with a lesser order waits that has not tried since the last news."""
        if not self._ordered:
            return True
        news = self.news
        return not any(
            one.order is not None and one.order < order and one.tried != news
            for one in tuple(self.waits)
        )

    def notify(self) -> None:
        """Have all that waits in this process look."""
        self._process_table.notify(self._inbox.slot, _core.ATTENTION_BIT)

    def has_later(self, wait: MemoryWait) -> bool:
        """Whether another one may go now that ``wait`` has tried in vain."""
        return wait.order is not None and any(
            one.order is not None and one.order > wait.order and one.tried != wait.tried
            for one in tuple(self.waits)
        )

    @property
    def news(self) -> int:
        """Count that changes when memory has been given back."""
        return self._arena.news

    @property
    def returned(self) -> int:
        """Count of values that were let go of while somebody starved. A try that fails gives back what it has
        got by then, which is news, and nothing that was let go of."""
        return self._arena.returned

    def blockers(self, budget: _core.MemoryBudget | None) -> Blockers:
        """Return who may let go of memory, of that budget or of the session: any of them. Empty: nobody, or
        the program. Who waits for memory for a result itself lets go of none."""
        process_table = self._process_table
        held = {slot for slot in self._holders(budget) if process_table.starving(slot) != _RESULTS}
        found = [one for one in self._under_way() if one[0] in held] if held else []
        for slot in held - {slot for slot, _, _ in found} - {self._inbox.slot}:
            if not process_table.is_idle(slot):
                text = f"{process_table.name(slot)}, which holds memory that is needed"
                found += [(slot, STEPS, text), (slot, CALLS, text)]
        return tuple(found)

    def program_holds(self, budget: _core.MemoryBudget | None) -> bool:
        """Whether the program holds some."""
        return DRIVER in self._holders(budget)

    def _holders(self, budget: _core.MemoryBudget | None) -> set[int]:
        held = set(self._arena.holders(budget))
        if budget is None:
            for slot in range(self._process_table.used):
                if slot != self._inbox.slot and self._process_table.memory(slot):
                    held.update(self._process_table.holders(slot))
        return held

    def is_all_of_the_program(self) -> bool:
        """Whether the program has no thread but one."""
        threads = [t for t in threading.enumerate() if not isinstance(t, Background)]
        return self._inbox.slot == DRIVER and len(threads) == 1

    @property
    def program_waits(self) -> bool:
        """Whether the program's main thread waits for something of this library."""
        return self._process_table.is_waiting(DRIVER)

    def less(self, time: int) -> int:
        """Return how much of ``time`` a value waits, after those that have waited in vain."""
        return time >> min(self.in_vain, _MOST_IN_VAIN)

    @property
    def has_nothing_out(self) -> bool:
        """Whether no value of this process is in use."""
        return self._arena.has_nothing_out

    @property
    def over(self) -> bool:
        """Whether the session ends."""
        return self._process_table.is_exiting(DRIVER)

    def notify_at(self, wait: MemoryWait) -> None:
        """Notify this process's doorbell at the deadline of ``wait``."""
        with suppress(SystemLimitError):  # no thread is to be had: then the next ring will do
            self._alarm.add(wait)


def begun(error: ArenaFullError, begin: Callable[[], MemoryWait]) -> MemoryWait:
    """Return the wait of what had no memory because of ``error``, which is to be tried once more now."""
    if is_final(error):
        raise error.with_traceback(None)  # which refers to frames that have the values
    wait = begin()
    wait.learn(error)
    wait.tries()
    return wait


class Sending:
    """Something that is sent as soon as there is memory for it."""

    def __init__(
        self,
        send: Callable[[], object],
        begin: Callable[[], MemoryWait],
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """``send()`` returns ``False`` if it could not, for want of something else. ``over()``: whether it
        will raise, whatever memory there is."""
        self._send = send
        self._begin = begin
        self._over = over
        #: Wait for memory; ``None`` before memory was short.
        self.wait: MemoryWait | None = None

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        wait, self.wait = self.wait, None
        if wait is not None:
            wait.end()

    @property
    def why(self) -> str:
        """The error that it would be."""
        return "" if self.wait is None else self.wait.why

    def causes(self) -> Blockers:
        return () if self.wait is None else self.wait.causes()

    def ready(self) -> bool:
        """Whether to try again, as far as memory goes."""
        return self.wait is None or self.wait.ready() or self._over()

    def try_once(self) -> bool:
        """Send, if there is memory. Raises what ``send()`` raises, and ``ArenaFullError`` if nobody lets go
        of any."""
        if not self.ready():
            return False
        while True:
            crossing = False
            if self.wait is not None:
                self.wait.tries()
                crossing = self.wait.crossing
            try:
                if crossing:
                    _core.Arena.let_first_cross(True)
                return self._send() is not False
            except ArenaFullError as error:
                if self.wait is not None:
                    self.wait.note(error)
                    return False
                self.wait = begun(error, self._begin)
            finally:
                if crossing:
                    _core.Arena.let_first_cross(False)


class MemoryWait:
    """Wait for memory of one value.

    It goes on as long as somebody who holds memory has something to do, and may so let go of it; and for a
    time where the program holds some. When that lets go of it is not known.
    """

    def __init__(
        self,
        shortage: Shortage,
        budget: Callable[[], _core.MemoryBudget | None],
        until: Callable[[], int] = lambda: 0,
        order: int | None = None,
        is_result: bool = False,
        blocks: bool = False,
    ) -> None:
        self._shortage = shortage
        self._budget = budget
        self._until = until
        #: Place of this wait among those that have one.
        self.order = order
        self.is_result = is_result
        self._blocks = blocks
        self._of_graph = False
        #: The error that it would be.
        self.why = "others go first"
        self._in_vain = False
        #: Whether the next try crosses the cap, and whether this one does.
        self._may_cross = self.crossing = False
        self._crossed_at = 0
        # Whether it was found to be in vain while it waited. The program does not wait where it tries.
        self._is_over = False
        self._wanted = True
        # The last time that somebody ran who might let go of memory, and that a value was let go of.
        self._hoped_at = self._news_at = _core.monotonic_ns()
        self._program_held = False
        self._released_at = 0  # 0: it has held none
        self._waiting_since = 0  # of the program, as far as it was seen; 0: it went on
        #: The news since which it was tried.
        self.tried = -1
        self._returned = shortage.returned
        # A try that fails gives back what it had got by then, which is news as well.
        self._pauses = Pauses(0.002, 0.1)
        self._not_before = 0
        self._next_look_ns = 0
        self._due = False
        #: When the alarm rings, in nanoseconds of the monotonic clock; 0: not as things are.
        self.deadline = 0

    def ready(self) -> bool:
        """Whether to try again. If so, that stays so until it is tried."""
        self._due = self._due or self._is_due()
        return self._due

    def _is_due(self) -> bool:
        if self.tried != self._shortage.news and (
            self.order is None or self._shortage.is_next(self.order)
        ):
            if _core.monotonic_ns() >= self._not_before:
                return True
            self._notify_at(self._not_before)
        # That takes its time, and each ring asks.
        now = _core.monotonic_ns()
        if now < self._next_look_ns:
            self._notify_at(self._next_look_ns)
            return False
        self._next_look_ns = now + _LEAST_NS
        self._is_over = self._is_in_vain()
        if crosses_at := self._crosses_at():
            self._may_cross = now >= crosses_at
            self._notify_at(crosses_at)
        return self._is_over or self._may_cross

    def tries(self) -> None:
        """Note that the send is about to be tried."""
        self._due = False
        self.crossing, self._may_cross = self._may_cross, False
        if self.crossing:
            self._crossed_at = _core.monotonic_ns()
        self.tried = self._shortage.news
        if self._returned != self._shortage.returned:
            self._returned = self._shortage.returned
            self._news_at = _core.monotonic_ns()
            self._is_over = False
        self._in_vain = self._is_over or self._is_in_vain()

    def learn(self, error: ArenaFullError) -> None:
        """Note which memory is short, and who holds it."""
        self.why = str(error)
        self._of_graph = error._cap == _GRAPH

    def goes_on(self, error: ArenaFullError) -> bool:
        """Whether to wait on, after the send has been tried in vain."""
        self.learn(error)
        self._not_before = _core.monotonic_ns() + int(self._pauses.next() * 1e9)
        if self._in_vain and self._wanted:
            self._shortage.in_vain += 1
        if self._shortage.has_later(self):
            self._shortage.notify()
        return not is_final(error) and not self._in_vain

    def note(self, error: ArenaFullError) -> None:
        """Note that the send has been tried in vain; raise ``error`` if it is not to be tried again."""
        if not self.goes_on(error):
            raise error.with_traceback(None)  # which refers to frames that have the values

    def causes(self) -> Blockers:
        """Return who may let go of the memory: any of them. Empty: nobody, or the program as well."""
        if self._program_until(self._news_at) > _core.monotonic_ns():
            return ()
        return self._shortage.blockers(self._held())

    def end(self) -> None:
        """End the wait."""
        if not self._in_vain and self.tried >= 0:
            self._shortage.in_vain = 0
        self._shortage.end(self)

    def _held(self) -> _core.MemoryBudget | None:
        return self._budget() if self._of_graph else None

    def _is_in_vain(self) -> bool:
        until = self._until()
        self._wanted = until >= 0 and not self._shortage.over
        if not self._wanted:
            return True
        if until:
            self._notify_at(until)
        now = _core.monotonic_ns()
        if self._shortage.blockers(self._held()):
            self._hoped_at = now
            if (ends := self._program_until(self._news_at)) > now:
                self._notify_at(ends)  # from then on it may be part of a cycle
            return False
        since = max(self._hoped_at, self._news_at)
        vain_at = max(since + _RELEASE_NS, self._program_until(since))
        # The program may wait by then, or hold none any more.
        self._notify_at(min(vain_at, now + _LOOK_NS))
        return now >= vain_at

    def _program_until(self, since: int) -> int:
        """Return until when the program is expected to let go of some, if it has not since then, or what it
        has let go of to be there; 0: it holds none."""
        shortage = self._shortage
        if not shortage.program_holds(self._held()):
            if self._program_held:  # it takes its time until what was let go of is there to be had
                self._program_held = False
                self._released_at = _core.monotonic_ns() + _RELEASE_NS
            return self._released_at
        self._program_held = True
        if (self._blocks or self.is_result) and shortage.is_all_of_the_program():
            return 0  # a result of the inline engine's waits in its thread
        if not shortage.program_waits:
            self._waiting_since = 0
            return since + shortage.less(_PROGRAM_NS)
        self._waiting_since = self._waiting_since or _core.monotonic_ns()
        return max(since, self._waiting_since) + shortage.less(_WAITING_NS)

    def _crosses_at(self) -> int:
        """Return when a result may cross the cap; 0: not as things are. It may where the program waits and
        its own process has no other value: the others may hold all memory with results that the program gets
        later, and let go of none before it has this one."""
        shortage = self._shortage
        if not (self.is_result and self._waiting_since and shortage.has_nothing_out):
            return 0
        return max(self._news_at, self._waiting_since, self._crossed_at) + _CROSSES_NS

    def _notify_at(self, time: int) -> None:
        now = _core.monotonic_ns()
        if time > now and not now < self.deadline <= time:
            self.deadline = time
            self._shortage.notify_at(self)


def _in_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None
