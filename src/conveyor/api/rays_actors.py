"""Description of an actor that Ray has started, made in the actor's own process."""

from __future__ import annotations

import pickle
from typing import Any

from msgspec.structs import replace

from conveyor.api.methods import methods_of
from conveyor.runtime.protocol import MethodInfo

#: A parameter that Ray adds to methods that it traces.
_RAYS_PARAMETER = "_ray_trace_ctx"


def described_here(made: Any) -> bytes:
    """Return the methods of the actor ``made``, pickled; ``None``, pickled, if it has async methods."""
    methods = {name: _of_ray(type(made), info) for name, info in methods_of(type(made)).items()}
    has_async = any(info.is_async for info in methods.values())
    return pickle.dumps(None if has_async else methods)


def _of_ray(cls: type, info: MethodInfo) -> MethodInfo:
    """Add what ``ray.method`` was told of the method, and take out the parameter that Ray adds."""
    returns = getattr(getattr(cls, info.name), "__ray_num_returns__", None)
    if isinstance(returns, int):
        info = replace(info, num_returns=returns)
    if info.signature is not None and _RAYS_PARAMETER in info.signature.parameters:
        own = [p for p in info.signature.parameters.values() if p.name != _RAYS_PARAMETER]
        info = replace(info, signature=info.signature.replace(parameters=own))
    return info
