"""An actor in the driver's process: its instance, and what is asked of it."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from conveyor.codec import decode_error, encode_error
from conveyor.engine.inline.crossing import ArrivalError, Crossing
from conveyor.engine.inline.lines import Host, Job, Line, Run
from conveyor.engine.inline.origin import Origin
from conveyor.exceptions import ActorDiedError, ActorRestartedError, SerializationError
from conveyor.runtime.actor import forked
from conveyor.runtime.calls.call import Call, with_arguments
from conveyor.runtime.calls.exit_hook import call_exit_hook
from conveyor.runtime.calls.generators import OpenGenerators
from conveyor.runtime.calls.methods import find, find_method
from conveyor.runtime.calls.returns import elements
from conveyor.runtime.calls.unsendable import blame_call, blame_result
from conveyor.runtime.protocol import ActorId, MethodInfo
from conveyor.runtime.refs.ref import EMPTY, Ref, cancelled_error
from conveyor.runtime.refs.values import with_values
from conveyor.runtime.waiting.works import Blockers

if TYPE_CHECKING:
    from conveyor.engine.inline.outbox import Outbox


class Failure:
    """An error as it travels, and as it was raised: with its traceback and everything in it."""

    __slots__ = ("_meta", "_original")

    def __init__(
        self, error: BaseException, actor: str, label: str, constructor: bool = False
    ) -> None:
        self._meta = encode_error(error, actor, label, constructor=constructor)
        self._original = error

    def error(self) -> BaseException:
        """The error to raise at the receiver. Its ``__cause__`` is for the debugger."""
        made = decode_error(self._meta)
        made.__cause__ = self._original
        return made


def interrupts(error: BaseException) -> bool:
    """Whether ``error`` is meant for the program as a whole: Ctrl-C, or the debugger's "quit"."""
    debugger = sys.modules.get("bdb")
    return isinstance(error, KeyboardInterrupt) or (
        debugger is not None and isinstance(error, debugger.BdbQuit)
    )


def _is_cancellation(error: BaseException) -> bool:
    asyncio = sys.modules.get("asyncio")  # slow to import
    return asyncio is not None and isinstance(error, asyncio.CancelledError)


class Expired(Failure):
    """What a task leaves that had not run at its execution's deadline."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self._make = make

    def error(self) -> BaseException:
        return self._make()


class Actor:
    """One actor. Lives as long as anything asks about it."""

    def __init__(
        self,
        identity: ActorId,
        class_name: str,
        methods: Mapping[str, MethodInfo],
        host: Host,
        crossing: Crossing,
        *,
        named: bool,
        shared: bool,
    ) -> None:
        self.id = identity
        self.class_name = class_name
        self.methods = methods
        self.host = host
        self.generators = OpenGenerators()
        self.crossing = crossing
        self.named = named
        #: A handle may be inside of a value, so it is not known when the last one is gone.
        self.shared = shared
        self.handles = 0
        self.retired = False
        self.instance: Any = None
        self.start_failure: Failure | None = None
        self.calls: set[CallJob] = set()  # not done yet
        self.call_numbers = itertools.count(1)
        self.outboxes: dict[Host | None, Outbox] = {}
        self.start: Start | None = None
        self._end: tuple[str, str | None, int | None] | None = None
        #: How to make it again, if its end was its own doing.
        self.origin: Origin | None = None
        self._for_good = False
        #: It is dead, and what ran when it ended still counts.
        self.finishing = False

    @property
    def name(self) -> str:
        return self.id.name

    @property
    def alive(self) -> bool:
        return self._end is None

    def check_alive(self) -> None:
        if self._end is not None:
            raise self.death()

    def death(self) -> ActorDiedError:
        """The error for whoever needs this actor."""
        assert self._end is not None
        how, doing, code = self._end
        text = f"actor {self.name} (inline) {how}"
        if self.comes_back:
            text += "; it is being started again, and then the same can be tried again"
            return ActorRestartedError(text, self.name, doing, code)
        return ActorDiedError(text, self.name, doing, code)

    @property
    def ended_for_good(self) -> bool:
        """Nobody may start it again."""
        return self._for_good

    @property
    def comes_back(self) -> bool:
        """Whether it is dead, and made again when it is needed (``max_restarts``)."""
        if self._end is None or self._for_good or self.origin is None:
            return False
        return self._end[2] != 0 and self.origin.restarts_left

    def end(
        self,
        how: str,
        doing: str | None = None,
        code: int | None = None,
        *,
        for_good: bool = True,
        orderly: bool = True,
        finish: bool = False,
        error: BaseException | None = None,
    ) -> None:
        """It is dead from now on. A method that still runs is not stopped; nobody hears of it, unless
        ``finish``. ``orderly``: with what its class does at the end. ``error``: for who waits for it, if
        that is not its death."""
        self._for_good = self._for_good or for_good
        if self._end is not None:
            return
        self._end = (how, doing, code)
        self.finishing = finish
        for call in list(self.calls):
            if finish and self.host.goes_on(call):
                continue
            call.settle(error=error or self.death())
            self.host.lines.finished(call)
        instance, self.instance = self.instance, None

        def at_the_end(run: Run) -> None:
            nonlocal instance
            for call in list(self.calls):  # coroutines that were cancelled before they began
                call.settle(error=self.death())
                self.host.lines.finished(call)
            interrupt = None
            if orderly:
                interrupt = self.generators.close_all()
                interrupt = call_exit_hook(instance, self.name, run) or interrupt
            instance = None
            if interrupt is not None:
                try:
                    raise interrupt  # of who ends the program that all of this is in
                finally:
                    del interrupt  # its traceback has this frame

        self.host.close(at_the_end)

    def retire(self) -> None:
        """Nobody can call it any more: it ends when what was asked of it is done."""
        self.retired = True
        if not self.calls:
            self.end("has ended: its last handle is gone")

    def exited(self, error: SystemExit, doing: str, where: str = "") -> None:
        """User code has asked for the end of the process that it believes to be in. ``where``: of what
        it was doing it."""
        if self.host.lines.inherited:
            forked.leave(error)
        code = error.code
        if code is None:
            number = 0
        elif isinstance(code, int):
            number = code
        else:
            number = 1
            print(code, file=sys.stderr)
        how = f"left by sys.exit: it exited with code {number} while running {doing}"
        self.end(how + (f" ({where})" if where else ""), doing, number, for_good=False)

    def wait_for_start(self) -> None:
        """Until the constructor has run."""
        if self.start is not None:
            self.host.finish(self.start)
            self.start = None

    def method(self, name: str) -> tuple[Callable[..., Any], bool]:
        """The instance's method ``name``, and whether it is a coroutine function."""
        failure = self.start_failure
        if failure is not None:

            def failed(*_args: Any, **_kwargs: Any) -> Any:
                raise failure.error()

            return failed, False
        instance = self.instance
        self.check_alive()  # it may have ended while the graph is compiled
        return find_method(instance, name)


