"""Actors in the driver's process, and their calls."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from conveyor.calls.call import Call, find, find_method, returned, with_arguments
from conveyor.calls.constructor import call_exit_hook
from conveyor.calls.generators import OpenGenerators
from conveyor.calls.pending import Taken
from conveyor.calls.unsendable import blame_call, blame_result
from conveyor.driver.actors import Actor as Lasting
from conveyor.engines.inline.loopback import (
    ArrivalError,
    Failure,
    Loopback,
    interrupts,
    is_cancellation,
)
from conveyor.engines.inline.threads import ActorThread, Job, JobQueue, Run
from conveyor.exceptions import ActorDiedError, ActorRestartedError, SerializationError, TaskError
from conveyor.refs.ref import EMPTY, Ref, Unseen, cancelled_error, failure_of, tell_unseen
from conveyor.refs.values import RefFailed, wait_for_all, with_values
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.wait_graph import Again, Blockers
from conveyor.worker import forked


class Actor:
    """Actor of the inline engine. The object lives as long as anything asks about the actor."""

    def __init__(
        self,
        identity: ActorId,
        lasting: Lasting,
        queue: JobQueue,
        loopback: Loopback,
    ) -> None:
        self.id = identity
        #: State that the actor has in common with the one that is made again after it.
        self.lasting = lasting
        self.queue = queue
        self.generators = OpenGenerators()
        self.loopback = loopback
        self.retired = False
        self.instance: Any = None
        self.start_failure: Failure | None = None
        self.calls: set[CallJob] = set()  # not done yet
        self.call_numbers = itertools.count(1)
        self.outboxes: dict[JobQueue | None, Outbox] = {}
        self.start: Start | None = None
        self._end: tuple[str, str | None, int | None] | None = None
        #: Whether the actor is dead, and methods that ran at its end still count.
        self.finishing = False
        # As a member of a graph: this process, and which of the session's deaths its own is.
        self._session_end: BaseException | None = None
        self.pid = os.getpid()
        self.slot = queue.actor_threads.slot
        self.incarnation = 0
        self.death_number = 0

    @property
    def name(self) -> str:
        return self.id.name

    @property
    def alive(self) -> bool:
        return self._end is None

    @property
    def is_unmade(self) -> bool:
        """Whether the actor lives, and its constructor has raised."""
        return self.alive and self.start_failure is not None

    def check_alive(self) -> None:
        if self._end is not None:
            raise self.why()

    def why(self) -> BaseException:
        """Return the error for those who wait for the dead actor: the session's end, or the actor's death."""
        return self._session_end or self.death()

    def death(self, _label: Callable[[int, int], str | None] | None = None) -> ActorDiedError:
        """Return the error for those who need the dead actor. The actor itself knows what it was doing, so
        ``_label`` is not used."""
        assert self._end is not None
        how, doing, code = self._end
        text = f"actor {self.name} (inline) {how}"
        if self.comes_back:
            text += "; it is being started again, and then the same can be tried again"
            return ActorRestartedError(text, self.name, doing, code)
        return ActorDiedError(text, self.name, doing, code)

    @property
    def comes_back(self) -> bool:
        """Whether the actor is dead, and is made again when it is needed (``max_restarts``)."""
        if self._end is None or self.lasting.ended:
            return False
        return self._end[2] != 0 and self.lasting.restarts_left

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
        """End the actor. A method that still runs is not stopped, but its result reaches nobody, unless
        ``finish``. ``orderly``: do what its class does at the end. ``error``: the session's end, if the actor
        ends with the session."""
        if for_good:
            self.lasting.over.set()
        if self._end is not None:
            return
        self._session_end = error
        self._end = (how, doing, code)
        if self.start_failure is not None and not self.start_failure.reported:
            tell_unseen(self.start_failure.error())
        if self.lasting.ended:
            self.lasting.constructor = None
        self.finishing = finish
        self.death_number = self.queue.actor_threads.note_death()
        for call in list(self.calls):
            if finish and self.queue.goes_on(call):
                continue
            call.resolve(error=self.why())
            self.queue.actor_threads.finished(call)
        instance, self.instance = self.instance, None

        def at_the_end(run: Run) -> None:
            nonlocal instance
            for call in list(self.calls):  # coroutines that were cancelled before they began
                call.resolve(error=self.why())
                self.queue.actor_threads.finished(call)
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

        self.queue.close(at_the_end)

    def retire(self) -> None:
        """End the actor once its calls and streams are done: nobody can call it any more."""
        self.retired = True
        if not (self.calls or self.generators):
            self.end("has ended: its last handle is gone")

    def on_system_exit(self, error: SystemExit, doing: str, where: str = "") -> None:
        """End the actor, since user code has called ``sys.exit``: it believes to be in a process of its own.
        ``where``: the part of ``doing`` in which it was called."""
        if self.queue.actor_threads.inherited:
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

    def enqueue_start(self) -> Callable[[], object]:
        """Have the constructor run, if there is one to run; with the lock held, see ``JobQueue.enqueue``."""
        return (lambda: None) if self.start is None else self.queue.enqueue(self.start)

    def wait_for_start(self) -> None:
        """Wait until the constructor has run."""
        if self.start is not None:
            self.queue.finish(self.start)
            self.start = None

    def method(self, name: str) -> tuple[Callable[..., Any], bool]:
        """Return the instance's method ``name``, and whether it is a coroutine function."""
        failure = self.start_failure
        if failure is not None:

            def failed(*_args: Any, **_kwargs: Any) -> Any:
                raise failure.error()

            return failed, False
        instance = self.instance
        self.check_alive()  # it may have ended while the graph is compiled
        return find_method(instance, name, self.queue.has_loop)


