"""What a fork server's environment says to the C library."""

import os
import subprocess
import sys

import pytest

from conveyor.engines.local import server
from conveyor.engines.local.server import with_huge_heap

OURS = "glibc.malloc.hugetlb=1"


@pytest.fixture
def library(monkeypatch):
    """Has the C library be another one, or of another version."""
    names = {"name": "glibc 2.36"}

    def confstr(requested):
        assert requested == "CS_GNU_LIBC_VERSION"
        if isinstance(names["name"], Exception):
            raise names["name"]
        return names["name"]

    monkeypatch.setattr(server.os, "confstr", confstr)
    return lambda name: names.update(name=name)


def test_the_heap_is_to_have_huge_pages(library):
    given = {"PATH": "/bin"}
    assert with_huge_heap(given) == {"PATH": "/bin", "GLIBC_TUNABLES": OURS}
    assert given == {"PATH": "/bin"}


def test_other_tunables_stay(library):
    given = {"GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.arena_max=1"}
    found = with_huge_heap(given)["GLIBC_TUNABLES"]
    assert found == f"{given['GLIBC_TUNABLES']}:{OURS}"


@pytest.mark.parametrize(
    "given",
    [
        {"THP_MEM_ALLOC_ENABLE": "0"},
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"},
        {"GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.hugetlb=2"},
    ],
)
def test_what_somebody_has_said_is_left_alone(library, given):
    assert with_huge_heap(given) == given


@pytest.mark.parametrize(
    "name", ["glibc 2.34", "glibc 1.40", "musl 1.2", "", None, ValueError(), OSError()]
)
def test_a_library_that_has_no_such_pages_is_left_alone(library, name):
    library(name)
    assert with_huge_heap({"PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("name", ["glibc 2.35", "glibc 2.100", "glibc 3.0"])
def test_newer_ones_have_them(library, name):
    library(name)
    assert with_huge_heap({})["GLIBC_TUNABLES"] == OURS


#: Says for each of several pieces whether it has pages of its own, behind the call and where much is free.
PIECES = """
import ctypes
import os

from conveyor.engines.local.server import fill_huge_heap

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = (ctypes.c_size_t,)
library.free.argtypes = (ctypes.c_void_p,)

small = [library.malloc(100 << 10) for _ in range(60)]
behind = small.pop()  # or what is free would be given back
for piece in small:
    library.free(piece)
fill_huge_heap(os.environ)
pieces = [library.malloc(1 << 20) for _ in range(20)]
print(sum(bool(ctypes.c_size_t.from_address(piece - 8).value & 2) for piece in pieces))
"""


@pytest.mark.skipif(not server._knows_huge_pages(), reason="needs glibc 2.35")
def test_the_heap_is_filled_also_where_as_much_is_free_in_it():
    environ = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(
        [sys.executable, "-c", PIECES], env=environ, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
