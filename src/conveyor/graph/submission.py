"""Submission to a graph: the arguments of ``execute``, the submission of an execution, and three ways to wait
until it succeeds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Mapping
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, cast

from msgspec import Struct, field

from conveyor import _core
from conveyor.checks import check_deadline, check_timeout
from conveyor.dag.inputs import Key, Path, given
from conveyor.exceptions import ArgumentsError, CapacityError
from conveyor.later import LaterModule
from conveyor.plan.model import Passed, Plan
from conveyor.refs.ref import Ref, blockers_of
from conveyor.refs.values import RefFailed, is_there, lacking, refs_among, with_values
from conveyor.runtime.process import Process
from conveyor.runtime.wait_graph import Ask
from conveyor.runtime.waiting import TimeLimit, wait_within

# It brings asyncio, which is slow to import.
aio: Any = LaterModule("conveyor.runtime.aio")

#: The options of ``execute``. Inputs of the graph may have the same names.
RESERVED = ("timeout", "deadline")


def reserved_inputs(plan: Plan) -> tuple[str, ...]:
    """Return the inputs of the graph with the name of an option of ``execute``: they win over it."""
    return tuple(name for name in RESERVED if name in plan.keywords)


class Options:
    """Tells the options of ``execute`` from inputs of the same names."""

    def __init__(
        self,
        inputs: tuple[str, ...],
        submit_timeout: float | None = None,
        deadline: float | None = None,
    ) -> None:
        """inputs: see ``reserved_inputs``. submit_timeout, deadline: the defaults."""
        self._timeout_is_input = "timeout" in inputs
        self._deadline_is_input = "deadline" in inputs
        self._submit_timeout = submit_timeout
        self._seconds = deadline

    def take(
        self, kwargs: dict[str, Any], timeout: Any, deadline: Any
    ) -> tuple[float | None, float | None]:
        """Return the timeout and the deadline of an execution, both in seconds. An option that is an input
        goes to ``kwargs``."""
        if self._timeout_is_input:
            kwargs["timeout"] = timeout
            timeout = None
        timeout = check_timeout(timeout)
        if timeout is None:
            timeout = self._submit_timeout
        return timeout, self.deadline(kwargs, deadline)

    def deadline(self, kwargs: dict[str, Any], deadline: Any) -> float | None:
        """Return the deadline, as :meth:`take` does, for a submission without a timeout."""
        if self._deadline_is_input:
            if deadline is not None:
                kwargs["deadline"] = deadline
            deadline = None
        return self._seconds if deadline is None else check_deadline(deadline)


def match_inputs(
    plan: Plan, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments as the frames of the plan's input edges, in the order of ``plan.inputs``.

    ``name`` is the graph's. Raises ``ArgumentsError`` if they do not fit the graph's inputs.
    """
    check_inputs(plan, name, args, kwargs)
    if plan.whole_input:
        return args * len(plan.inputs)
    return tuple(_frame(bundle.keys, args, kwargs) for bundle in plan.inputs)


def takes_parts(plan: Plan) -> bool:
    """Return whether parts of arguments are sent, or are results."""
    keys = [key for bundle in plan.inputs for key in bundle.keys]
    if plan.shape is not None:
        keys += [leaf.key for leaf in plan.shape.leaves if isinstance(leaf, Passed)]
    return any(isinstance(key, Path) for key in keys)


def whole_arguments(plan: Plan) -> tuple[tuple[int | str, ...], ...] | None:
    """Return the arguments that the frames of each input edge are made of; ``None``: parts of some are
    sent."""
    inputs = tuple([bundle.keys for bundle in plan.inputs])
    for key in itertools.chain.from_iterable(inputs):
        if not (type(key) is str or (type(key) is int and 0 <= key < plan.positional)):
            return None
    return cast("tuple[tuple[int | str, ...], ...]", inputs)


