"""What handles of a graph and its owner, the process that has compiled it, say to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from conveyor.runtime.messages.message import Message

if TYPE_CHECKING:
    from conveyor.runtime.refs.pickled.exchange import Parts
    from conveyor.runtime.waiting.works import Blockers

#: What can be asked of a graph's owner beside executions; the names are those of ``CompiledGraph``.
Question = Literal["explain", "status", "stats", "is_teardown"]


class ToOwner(Message, frozen=True):
    """What a handle says. Each request has a number."""


class Execute(ToOwner, frozen=True):
    """Begin an execution. ``patient``: wait for room, for ``patience`` seconds (``None``: for ever).
    ``left``: seconds that it has for all of it (``None``: no limit). These are durations, since clocks of
    hosts differ. The snapshot holds the arguments (``whole``: the only one, as it is), or the error of one of
    them (``failed``). Answered by :class:`Answered`."""

    number: int
    patient: bool
    whole: bool
    failed: bool
    patience: float | None
    left: float | None
    parts: Parts


class Show(ToOwner, frozen=True):
    """Say something of the graph. Answered by :class:`Answered`."""

    number: int
    question: Question
    args: tuple[Any, ...]


class Withdraw(ToOwner, frozen=True):
    """Nobody waits for the answer any more."""

    number: int


class Whom(ToOwner, frozen=True):
    """Who has to do something before the request is answered? Answered by :class:`HeldUp`."""

    number: int
    question: int


class FromOwner(Message, frozen=True):
    """What a handle is told, each about a request of its."""


class Answered(FromOwner, frozen=True):
    """What was asked for, pickled, or (not ``ok``) the error to raise."""

    number: int
    ok: bool
    data: bytes


class HeldUp(FromOwner, frozen=True):
    """Who has to do something before the request is answered."""

    number: int
    question: int
    blockers: Blockers
