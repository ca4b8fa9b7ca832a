"""What the driver tells an actor's process of itself and of others."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.runtime.process import ArenaSize


@dataclass(frozen=True, slots=True)
class Hello:
    """What an actor's process is told at birth. With it come descriptors, in this order: board, own arena,
    own eventfd, driver's arena, driver's eventfd, control socket, request socket, call segment, control
    segment."""

    slot: int
    name: str
    number: int
    session: str
    arena: ArenaSize
    driver_slot: int
    mailbox_bit: int
    control_bit: int
    max_concurrency: int | None
    has_async: bool
    grace: float


@dataclass(frozen=True, slots=True)
class Caller:
    """A link that somebody opens to this actor; its segment comes on the control socket."""

    slot: int
    incarnation: int
    bit: int
