"""NIXL: readers fetch tensors out of the writer's memory, by the fastest way that UCX finds."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from conveyor.transport.base import Capabilities, Transport, Wire

if TYPE_CHECKING:
    from conveyor.transport.nixl.endpoint import NixlEndpoint


class NixlTransport(Transport):
    """Moves tensors of the CPU with NVIDIA's transfer library, over UCX.

    The writer does nothing for a transfer once it is announced: readers read its memory. So a writer that
    computes, or is stopped, holds nobody up where UCX can read another process's memory.
    """

    name = "nixl"
    capabilities = Capabilities(devices=frozenset({"cpu"}), between_hosts=True)

    def viable(self) -> str | None:
        """Return why torch or nixl is missing here, or ``None``. This imports neither; ``open`` finds out the
        rest."""
        if not _is_there("torch"):
            return "torch is not installed: pip install 'conveyor[torch]'"
        if not _is_there("nixl"):
            return "nixl is not installed: pip install 'conveyor[nixl]'"
        return None

    def open(self, wire: Wire) -> NixlEndpoint:
        """Open the writer's or a reader's end, by the rank."""
        from conveyor.transport.nixl.endpoint import Reader, Writer  # needs torch and nixl

        return (Reader if wire.rank else Writer)(wire)


def _is_there(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


TRANSPORT = NixlTransport()
