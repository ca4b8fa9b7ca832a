"""A picture as PNG, with nothing but zlib."""

from __future__ import annotations

import struct
import zlib

from conveyor.observe.picture import Picture
from conveyor.observe.raster import rasterise

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_png(picture: Picture) -> bytes:
    """The bytes of a PNG file: 8 bits for each of red, green and blue."""
    canvas = rasterise(picture)
    stride = canvas.width * 3
    packer = zlib.compressobj(6)
    packed = bytearray()
    pixels = memoryview(canvas.pixels)
    for start in range(0, len(pixels), stride):
        packed += packer.compress(b"\0")  # the row's filter: none
        packed += packer.compress(pixels[start : start + stride])
    packed += packer.flush()
    header = struct.pack(">IIBBBBB", canvas.width, canvas.height, 8, 2, 0, 0, 0)
    return b"".join(
        (_SIGNATURE, _chunk(b"IHDR", header), _chunk(b"IDAT", bytes(packed)), _chunk(b"IEND", b""))
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
