"""Calls that are made again where they fail (``max_task_retries``): each try is an ordinary call.

The caller does it, as only he knows of an actor that has died. Nobody needs to wait for the result: whoever
sees a try fail, the thread that made it, or the watcher's news, has the next one made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from conveyor.calls.pending import Pending, is_constant
from conveyor.calls.retrying import Retrying
from conveyor.calls.unsendable import arguments
from conveyor.codec import append_to_message, blamed
from conveyor.codec.errors import has_begun
from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    SerializationError,
    TaskError,
    WaitTimeoutError,
)
from conveyor.refs.ref import (
    EMPTY,
    Failure,
    Ref,
    Source,
    Unseen,
    blockers_of,
    cancelled_error,
    failure_of,
)
from conveyor.refs.together import look_at_others
from conveyor.runtime import ending
from conveyor.runtime.protocol import ActorId, Retries, Runtime
from conveyor.runtime.wait_graph import Again, Blockers
from conveyor.runtime.waiting import TimeLimit, wait_within

#: Makes one try with these arguments, by position and by name, and whether it is not the first.
Make: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any], bool], Ref]

#: Seconds that a call is waited for as any other one, before its wait is prepared to be described, and to be
#: ended by others that are got with it.
_FIRST_LOOK = 0.005


class RetriedRef(Ref):
    """The result of the call's last try."""

    __slots__ = ()

    def _error_of(self, outcome: Failure) -> BaseException:
        tries: Tries = self._source
        return tries.annotate(tries.last._error_of(outcome))

    def _latest_try(self) -> Ref:
        tries: Tries = self._source
        return tries.last


