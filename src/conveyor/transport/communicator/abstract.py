"""What a communicator has to be able to do."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Communicator(ABC):
    """Moves tensors among a fixed set of actors, each of which has a rank.

    One is made where the graph is compiled, and named by ``with_tensor_transport(transport=...)`` or as the
    graph's ``default_communicator``. Every actor that takes part in such an edge gets a copy of it (so it is
    pickled, as it was before :meth:`initialize`), which is initialized, used and destroyed there, by one
    thread that does nothing else. All of these may block: only transfers wait for them. ``destroy`` alone may
    be called by another thread while one of the others blocks, which it should make raise.

    ``send`` and ``recv`` are called in matching order at both ends, one at a time in each process. One that
    raises fails its execution. Both ends then have a new copy initialized, and go on with that.

    ``collective.allreduce.bind(..., transport=communicator)`` and its like call ``allreduce``,
    ``allgather`` and ``reducescatter``, of all actors, in one order in all of them. For these, each actor
    has one more copy, which all graphs that name the communicator share.
    """

    @abstractmethod
    def initialize(self, rank: int) -> None:
        """Begin, as the actor with that rank. It is called in the actors that need it, when the first tensor
        is moved, so it must not wait for all ranks."""

    @abstractmethod
    def get_actor_handles(self) -> Sequence[Any]:
        """List the actors."""

    @abstractmethod
    def get_rank(self, actor: Any) -> int:
        """Return the rank of one of the actors."""

    @abstractmethod
    def get_self_rank(self) -> int | None:
        """Return the rank of this process's actor; ``None`` before :meth:`initialize`."""

    @abstractmethod
    def send(self, value: torch.Tensor, peer_rank: int) -> None:
        """Send a contiguous tensor. It may be written to once this has returned."""

    @abstractmethod
    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        peer_rank: int,
        allocator: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> torch.Tensor:
        """Receive a tensor; ``allocator`` makes one to receive into, on the kind of device
        where the sender has its."""

    @abstractmethod
    def destroy(self) -> None:
        """Let go of everything, and have what blocks raise. It is called once for each initialization."""

    def get_world_size(self) -> int:
        """Count the actors."""
        return len(self.get_actor_handles())

    def get_transport_name(self) -> str:
        """Name it, for ``explain()`` and errors."""
        return type(self).__name__

    @classmethod
    def generate_communicator_id(cls) -> str:
        """Make a name that no other communicator has."""
        return os.urandom(16).hex()

    # Called by the collectives of graphs. A missing method fails the execution.

    def allreduce(self, send_buf: torch.Tensor, recv_buf: torch.Tensor, op: Any = None) -> None:
        """Reduce a tensor of every rank; every rank gets the result. ``op`` is a
        ``conveyor.experimental.collective.ReduceOp``."""
        raise NotImplementedError(f"{self.get_transport_name()} has no allreduce")

    def allgather(self, send_buf: torch.Tensor, recv_buf: torch.Tensor) -> None:
        """Join the tensors of all ranks along dimension 0, in the order of ranks, at every rank."""
        raise NotImplementedError(f"{self.get_transport_name()} has no allgather")

    def reducescatter(self, send_buf: torch.Tensor, recv_buf: torch.Tensor, op: Any = None) -> None:
        """Reduce a tensor of every rank; every rank gets its part along dimension 0, the first the first."""
        raise NotImplementedError(f"{self.get_transport_name()} has no reducescatter")
