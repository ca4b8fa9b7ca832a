"""What the driver asks of an engine, which hosts the processes of its actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from conveyor.codec import Reader
from conveyor.driver.hosts.far_host import FarHost, Home
from conveyor.runtime.protocol import ProcessOptions

#: Substitute for a wait status: the process was no child of ours, and how it has ended is not known.
UNKNOWN_END = -1

Settle: TypeAlias = "Callable[[FarHost], tuple[Reader, bytes, list[int]]]"
"""Has a host make the endpoints of a process that comes to be there: see :meth:`Hosts.spawn`."""

Page: TypeAlias = tuple[int, int, int, int, int, int, str]
"""What a slot of a board says of its process: see ``Board.status``."""


class Spawned(Struct, frozen=True):
    """A process that the engine has started.

    stderr_tail: gives the last lines that it wrote to stderr.
    out_of_memory: whether SIGKILL, which has ended it, came from the kernel's out-of-memory killer; ``None``:
        that cannot be told.
    end_headless: :meth:`Hosts.end_headless` of it.
    went_on: whether that has ended it, once it has ended.
    place: in words, where it is, if not on the driver's node.
    last_page: its last process snapshot, and whether it was left by ``sys.exit``, once it has ended on
        another node.
    lost: whether its node was lost, and how.
    stays: it is somebody else's, and no end of ours ends it: ``kill`` has it leave the session, which it does
        when the method that it runs has returned.
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
    """A process that may take long to come: there may be no place for it yet."""

    def ask(self) -> bool:
        """Ask for the process. Nothing has been done before. Return whether :meth:`wait` returns at once."""
        ...

    def wait(self) -> Spawned:
        """Return the process, when it is there. Raises ``ActorStartError`` if it does not come."""
        ...

    def give_up(self, why: str) -> None:
        """Stop asking for the process, and end the waits for it: nobody wants it any more. On any thread."""
        ...


class Hosts(Protocol):
    """An engine, which hosts actors as processes. It is handed to the driver, and knows processes but no
    channels.

    The driver takes for granted that they are processes of this machine, under one kernel with it: they are
    given descriptors when they are spawned, they share the memory behind them, each has a pid, and its end is
    told as a wait status. For a process on another node, that node (:class:`FarHost`) does so; its pid is a
    number that no other process of the session has.
    """

    #: Whether the engine chooses a node by ``ProcessOptions.placement``.
    places: bool

    def start(self, on_exit: Callable[[int, int], None], home: Home) -> None:
        """Begin the session. ``on_exit(pid, status)`` is called on a thread of the engine's when a process
        has ended. The status is the kernel's (see ``os.waitstatus_to_exitcode``), or :data:`UNKNOWN_END`."""
        ...

    def on_thread(self) -> bool:
        """Whether the calling thread is the one on which the engine calls back: while it waits, no end is
        told."""
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
        """Start a process that runs ``worker.main(payload, fds)``, or return how it is asked for.
        ``on_spawned(pid)`` is called, on a thread of the engine's, before ``on_exit`` for this process, and
        both may be before this returns. ``fds`` are not closed before :meth:`Spawning.wait` has returned.

        If the process comes to be on another node, ``settle(host)`` is called before. It has that node make
        the process's endpoints. It returns the process's slot and incarnation there, the substitute for the
        payload, and the numbers of the segments that are to be passed last.
        """
        ...

    def kill(self, pid: int) -> None: ...

    def end_headless(self, pid: int) -> None:
        """End a process whose main thread is gone. If the process goes on (as another program, or with its
        other threads) it is killed; one that is ending is left to it. Returns at once."""
        ...

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Call back, on a thread of the engine's, whenever ``fd`` can be read."""
        ...

    def unwatch(self, fd: int) -> None: ...

    def close(self) -> None:
        """End all processes and wait until they are gone."""
        ...
