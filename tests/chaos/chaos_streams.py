"""The items of generators: of graphs, and of ordinary calls that go on for as long as a round does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_actors import AsyncChaos, Step
from chaos_around import SOON, Running, Wrong
from chaos_graphs import STREAMING, Stream
from chaos_judge import Judge
from chaos_values import digest, random_payload

import conveyor
from conveyor import StreamRef
from conveyor.exceptions import (
    ActorDiedError,
    ExecutionCancelledError,
    TaskError,
    WaitTimeoutError,
)


@dataclass
class Call:
    """An ordinary call of a generator. ``expected``: the digests of its items."""

    place: int
    stream: Any
    expected: tuple[int, ...]
    where: str
    taken: int = 0
    cancelled: bool = False


class Streams(Judge):
    calls: list[Call]

    # Of graphs

    def _check_items(
        self,
        running: Running,
        number: int,
        place: int,
        stream: StreamRef,
        timeout: float | None = None,
        most: int = 1 << 62,
    ) -> bool | None:
        """Take ``most`` items. None: not all of them have come within ``timeout``, each."""
        where = f"{running.spec.name}, execution {number}, stream {place}"
        expected = running.expected[number][place]
        for _ in range(most):
            since = self._doing(f"an item of {where}")
            try:
                value = stream.next(timeout)
            except StopIteration:
                self._check_end(running, number, place)
                return True
            except WaitTimeoutError as error:
                self._check_timeout(error, running, timeout, where)
                return None
            except BaseException as error:
                self._check_error(error, running, number, expected, since, where)
                if isinstance(error, ActorDiedError):
                    running.uncounted.add(place)
                if running.exact and isinstance(error, TaskError):
                    self._check_all_taken(running, number, place)
                return True
            self._check_item(running, number, place, value)
        return True

    def _check_item(self, running: Running, number: int, place: int, value: Any) -> None:
        """``value`` is the next item."""
        expected = running.expected[number][place]
        assert isinstance(expected, Stream)
        taken = running.taken.get((number, place), 0)
        where = f"{running.spec.name}, execution {number}, stream {place}, item {taken}"
        if taken is not None and taken >= len(expected.items):
            raise Wrong(f"{where}: there are no more than {len(expected.items)}")
        if running.exact and place in running.uncounted:
            if taken is not None:
                running.taken[number, place] = taken + 1
            return
        if taken is None:
            if digest(value) not in expected.items:
                raise Wrong(f"{where}: no item of it")
            return
        self._check_value(value, expected.items[taken], where, keep=self.rng.random() < 0.2)
        running.taken[number, place] = taken + 1
        self.tally.items += 1

    def _check_end(self, running: Running, number: int, place: int) -> None:
        """The stream has ended without an error."""
        expected = running.expected[number][place]
        assert isinstance(expected, Stream)
        if running.exact and place in running.uncounted:
            return
        if running.exact and expected.failed is not None:
            raise Wrong(f"{running.spec.name}, execution {number}: no error, not {expected.failed}")
        self._check_all_taken(running, number, place)

    def _check_all_taken(self, running: Running, number: int, place: int) -> None:
        expected = running.expected[number][place]
        assert isinstance(expected, Stream)
        taken = running.taken.get((number, place), 0)
        if taken is not None and taken != len(expected.items):
            raise Wrong(
                f"{running.spec.name}, execution {number}, stream {place} has ended after {taken} "
                f"items of {len(expected.items)}"
            )

    def _check_all(self, running: Running, number: int, place: int, value: Any, where: str) -> None:
        """``value`` is what ``get`` has given: of a stream, all items that were left."""
        if not isinstance(running.expected[number][place], Stream):
            self._check_value(value, running.expected[number][place], where)
            return
        for item in value:
            self._check_item(running, number, place, item)
        self._check_end(running, number, place)

    def _take_some(self, running: Running, number: int) -> None:
        """Some items of a stream, which may then be dropped."""
        rng, refs = self.rng, running.pending[number]
        places = [place for place in running.spec.streams if refs[place] is not None]
        if not places:
            return
        place = rng.choice(places)
        timeout = rng.choice([0, 0.0005, 0.002])
        self._check_items(running, number, place, refs[place], timeout, rng.randint(1, 5))
        # Where it is known how often each task runs, all of them have to begin.
        if not running.exact and rng.random() < 0.4:
            refs[place] = None
            self.tally.streams_dropped += 1
            running.dropped = True

    def _open_streams(self, running: Running) -> bool:
        return any(isinstance(ref, StreamRef) for refs in running.pending.values() for ref in refs)

    def _take_what_is_in_the_way(self, running: Running, upto: int | None = None) -> None:
        """Take the streams of executions until ``upto``: what comes behind them may wait for that."""
        before = sorted(running.pending) if upto is None else sorted(
            number for number in running.pending if number <= upto
        )  # fmt: skip
        self._take_in_turns(running, {number: running.pending[number] for number in before})

    def _take_in_turns(self, running: Running, refs: Mapping[int, Sequence[Any]]) -> None:
        """All items of all streams, of each as they come."""
        left = [
            (number, place)
            for number, some in refs.items()
            for place in running.spec.streams
            if some[place] is not None
        ]
        while left:
            timeout = None if len(left) == 1 else 0
            left = [
                (number, place)
                for number, place in left
                if self._check_items(running, number, place, refs[number][place], timeout) is None
            ]
            if left:
                self._doing(f"conveyor.wait for one of {len(left)} streams of {running.spec.name}")
                conveyor.wait([refs[number][place] for number, place in left])

    # Of calls

    def _call_stream(self) -> None:
        """Begin one, or go on with one that was begun before."""
        rng = self.rng
        if not self.calls or rng.random() < 0.4:
            self._begin_call(rng.randrange(len(self.members)))
            return
        call = rng.choice(self.calls)
        what = rng.choice(["take", "take", "take all", "cancel", "drop"])
        if what == "drop":
            self.calls.remove(call)
            self.tally.streams_dropped += 1
        elif what == "cancel":
            self._doing(f"cancel of {call.where}")
            call.cancelled = call.stream.cancel() or call.cancelled
        else:
            self._take(call, rng.randint(1, 5) if what == "take" else 1 << 62)

    def _begin_call(self, place: int) -> None:
        rng, member = self.rng, self.members[place]
        step = Step("call", 0, random_payload(rng, 200_000), False, False, 0, rng.choice([0, 1, 9]))
        x = rng.random()
        expected = tuple(digest(item) for item in AsyncChaos().items(step, x))
        method = rng.choice(STREAMING) if member.asynchronous else "items"
        where = f"the stream of {member.name}.{method}"
        since = self._doing(where)
        try:
            stream = getattr(member.handle, method).remote(step, x)
        except ActorDiedError as error:
            self._died(error, None, since, place)
            return
        self.calls.append(Call(place, stream, expected, where))
        self.tally.streams += 1

    def _take(self, call: Call, most: int) -> None:
        for _ in range(most):
            since = self._doing(f"item {call.taken} of {call.where}")
            try:
                value = call.stream.next()
            except StopIteration:
                if call.taken != len(call.expected) or call.cancelled:
                    raise Wrong(f"{call.where} ends with item {call.taken}: {call}") from None
            except ActorDiedError as error:
                self._died(error, None, since, call.place)
            except ExecutionCancelledError as error:
                if not call.cancelled:
                    raise Wrong(f"nobody has cancelled {call.where}") from error
            else:
                if call.cancelled or call.taken >= len(call.expected):
                    raise Wrong(f"{call.where} has another item: {call}")
                self._check_value(value, call.expected[call.taken], call.where)
                call.taken += 1
                self.tally.items += 1
                continue
            self.calls.remove(call)
            return

    def _finish_calls(self) -> None:
        for call in list(self.calls):
            if self.rng.random() < 0.7:
                self._take(call, 1 << 62)
        self.calls.clear()

    def _check_closed(self) -> None:
        """Nobody holds a stream any more: every generator has ended, also those that were dropped."""
        for member in self.members:
            if member.dead:
                continue
            self._doing(f"the end of the generators of {member.name}")
            end = time.monotonic() + SOON
            while open_ones := member.handle.streaming.remote().get():
                if time.monotonic() > end:
                    raise Wrong(f"{open_ones} generators of {member.name} go on for nobody")
                time.sleep(0.001)
