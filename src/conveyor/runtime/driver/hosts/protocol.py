"""What the driver asks of who hosts the processes of its actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from conveyor.codec import Reader
from conveyor.runtime.driver.hosts.far_host import FarHost, Home
from conveyor.runtime.protocol import ProcessOptions

#: In place of a wait status: the process was nobody's child here, and how it has ended is not known.
UNKNOWN_END = -1

Settle: TypeAlias = "Callable[[FarHost], tuple[Reader, bytes, list[int]]]"
"""Has a host make the endpoints of a process that comes to be there: see :meth:`Hosts.spawn`."""

Page: TypeAlias = tuple[int, int, int, int, int, int, str]
"""What a slot of a board says of its process: see ``Board.status``."""


class Spawned(Struct, frozen=True):
    """A process that the hosts have started.

    ``stderr_tail`` gives the last lines it wrote to stderr. ``out_of_memory``, once it was killed by
    SIGKILL, whether that was the kernel's out-of-memory killer; ``None``: that cannot be told.
    ``end_headless`` is :meth:`Hosts.end_headless` of it, and ``went_on`` says, once it has ended, whether
    that has ended it. ``place`` says in words where it is, if not on the driver's host; ``last_page``, once
    it has ended there, what its slot of the board said, and whether it was left by ``sys.exit``; ``lost``,
    whether its host was lost, and how. ``stays``: it is somebody else's, and no end of ours ends it: ``kill``
    has it leave the session, which it does when the method that it runs has returned.
    """

    pid: int
    stderr_tail: Callable[[], str]
    out_of_memory: Callable[[], bool | None]
    end_headless: Callable[[], None]
    went_on: Callable[[], bool]
    place: str = ""
    last_page: Callable[[], tuple[Page, bool] | None] = lambda: None
    lost: Callable[[], str] = lambda: ""
    stays: bool = False


class Spawning(Protocol):
    """A process that may take long to come: there is no place for it yet, say."""

    def ask(self) -> bool:
        """Ask for it. Nothing has been done before. Whether :meth:`wait` returns at once."""
        ...

    def wait(self) -> Spawned:
        """The process, when it is there. ``ActorStartError`` if it does not come."""
        ...

    def give_up(self, why: str) -> None:
        """Nobody wants it any more, who waits for it included. On any thread."""
        ...


class Hosts(Protocol):
    """Who hosts actors as processes. It is handed to the driver, and knows processes but no channels.

    The driver takes for granted that they are processes of this machine, under one kernel with it: they
    are given descriptors when they are spawned, they share the memory behind them, each has a pid, and
    its end is told as a wait status. Where one is on another host (:class:`FarHost`) that does so, and what
    is called a pid here is a number that no other process of the session has.
    """

    #: Whether they choose a place by ``ProcessOptions.placement``.
    places: bool

    def start(self, on_exit: Callable[[int, int], None], home: Home) -> None:
        """``on_exit(pid, status)`` is called on a thread of the hosts' when a process has ended. The status
        is the kernel's (see ``os.waitstatus_to_exitcode``), or :data:`UNKNOWN_END`."""
        ...

    def on_thread(self) -> bool:
        """Whether the caller is called back by the hosts: while it waits, no end is told."""
        ...

    def spawn(
        self,
        name: str,
        payload: bytes,
        fds: Sequence[int],
        options: ProcessOptions,
        on_spawned: Callable[[int], object],
        settle: Settle,
    ) -> Spawned | Spawning:
        """Start a process that runs ``worker.main(payload, fds)``, or say how it is asked for.
        ``on_spawned(pid)`` is called, on a thread of the hosts', before ``on_exit`` for this process, and
        both may be before this returns. ``fds`` are not closed before :meth:`Spawning.wait` has returned.

        Where the process comes to be on another host, ``settle(host)`` is called before: it has that host
        make the process's endpoints, and gives which process it is there, what takes the place of the
        payload, and the numbers of the segments that are to be passed last."""
        ...

    def kill(self, pid: int) -> None: ...

    def end_headless(self, pid: int) -> None:
        """The main thread of the process is gone. If the process goes on (as another program, or with its
        other threads) it is killed; one that is ending is left to it. Returns at once."""
        ...

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Call back, on a thread of the hosts', whenever ``fd`` can be read."""
        ...

    def unwatch(self, fd: int) -> None: ...

    def close(self) -> None:
        """End all processes and wait until they are gone."""
        ...
