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
    """A way to such tensors. It is sent to whoever fetches, so it can be pickled.

    name: what it is called.
    takes_all: it is asked of each tensor of the value; else only of those that are on no CPU.
    """

    name: str
    takes_all: bool = False

    @abstractmethod
    def collected(self) -> Collected:
        """What the tensors are put into that are got by it, while the value is encoded."""

    def specs(self, tensors: list[Any]) -> Sequence[TensorSpec]:
        """What is said of the tensors beside the note."""
        from conveyor.codec.parcels import TensorSpec

        return [TensorSpec.of(one) for one in tensors]

    def copied(self, tensor: Any) -> Any:
        """A copy of one of them, for a snapshot."""
        return tensor.clone()

    @abstractmethod
    def offer(self, number: int, tensors: list[Any]) -> bytes | None:
        """Let others have contiguous tensors, which are kept here until :meth:`forget`. Returns a note for
        them; ``None``: they cannot have them.

        number: of the value.
        """

    @abstractmethod
    def fetch(self, where: Located, specs: Sequence[TensorSpec], note: bytes) -> list[Any]:
        """Get copies of tensors of the value at ``where``, which another process has offered. It returns when
        they are made."""

    def way(self, note: bytes) -> str:
        """How this process would get what ``note`` offers, as ``Ref.route`` tells it."""
        return self.name

    def forget(self, number: int, note: bytes, tensors: list[Any]) -> None:  # noqa: B027 - most have nothing
        """The value is kept no more."""


class Beside(NamedTuple):
    """What a frame says of them.

    route: how they are got.
    specs: what they are; none if the note says it.
    note: of the route.
    """

    route: Route
    specs: Sequence[TensorSpec]
    note: bytes

    def pack(self) -> bytes:
        """For ``Located.beside``."""
        return pickle.dumps(tuple(self), 5)

    @classmethod
    def unpack(cls, packed: bytes) -> Beside:
        """What :meth:`pack` has made."""
        return cls(*pickle.loads(packed))
