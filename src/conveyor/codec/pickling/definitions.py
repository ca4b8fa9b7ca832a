"""Classes and functions that a channel has carried by value: its writer's view, and each reader's.

A group stays with a reader until its writer says that it is gone: nothing of it is alive there any more. What
the reader has made of it lives on as long as somebody there refers to it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import itemgetter
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

# Guards the knowledge of readers. Two threads may learn the definitions of a frame, before one of them takes
# it.
_lock = threading.RLock()


class SentDefinitions:
    """Groups that a channel has carried. Belongs to the channel's writer."""

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
        "stays",
    )

    def __init__(
        self, readers: tuple[Reader, ...] = (), elsewhere: Callable[[], str] = lambda: ""
    ) -> None:
        # Names the readers that are on other nodes, where nothing that refers to this process can be
        # followed.
        self.elsewhere = elsewhere
        # Readers that decode each frame, in the order of the ring: each of them makes a claim in it good
        # once. Empty: one unknown reader.
        self.readers = readers
        self.groups: set[Token] = set()
        # Groups that are gone; the next frames tell. Finalizers add to it, in any thread; the rest is the
        # encoder's. It is an object of the core, which looks here, so that its end runs no bytecode: an
        # exception that a signal handler raised there would be lost.
        self.gone = _core.Untold()
        # Whether the last value needed the full pickler: a guess for the next one, nothing more.
        self.by_value = False
        # Tensors that travel beside the frame of the value that is being pickled.
        self.collected: Collected | None = None
        # Keeper of the promises about the value that is being pickled.
        self.keeper: Keeper | None = None
        # Whether the value is pickled into one string: memory that it refers to is read at once.
        self.in_band = False
        # Whether the memory of arrays and tensors of the value stays here, and that of nothing else.
        self.stays = False

    def note(self, groups: Iterable[Group]) -> None:
        """Note that a frame carries ``groups``."""
        for group in groups:
            self.groups.add(group.key)
            group.carried.add(self.gone)

    def take_gone(self) -> Sequence[Token]:
        """Return the groups that the frame which is being made tells to be gone.

        The frame, and those behind it, have to define them again if they refer to them.
        """
        gone = self.gone.take(MOST_TOLD)
        self.groups.difference_update(gone)
        return gone

    def forget(self) -> None:
        """Send all definitions again: a reader has lost a frame with some."""
        self.groups.clear()

    def undo(self, meta: bytes) -> None:
        """Take back a frame with a header that was encoded and will not be published. Its definitions are
        not sent, and nobody comes for its claims."""
        definitions, _, gone, _ = unpack(meta)
        self.groups.difference_update([tokens[0] for tokens, *_ in definitions])
        self.gone.add(gone)
        self._withdraw(meta, self.readers)

    def unclaimed(self, meta: bytes, left: Iterable[int]) -> None:
        """Withdraw the claims of a frame with a header for the readers with these numbers, which never come
        for them."""
        self._withdraw(meta, [self.readers[i] for i in left] if self.readers else ())

    def _withdraw(self, meta: bytes, readers: Sequence[Reader]) -> None:
        _, made, _, _ = unpack(meta)
        claims.withdraw(made, readers)


class Generation:
    """The groups that frames of a channel may refer to, between two changes of what its reader knows.

    Who keeps such a frame, to decode it later, holds this.
    """

    __slots__ = ("__weakref__", "dropped", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        # Groups of this generation that the writer has let go of since.
        self.dropped: list[Sequence[tuple[int, Pin]]] = []


class KnownDefinitions:
    """Groups that a channel has brought. Belongs to the channel's reader.

    Holds what the writer believes to be known; the definitions can be forgotten when the last
    channel that brought them is gone, or has let go of them, and nothing is made of them any more.
    """

    __slots__ = ("generation", "living", "most", "pins")

    def __init__(self) -> None:
        self.generation = Generation(0)
        # Generations in their order, and among them some that nobody holds any more.
        self.living: list[weakref.ref[Generation]] = []
        self.most = 64  # of them, before those are taken out
        # Each with the number of the first generation that knows it.
        self.pins: dict[Token, tuple[int, Pin]] = {}

    def learn(self, definitions: Iterable[Definition], gone: Iterable[Token] = ()) -> None:
        """Take note of the groups in a frame, and of those that are gone. Loads nothing."""
        with _lock:
            pins = self.pins
            left = [key for key in gone if key in pins]
            new = [one for one in definitions if one[0][0] not in pins or one[0][0] in left]
            if not left and not new:
                return
            number = self._begin_generation()
            self._drop(sorted([pins[key] for key in left], key=itemgetter(0)))
            for key in left:
                del pins[key]
            for definition in new:
                pins[definition[0][0]] = number, byvalue.pin(definition)

    def _begin_generation(self) -> int:
        living = self.living
        generation = Generation(self.generation.number + 1)
        living.append(weakref.ref(generation))
        self.generation = generation
        while len(living) > 1 and living[-2]() is None:
            del living[-2]
        if len(living) > self.most:
            living[:] = [ref for ref in living if ref() is not None]
            self.most = 2 * len(living) + 64
        return generation.number

    def _drop(self, pins: Sequence[tuple[int, Pin]]) -> None:
        """Have each generation before this one keep those of ``pins`` that it knows; older pins are first."""
        for ref in islice(reversed(self.living), 1, None):
            generation = ref()
            if generation is None:
                continue
            while pins and pins[-1][0] > generation.number:
                pins = pins[:-1]
            if not pins:
                break
            generation.dropped.append(pins)


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
