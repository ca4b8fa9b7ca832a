"""Values of all sizes that are known by one number, and the number of any value."""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, fields, is_dataclass
from random import Random
from typing import Any

import numpy as np

from conveyor import ObjectRef
from conveyor.dag.inputs import InputData

KINDS = ("int", "str", "bytes", "array", "array", "tuple", "dict", "pair", "none")
#: Those of torch, which rounds with transports have among theirs.
TENSORS = ("tensor", "tensors")
#: The same of the simulated accelerator, and one of it beside others of the CPU.
ON_DEVICE = ("tensor on a device", "tensors on a device", "tensors of both")
MB = 1 << 20
#: s for the value of a ref that somebody has put before.
REF_LIMIT = 60


@dataclass(frozen=True)
class Payload:
    """What a value looks like: ``size`` is its bulk in bytes, where its kind has any."""

    kind: str
    size: int


@dataclass(frozen=True)
class Pair:
    left: Any
    right: Any


def random_payload(rng: Random, largest: int = 4 * MB) -> Payload:
    scale = rng.random()
    if scale < 0.6:
        size = rng.randrange(8, 200)
    elif scale < 0.85:
        size = rng.randrange(1000, 8000)
    elif scale < 0.96:
        size = rng.randrange(64 << 10, 512 << 10)
    else:
        size = rng.randrange(MB, 4 * MB)
    return Payload(rng.choice(KINDS), min(size, largest))


def make(payload: Payload, seed: int) -> Any:
    """The value of this look that ``seed`` (32 bits) stands for."""
    kind, size = payload.kind, payload.size
    if kind == "none":
        return None
    if kind == "int":
        return seed
    if kind == "str":
        return f"{seed:08x}" * (size // 8)
    if kind == "bytes":
        return seed.to_bytes(4, "little") * (size // 4)
    if kind in TENSORS:
        return _tensors(kind, size, seed)
    if kind in ON_DEVICE:
        return _on_device(kind, size, seed)
    array = np.full(size // 8 + 1, seed, np.int64)
    if kind == "array":
        return array
    if kind == "tuple":
        return seed, (f"{seed:x}", None, 1.5, True)
    if kind == "dict":
        return {"array": array, "more": [seed, b"x" * (seed % 100)]}
    return Pair(array, [seed])


def _tensors(kind: str, size: int, seed: int) -> Any:
    import torch  # slow

    made = torch.full((size // 8 + 1,), seed, dtype=torch.int64)
    if kind == "tensor":
        return made
    # A view of the one before, another dtype, one without elements, and one that is there twice.
    small = torch.arange(seed % 50, dtype=torch.float32)
    return {"whole": made, "part": made[1:], "small": [small, small], "empty": made[:0], "n": seed}


def _on_device(kind: str, size: int, seed: int) -> Any:
    import accelerator

    accelerator.install()
    value = _tensors("tensors", size, seed)
    whole = value["whole"].new_empty(value["whole"].shape, device="sim")
    # It may be filled long after it was made.
    accelerator.kernel(seed % 3 / 1e3, lambda tensor: tensor.fill_(seed), whole)
    if kind == ON_DEVICE[0]:
        return whole
    value |= {"whole": whole, "part": whole[1:]}
    if kind == ON_DEVICE[1]:
        value["small"] = [tensor.to("sim") for tensor in value["small"]]
    return value


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def digest(value: Any, so_far: int = 0) -> int:
    """A checksum of everything in ``value``, its types among it. A ref counts as its value."""
    if isinstance(value, ObjectRef):
        return digest(value.get(timeout=REF_LIMIT), so_far)
    if _is_tensor(value):
        return digest(value.cpu().numpy(), zlib.crc32(b"tensor", so_far))
    crc = zlib.crc32(type(value).__name__.encode(), so_far)
    if isinstance(value, np.ndarray):
        crc = zlib.crc32(f"{value.dtype.str}{value.shape}".encode(), crc)
        return zlib.crc32(np.ascontiguousarray(value).data, crc)
    if isinstance(value, bytes):
        return zlib.crc32(value, crc)
    if isinstance(value, (list, tuple)):
        for item in value:
            crc = digest(item, crc)
        return crc
    if isinstance(value, dict):
        for key, item in value.items():
            crc = digest(item, zlib.crc32(repr(key).encode(), crc))
        return crc
    if isinstance(value, InputData):
        return digest((value.args, value.kwargs), crc)
    if is_dataclass(value):
        for field in fields(value):
            crc = digest(getattr(value, field.name), crc)
        return crc
    return zlib.crc32(repr(value).encode(), crc)


def arrays(value: Any) -> list[np.ndarray]:
    """Every array in ``value``, and those that tensors of the CPU lie in; not those behind refs."""
    if _is_tensor(value):
        return [value.numpy()] if value.device.type == "cpu" else []
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in arrays(item)]
    if isinstance(value, dict):
        return [array for item in value.values() for array in arrays(item)]
    if isinstance(value, InputData):
        return arrays((value.args, value.kwargs))
    if is_dataclass(value):
        return [array for field in fields(value) for array in arrays(getattr(value, field.name))]
    return []


def scribble(value: Any) -> None:
    """Overwrite every array in ``value`` that may be written."""
    for array in arrays(value):
        if array.flags.writeable:
            array[:] = -1


def bulk(value: Any) -> int:
    """About how many bytes ``value`` holds."""
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return int(value.nbytes)
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(bulk, value))
    if isinstance(value, dict):
        return sum(map(bulk, value.values()))
    if is_dataclass(value):
        return sum(bulk(getattr(value, field.name)) for field in fields(value))
    return 8