class Tries:
    """Call that is tried again where it fails, as the source of its result."""

    cancel_with_await = True
    get_timeout: float | None = None

    def __init__(
        self,
        runtime: Runtime,
        actor: ActorId,
        method: str,
        make: Make,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        retries: Retries,
    ) -> None:
        """``actor``, ``method``: what is called."""
        self._runtime = runtime
        self._others = runtime.retrying.setdefault(actor.index, Retrying())
        self._retries = retries
        self._left = retries.most or 0
        self._number = 1
        self._cancelled = False
        # Guards what the last try is, and whether there may be another one. Reentrant: a signal handler may
        # cancel in the middle of this.
        self._lock = threading.RLock()
        #: The result, or the error, once no other try is to come.
        self._outcome: Any = EMPTY
        # Function that makes a try, as long as there may be another one.
        self._make: Make | None = make
        # Before the call: it may change its own arguments.
        self._given: Given | None = Given(runtime, f"{actor.name}.{method}", args, kwargs)
        self.last = self._try(make, args, kwargs, False)
        self.window: Any = self.last._window
        self._others.begun(self)

    def ref(self) -> RetriedRef:
        """The ref of the result; the tries go on by themselves from now on."""
        made = RetriedRef(self, -1)
        # Where calls are run by who makes them, so are their tries. Otherwise others may come before, and one
        # thread makes them all: of two that find the same try over, each would make the next one.
        if self.window is None:
            self.see()
        else:
            self._watch(self.last)
        return made

    # End of a try

    def is_over(self) -> bool:
        return self._outcome is EMPTY and self.last.done()

    def has_lost_its_actor(self) -> bool:
        return isinstance(failure_of(self.last._resolved(None)), ActorRestartedError)

    def see(self) -> None:
        """Look whether the last try is over, now and when it is."""
        while (last := self.last).done():
            if not self._go_on(last):
                return
        self._watch(last)

    def _watch(self, last: Ref) -> None:
        watcher = self._runtime.watcher
        if watcher.closed:  # it would be told of at once, again and again
            self._end(Failure(ending.error()))
            return
        watcher.watch(last, self._watched)

    def _watched(self) -> None:
        if self._outcome is EMPTY:
            self._others.see_soon(self._see_in_order)

    def _see_in_order(self) -> None:
        """Look at this call, after those before it where their actor has died."""
        if not self.is_over():  # it was seen when another was, before
            return
        try:
            if self.has_lost_its_actor():
                while isinstance(before := self._others.first(), Tries) and before is not self:
                    if not before.is_over():
                        break
                    before.see()
        finally:  # nobody tells of it again
            self.see()

    def _go_on(self, last: Ref) -> bool:
        """Make another try, or end the call, now that ``last`` is over. Returns whether there is another
        try."""
        with self._lock:
            make, given = self._make, self._given
        try:
            outcome = last._resolved(None)
            error = failure_of(outcome)
            if error is None or make is None or given is None or not self._again(error, given):
                self._end(outcome)
                return False
            made = self._try(make, *given.get(), True)
            if outcome.unseen is not None:
                outcome.unseen.got = True
        except BaseException as instead:
            self._end(Failure(ending.error() if self._runtime.ending else instead))
            if not isinstance(instead, Exception):
                raise
            return False
        with self._lock:
            self.last = made
            cancelled = self._cancelled
        self._others.begun(self)
        if cancelled:
            made.cancel()
        self._runtime.process.notify()
        return True

    def _again(self, error: BaseException, given: Given) -> bool:
        if isinstance(error, TaskError):
            again = has_begun(error) and self._names(error)
        else:
            again = isinstance(error, ActorRestartedError)
        return again and not given.failed() and self._take_one()

    def _take_one(self) -> bool:
        """Count another try, which is made now. False if there may be none."""
        with self._lock:
            if self._left == 0 or self._cancelled:
                return False
            self._left -= self._left > 0  # without a limit it is negative
            self._number += 1
            return True

    def _try(self, make: Make, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool) -> Ref:
        while True:
            try:
                return make(args, kwargs, again)
            except ActorRestartedError:  # since it was found alive, just now
                if not self._take_one():
                    raise
            # It has not been sent, and may lack the result of one that is made again: `again` is as before.

    def _names(self, error: TaskError) -> bool:
        """Whether a call that has raised it is to be made again."""
        wanted = self._retries.named
        if isinstance(wanted, bool):
            return wanted
        # What would steer the caller's program, `KeyboardInterrupt` say, is of its class only there.
        return isinstance(error, wanted) or isinstance(error.cause, wanted)

    def _end(self, outcome: Any) -> None:
        with self._lock:
            if self._outcome is EMPTY:
                self._outcome = outcome
            let_go = self._make, self._given
            self._make, self._given = None, None
        outcome = self._outcome
        if isinstance(error := failure_of(outcome), TaskError) and outcome.unseen is None:
            outcome.unseen = Unseen(error)
        self._others.ended(self)
        del let_go  # without the lock: these may be the last references to them
        self._runtime.process.notify()

    # Source protocol

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        time_limit = TimeLimit(timeout)
        if not self._is_over(ref):
            left = time_limit.left()
            # As for any call first: that costs the least, and most calls need no other try.
            with suppress(WaitTimeoutError):
                self.last._resolved(_FIRST_LOOK if left is None else min(left, _FIRST_LOOK))
            if not self._is_over(ref):
                self._wait(ref, time_limit)
        if ref._outcome is EMPTY:
            ref._outcome = self._outcome
        return EMPTY

    def _wait(self, ref: Ref, time_limit: TimeLimit) -> None:
        def over() -> bool:
            if self._is_over(ref):
                return True
            look_at_others(ref)
            return False

        # Those of the call's session, which may have ended meanwhile: there may be another one by now.
        inbox, wait_registry = self._runtime.inbox, self._runtime.wait_registry
        with wait_registry.waiting(
            lambda n: self.blockers(ref, n), True, time_limit.bounded
        ) as wait:
            wait_within(inbox, over, time_limit, lambda: self.describe(ref), self.doing, wait)

    def _is_over(self, ref: Ref) -> bool:
        """Whether the outcome is here. Who waits for it need not wait for the thread that makes the tries:
        nor can he, once the session ends."""
        last = self.last
        if self._outcome is EMPTY and last.done() and not last.has_failed():
            outcome = last._resolved(None)
            if failure_of(outcome) is None:
                self._end(outcome)
        if self._outcome is EMPTY and self._runtime.ending:
            self._end(Failure(ending.error()))
        return self._outcome is not EMPTY or ref._outcome is not EMPTY

    def is_ready(self, ref: Ref) -> bool:
        if self._outcome is not EMPTY:
            return True
        last = self.last
        return last.done() and not last.has_failed()

    def has_failed(self, ref: Ref) -> bool:
        return failure_of(self._outcome) is not None

    def cancel(self, ref: Ref) -> bool:
        with self._lock:
            if self._outcome is not EMPTY:
                return False
            self._cancelled = True
            last = self.last
            # Before anybody can find that there is no other try, whose error would be the call's.
            self._outcome = Failure(cancelled_error(self.describe(ref)))
        last.cancel()
        self._end(self._outcome)
        if ref._outcome is EMPTY:
            ref._outcome = self._outcome
        return True

    def why_not_run(self, ref: Ref, overdue: bool) -> BaseException:
        source: Source = self.last._source
        return source.why_not_run(self.last, overdue)

    def blockers(self, ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
        return blockers_of(self.last, question, again)

    def describe(self, ref: Ref) -> str:
        last = self.last
        source: Source = last._source
        what = source.describe(last)
        return what if self._number == 1 else f"{what}, try {self._number}"

    def annotate(self, error: BaseException) -> BaseException:
        """Return ``error`` of the last try, with a note of how many tries there were."""
        if self._number == 1:
            return error
        text = f"this was try {self._number}"
        if self._left == 0:
            text += f", the last of a call with max_task_retries={self._retries.most}"
        if isinstance(error, TaskError):
            append_to_message(error, text)
        elif isinstance(error, ActorDiedError):
            error.args = (f"{error}\n{text}", *error.args[1:])
        return error

    def doing(self) -> str:
        last = self.last
        source: Source = last._source
        if not last.done():
            return source.doing()
        does = source.does() if isinstance(source, Pending) else source.doing()
        return f"{does}; it has failed, and is being made again"


class Given:
    """The arguments, as they were when the call was made."""

    def __init__(
        self, runtime: Runtime, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """``label``: what is called. Raises ``SerializationError`` where they cannot be sent."""
        every: dict[int | str, Any] = dict(enumerate(args))
        every.update(kwargs.items())
        self._refs = {key: one for key, one in every.items() if isinstance(one, Ref)}
        rest = {key: one for key, one in every.items() if key not in self._refs}
        # What nobody can change needs no copy.
        plain = all(map(is_constant, rest.values()))
        try:
            self._stored = None if plain else runtime.keep(rest)
        except SerializationError as error:
            raise blamed(error, arguments(label, args, kwargs)) from error.__cause__
        self._rest = rest if plain else {}
        self._positions, self._names = range(len(args)), tuple(kwargs)

    def get(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        every = {**self._refs, **(self._rest if self._stored is None else self._stored.get())}
        args = tuple([every[key] for key in self._positions])
        return args, {name: every[name] for name in self._names}

    def failed(self) -> bool:
        """Whether one of the values that it takes has failed: so would each other try."""
        return any(one.done() and one.has_failed() for one in self._refs.values())
