"""How elements of tensors are reduced."""

from __future__ import annotations

from enum import Enum


class ReduceOp(Enum):
    """What a reduction makes of one element of each rank.

    ``SUM``, ``PRODUCT``, ``MIN``, ``MAX``, and ``AVG``, the sum divided by the number of ranks, which only
    floating point numbers have. The values are those that the native core knows them by.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVG = 4
