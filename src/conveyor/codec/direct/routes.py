"""Ways to get tensors of a value that has stayed, other than reading: those of devices, or what a user's
transport moves."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from conveyor.codec.direct.located import Located
    from conveyor.codec.parcels import TensorSpec
    from conveyor.codec.tensors.beside import Collected


class Route(ABC):
    """Way to get tensors of a value other than by reading. It is sent to whoever fetches, so it can be
    pickled.

    name: the name of the route.
    takes_all: it is asked of each tensor of the value; else only of those that are on no CPU.
    """

    name: str
    takes_all: bool = False

    @abstractmethod
    def collected(self) -> Collected:
        """Return the collection that takes the tensors of this route out of the value while the value is
        encoded."""

    def specs(self, tensors: list[Any]) -> Sequence[TensorSpec]:
        """Describe the tensors, for the frame, beside the note."""
        from conveyor.codec.parcels import TensorSpec

        return [TensorSpec.of(one) for one in tensors]

    def copied(self, tensor: Any) -> Any:
        """Copy one of the tensors, for a snapshot."""
        return tensor.clone()

    @abstractmethod
    def offer(self, number: int, tensors: list[Any]) -> bytes | None:
        """Offer contiguous tensors to others; they are kept here until :meth:`forget`. Returns a note for
        the others; ``None``: they cannot have the tensors.

        number: of the value.
        """

    @abstractmethod
    def fetch(self, where: Located, specs: Sequence[TensorSpec], note: bytes) -> list[Any]:
        """Get copies of tensors of the value at ``where``, which another process has offered. Returns when
        they are made."""

    def way(self, note: bytes) -> str:
        """Name the way by which this process would get what ``note`` offers, as ``Ref.route`` tells it."""
        return self.name

    def forget(self, number: int, note: bytes, tensors: list[Any]) -> None:  # noqa: B027 - most have nothing
        """Let go of the tensors: the value is kept no more."""


class Beside(NamedTuple):
    """Description, in a frame, of the tensors that are got by a route.

    route: how they are got.
    specs: shape, dtype and device of each; none if the note says them.
    note: of the route.
    """

    route: Route
    specs: Sequence[TensorSpec]
    note: bytes

    def pack(self) -> bytes:
        """Pack this for ``Located.beside``."""
        return pickle.dumps(tuple(self), 5)

    @classmethod
    def unpack(cls, packed: bytes) -> Beside:
        """Rebuild a description from the bytes of :meth:`pack`."""
        return cls(*pickle.loads(packed))
