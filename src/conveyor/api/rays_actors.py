"""What an actor that Ray has started says of itself, in its own process."""

from __future__ import annotations

import pickle
from typing import Any

from msgspec.structs import replace

from conveyor.api.methods import methods_of


def described_here(made: Any) -> bytes:
    """The methods of the actor ``made``, pickled; ``None`` of one with async methods."""
    methods = {}
    for name, info in methods_of(type(made)).items():
        returns = getattr(getattr(type(made), name), "__ray_num_returns__", None)
        methods[name] = replace(info, num_returns=returns) if isinstance(returns, int) else info
    has_async = any(info.is_async for info in methods.values())
    return pickle.dumps(None if has_async else methods)