class Start(Job):
    """The making of an actor's instance."""

    def __init__(
        self, actor: Actor, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(actor.host, f"{actor.name}.__init__")
        self.method, self.call = "__init__", 0
        self._actor = actor
        self._make: Callable[[], Any] = functools.partial(cls, *args, **kwargs)

    def start(self) -> None:
        actor, make = self._actor, self._make
        del self._make  # the arguments are the instance's now
        try:
            instance = make()
            actor.host.lines.came_back(self.label)
        except SystemExit as error:
            actor.exited(error, "__init__")
        except BaseException as error:
            actor.host.lines.came_back(self.label)
            if interrupts(error):
                raise
            # Every later call, and every step of a graph, answers with this.
            actor.start_failure = Failure(error, actor.name, self.label, True)
        else:
            if actor.alive:
                actor.instance = instance

    def interrupted(self, error: BaseException) -> None:
        self._actor.end(f"was interrupted by {type(error).__name__} while running __init__")


class CallRef(Ref):
    """The result of an actor call."""

    __slots__ = ()


class CallJob(Job):
    """A method call, and where its result comes from."""

    #: For `Ref`: there is no channel that a result would have to be taken out of.
    gate: Any = None
    cancel_with_await = True
    get_timeout: float | None = None

    def __init__(self, actor: Actor, asked: Call) -> None:
        """``asked``: what is called, without the arguments."""
        super().__init__(actor.host, f"{actor.name}.{asked[0]} (not sent yet)")
        self.actor = actor
        self.method, _, _, self._num_returns, self._what = asked
        self._asked = asked
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        self._arrival: Failure | None = None
        self._exit: SystemExit | None = None  # which rebuilding the arguments has raised
        # None once it is settled, so that a result is not kept by what it is the result of.
        self._ref: CallRef | None = CallRef(self, -1)
        self.outbox: Outbox | None = None
        self._submitted = False

    def expect(self) -> CallRef:
        """The ref, which the actor's end settles from now on, whoever ends it."""
        ref = self._ref
        assert ref is not None
        self.actor.calls.add(self)
        return ref

    def pack(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take the arguments across; refs among them, which are done, as their values. Raises what keeps
        it from being sent: ``RefFailed`` among it."""
        args, named = with_values(args, kwargs)
        call = with_arguments(self._asked, args, named)
        try:
            _, self._args, given_there, *_ = self.actor.crossing.carry(call, shared=False)
            self._kwargs = given_there or {}
        except SerializationError as error:
            raise blame_call(error, self.actor.name, call) from error.__cause__
        except ArrivalError as error:
            if isinstance(error.error, SystemExit):
                self._exit = error.error
            self._arrival = Failure(error.error, self.actor.name, f"{self.actor.name}.call")
        number = self.call = next(self.actor.call_numbers)
        self.label = f"{self.actor.name}.{self.method} (call {number})"

    def submit(self) -> None:
        self._submitted = True
        self.host.submit(self)

    @property
    def settled(self) -> bool:
        """The ref has its outcome: what is left to be done is not wanted."""
        return self._ref is None

    def withdraw(self) -> None:
        """It could not be made, and nobody has its ref."""
        self._ref = None
        self.actor.calls.discard(self)

    # On its host

    def start(self) -> Coroutine[Any, Any, None] | None:
        actor = self.actor
        args, kwargs, self._args, self._kwargs = self._args, self._kwargs, (), {}
        if self._exit is not None:
            self._raised(self._exit)
            return None
        failure = self._arrival or actor.start_failure
        if failure is not None:
            self.settle(error=failure)
            return None
        instance = actor.instance
        if not actor.alive:  # since its turn has come
            self.settle(error=actor.death())
            return None
        try:
            method, is_async = find(instance, actor.generators, self.method, self._what)
        except Exception as error:
            self._raised(error)
            return None
        if is_async and actor.host.has_loop:
            return actor.host.limited(self._go_on(method, args, kwargs))
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            self._raised(error)
        else:
            self._returned(result)
        return None

    async def _go_on(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        try:
            result = await method(*args, **kwargs)
        except BaseException as error:
            self._raised(error)
        else:
            self._returned(result)

    def _raised(self, error: BaseException) -> None:
        if isinstance(error, SystemExit):
            self.actor.exited(error, self.method, f"call {self.call}")
            return
        self._came_back()
        if interrupts(error):
            raise error
        if self.actor.finishing and _is_cancellation(error):
            self.settle(error=self.actor.death())  # it ended while its coroutine was being started
            return
        label = f"{self.actor.name}.{self.method}"
        self.settle(error=Failure(error, self.actor.name, label))

    def _came_back(self) -> None:
        self.host.lines.came_back(f"{self.actor.name}.{self.method}")

    def _returned(self, result: Any) -> None:
        self._came_back()
        count = self._num_returns
        try:
            if count > 1:
                label = f"{self.actor.name}.{self.method}"
                result = elements(result, count, label)
            value = self.actor.crossing.carry(result, shared=True, kept=True)
        except ArrivalError as error:
            self.settle(error=error.error)
        except SerializationError as error:
            self._raised(blame_result(error, self.actor.name, self._asked, result))
        except BaseException as error:
            self._raised(error)
        else:
            self.settle(value)

    def interrupted(self, error: BaseException) -> None:
        self.settle(error=error)

    def settle(self, value: Any = None, *, error: BaseException | Failure | None = None) -> None:
        """Give the ref its outcome; the first one counts."""
        with self.host.lines.changed:
            ref, self._ref = self._ref, None
            if ref is None:
                return
            self.actor.calls.discard(self)
            if isinstance(error, Failure):
                ref._fail(error.error(), error.error)
            elif error is not None:
                ref._fail(error)
            else:
                ref._arrived(value)
        if self.actor.retired:
            self.actor.retire()

    def movers(self) -> list[Line]:
        return super().movers() if self.outbox is None else [self.outbox.line]

    def rests(self, seen: set[Job]) -> bool:
        if self.outbox is None:
            return super().rests(seen)
        waits_for = self.outbox.line.waits_for
        return waits_for is not None and self.host.lines.rests(waits_for, seen)

    # Source of its ref

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        lines = self.host.lines
        if not self._submitted:
            lines.block(self, lambda: self._submitted or ref._outcome is not EMPTY, timeout)
        if ref._outcome is EMPTY:
            self.host.finish(self, timeout)
        return ref._outcome

    def blockers(self, ref: Ref, question: int) -> Blockers | None:
        return ()  # lines find cycles themselves

    def is_ready(self, ref: Ref) -> bool:
        return ref._outcome is not EMPTY

    def cancel(self, ref: Ref) -> bool:
        self.settle(error=cancelled_error(self.label))
        self.host.cancel(self)
        self.host.lines.finished(self)
        return True

    def has_failed(self, ref: Ref) -> bool:
        return False  # one that has has its outcome

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        return cancelled_error(self.label)

    def describe(self, ref: Ref) -> str:
        return self.label

    def doing(self) -> str:
        return "everything runs in this process"
