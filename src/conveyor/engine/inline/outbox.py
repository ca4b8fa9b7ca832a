"""Calls that cannot be made yet, because an argument of theirs is not there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from conveyor.engine.inline.actor import Actor
from conveyor.engine.inline.call import CallJob
from conveyor.engine.inline.lines import Host, Line
from conveyor.runtime.calls.arguments import Taken
from conveyor.runtime.refs.values import RefFailed, wait_for_all

#: By position and by name, and what else was taken when the call was made.
Arguments = tuple[tuple[Any, ...], Mapping[str, Any], "Taken | None"]


class Outbox:
    """The calls of one caller to one actor, in order, with a thread that waits for their arguments.

    There only while a call is in it. Later calls of the same caller queue up behind.
    """

    def __init__(self, actor: Actor, caller: Host | None) -> None:
        self._actor = actor
        self._caller = caller
        self._calls: deque[tuple[CallJob, Arguments]] = deque()
        self.line = Line()

    def add(self, call: CallJob, arguments: Arguments) -> None:
        """Asked with the lock held."""
        call.outbox = self
        self._calls.append((call, arguments))
        if len(self._calls) == 1:
            name = f"inline calls of {self._actor.name}"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        lines = self._actor.host.lines
        lines.adopt(self.line)
        while True:
            call, arguments = self._calls[0]
            make_call(call, arguments)
            with lines.lock:
                call.outbox = None
                self._calls.popleft()
                lines.changed.notify_all()
                if not self._calls:
                    del self._actor.outboxes[self._caller]
                    return


def make_call(call: CallJob, arguments: Arguments) -> None:
    """Make a call of which somebody has the ref already: what is wrong with it goes there."""
    if call.settled:  # cancelled
        return
    try:
        call.actor.check_alive()
        wait_for_all(*arguments[:2])
        call.pack(*arguments)
    except Exception as error:
        call.settle(error=error.error if isinstance(error, RefFailed) else error)
        call.host.lines.finished(call)
    else:
        # Who waits for it now waits for its actor, and no longer for this thread, which may wait as well.
        call.outbox = None
        if not call.settled:
            call.submit()
