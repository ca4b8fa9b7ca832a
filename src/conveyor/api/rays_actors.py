"""What an actor that Ray has started says of itself, in its own process."""

from __future__ import annotations

import pickle
from typing import Any

from msgspec.structs import replace

from conveyor.api.methods import methods_of
from conveyor.runtime.protocol import MethodInfo

#: Of methods that Ray traces: a parameter of Ray's own.
_RAYS_PARAMETER = "_ray_trace_ctx"


def described_here(made: Any) -> bytes:
    """The methods of the actor ``made``, pickled; ``None`` of one with async methods."""
    methods = {name: _of_ray(type(made), info) for name, info in methods_of(type(made)).items()}
    has_async = any(info.is_async for info in methods.values())
    return pickle.dumps(None if has_async else methods)


def _of_ray(cls: type, info: MethodInfo) -> MethodInfo:
    """With what ``ray.method`` has been told of it, as its callers see it."""
    returns = getattr(getattr(cls, info.name), "__ray_num_returns__", None)
    if isinstance(returns, int):
        info = replace(info, num_returns=returns)
    if info.signature is not None and _RAYS_PARAMETER in info.signature.parameters:
        own = [p for p in info.signature.parameters.values() if p.name != _RAYS_PARAMETER]
        info = replace(info, signature=info.signature.replace(parameters=own))
    return info
