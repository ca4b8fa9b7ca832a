"""Messages between actors and the rendezvous of pickled refs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conveyor.runtime.messages.message import Message

if TYPE_CHECKING:
    from conveyor.codec import Reader
    from conveyor.exceptions import RuntimeStateError
    from conveyor.runtime.waiting.works import Blockers

ExportId = tuple[int, int]
"""The process that made the ref (an actor's number, 0 for the driver), and a number there."""

#: A snapshot as it travels: what it is made of, and its body unless that comes as a file.
Parts = tuple[int, int, int, "bytes | None"]


class ToRendezvous(Message, frozen=True):
    """Message from an actor to the driver."""


class Export(ToRendezvous, frozen=True):
    """Notice that a ref has been pickled for ``readers``, with that ticket. Answered by :class:`Refused`, if
    at all."""

    export: ExportId
    ticket: int
    readers: tuple[Reader, ...]


class Confirm(ToRendezvous, frozen=True):
    """Answered by :class:`Confirmed` once all that was said before has been noted."""

    number: int


class Load(ToRendezvous, frozen=True):
    """Notice that a pickle has been loaded. ``original``: the ref is there already, and needs no outcome."""

    export: ExportId
    ticket: int
    original: bool


class Drop(ToRendezvous, frozen=True):
    """Notice that nothing is left of the ref in this process."""

    export: ExportId


class GiveUp(ToRendezvous, frozen=True):
    """Notice that ``readers`` (``None``: this process) will not come with the ticket."""

    ticket: int
    readers: tuple[Reader, ...] | None


class Ask(ToRendezvous, frozen=True):
    """Question of who has to do something before the ref is done. Answered by :class:`Answer`."""

    export: ExportId
    question: int


class Tell(ToRendezvous, frozen=True):
    """Answer to :class:`Whom`, for the actor ``asker``."""

    export: ExportId
    question: int
    asker: int
    blockers: Blockers


class Made(ToRendezvous, frozen=True):
    """Outcome of this actor's own ref."""

    export: ExportId
    ok: bool
    parts: Parts


class Dry(ToRendezvous, frozen=True):
    """Answer to question ``question`` (see :class:`conveyor.worker.messages.Settle`): all that has come
    from these processes was loaded or given up, and nothing more of theirs comes."""

    question: int


class FromRendezvous(Message, frozen=True):
    """Message from the driver to an actor."""


class Refused(FromRendezvous, frozen=True):
    """Notice that nobody can load a pickle with that ticket, and why."""

    ticket: int
    error: RuntimeStateError


class Confirmed(FromRendezvous, frozen=True):
    """Answer to :class:`Confirm` ``number``."""

    number: int


class Forget(FromRendezvous, frozen=True):
    """Notice that nobody wants the outcome of the actor's own ref any more."""

    export: ExportId


class Whom(FromRendezvous, frozen=True):
    """Question of the actor ``asker``: who has to do something before this actor's own ref is done."""

    export: ExportId
    question: int
    asker: int


class Answer(FromRendezvous, frozen=True):
    """Answer to :class:`Ask`: who has to do something before a ref is done."""

    export: ExportId
    question: int
    blockers: Any


class Arrived(FromRendezvous, frozen=True):
    """Outcome of a ref that was loaded here."""

    export: ExportId
    ok: bool
    parts: Parts
