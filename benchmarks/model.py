"""What is measured: workloads and cases, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

TopologyKind = Literal["chain", "fan", "args"]
Device = Literal["numpy", "torch"]
Placement = Literal["free", "pinned", "split"]
"""free: the kernel places the processes; pinned: all of them on one core; split: this process's
main thread on the first core, the workers' on the others."""

Tier = Literal["quick", "default", "full"]

PLACEMENTS: tuple[Placement, ...] = ("free", "pinned", "split")
TIERS: tuple[Tier, ...] = ("quick", "default", "full")
ARGUMENTS = 8


@dataclass(frozen=True)
class Topology:
    """How workers are connected.

    chain: ``tasks`` calls one after the other, dealt out to ``size`` workers in turn.
    fan: one input to ``size`` workers, all outputs back.
    args: ``ARGUMENTS`` inputs to one worker.
    """

    kind: TopologyKind
    size: int
    method: str = "echo"
    tasks: int = 0

    @property
    def hops(self) -> int:
        return self.tasks or self.size

    def expected(self, value: object) -> object:
        """What one execution of an echo returns."""
        return [value] * self.size if self.kind == "fan" else value


@dataclass(frozen=True)
class Latency:
    """One execution at a time; ``pace_ms`` of sleep before each."""

    topology: Topology
    pace_ms: float = 0.0


@dataclass(frozen=True)
class Throughput:
    """Executions per second with ``in_flight`` on their way at once."""

    topology: Topology
    in_flight: int


@dataclass(frozen=True)
class Transfer:
    """A payload to one worker that reads every page; ``back``: and the payload back again."""

    device: Device
    size: int
    back: bool = False


@dataclass(frozen=True)
class InPlace:
    """A value made in the channel's memory, sent to a worker that reads its first byte."""

    device: Device
    size: int


@dataclass(frozen=True)
class EagerCall:
    """A plain call of an actor's method."""


@dataclass(frozen=True)
class AsyncEcho:
    """Echo on one actor, awaited."""


@dataclass(frozen=True)
class Lifecycle:
    """Compile plus first execution, and teardown, of a chain of ``tasks`` on ``actors``."""

    actors: int
    tasks: int


@dataclass(frozen=True)
class Start:
    """From nothing to the first reply of ``actors`` actors; ``torch``: that import torch."""

    actors: int
    torch: bool = False


@dataclass(frozen=True)
class ImportTime:
    """``import`` of the system's package in a fresh interpreter."""


@dataclass(frozen=True)
class Idle:
    """CPU of all processes with a compiled chain of ``actors``, 1 s after its last execution."""

    actors: int


@dataclass(frozen=True)
class Memory:
    """Resident memory of bare actors, shared pages divided among their users (PSS)."""

    actors: int


@dataclass(frozen=True)
class Death:
    """From SIGKILL of a working actor to the exception in the waiting caller."""

    eager: bool = False
    mebibytes: int = 0


@dataclass(frozen=True)
class Executor:
    """Steps of a model that is cut into ``stages``, each of ``ranks`` workers whose simulated devices compute
    for ``stage_ms``; behind that the ranks of a stage reduce what they have."""

    stages: int
    stage_ms: float
    ranks: int = 1


@dataclass(frozen=True)
class AllReduce:
    """A sum of ``size`` bytes of float32 over ``ranks``, each bound to a core.

    bound: it is bound in a graph; else methods call it.
    """

    ranks: int
    size: int
    bound: bool = False


@dataclass(frozen=True)
class Overlap:
    """The program of "Overlapping communication and computation": ``senders`` tensors of a simulated
    accelerator to one receiver, which copies each for ``copy_ms`` and has a kernel of ``kernel_ms`` for
    it."""

    senders: int
    copy_ms: float
    kernel_ms: float
    overlap: bool


DirectUse = Literal["call", "again", "busy", "used", "cold", "into", "in-place"]
"""What is done with a value that stays with its maker, once it is there (but for ``call``).

call: the maker is asked for it and the reader peeks at it, from the first call to the reply.
again: the reader peeks at the same value time after time.
busy: the same, while the maker computes in Python.
used: the reader reads all of it once. It was made anew before.
cold: the same, and the reader keeps it: the next one comes to memory that nobody has used.
into: it is fetched into a tensor that is there.
in-place: it was made in memory that others may read, and the reader peeks at it.
"""


@dataclass(frozen=True)
class Direct:
    """A value of ``count`` torch tensors of ``size`` bytes each that stays with its maker, and is fetched by
    each of ``readers``."""

    use: DirectUse
    size: int
    count: int = 1
    readers: int = 1

    @property
    def nbytes(self) -> int:
        return self.size * self.count

    @property
    def peeks(self) -> bool:
        """Whether a reader looks at one byte of the value only."""
        return self.use in ("call", "again", "busy", "in-place")


@dataclass(frozen=True)
class Core:
    """One of the ``CALLS`` of ``measure/core.py``, or one of its ``VALUES`` and the way that it goes."""

    what: str
    way: str = ""


@dataclass(frozen=True)
class Growth:
    """The time for each of ``counts`` things of one kind, all of them at once."""

    what: str
    counts: tuple[int, ...]


Spec = (
    Latency
    | Throughput
    | Transfer
    | InPlace
    | EagerCall
    | AsyncEcho
    | Lifecycle
    | Start
    | ImportTime
    | Idle
    | Memory
    | Death
    | Executor
    | AllReduce
    | Overlap
    | Direct
    | Core
    | Growth
)


@dataclass(frozen=True)
class Workload:
    """One named thing to measure, on each of ``systems``.

    setup: workloads of one system with the same set-up share a process.
    tiers: for each system, the smallest run that includes it.
    """

    name: str
    section: str
    spec: Spec
    setup: str
    tiers: dict[str, Tier]
    limit_s: float = 30.0
    placements: dict[str, tuple[Placement, ...]] = field(default_factory=dict)

    def placements_on(self, system: str) -> tuple[Placement, ...]:
        return self.placements.get(system, ("free",))


@dataclass(frozen=True)
class Case:
    """A workload on a system in a placement: one row of raw results."""

    workload: str
    system: str
    placement: Placement

    def __str__(self) -> str:
        return f"{self.workload} on {self.system} ({self.placement})"
