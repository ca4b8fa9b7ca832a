"""``ray.experimental``."""

from __future__ import annotations

from conveyor.compat.ray.experimental.targets import (
    set_target_device_for_ref,
    set_target_for_ref,
)
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
