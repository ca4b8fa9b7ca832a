"""References to what generators yield: what ``execute`` and ``.remote()`` return for them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from conveyor import _core
from conveyor.checks import check_timeout, deadline_of, left_until
from conveyor.codec import Reader
from conveyor.exceptions import SerializationError
from conveyor.later import LaterModule
from conveyor.refs.ref import EMPTY, Ref, Source, asyncio_waits, blockers_of
from conveyor.refs.together import look_at_others
from conveyor.runtime import context
from conveyor.runtime.process import Process
from conveyor.runtime.wait_graph import Blockers
from conveyor.runtime.waiting import PassingOn, TimeLimit, wait_within
from conveyor.typevars import ItemT
from conveyor.user_frames import trimmed

if TYPE_CHECKING:
    from conveyor.runtime.protocol import Runtime

# Of a higher layer.
fetching: Any = LaterModule("conveyor.direct.fetching")


#: No execution has such a number.
_NOTHING = (1 << 64) - 1


class StreamReader:
    """Items of one generator task, of all executions of its graph, in the order of the ring."""

    def __init__(
        self,
        reader: _core.Reader,
        process: Process,
        first: int,
        limits: _core.Limits,
        task: int,
    ) -> None:
        """``first``: the number of the first execution. ``task``: the generator's, in ``limits``."""
        self._reader = reader
        self._process = process
        self._limits = limits
        self._task = task
        # Reentrant: a signal handler may end the session, or the graph, in the middle of a `take`.
        self._lock = threading.RLock()
        # Items that came for one execution while another's were looked for.
        self._stash: dict[int, deque[Any]] = {}
        self._over: set[int] = set()
        self._wanted = first
        # Noted by finalizers, which may run in the middle of anything.
        self._ended: deque[int] = deque()

    def take(self, number: int) -> Any:
        """Return the next item of execution ``number``, or ``EMPTY``."""
        try:
            with self._lock:
                item = self._take(number)
        finally:
            if self._ended:
                self._tidy()
        if type(item) is _Broken:
            raise item.take_error()
        return item

    def is_there(self, number: int) -> bool:
        """Whether ``take`` would find an item."""
        try:
            with self._lock:
                if not self._stash.get(number):
                    item = self._take(number)
                    if item is not EMPTY:
                        self._stash.setdefault(number, deque()).appendleft(item)
                return bool(self._stash.get(number))
        finally:
            self._tidy()

    def end(self, number: int) -> None:
        """Let go of the items of execution ``number``: nobody wants more. May be called by a finalizer."""
        self._ended.append(number)
        self._tidy()

    def close(self) -> None:
        """Keep the items that have come and that somebody may want, and take no more."""
        try:
            with self._lock:
                self._reader.want(_NOTHING)  # or generators would run on, with nobody in their way
                try:
                    self._take(-1)
                finally:
                    self._reader.close()
        finally:
            self._tidy()

    def _take(self, number: int) -> Any:
        stash = self._stash.get(number)
        if stash:
            return stash.popleft()
        if 0 <= number < self._wanted or number in self._over:
            return EMPTY  # what has come since, or still comes, would have a hole before it
        reader, others = self._reader, False
        found: Any = EMPTY
        while found is EMPTY and not reader.empty:
            try:
                item = reader.receive()
            except Exception as error:  # it is out of the ring: this is what there is of it
                item = _Broken(error)
            if reader.tag == number:
                found = item
            elif reader.tag >= self._wanted and reader.tag not in self._over:
                self._stash.setdefault(reader.tag, deque()).append(item)
                others = True
        if others:  # another thread may sleep until one of these comes
            self._process.notify()
        return found

    def _tidy(self) -> None:
        """Do the clean-up that finalizers have noted, unless another thread holds the lock. That thread
        calls this afterwards: a finalizer does not wait for it."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._forget(self._ended.popleft())
            finally:
                self._lock.release()

    def _forget(self, number: int) -> None:
        if number < self._wanted or number in self._over:
            return
        self._stash.pop(number, None)
        self._over.add(number)
        while self._wanted in self._over:
            self._over.discard(self._wanted)
            self._wanted += 1
        # By itself: those before it may be wanted for as long as anybody likes.
        self._limits.drop_stream(number, self._task)
        self._reader.want(self._wanted)  # rings the actor
        while self._reader.front >= 0 and (
            self._reader.front < self._wanted or self._reader.front in self._over
        ):
            self._reader.skip()


class _Broken:
    """Item that could not be decoded."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error.with_traceback(None)

    def take_error(self) -> Exception:
        """Return the error, and forget it here: its frames refer to this object."""
        error, self._error = self._error, None
        assert error is not None
        return error


