"""Which classes and functions a channel has carried by value: its writer's view, and each reader's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from conveyor.codec import claims
from conveyor.codec.claims import Reader
from conveyor.codec.header import Definition, Token, unpack
from conveyor.codec.pickling import byvalue
from conveyor.codec.pickling.byvalue import Group

if TYPE_CHECKING:
    from conveyor.codec.promises import Keeper
    from conveyor.codec.tensors.beside import Collected


class SentDefinitions:
    """Which groups a channel has carried. Belongs to the channel's writer."""

    __slots__ = ("by_value", "collected", "elsewhere", "groups", "in_band", "keeper", "readers")

    def __init__(
        self, readers: tuple[Reader, ...] = (), elsewhere: Callable[[], str] = lambda: ""
    ) -> None:
        # In words, those of the readers that are on other hosts, where nothing that refers to this process
        # can be followed.
        self.elsewhere = elsewhere
        # Who decodes each frame, in the order of the ring: each of them makes a claim in it good once. Empty:
        # one that is not known.
        self.readers = readers
        self.groups: set[Token] = set()
        # Whether the last value needed the full pickler: a guess for the next one, nothing more.
        self.by_value = False
        # While a value is pickled whose tensors travel beside its frame: those.
        self.collected: Collected | None = None
        # While a value is pickled of which something was promised: who keeps to it.
        self.keeper: Keeper | None = None
        # While a value is pickled into one string: memory that it refers to is read at once.
        self.in_band = False

    def forget(self) -> None:
        """A reader has lost a frame with definitions: they are all sent again."""
        self.groups.clear()

    def undo(self, meta: bytes) -> None:
        """A frame with a header was encoded and will not be published: its definitions are not sent, and
        nobody comes for its claims."""
        definitions, _, _ = unpack(meta)
        self.groups.difference_update(tokens[0] for tokens, _, _ in definitions)
        self._withdraw(meta, self.readers)

    def unclaimed(self, meta: bytes, left: Iterable[int]) -> None:
        """The readers with these numbers never come for the claims of a frame with a header."""
        self._withdraw(meta, [self.readers[i] for i in left] if self.readers else ())

    def _withdraw(self, meta: bytes, readers: Sequence[Reader]) -> None:
        _, made, _ = unpack(meta)
        claims.withdraw(made, readers)


class KnownDefinitions:
    """Which groups a channel has brought. Belongs to the channel's reader.

    Holds what the writer believes to be known; the definitions can be forgotten when the last
    channel that brought them is gone and nothing is made of them any more.
    """

    __slots__ = ("pins",)

    def __init__(self) -> None:
        self.pins: dict[Token, byvalue.Pin] = {}

    def learn(self, definitions: Iterable[Definition]) -> None:
        """Take note of the groups in a frame. Loads nothing."""
        for tokens, payload, needs in definitions:
            key = tokens[0]
            if key not in self.pins:
                self.pins[key] = byvalue.pin(tokens, payload, needs)


def definitions_of(groups: Iterable[Group], sent: SentDefinitions) -> list[Definition]:
    """What a frame that refers to ``groups`` must carry, in the order to learn it in.

    Leaves ``sent`` alone: its ``groups`` are to be updated once nothing can fail any more.
    """
    missing: dict[Token, Group] = {}

    def visit(group: Group) -> None:
        if group.key not in sent.groups and group.key not in missing:
            for needed in group.needs:
                visit(needed)
            missing[group.key] = group

    for group in groups:
        visit(group)
    return [(g.tokens, g.payload, tuple(n.key for n in g.needs)) for g in missing.values()]
