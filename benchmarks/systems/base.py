"""What every system offers to the measurements: paths through workers, and little else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from benchmarks.model import AllReduce, Direct, Executor, Overlap, Topology


def _nothing() -> None:
    pass


@dataclass
class Path:
    """A built topology. ``once`` is one execution; ``submit`` and ``receive`` are its halves.

    workers: the process ids of the workers.
    """

    once: Callable[[Any], Any]
    submit: Callable[[Any], Any]
    receive: Callable[[Any], Any]
    close: Callable[[], None] = _nothing
    workers: list[int] = field(default_factory=list)


@dataclass
class AsyncPath:
    """The same for asyncio; opened inside the running loop."""

    once: Callable[[Any], Awaitable[Any]]
    close: Callable[[], None] = _nothing


@dataclass
class DirectPath:
    """A maker of values that stay with it, and who reads them.

    make: a value of which every byte is the given number; what it is known by. ``made`` waits for it.
    pull: what each reader reads of it; for ``into`` nothing, since ``target`` is where it is then.
    wake: has the readers be awake.
    compute: has the maker compute in Python until then, by ``time.monotonic()``.
    maker: its process id.
    beside: other ways to pull, each the figure of that name.
    """

    make: Callable[[int], Any]
    pull: Callable[[Any], list[int]]
    made: Callable[[Any], None] = lambda _: None
    wake: Callable[[], None] = _nothing
    compute: Callable[[float], Any] = lambda _: None
    close: Callable[[], None] = _nothing
    target: Any = None
    maker: int = 0
    out_of_band: dict[str, Callable[[Any], list[int]]] = field(default_factory=dict)


class System:
    """One way to run workers. A method a system lacks is never asked of it by the registry."""

    name: ClassVar[str]
    package: ClassVar[str] = ""
    main_threads_work: ClassVar[bool] = True  # else /proc does not tell on which core work runs
    startup_s: ClassVar[float] = 15.0  # added to the time limit of the first case of a process

    def open(self) -> None:
        """Start what all cases of this process share."""

    def close(self) -> None:
        """End it."""

    def path(self, topology: Topology) -> Path:
        """Workers connected as ``topology`` says, ready for executions."""
        raise NotImplementedError

    def call_path(self, method: str) -> Path:
        """Plain calls of one actor's method."""
        raise NotImplementedError

    async def async_path(self) -> AsyncPath:
        """Echo on one actor, awaited."""
        raise NotImplementedError

    def executor_path(self, spec: Executor) -> Path:
        """A pipeline of ``benchmarks.stage.Stage``; what is submitted goes to every one of them."""
        raise NotImplementedError

    def allreduce_path(self, spec: AllReduce) -> Path:
        """Ranks that time a number of allreduces, which is what is submitted; rank 0's times come back."""
        raise NotImplementedError

    def overlap_path(self, spec: Overlap) -> tuple[Path, float]:
        """The program of overlap, and the seconds that an execution of it takes in simulation."""
        raise NotImplementedError

    def direct_path(self, spec: Direct) -> DirectPath:
        """A maker of values that stay with it, and readers."""
        raise NotImplementedError

    def empty(self, device: str, size: int) -> Any:
        """``size`` bytes in the channel's memory, as a numpy array or a torch tensor."""
        raise NotImplementedError
