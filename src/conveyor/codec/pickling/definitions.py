"""Classes and functions that a channel has carried by value: its writer's view, and each reader's.

A group stays with a reader until its writer says that it is gone: nothing of it is alive there any more. What
the reader has made of it lives on as long as somebody there refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from conveyor import _core
from conveyor.codec import claims
from conveyor.codec.claims import Reader
from conveyor.codec.header import Definition, Token, unpack
from conveyor.codec.pickling import byvalue
from conveyor.codec.pickling.byvalue import Group, Pin

if TYPE_CHECKING:
    from conveyor.codec.promises import Keeper
    from conveyor.codec.tensors.beside import Collected


# Groups that are gone, in one frame: it should fit a slot.
MOST_TOLD = 32


class SentDefinitions:
    """Which groups a channel has carried. Belongs to the channel's writer."""

    __slots__ = (
        "__weakref__",
        "by_value",
        "collected",
        "elsewhere",
        "gone",
        "groups",
        "in_band",
        "keeper",
        "readers",
    )

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
        # Those that are gone, of which the next frames tell. Finalizers append here, in any thread; the rest
        # is the encoder's. The core looks here, if any channel has such.
        self.gone: list[Token] = []
        # Whether the last value needed the full pickler: a guess for the next one, nothing more.
        self.by_value = False
        # While a value is pickled whose tensors travel beside its frame: those.
        self.collected: Collected | None = None
        # While a value is pickled of which something was promised: who keeps to it.
        self.keeper: Keeper | None = None
        # While a value is pickled into one string: memory that it refers to is read at once.
        self.in_band = False

    def __del__(self, count: Callable[[int], None] = _core.count_untold) -> None:
        if self.gone:
            count(-len(self.gone))

    def note(self, groups: Iterable[Group]) -> None:
        """A frame carries ``groups``."""
        for group in groups:
            self.groups.add(group.key)
            group.carried.add(self)

    def let_go(self, keys: Sequence[Token]) -> None:
        """Tell with the next frames that these groups are gone. Finalizers call it, in any thread."""
        self.gone.extend(keys)
        _core.count_untold(len(keys))

    def take_gone(self) -> Sequence[Token]:
        """Return the groups that the frame which is being made tells to be gone.

        The frame, and those behind it, have to define them again if they refer to them.
        """
        gone = self.gone[:MOST_TOLD]
        if gone:
            del self.gone[: len(gone)]
            _core.count_untold(-len(gone))
            self.groups.difference_update(gone)
        return gone

    def forget(self) -> None:
        """A reader has lost a frame with definitions: they are all sent again."""
        self.groups.clear()

    def undo(self, meta: bytes) -> None:
        """A frame with a header was encoded and will not be published: its definitions are not sent, and
        nobody comes for its claims."""
        definitions, _, gone, _ = unpack(meta)
        self.groups.difference_update([tokens[0] for tokens, *_ in definitions])
        self.let_go(gone)
        self._withdraw(meta, self.readers)

    def unclaimed(self, meta: bytes, left: Iterable[int]) -> None:
        """The readers with these numbers never come for the claims of a frame with a header."""
        self._withdraw(meta, [self.readers[i] for i in left] if self.readers else ())

    def _withdraw(self, meta: bytes, readers: Sequence[Reader]) -> None:
        _, made, _, _ = unpack(meta)
        claims.withdraw(made, readers)


class Generation:
    """The groups that frames of a channel may refer to which came before the writer let go of some.

    Who keeps such a frame, to decode it later, holds this.
    """

    __slots__ = ("dropped", "next", "pins")

    def __init__(self, pins: dict[Token, Pin]) -> None:
        self.pins = pins  # those of the channel that are left, of whichever generation
        self.dropped: tuple[Pin, ...] = ()
        self.next: Generation | None = None


class KnownDefinitions:
    """Groups that a channel has brought. Belongs to the channel's reader.

    Holds what the writer believes to be known; the definitions can be forgotten when the last
    channel that brought them is gone, or has let go of them, and nothing is made of them any more.
    """

    __slots__ = ("generation",)

    def __init__(self) -> None:
        self.generation = Generation({})

    def learn(self, definitions: Iterable[Definition], gone: Iterable[Token] = ()) -> None:
        """Take note of the groups in a frame, and of those that are gone. Loads nothing."""
        pins = self.generation.pins
        dropped = tuple([pins.pop(key) for key in gone if key in pins])
        if dropped:
            before = self.generation
            self.generation = before.next = Generation(pins)
            before.dropped = dropped
        for definition in definitions:
            key = definition[0][0]
            if key not in pins:
                pins[key] = byvalue.pin(definition)


def definitions_of(groups: Iterable[Group], sent: SentDefinitions) -> list[Group]:
    """The groups that a frame which refers to ``groups`` must carry, in the order to learn them in.

    Leaves ``sent`` alone: it is to take ``note`` of them once nothing can fail any more.
    """
    missing: dict[Token, Group] = {}

    def visit(group: Group) -> None:
        if group.key not in sent.groups and group.key not in missing:
            for needed in group.needs:
                visit(needed)
            missing[group.key] = group

    for group in groups:
        visit(group)
    return list(missing.values())
