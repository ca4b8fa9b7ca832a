"""Collectives among the tasks of a random graph: as nodes of conveyor, and in plain Python."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from conveyor.experimental import collective

OPERATIONS = ("allreduce", "allreduce", "allgather", "reducescatter", "all_to_all", "barrier")
_REDUCE = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum}


@dataclass(frozen=True)
class Meeting:
    """One rank's part of a collective. ``first``: the task of rank 0, which stands for the collective."""

    operation: str
    op: str
    rounds: int | None
    first: int
    rank: int


def random_meeting(rng: Random, ranks: int, first: int) -> tuple[list[Meeting], int]:
    """A collective over so many ranks, and the bytes of what each puts in."""
    operation = rng.choice(OPERATIONS)
    op, rounds = rng.choice(sorted(_REDUCE)), rng.choice([None, 1, 2])
    rows = rng.choice([1, 1, 10, 700, 20_000])
    return [Meeting(operation, op, rounds, first, rank) for rank in range(ranks)], 8 * (
        ranks * rows - 1
    )


def bind(meeting: Meeting, nodes: Sequence[Any]) -> list[Any]:
    """The nodes of all ranks."""
    op = collective.ReduceOp[meeting.op]
    if meeting.operation == "allreduce":
        return list(collective.allreduce.bind(nodes, op, rounds=meeting.rounds))
    if meeting.operation == "reducescatter":
        return list(collective.reducescatter.bind(nodes, op))
    return list(getattr(collective, meeting.operation).bind(nodes))


def met(meeting: Meeting, arrays: Sequence[Any]) -> Any:
    """What its rank gets."""
    rank = meeting.rank
    if meeting.operation == "allgather":
        return np.concatenate(arrays)
    if meeting.operation == "barrier":
        return arrays[rank]
    if meeting.operation == "all_to_all":
        return np.concatenate([np.split(array, len(arrays))[rank] for array in arrays])
    reduced = functools.reduce(_REDUCE[meeting.op], arrays)
    if meeting.operation == "reducescatter":
        return np.split(reduced, len(arrays))[rank]
    return reduced
