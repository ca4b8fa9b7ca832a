"""Gloo transport: tensors of the CPU over TCP, by the library that torch brings for it."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from conveyor.transport.base import Capabilities, Transport, Wire

if TYPE_CHECKING:
    from conveyor.transport.gloo.endpoint import GlooEndpoint


class GlooTransport(Transport):
    """Moves tensors of the CPU over TCP connections on the loopback interface.

    Its groups are its own: ``torch.distributed`` is neither initialised nor asked, so a program may use
    that beside it.
    """

    name = "gloo"
    capabilities = Capabilities(devices=frozenset({"cpu"}), between_hosts=True)

    def viable(self) -> str | None:
        """Return why gloo cannot be used here, or ``None``. This does not import torch; ``open`` finds out
        the rest."""
        if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
            return "torch is not installed: pip install 'conveyor[torch]'"
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and not has_gloo(distributed):
            return "this build of torch has no gloo"
        return None

    def open(self, wire: Wire) -> GlooEndpoint:
        """Import torch, and open this process's end of an edge."""
        import torch.distributed  # slow

        if not has_gloo(torch.distributed):
            raise RuntimeError("this build of torch has no gloo")
        from conveyor.transport.gloo.endpoint import GlooEndpoint  # needs torch

        return GlooEndpoint(wire)


def has_gloo(distributed: object) -> bool:
    """Say whether ``torch.distributed`` was built with gloo."""
    available = getattr(distributed, "is_gloo_available", None)
    return available is not None and bool(available())


TRANSPORT = GlooTransport()