class Start(Job):
    """Job that makes an actor's instance."""

    def __init__(self, actor: Actor, make: Callable[[], Any]) -> None:
        super().__init__(actor.queue, f"{actor.name}.__init__")
        self.method, self.call = "__init__", 0
        self._actor = actor
        self._make = make

    def start(self) -> None:
        actor, make = self._actor, self._make
        del self._make  # the arguments are the instance's now
        try:
            instance = make()
            actor.queue.actor_threads.came_back(self.label)
        except SystemExit as error:
            actor.on_system_exit(error, "__init__")
        except BaseException as error:
            actor.queue.actor_threads.came_back(self.label)
            if interrupts(error):
                raise
            # Every later call, and every step of a graph, answers with this.
            actor.start_failure = Failure(error, actor.name, self.label, True)
        else:
            if actor.alive:
                actor.instance = instance

    def interrupted(self, error: BaseException) -> None:
        self._actor.end(f"was interrupted by {type(error).__name__} while running __init__")


#: By position and by name, and what else was taken when the call was made.
Arguments = tuple[tuple[Any, ...], Mapping[str, Any], "Taken | None"]


class Outbox:
    """The calls of one caller to one actor, in order, with a thread that waits for their arguments.

    There only while a call is in it. Later calls of the same caller queue up behind.
    """

    def __init__(self, actor: Actor, caller: JobQueue | None) -> None:
        self._actor = actor
        self._caller = caller
        self._calls: deque[tuple[CallJob, Arguments]] = deque()
        self.actor_thread = ActorThread()

    def add(self, call: CallJob, arguments: Arguments) -> None:
        """Asked with the lock held."""
        call.outbox = self
        self._calls.append((call, arguments))
        if len(self._calls) == 1:
            name = f"inline calls of {self._actor.name}"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        actor_threads = self._actor.queue.actor_threads
        actor_threads.adopt(self.actor_thread)
        while True:
            call, arguments = self._calls[0]
            make_call(call, arguments)
            with actor_threads.lock:
                call.outbox = None
                self._calls.popleft()
                actor_threads.changed.notify_all()
                if not self._calls:
                    del self._actor.outboxes[self._caller]
                    return


def make_call(call: CallJob, arguments: Arguments) -> None:
    """Make a call whose reference somebody already has: an error of the call goes to that reference."""
    if call.resolved:  # cancelled
        return
    try:
        call.actor.check_alive()
        wait_for_all(*arguments[:2])
        call.pack(*arguments)
    except Exception as error:
        call.resolve(error=error.error if isinstance(error, RefFailed) else error)
        call.queue.actor_threads.finished(call)
    else:
        # A caller that waits for the call now waits for its actor, no longer for this thread, which may wait
        # too.
        call.outbox = None
        if not call.resolved:
            call.submit()


class CallRef(Ref):
    """The result of an actor call."""

    __slots__ = ()


