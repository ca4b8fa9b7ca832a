"""Calls of an actor in the driver's process, from one caller."""

from __future__ import annotations

from typing import Any

from conveyor.engine.inline.actor import Actor
from conveyor.engine.inline.call import CallJob
from conveyor.engine.inline.lines import Host
from conveyor.engine.inline.outbox import Outbox
from conveyor.exceptions import SerializationError
from conveyor.runtime.calls.arguments import take
from conveyor.runtime.calls.call import Call, count_of, with_arguments
from conveyor.runtime.calls.unsendable import blame_call
from conveyor.runtime.refs.elements import elements_of
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.refs.values import RefFailed, lacking


class ActorLink:
    """A link to one actor, and not to the one that is made again after its death."""

    def __init__(self, actor: Actor, caller: Host | None) -> None:
        """``caller``: the actor that calls; ``None`` is the program."""
        self._actor = actor
        self._caller = caller

    @property
    def gone(self) -> bool:
        return not self._actor.alive

    def call(self, call: Call, again: bool = False) -> Any:
        """Start a call; one ref, or a list of them if it has several results. ``again``: ahead of those that
        wait for arguments, which may be just this one's result."""
        ref = self._start(call, again)
        return elements_of(ref, count_of(call[3]))

    def _start(self, asked: Call, again: bool) -> Ref:
        actor, caller = self._actor, self._caller
        args, kwargs = asked[1], asked[2] or {}
        # What waits has its arguments in the outbox, and no others.
        call = CallJob(actor, with_arguments(asked, (), None))
        ref = call.expect()
        if (again or caller not in actor.outboxes) and lacking(args, kwargs) is None:
            try:
                actor.check_alive()
                call.pack(args, kwargs)
            except RefFailed as failed:
                call.settle(error=failed.error)
                return ref
            except BaseException:
                call.withdraw()
                raise
            else:
                call.submit()
                return ref
        try:
            waits, taken = take(asked)
        except BaseException as error:
            call.withdraw()
            if isinstance(error, SerializationError):
                raise blame_call(error, actor.name, asked) from error.__cause__
            raise
        with actor.host.lines.lock:
            outbox = actor.outboxes.get(caller)
            if outbox is None:
                outbox = actor.outboxes[caller] = Outbox(actor, caller)
            outbox.add(call, (waits[1], waits[2] or {}, taken))
        return ref
