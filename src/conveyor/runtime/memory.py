"""Arrays and tensors made in the channel's memory, so that sending them copies nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from conveyor.checks import check_shape
from conveyor.exceptions import ArenaFullError
from conveyor.later import LaterModule
from conveyor.runtime import context

if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np, torch = LaterModule("numpy"), LaterModule("torch")

#: More bytes than any arena has: what is larger fits no number of the native core's, and is refused as this
#: is.
_MOST = 1 << 62


def _allocate(size: int) -> Any:
    runtime = context.current()
    if size <= _MOST:
        return runtime.allocate(size)
    try:
        return runtime.allocate(_MOST)
    except ArenaFullError as error:
        error.args = (str(error).replace(str(_MOST), str(size), 1), *error.args[1:])
        raise


def empty(shape: int | Sequence[int], dtype: Any = float) -> np.ndarray[Any, Any]:
    """An uninitialised numpy array in this process's arena.

    shape, dtype: as for ``numpy.empty`` (C order). Sent as a whole by a maker that keeps no
    reference to it (``return array`` in an actor; ``graph.execute(make())`` in the driver), its
    memory itself travels and the cost does not depend on its size. A maker that still holds it, or
    a view of it, sends a copy, so nobody sees later writes; and so does one that sends another
    library's view of it, such as ``torch.from_numpy(array)``. Raises ``MemoryError`` at the memory cap.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"arrays of {kind} hold Python objects and cannot lie in shared memory")
    sizes = check_shape(shape)
    buffer = _allocate(math.prod(sizes) * kind.itemsize)
    array: np.ndarray[Any, Any] = np.ndarray(sizes, kind, buffer=buffer)
    return array


def empty_tensor(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor in this process's arena; see :func:`empty`."""
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, such as torch.float32, not {dtype!r}")
    sizes = check_shape(shape)
    count = math.prod(sizes)
    if count == 0:
        return torch.empty(sizes, dtype=kind)
    buffer = _allocate(count * kind.itemsize)
    tensor = torch.frombuffer(buffer, dtype=kind, count=count).view(sizes)
    buffer.made_for(tensor.untyped_storage()._cdata)
    return tensor
