"""Features whose names may still change. Ray has them under the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor.later import names_later

if TYPE_CHECKING:
    from conveyor.direct.freed import wait_tensor_freed
    from conveyor.direct.into import set_target_device_for_ref, set_target_for_ref
    from conveyor.direct.managers.manager import (
        CommunicatorMetadata,
        FetchRequest,
        TensorTransportManager,
        TensorTransportMetadata,
    )
    from conveyor.direct.managers.registry import register_tensor_transport
    from conveyor.experimental import channel, collective
    from conveyor.experimental.nixl_memory import (
        deregister_nixl_memory,
        register_nixl_memory,
        register_nixl_memory_pool,
        set_nixl_cuda_stream,
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

_NIXL = "conveyor.experimental.nixl_memory"
_MANAGER = "conveyor.direct.managers.manager"

__getattr__, __dir__ = names_later(
    globals(),
    {
        "CommunicatorMetadata": _MANAGER,
        "FetchRequest": _MANAGER,
        "TensorTransportManager": _MANAGER,
        "TensorTransportMetadata": _MANAGER,
        "channel": "conveyor.experimental.channel",
        "collective": "conveyor.experimental.collective",
        "deregister_nixl_memory": _NIXL,
        "register_nixl_memory": _NIXL,
        "register_nixl_memory_pool": _NIXL,
        "set_nixl_cuda_stream": _NIXL,
        "set_target_device_for_ref": "conveyor.direct.into",
        "set_target_for_ref": "conveyor.direct.into",
        "register_tensor_transport": "conveyor.direct.managers.registry",
        "wait_tensor_freed": "conveyor.direct.freed",
    },
)