class CallJob(Job):
    """Job of a method call, which resolves the call's reference."""

    #: For `Ref`: there is no channel that a result would have to be taken out of.
    window: Any = None
    cancel_with_await = True
    get_timeout: float | None = None

    def __init__(self, actor: Actor, requested: Call) -> None:
        """``requested``: what is called, without the arguments."""
        super().__init__(actor.queue, f"{actor.name}.{requested[0]} (not sent yet)")
        self.actor = actor
        self.method, _, _, self._result_spec, self._what = requested
        self._requested = requested
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        self._arrival: Failure | None = None
        self._exit: SystemExit | None = None  # which rebuilding the arguments has raised
        # None once it is resolved, so that the call does not keep its own result alive.
        self._ref: CallRef | None = CallRef(self, -1)
        self.outbox: Outbox | None = None
        self._submitted = False

    def expect(self) -> CallRef:
        """Return the reference. From now on it is resolved by the actor's end, too, whoever ends the
        actor."""
        ref = self._ref
        assert ref is not None
        self.actor.calls.add(self)
        return ref

    def pack(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], taken: Taken | None = None
    ) -> None:
        """Send the arguments to the actor, with the values of those references among them that are done.
        ``taken``: the other references, if they were taken before. Raises what keeps the call from being
        sent, such as ``RefFailed``."""
        args, named = with_values(args, kwargs)
        call = with_arguments(self._requested, args, named)
        try:
            sent = taken.with_later(call) if taken else call
            _, self._args, given_there, *_ = self.actor.loopback.carry(sent, shared=False)
            self._kwargs = given_there or {}
        except SerializationError as error:
            raise blame_call(error, self.actor.name, call) from error.__cause__
        except ArrivalError as error:
            if isinstance(error.error, SystemExit):
                self._exit = error.error
            label = f"{self.actor.name}.call"
            self._arrival = Failure(error.error, self.actor.name, label, begun=False)
        number = self.call = next(self.actor.call_numbers)
        self.label = f"{self.actor.name}.{self.method} (call {number})"

    def submit(self) -> None:
        self._submitted = True
        self.queue.submit(self)

    @property
    def resolved(self) -> bool:
        """Whether the reference is resolved, so that nobody wants the rest of the work."""
        return self._ref is None

    def withdraw(self) -> None:
        """Take the call back: it could not be made, and nobody has its reference."""
        self._ref = None
        self.actor.calls.discard(self)

    # In its queue

    def start(self) -> Coroutine[Any, Any, None] | None:
        actor = self.actor
        args, kwargs, self._args, self._kwargs = self._args, self._kwargs, (), {}
        if self._exit is not None:
            self._raised(self._exit)
            return None
        failure = self._arrival or actor.start_failure
        if failure is not None:
            self.resolve(error=failure)
            return None
        instance = actor.instance
        if not actor.alive:  # since its turn has come
            self.resolve(error=actor.why())
            return None
        try:
            call = with_arguments(self._requested, args, kwargs)
            method, is_async = find(instance, actor.generators, call)
        except Exception as error:
            self._raised(error)
            return None
        if is_async and actor.queue.has_loop:
            return actor.queue.limited(self._go_on(method, args, kwargs))
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
            self.actor.on_system_exit(error, self.method, f"call {self.call}")
            return
        self._came_back()
        if interrupts(error):
            raise error
        if self.actor.finishing and is_cancellation(error):
            self.resolve(error=self.actor.why())  # it ended while its coroutine was being started
            return
        label = f"{self.actor.name}.{self.method}"
        self.resolve(error=Failure(error, self.actor.name, label))

    def _came_back(self) -> None:
        self.queue.actor_threads.came_back(f"{self.actor.name}.{self.method}")

    def _returned(self, result: Any) -> None:
        self._came_back()
        try:
            if self._result_spec != 1:
                label = f"{self.actor.name}.{self.method}"
                result = returned(result, self._result_spec, self._what, label)
            value = self.actor.loopback.carry(result, shared=True, snapshot=True)
        except ArrivalError as error:
            self.resolve(error=error.error)
        except SerializationError as error:
            self._raised(blame_result(error, self.actor.name, self._requested, result))
        except BaseException as error:
            self._raised(error)
        else:
            self.resolve(value)

    def interrupted(self, error: BaseException) -> None:
        self.resolve(error=error)

    def resolve(self, value: Any = None, *, error: BaseException | Failure | None = None) -> None:
        """Resolve the reference; the first outcome counts."""
        with self.queue.actor_threads.lock:
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
            if isinstance(raised := failure_of(ref._outcome), TaskError):
                ref._outcome.unseen = Unseen(raised)
        if self.actor.retired:
            self.actor.retire()

    def movers(self) -> list[ActorThread]:
        return super().movers() if self.outbox is None else [self.outbox.actor_thread]

    def rests(self, seen: set[Job]) -> bool:
        if self.outbox is None:
            return super().rests(seen)
        waits_for = self.outbox.actor_thread.waits_for
        return waits_for is not None and self.queue.actor_threads.rests(waits_for, seen)

    # Source of its ref

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        actor_threads = self.queue.actor_threads
        if not self._submitted:
            actor_threads.block(self, lambda: self._submitted or ref._outcome is not EMPTY, timeout)
        if ref._outcome is EMPTY:
            self.queue.finish(self, timeout)
        return ref._outcome

    def blockers(self, ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
        return ()  # threads find cycles themselves

    def is_ready(self, ref: Ref) -> bool:
        return ref._outcome is not EMPTY

    def cancel(self, ref: Ref) -> bool:
        self.resolve(error=cancelled_error(self.label))
        self.queue.cancel(self)
        self.queue.actor_threads.finished(self)
        return True

    def has_failed(self, ref: Ref) -> bool:
        return False  # one that has has its outcome

    def why_not_run(self, ref: Ref, overdue: bool) -> BaseException:
        return cancelled_error(self.label)

    def describe(self, ref: Ref) -> str:
        return self.label

    def doing(self) -> str:
        return "everything runs in this process"
