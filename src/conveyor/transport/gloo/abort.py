"""How a transfer of gloo is ended that gloo itself forgets.

Where a connection ends, gloo tells the transfers that have not begun. One that is half done is told nothing
(``Pair::signalException`` passes over it), and whoever waits for it waits for ever. Its C++ class has an
``abort`` for that, which Python is not given.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import torch

#: The classes of what ``ProcessGroupGloo.send`` and ``recv`` return, as their symbols have them.
_CLASSES = "N4c10d16ProcessGroupGloo8SendWork", "N4c10d16ProcessGroupGloo8RecvWork"
#: Of a table of virtual functions, what stands in front of the functions.
_HEADER = 2 * ctypes.sizeof(ctypes.c_void_p)


def abort(work: Any) -> bool:
    """Have whoever waits for a transfer stop, now or when it begins to wait. From any thread.

    ``False``: this torch has no such function, or keeps its objects in another way. Nothing was done.
    """
    # pybind11 has the address of the object right behind Python's own fields.
    address = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    if not address:
        return False
    function = _functions().get(ctypes.c_void_p.from_address(address).value or 0)
    if function is None:
        return False
    function(ctypes.c_void_p(address))
    return True


@cache
def _functions() -> dict[int, Any]:
    """Find the functions, by the table that an object of their class begins with."""
    found: dict[int, Any] = {}
    try:
        library = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cpu.so"))
        for name in _CLASSES:
            table = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name}E"))
            function = library[f"_Z{name}5abortEv"]
            function.argtypes, function.restype = (ctypes.c_void_p,), None
            found[table + _HEADER] = function
    except (OSError, AttributeError, ValueError):
        return {}
    return found
