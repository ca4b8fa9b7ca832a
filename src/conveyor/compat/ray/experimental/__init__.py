"""``ray.experimental``. Targets are as in Ray, which refuses values that have not stayed on their actors."""

from __future__ import annotations

from typing import Any

import conveyor
from conveyor.direct import into
from conveyor.experimental import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
    channel,
    collective,
    deregister_nixl_memory,
    register_nixl_memory,
    register_nixl_memory_pool,
    register_tensor_transport,
    set_nixl_cuda_stream,
    wait_tensor_freed,
)
from conveyor.refs.ref import Ref, located

__all__ = [
    "CommunicatorMetadata",
    "FetchRequest",
    "TensorTransportManager",
    "TensorTransportMetadata",
    "channel",
    "collective",
    "deregister_nixl_memory",
    "register_nixl_memory",
    "register_nixl_memory_pool",
    "register_tensor_transport",
    "set_nixl_cuda_stream",
    "set_target_device_for_ref",
    "set_target_for_ref",
    "wait_tensor_freed",
]


def set_target_for_ref(ref: Ref, target: Any) -> None:
    """Do the same as ``conveyor.experimental.set_target_for_ref``, but wait for the result of a call first,
    to see whether the value has stayed on its actor.

    Raises:
        ValueError: the value of ``ref`` has not stayed where it was made.
    """
    _check(ref)
    into.set_target_for_ref(ref, target)


def set_target_device_for_ref(ref: Ref, device: Any) -> None:
    """Do the same as ``conveyor.experimental.set_target_device_for_ref``, but wait and raise as
    :func:`set_target_for_ref` does."""
    _check(ref)
    into.set_target_device_for_ref(ref, device)


def _check(ref: Any) -> None:
    if not isinstance(ref, Ref):
        return
    conveyor.wait([ref])
    # The error of a failed call is raised by `get`, not here.
    if not ref.has_failed() and located(ref.to_send()) is None:
        raise ValueError(f"Ref {ref!r} is not an RDT object.")
