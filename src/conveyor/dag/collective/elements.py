"""What tensors can be made of, where the native core reduces them."""

from __future__ import annotations

#: The types of elements, by the numbers that the native core knows them by.
ELEMENT_TYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)
#: Those below this number are floating point numbers.
FLOATS = 4
