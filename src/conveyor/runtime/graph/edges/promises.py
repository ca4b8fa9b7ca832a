"""What holds for the tensors of a graph's edges, for their writers."""

from __future__ import annotations

from typing import Any

from conveyor.codec.promises import Keeper
from conveyor.plan.model import Plan, Promise


def keeper_of(source: str, promise: Promise, bundled: bool = False) -> Keeper:
    """Make who keeps to ``promise`` at the writer of the edge that carries ``source``."""
    return Keeper(source, promise.device, promise.static_shape, promise.direct_return, bundled)


class InputPromises:
    """What was said of the inputs of a graph, kept at its executor."""

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
        """Return what is sent in place of ``inputs``, the frames of the plan's input edges.

        Raises:
            TransportError: one is not what was promised.
        """
        packed = list(inputs)
        for place, keeper in self._keepers.items():
            packed[place] = keeper.pack(packed[place])
        return tuple(packed)

    def fresh(self) -> list[Keeper]:
        """List those that have seen no execution yet."""
        return [keeper for keeper in self._keepers.values() if keeper.fresh]

    @staticmethod
    def forget(fresh: list[Keeper]) -> None:
        """The execution was not the first one: it has not begun."""
        for keeper in fresh:
            keeper.forget()
