"""One process that Ray is asked for, as the driver knows it, from the request to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import field

from conveyor.codec import Reader
from conveyor.engines.ray.agent_host import AgentHost
from conveyor.engines.ray.greeting import Elsewhere
from conveyor.engines.ray.news import Ended
from conveyor.engines.ray.processes import Resident
from conveyor.engines.ray.tail import tail
from conveyor.exceptions import ActorStartError
from conveyor.flag import Flag


class Started(Resident, eq=False, kw_only=True):
    """A process that Ray is asked for, from the request to its end.

    The thread that asks Ray sets ``fds``, ``handle``, ``ran``, ``host`` and ``place``, and clears ``done``.
    The rest changes on the event loop's thread, apart from the fields that :class:`Resident` excepts.
    """

    number: int
    name: str
    asked: Mapping[str, Any]
    on_spawned: Callable[[int], object]
    error: str = ""
    unwanted: bool = False
    #: Set once there is a pid or an error, or the process is known to be on another node.
    done: Flag = field(default_factory=Flag)
    #: Ray's handle, and the ref of the call that lasts as long as the process.
    handle: Any = None
    ran: Any = None
    stderr: str = ""
    #: Whether Ray says that it has died before it came to the driver.
    died_early: bool = False
    #: Its node, if not the driver's; which process it is there, and how it has ended.
    elsewhere: Elsewhere | None = None
    host: AgentHost | None = None
    place: Reader = (0, 0)
    ended: Ended | None = None

    def refuse(self, why: str) -> None:
        """Give the process up: the start fails with ``why``, unless it is done already."""
        self.close_fds()
        if not self.done.is_set():
            self.error = why
            self.done.set()

    @property
    def key(self) -> int:
        """Number of the process in the session: its pid, with the node's number above it on another node."""
        return self.pid if self.host is None else self.host.number << 32 | self.pid

    def last_lines(self) -> str:
        """Return the last lines that the process has written to stderr."""
        if self.host is None:
            return tail(self.stderr)
        return "" if self.ended is None else self.ended.tail


def said(error: BaseException | None) -> str:
    """Return why a process has not come, by the outcome of the call that was to last as long as it."""
    if error is None:
        return "it has ended before it came to the driver"
    cause = getattr(error, "cause", None)
    return str(cause if isinstance(cause, ActorStartError) else error)
