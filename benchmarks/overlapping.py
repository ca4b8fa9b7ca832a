"""The program of "Overlapping communication and computation", on a simulated accelerator."""

from __future__ import annotations

from typing import Any

import accelerator
from benchmarks.model import Overlap

SIDE = 512


def install(spec: Overlap) -> None:
    """Have the accelerator here, on which copying one tensor takes what ``spec`` says."""
    accelerator.install(accelerator.Settings(bandwidth=SIDE * SIDE * 4 / (spec.copy_ms / 1e3)))


class TorchTensorWorker:
    """Sends or receives. Made in its own process."""

    def __init__(self, spec: Overlap, index: int) -> None:
        install(spec)
        self.kernel = spec.kernel_ms / 1e3
        self.device = f"sim:{index}"

    def send(self, value: int) -> Any:
        import torch

        return torch.ones((SIDE, SIDE), device=self.device) * value

    def recv_and_matmul(self, two_d_tensor: Any) -> float:
        accelerator.kernel(self.kernel)
        return float(two_d_tensor[0][0].item())
