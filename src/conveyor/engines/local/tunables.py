"""Settings of the C library's allocator in actors."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping

from conveyor.engines.surroundings import HUGE_TENSORS

#: glibc's, read when a program is executed, and never again.
TUNABLES = "GLIBC_TUNABLES"

_HUGE_HEAP = "glibc.malloc.hugetlb"
_SINCE = 2, 35
_HUGE_PAGE = 2 << 20
_MOST_PIECES = 32


class _MallInfo(ctypes.Structure):
    """Result of mallinfo(3). ``hblks``: how many pieces have pages of their own. It says nothing where
    another library hands out memory."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def with_huge_heap(environ: Mapping[str, str]) -> dict[str, str]:
    """This environment for a fork server: its heap, and its actors', gets huge pages, as large tensors do,
    unless ``environ`` says otherwise: it has that tunable already, or wants no huge tensors.

    Who fetches many tensors looks up each of their pages, and where they are small that takes longer than to
    copy them. Actors' own environments have nothing of this, and neither have the programs that they start.
    """
    given = environ.get(TUNABLES, "")
    names = {one.partition("=")[0] for one in given.split(":")}
    if environ.get(HUGE_TENSORS, "1") == "0" or _HUGE_HEAP in names or not _knows_huge_pages():
        return dict(environ)
    ours = f"{_HUGE_HEAP}=1"
    return {**environ, TUNABLES: f"{given}:{ours}" if given else ours}


def fill_huge_heap(environ: Mapping[str, str]) -> None:
    """Have what is smaller than a huge page lie in the heap, where that has such pages by ``environ``.

    glibc gives each piece from 128 KiB on pages of its own, until it gets a larger one back: from then on the
    like lie in the heap. So it gets one back here. A tunable would say the same, but then even larger pieces
    would never come to lie there, and each would be mapped and unmapped every time.

    A piece may come out of what is free in the heap: that one says nothing, and others are taken until one
    has pages of its own. Where none of many has, glibc had got such a one back before.
    """
    asked = f"{_HUGE_HEAP}=1" in environ.get(TUNABLES, "").split(":")
    if not asked or not _knows_huge_pages():
        return
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = (ctypes.c_size_t,)
    library.free.argtypes = (ctypes.c_void_p,)
    library.mallinfo2.restype = _MallInfo
    mapped = library.mallinfo2().hblks
    pieces: list[int] = []
    while len(pieces) < _MOST_PIECES:
        piece = library.malloc(_HUGE_PAGE)
        if not piece:  # there is no memory
            break
        pieces.append(piece)
        if library.mallinfo2().hblks > mapped:
            break
    for piece in pieces:
        library.free(piece)  # nothing of it was touched


def _knows_huge_pages() -> bool:
    """Whether this C library is a glibc that can ask for huge pages."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # another library
        return False
    version = re.fullmatch(r"glibc (\d+)\.(\d+)", name)
    return version is not None and (int(version[1]), int(version[2])) >= _SINCE
