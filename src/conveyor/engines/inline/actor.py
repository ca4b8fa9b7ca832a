"""An actor in the driver's process: its instance, its beginning and its end."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conveyor.calls.call import find_method
from conveyor.calls.constructor import call_exit_hook
from conveyor.calls.generators import OpenGenerators
from conveyor.driver.actors import Actor as Lasting
from conveyor.engines.inline.crossing import Crossing, Failure, interrupts
from conveyor.engines.inline.lines import Host, Job, Run
from conveyor.exceptions import ActorDiedError, ActorRestartedError
from conveyor.refs.ref import tell_unseen
from conveyor.runtime.protocol import ActorId
from conveyor.worker import forked

if TYPE_CHECKING:
    from conveyor.engines.inline.call import CallJob, Outbox


class Actor:
    """Actor of the inline engine. The object lives as long as anything asks about the actor."""

    def __init__(
        self,
        identity: ActorId,
        lasting: Lasting,
        host: Host,
        crossing: Crossing,
    ) -> None:
        self.id = identity
        #: State that the actor has in common with the one that is made again after it.
        self.lasting = lasting
        self.host = host
        self.generators = OpenGenerators()
        self.crossing = crossing
        self.retired = False
        self.instance: Any = None
        self.start_failure: Failure | None = None
        self.calls: set[CallJob] = set()  # not done yet
        self.call_numbers = itertools.count(1)
        self.outboxes: dict[Host | None, Outbox] = {}
        self.start: Start | None = None
        self._end: tuple[str, str | None, int | None] | None = None
        #: Whether the actor is dead, and methods that ran at its end still count.
        self.finishing = False
        # As a member of a graph: this process, and which of the session's deaths its own is.
        self._session_end: BaseException | None = None
        self.pid = os.getpid()
        self.slot = host.lines.slot
        self.incarnation = 0
        self.death_number = 0

    @property
    def name(self) -> str:
        return self.id.name

    @property
    def alive(self) -> bool:
        return self._end is None

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
        if self.start_failure is not None and not self.start_failure.told:
            tell_unseen(self.start_failure.error())
        if self.lasting.ended:
            self.lasting.kept = None
        self.finishing = finish
        self.death_number = self.host.lines.note_death()
        for call in list(self.calls):
            if finish and self.host.goes_on(call):
                continue
            call.settle(error=self.why())
            self.host.lines.finished(call)
        instance, self.instance = self.instance, None

        def at_the_end(run: Run) -> None:
            nonlocal instance
            for call in list(self.calls):  # coroutines that were cancelled before they began
                call.settle(error=self.why())
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
        """End the actor once its calls and streams are done: nobody can call it any more."""
        self.retired = True
        if not (self.calls or self.generators):
            self.end("has ended: its last handle is gone")

    def exited(self, error: SystemExit, doing: str, where: str = "") -> None:
        """End the actor, since user code has called ``sys.exit``: it believes to be in a process of its own.
        ``where``: the part of ``doing`` in which it was called."""
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
        """Wait until the constructor has run."""
        if self.start is not None:
            self.host.finish(self.start)
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
        return find_method(instance, name, self.host.has_loop)


class Start(Job):
    """Job that makes an actor's instance."""

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