def check_inputs(plan: Plan, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ``ArgumentsError`` if there are too few arguments or too many, or others than the graph takes."""
    if plan.whole_input:
        if kwargs or len(args) != 1:
            raise ArgumentsError(
                f"{name} takes exactly one argument, because its InputNode is used whole; "
                f"got {_count(args, kwargs)}"
            )
        return
    if len(args) != plan.positional:
        raise ArgumentsError(
            f"{name} takes {plan.positional} positional argument(s), got {_count(args, kwargs)}"
        )
    missing = [key for key in plan.keywords if key not in kwargs]
    unknown = [key for key in kwargs if key not in plan.keywords]
    if missing or unknown:
        raise ArgumentsError(
            f"{name} takes the keyword argument(s) {', '.join(plan.keywords) or 'none'}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; not known: {', '.join(unknown)}" if unknown else "")
        )


def _frame(keys: tuple[Key | None, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if not keys:
        return None
    if keys == (None,):
        return given(None, args, kwargs)
    # Most inputs are whole arguments.
    return tuple([args[key] if type(key) is int else given(key, args, kwargs) for key in keys])


def _count(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return f"{len(args)} positional and {len(kwargs)} keyword argument(s)"


T = TypeVar("T")


class Need(Struct, frozen=True):
    """Something that a submission lacks. The submission goes on when ``ready()``."""

    ready: Callable[[], bool]
    #: Asks for the processes that have to do something before that.
    ask: Ask
    #: In words: what is waited for, and what the processes do that should bring it about.
    what: Callable[[], str]
    who: Callable[[], str]
    #: Why an execution that must not wait is refused; ``None``: it waits all the same, for an answer that
    #: comes soon, and the caller's patience does not count.
    refusal: Callable[[], str] | None = None
    #: The argument that is lacking, if an argument is.
    ref: Ref | None = None
    #: Whether it is ``ready()`` at the execution's deadline at the latest.
    bounded: bool = False


#: Yields whenever it lacks something, and in the end returns the results of ``execute``. Callers close it.
Submission: TypeAlias = Generator[Need, None, Any]


#: Begins an execution with these arguments and this deadline, or returns ``None``.
FastPath: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


class Terms(Struct, frozen=True):
    """Conditions of an execution, as its caller has asked for it."""

    #: The way to wait: the thread blocks, a coroutine awaits, or the execution is refused.
    mode: Literal["block", "await", "refuse"]
    #: How long it may block.
    time_limit: TimeLimit
    #: Seconds within which it must have run.
    seconds: float | None
    #: Since when, on the monotonic clock, in nanoseconds.
    since: int = field(default_factory=_core.monotonic_ns)

    def restart_limit(self) -> TimeLimit:
        """Return how long the graph's dead actors may take to come back before the execution begins:
        :attr:`time_limit`, unless the deadline is sooner."""
        timeout, seconds = self.time_limit.timeout, self.seconds
        if seconds is None or (timeout is not None and timeout <= seconds):
            return self.time_limit
        return TimeLimit(seconds)


class Entry(Protocol[T]):
    """The submission of one graph's executions: to its window, in this process, or to its owner.

    ``T`` is the state of an execution until it has begun.
    """

    @property
    def takes_parts(self) -> bool:
        """Whether a ref must be decoded, since parts of arguments are sent."""
        ...

    @property
    def remote_status(self) -> bool:
        """Whether some of the graph's actors are on another node."""
        ...

    def at_once(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deadline: Any = None,
        blocking: bool = True,
    ) -> Any:
        """Begin an execution that lacks nothing, and return its results; ``None``: it has not begun, and the
        attempt will say why. ``deadline``: the argument of ``execute``. ``blocking``: it may wait for another
        thread's submission, shortly."""
        ...

    def is_down(self) -> bool:
        """Return whether :meth:`revive` may have something to do."""
        ...

    def revive(self, terms: Terms) -> None:
        """Bring the graph back if it can be without being asked. Raises ``WaitTimeoutError`` or
        ``DeadlineExceededError`` if that takes too long."""
        ...

    def begin(self, terms: Terms) -> T:
        """Return the state of a new execution; its deadline runs since it was asked for."""
        ...

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``ArgumentsError`` for arguments that do not fit, before any of them is waited for."""
        ...

    def until_done(self, need: Need, execution: T) -> Need:
        """Return ``need``, of an argument, with an end when it is too late for the execution. Raises if it is
        too late already."""
        ...

    def submit(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        execution: T,
        terms: Terms,
        error: BaseException | None = None,
    ) -> Submission:
        """Run the rest of the submission: every argument is there. ``error``: the outcome of an argument that
        has no value; then nothing is sent, and the refs have that error."""
        ...


class Submitter(Generic[T]):
    """Takes executions; see the methods of the same names of ``CompiledGraph``."""

    def __init__(
        self,
        name: str,
        entry: Entry[T],
        waits: SubmissionWaits,
        options: Options,
        fast_path: FastPath | None = None,
    ) -> None:
        """``name``: the graph's. ``fast_path``: begins a part of the executions that ``entry.at_once`` would
        begin."""
        self.entry = entry
        #: Tried first.
        self.fast_path = fast_path or entry.at_once
        self._name = name
        self._waits = waits
        self._options = options

    def execute(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: Any, deadline: Any
    ) -> Any:
        timeout, seconds = self._options.take(kwargs, timeout, deadline)
        made = self.entry.at_once(args, kwargs, deadline)
        if made is not None:
            return made
        time_limit = TimeLimit(timeout)
        terms = Terms("block", time_limit, seconds)
        self.entry.revive(terms)
        return self._waits.block(self._submission(args, kwargs, terms), time_limit)

    def try_execute(self, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: Any) -> Any:
        seconds = self._options.deadline(kwargs, deadline)
        terms = Terms("refuse", TimeLimit(None), seconds)
        self.entry.revive(terms)
        return self._waits.refuse(self._submission(args, kwargs, terms))

    async def execute_async(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: Any
    ) -> Any:
        seconds = self._options.deadline(kwargs, deadline)
        made = self.entry.at_once(args, kwargs, deadline, blocking=False)
        if made is not None:
            return made
        terms = Terms("await", TimeLimit(None), seconds)
        if self.entry.is_down():
            import asyncio  # slow to import

            await asyncio.get_running_loop().run_in_executor(None, self.entry.revive, terms)
        return await self._waits.wait(self._submission(args, kwargs, terms))

    def _submission(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], terms: Terms
    ) -> Submission:
        entry = self.entry
        execution = entry.begin(terms)
        if refs_among(args, kwargs):
            entry.check(args, kwargs)
            while (ref := lacking(args, kwargs)) is not None:
                yield entry.until_done(self._argument(ref), execution)
            try:
                args, kwargs = with_values(args, kwargs, entry.takes_parts, entry.remote_status)
            except RefFailed as failed:
                return (yield from entry.submit(args, kwargs, execution, terms, failed.error))
        return (yield from entry.submit(args, kwargs, execution, terms))

    def _argument(self, ref: Ref) -> Need:
        return Need(
            functools.partial(is_there, ref),
            functools.partial(blockers_of, ref),
            lambda: f"{ref!r}, an argument of {self._name}",
            lambda: "it is not done",
            lambda: f"{self._name}: {ref!r}, which is an argument, is not there yet",
            ref,
        )


class SubmissionWaits:
    """Ways to wait on this process's doorbell."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def block(self, submission: Submission, time_limit: TimeLimit) -> Any:
        """Run the submission; this thread sleeps while the submission lacks something."""
        try:
            while True:
                try:
                    need = next(submission)
                except StopIteration as over:
                    return over.value
                self._block(need, time_limit if need.refusal is not None else TimeLimit(None))
        finally:
            submission.close()

    def _block(self, need: Need, time_limit: TimeLimit) -> None:
        process = self._process
        bounded = need.bounded or time_limit.bounded
        with process.wait_registry.waiting(need.ask, True, bounded) as wait:
            wait_within(process.inbox, need.ready, time_limit, need.what, need.who, wait)

    async def wait(self, submission: Submission) -> Any:
        """Run the submission; the running asyncio task sleeps while the submission lacks something."""
        try:
            while True:
                try:
                    need = next(submission)
                except StopIteration as over:
                    return over.value
                await aio.wait_until(need.ready, None if need.bounded else need.ask)
        finally:
            submission.close()

    def refuse(self, submission: Submission) -> Any:
        """Run the submission; raise ``CapacityError`` if it lacks something that may take its time."""
        try:
            while True:
                try:
                    need = next(submission)
                except StopIteration as over:
                    return over.value
                if need.refusal is None:
                    self._block(need, TimeLimit(None))
                # Asking for an argument has it fetched, so that a later submission finds it.
                elif need.ref is None or not need.ready():
                    raise CapacityError(need.refusal())
        finally:
            submission.close()
