"""One process that Ray is asked for, as the driver knows it: from the wish to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import field

from conveyor.codec import Reader
from conveyor.engine.ray.agent_host import AgentHost
from conveyor.engine.ray.greeting import Elsewhere
from conveyor.engine.ray.news import Ended
from conveyor.engine.ray.processes import Resident
from conveyor.engine.ray.tail import tail
from conveyor.exceptions import ActorStartError
from conveyor.flag import Flag


class Started(Resident, eq=False, kw_only=True):
    """One process, from the wish for it to its end. All but ``done`` changes on the hosts' thread."""

    number: int
    name: str
    asked: Mapping[str, Any]
    on_spawned: Callable[[int], object]
    error: str = ""
    unwanted: bool = False
    #: Set once there is a pid or an error, or it is elsewhere.
    done: Flag = field(default_factory=Flag)
    #: Ray's handle, and the ref of the call that lasts as long as the process.
    handle: Any = None
    ran: Any = None
    stderr: str = ""
    #: Ray says that it has died, and it had not come to the driver.
    died_early: bool = False
    #: Where it is, if not on the driver's host; which process it is there, and how it has ended.
    elsewhere: Elsewhere | None = None
    host: AgentHost | None = None
    place: Reader = (0, 0)
    ended: Ended | None = None

    def refuse(self, why: str) -> None:
        """There will be no such process."""
        self.close_fds()
        if not self.done.is_set():
            self.error = why
            self.done.set()

    @property
    def key(self) -> int:
        """Its number among the session's processes."""
        return self.pid if self.host is None else self.host.number << 32 | self.pid

    def last_lines(self) -> str:
        """The last that it has written to stderr."""
        if self.host is None:
            return tail(self.stderr)
        return "" if self.ended is None else self.ended.tail


def said(error: BaseException | None) -> str:
    """Why there is no process, by what Ray says of the call that was to be its life."""
    if error is None:
        return "it has ended before it came to the driver"
    cause = getattr(error, "cause", None)
    return str(cause if isinstance(cause, ActorStartError) else error)