_StreamT = TypeVar("_StreamT", bound="StreamRef[Any]")


class NotYielded:
    """Goes in place of the items of ``task``, which was taken for a generator and has returned ``value``."""

    __slots__ = ("task", "value")

    def __init__(self, task: str, value: Any) -> None:
        self.task = task
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return NotYielded, (self.task, self.value)


class NoGenerator(TypeError):
    """Raised for an item of a call that has returned ``value``, and no generator. ``get`` gives the value."""

    def __init__(self, task: str, value: Any) -> None:
        super().__init__(
            f"{task} has returned a {type(value).__name__}, and no generator: get its value with conveyor.get"
        )
        self.value = value


class StreamRef(Ref[list[ItemT]]):
    """Items that a generator method yields, as they come: ``for item in ref``, ``async for``, or
    ``ref.next(timeout)``. Each item can be had once; ``get`` gives a list of those that are left.

    The generator runs ahead by as many items as its credit allows (``Config.stream_items``) and then waits.
    Dropping the reference closes it. An error that it raises comes after its items.
    """

    __slots__ = ("_back", "_begun", "_collecting", "_gathering", "_is_whole", "_sent")

    def __init__(self, source: Source) -> None:
        super().__init__(source, -1)
        # Items that have been taken and come before the others: by a `get` that ended with an error, or for a
        # call or an execution that this is an argument of.
        self._back: deque[ItemT] = deque()
        self._gathering: _Gathering | None = None
        #: Held once items are gathered: who takes it begins that.
        self._begun = threading.Lock()
        #: Held by the thread that takes all items to send them. Reentrant, for signal handlers.
        self._collecting = threading.RLock()
        self._is_whole = False
        self._sent: Any = EMPTY

    def _look(self) -> Any:
        """Return the next item; ``EMPTY`` if it is not there yet. Raises ``StopIteration`` at the end, and
        any error that the generator has raised."""
        raise NotImplementedError

    def _is_there(self) -> bool:
        """Whether ``_look`` would find something."""
        raise NotImplementedError

    def _may_need_fetch(self) -> bool:
        """Whether something of the next item, which is there, may have to be fetched."""
        return False

    def _blockers(self, question: int) -> Blockers | None:
        """Return who has to do something before the next item comes; see ``runtime.wait_graph``."""
        return ()

    def _describe(self) -> str:
        """Describe the item that is waited for."""
        raise NotImplementedError

    def _doing(self) -> str:
        """Describe what the actor is doing."""
        raise NotImplementedError

    def next(self, timeout: float | None = None) -> ItemT:
        """The next item; waits for it.

        timeout: seconds (``None`` or -1: no limit). Raises ``StopIteration`` at the end,
        ``WaitTimeoutError`` when the time is over (the item can still be had), and what the generator
        has raised, as ``get`` of other references does.
        """
        timeout = check_timeout(timeout)
        if timeout is None:
            return self._next(None)
        return _core.with_fetch_limit(timeout, self._next, timeout)

    def _next(self, timeout: float | None) -> ItemT:
        item: ItemT = self._take_next()
        if item is not EMPTY:
            return item
        runtime = context.current()
        time_limit = TimeLimit(timeout)

        def ready() -> bool:
            nonlocal item
            item = self._take_next()
            if item is EMPTY:
                look_at_others(self)
            return item is not EMPTY

        with runtime.wait_registry.waiting(self._blockers, True, time_limit.bounded) as wait:
            wait_within(runtime.inbox, ready, time_limit, self._describe, self._doing, wait)
        return item

    def _take_next(self) -> Any:
        """Return the next item as ``_look`` does, also one that has been taken before."""
        if self._gathering is None:
            return self._back.popleft() if self._back else self._look()
        with self._gathering.lock:
            return self._back.popleft() if self._back else self._look()

    def __next__(self) -> ItemT:
        __tracebackhide__ = True  # by pytest
        try:
            return self.next()
        except Exception as error:
            raise trimmed(error)  # noqa: B904

    def __iter__(self: _StreamT) -> _StreamT:
        return self

    async def __anext__(self) -> ItemT:
        __tracebackhide__ = True  # by pytest
        try:
            while True:
                if not self.done():
                    wait = asyncio_waits().wait_or_cancel
                    await wait(self.done, self._blockers, self._awaited_as(), self._abandon)
                if self._may_need_fetch():
                    item = await fetching.when_there(self._look_async)
                else:
                    item = self._look_async()
                if item is not EMPTY:  # else another task has taken it
                    found: ItemT = item
                    return found
        except Exception as error:
            raise trimmed(error)  # noqa: B904

    def _look_async(self) -> Any:
        try:
            return self._take_next()
        except StopIteration:
            raise StopAsyncIteration from None

    def __aiter__(self: _StreamT) -> _StreamT:
        return self

    def get(self, timeout: float | None = None) -> list[ItemT]:
        """A list of all items that have not been taken yet; waits for the generator's end.

        If it raises, the items that it had taken can still be had with ``next``.
        """
        end = deadline_of(timeout)
        items: list[ItemT] = []
        while True:
            try:
                items.append(self.next(left_until(end)))
            except StopIteration:
                return items
            except NoGenerator as error:
                value: list[ItemT] = error.value
                return value
            except BaseException:
                self._back.extendleft(reversed(items))
                runtime = context.running()
                if runtime is not None:
                    runtime.process.notify()  # another thread may wait for the next one
                raise

    def _resolved(self, timeout: float | None) -> Any:
        raise TypeError(
            "a generator's reference has no parts, and no memory to be got into: its items have"
        )

    def to_send(self) -> list[ItemT]:
        # The same each time: what it is sent with may not begin yet, and is tried again.
        if self._sent is EMPTY:
            with self._alone():
                if self._sent is EMPTY:
                    with PassingOn():
                        self._sent = self.get()
        sent: list[ItemT] = self._sent
        return sent

    @property
    def is_whole(self) -> bool:
        """Whether ``to_send`` would not wait."""
        return self._is_whole

    def await_whole(self) -> None:
        """Wait for the generator's end, and keep its items for ``to_send``."""
        with self._alone():
            if self._is_whole:
                return
            try:
                self._back.extend(self.get())
            finally:
                self._is_whole = self._is_there()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Context of a thread that takes all items: two at a time would each have some of them."""

        def alone() -> bool:
            return self._collecting.acquire(blocking=False)

        if not alone():
            runtime, time_limit = context.current(), TimeLimit(None)
            # For the same items as the thread that is at it, so that a wait without end is found.
            with runtime.wait_registry.waiting(self._blockers, True, time_limit.bounded) as wait:
                wait_within(runtime.inbox, alone, time_limit, self._describe, self._doing, wait)
        try:
            yield
        finally:
            self._collecting.release()
            running = context.running()
            if running is not None:
                running.process.notify()  # who waits for that looks again

    def gather(self) -> bool:
        """Whether ``to_send`` would not wait. From now on items are taken as they come, until all are here:
        who sends them may have locks, and waits for nobody.

        Raises:
            SystemLimitError: no thread is to be had that would take them.
        """
        if not self._is_whole and self._begun.acquire(blocking=False):
            try:
                gathering = _Gathering(self)
                gathering.go_on_later(context.current())
            except BaseException:
                self._begun.release()
                raise
            self._gathering = gathering
        return self._is_whole

    def _gather(self, lock: threading.RLock) -> bool:
        """Take what is there. Whether more is to come."""
        try:
            with PassingOn():
                while self._is_there():
                    with lock:
                        item = self._look()
                        if item is EMPTY:
                            break
                        self._back.append(item)
            return True
        except (Exception, StopIteration):
            return False  # the end, or an error, which comes again for who sends them

    def __await__(self) -> Generator[Any, None, list[ItemT]]:
        return self._all().__await__()

    async def _all(self) -> list[ItemT]:
        try:
            return [item async for item in self]
        except NoGenerator as error:
            value: list[ItemT] = error.value
            return value

    def done(self) -> bool:
        """Whether the next item, or the end, is there."""
        return bool(self._back) or self._is_there()

    def new_borrow(self, readers: Sequence[Reader]) -> tuple[Any, ...]:
        raise SerializationError(
            f"{self!r} cannot be pickled: its items come to this process. Send a list of them"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._describe()}>"


class _Gathering:
    """Takes the items of a stream as they come. It does not hold the stream: one that nobody has any more is
    closed."""

    __slots__ = ("__weakref__", "_stream", "lock")

    def __init__(self, stream: StreamRef) -> None:
        self._stream = weakref.ref(stream)
        #: Held by who takes an item, so that they keep their order. Reentrant, for signal handlers.
        self.lock = threading.RLock()

    def done(self) -> bool:
        """Whether there is something to take. Items that have been taken do not count."""
        stream = self._stream()
        return stream is None or stream._is_there()

    def go_on_later(self, runtime: Runtime) -> None:
        known, watcher = weakref.ref(self), runtime.watcher

        def go_on() -> None:
            gathering = known()
            if gathering is not None:
                gathering._go_on(runtime)

        watcher.watch(self, lambda: watcher.completions.put(go_on))

    def _go_on(self, runtime: Runtime) -> None:
        stream = self._stream()
        if stream is None:
            return
        if stream._gather(self.lock) and not runtime.watcher.closed:
            self.go_on_later(runtime)
        else:
            stream._is_whole = True
        runtime.process.notify()  # who waits for an item, or for all of them, looks again


class ExecutionStream(StreamRef):
    """The items of one execution of a graph. ``ended`` is the reference to its end."""

    __slots__ = ("_effects", "_ended", "_instead", "_over")

    def __init__(self, ended: Ref, effects: tuple[Ref, ...]) -> None:
        super().__init__(ended._source)
        self._ended = ended
        self._effects = effects
        self._over = False
        #: What the method has returned that was taken for a generator.
        self._instead: NotYielded | None = None

    def _look(self) -> Any:
        if self._instead is None:
            item = self._look_for_item()
            if type(item) is not NotYielded:
                return item
            self._instead = item
        if not self._is_there():
            return EMPTY
        self._check_end()
        raise NoGenerator(self._instead.task, self._instead.value)

    def _look_for_item(self) -> Any:
        """Return the next item as ``_look`` does, or a ``NotYielded``."""
        raise NotImplementedError

    def _has_ended(self) -> bool:
        """Whether ``_end`` would not wait. What the generator has raised waits for no effect."""
        if not self._ended.done():
            return False
        return self._ended.has_failed() or all(effect.done() for effect in self._effects)

    def _check_end(self) -> None:
        """Raise what the task, or an effect, has raised."""
        self._ended.get()
        for effect in self._effects:
            effect.get()

    def _end(self) -> NoReturn:
        """Raise what is left to be raised, after all items have been taken."""
        self._check_end()
        self._over = True
        raise StopIteration

    def _awaited(self) -> Ref:
        """Return the ref that has to be done before the stream is over."""
        return next((ref for ref in (self._ended, *self._effects) if not ref.done()), self._ended)

    def parts(self) -> tuple[Ref, ...]:
        return (self._ended, *self._effects)

    def _blockers(self, question: int) -> Blockers | None:
        return blockers_of(self, question)

    def cancel(self) -> bool:
        return not self._over and self._ended.cancel()

    def cancelled(self) -> bool:
        return self._ended.cancelled()

    def _awaited_as(self) -> Hashable:
        return self._ended._awaited_as()

    def _describe(self) -> str:
        awaited = self._awaited()
        if awaited is self._ended:
            return f"the next item of {self._source.describe(awaited)}"
        return f"the end of a stream, which comes after {self._source.describe(awaited)}"

    def _doing(self) -> str:
        doing: str = self._source.doing()
        return doing


class GraphStream(ExecutionStream):
    """The items of one execution, from an actor that is a process."""

    __slots__ = ("_stream_reader",)

    def __init__(self, stream_reader: StreamReader, ended: Ref, effects: tuple[Ref, ...]) -> None:
        super().__init__(ended, effects)
        self._stream_reader = stream_reader

    def _look_for_item(self) -> Any:
        if self._over:
            raise StopIteration
        # Before the items are looked for: they were all published before the end was.
        ended = self._has_ended()
        item = self._stream_reader.take(self._ended._number)
        if item is not EMPTY:
            return item
        if not ended:
            return EMPTY
        try:
            self._ended.get()
        except BaseException:
            if self._ended._outcome is not EMPTY:  # else it can be tried again
                self._stream_reader.end(self._ended._number)
            raise
        # Where another actor's death made it look done, its end may have come only now, behind items.
        item = self._stream_reader.take(self._ended._number)
        if item is not EMPTY:
            return item
        self._stream_reader.end(self._ended._number)
        self._end()

    def _is_there(self) -> bool:
        return self._over or self._has_ended() or self._stream_reader.is_there(self._ended._number)

    def __del__(self) -> None:
        # Not there if __init__ has failed.
        stream_reader = getattr(self, "_stream_reader", None)
        if stream_reader is not None and self._ended._number >= 0:
            stream_reader.end(self._ended._number)
