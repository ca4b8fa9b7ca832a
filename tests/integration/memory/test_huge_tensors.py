"""Large tensors of actors have huge pages, where the kernel has any: who fetches them reads half as long."""

from pathlib import Path

import pytest
from integration_helpers import get

import conveyor

torch = pytest.importorskip("torch")

PRELOAD = ["torch"]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has none"
    ),
]


@conveyor.remote
class Maker:
    def wants_huge_pages(self, nbytes):
        import torch

        made = torch.ones(nbytes, dtype=torch.uint8)
        middle, inside = made.data_ptr() + nbytes // 2, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            name, *fields = line.split()
            if not name.endswith(":"):
                start, _, end = name.partition("-")
                inside = int(start, 16) <= middle < int(end, 16)
            elif inside and name == "VmFlags:":
                return "hg" in fields
        raise AssertionError("the tensor lies in no mapping")


def test_large_tensors_have_huge_pages_also_where_torch_was_imported_before_the_actor_was(session):
    maker = Maker.remote()
    assert get(maker.wants_huge_pages.remote(64 << 20)) is True
    conveyor.kill(maker)
