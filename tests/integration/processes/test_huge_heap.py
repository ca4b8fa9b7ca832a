"""The heap of actors has huge pages, in which many small tensors are fetched in half the time."""

from pathlib import Path

import pytest

from conveyor.engines.local.server import with_huge_heap

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    "GLIBC_TUNABLES" not in with_huge_heap({})
    or not MODE.exists()
    or "[madvise]" not in MODE.read_text(),
    reason="needs glibc 2.35, and a kernel that makes huge pages for who asks",
)

PROGRAM = """
import ctypes
import os

import conveyor


@conveyor.remote
class Maker:
    def flags(self):
        kept = [bytearray(200 << 10) for _ in range(64)]
        address = ctypes.addressof(ctypes.c_char.from_buffer(kept[32]))
        inside = False
        for line in open("/proc/self/smaps"):
            first, *rest = line.split()
            if "-" in first:
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "VmFlags:":
                return rest
        raise LookupError(hex(address))

    def tunables(self):
        return os.environ.get("GLIBC_TUNABLES")


conveyor.init(engine="local")
maker = Maker.remote()
print("hg" in conveyor.get(maker.flags.remote()), conveyor.get(maker.tunables.remote()))
"""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "True None"),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, "False None"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "False glibc.malloc.hugetlb=0"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, "True glibc.malloc.arena_max=2"),
    ],
    ids=["by-itself", "not-wanted", "said-otherwise", "beside-others"],
)
def test_small_values_lie_in_it(scripts, environ, expected):
    assert scripts.run(PROGRAM, env=environ).splitlines() == [expected]
