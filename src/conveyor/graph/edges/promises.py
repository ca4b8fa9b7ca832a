"""Promises about the tensors of a graph's edges, kept by their writers."""

from __future__ import annotations

from typing import Any

from conveyor.codec.promises import Keeper
from conveyor.plan.model import Plan, Promise


def keeper_of(source: str, promise: Promise, bundled: bool = False) -> Keeper:
    """Make the keeper of ``promise`` at the writer of the edge that carries ``source``."""
    return Keeper(source, promise.device, promise.static_shape, promise.direct_return, bundled)


class InputPromises:
    """Promises about the inputs of a graph, kept at its executor."""

    def __init__(self, plan: Plan) -> None:
        #: By the place of the input.
        self._keepers: dict[int, Keeper] = {}
        for place, bundle in enumerate(plan.inputs):
            edge = plan.edges[bundle.edge]
            if edge.promise is not None:
                bundled = bundle.keys != (None,)
                self._keepers[place] = keeper_of(edge.source, edge.promise, bundled)

    def __bool__(self) -> bool:
        return bool(self._keepers)

    def packed(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values that are sent in place of ``inputs``, the frames of the plan's input edges.

        Raises:
            TransportError: an input is not what was promised.
        """
        packed = list(inputs)
        for place, keeper in self._keepers.items():
            packed[place] = keeper.pack(packed[place])
        return tuple(packed)

    def fresh(self) -> list[Keeper]:
        """Return the keepers that have seen no execution yet."""
        return [keeper for keeper in self._keepers.values() if keeper.fresh]

    @staticmethod
    def forget(fresh: list[Keeper]) -> None:
        """Have these keepers forget the execution, which has not begun: it was not the first one."""
        for keeper in fresh:
            keeper.forget()
