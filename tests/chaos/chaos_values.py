"""Values of all sizes that are known by one number, and the number of any value."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields, is_dataclass
from random import Random
from typing import Any

import numpy as np

from conveyor import ObjectRef
from conveyor.dag.parts import InputData

KINDS = ("int", "str", "bytes", "array", "array", "tuple", "dict", "pair", "none")
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
    array = np.full(size // 8 + 1, seed, np.int64)
    if kind == "array":
        return array
    if kind == "tuple":
        return seed, (f"{seed:x}", None, 1.5, True)
    if kind == "dict":
        return {"array": array, "more": [seed, b"x" * (seed % 100)]}
    return Pair(array, [seed])


def digest(value: Any, so_far: int = 0) -> int:
    """A checksum of everything in ``value``, its types among it. A ref counts as its value."""
    if isinstance(value, ObjectRef):
        return digest(value.get(timeout=REF_LIMIT), so_far)
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
    """Every array in ``value``; not those behind refs."""
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
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(bulk, value))
    if isinstance(value, dict):
        return sum(map(bulk, value.values()))
    if is_dataclass(value):
        return sum(bulk(getattr(value, field.name)) for field in fields(value))
    return 8
