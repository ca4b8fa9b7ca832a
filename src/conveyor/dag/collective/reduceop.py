"""Reductions of the elements of tensors."""

from __future__ import annotations

from enum import Enum

#: The types of elements, by the numbers that the native core knows them by.
ELEMENT_TYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)
#: Element types with numbers below this one are floating point numbers.
FLOATS = 4


class ReduceOp(Enum):
    """Reduction that turns one element of each rank into one element.

    ``SUM``, ``PRODUCT``, ``MIN``, ``MAX``, and ``AVG``: the sum divided by the number of ranks, for floating
    point numbers only. The native core knows the reductions by these values.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVG = 4
