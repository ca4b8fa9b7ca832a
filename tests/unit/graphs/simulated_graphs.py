"""Graphs without processes, for what looks only at their Plans."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from conveyor.config import Config
from conveyor.dag import InputAttributeNode, InputNode, MultiOutputNode
from conveyor.dag.methods import bind
from conveyor.plan import Plan, lower
from conveyor.transport import Capabilities, Transport, registry

OUT_OF_BAND = "beside-test"


@dataclass(frozen=True)
class Actor:
    index: int
    name: str


def call(actor: Actor, method: str, *args: Any) -> Any:
    return bind(actor, method, args, {}, num_returns=1)


class _OutOfBand(Transport):
    """Never opened: only its capabilities count for a Plan."""

    name = OUT_OF_BAND
    capabilities = Capabilities(frozenset({"cpu"}))

    def open(self, wire: Any) -> Any:
        raise AssertionError("a Plan opens nothing")


@contextmanager
def transport_beside() -> Iterator[None]:
    registry.register(_OutOfBand())
    try:
        yield
    finally:
        registry.unregister(OUT_OF_BAND)


def random_plan(seed: int, *, out_of_band: bool = False, depth: int = 4, **options: Any) -> Plan:
    """A graph of up to four actors; all values reach a result."""
    rng = random.Random(seed)
    actors = [Actor(i, f"a{i}") for i in range(rng.randint(1, 4))]
    inp = InputNode()
    values: list[Any] = [inp[0], inp[1]]
    unread: list[Any] = []
    for _ in range(rng.randint(1, 10)):
        args = rng.sample(values, k=min(len(values), rng.randint(1, 3)))
        unread = [value for value in unread if all(value is not arg for arg in args)]
        made = call(rng.choice(actors), rng.choice("fg"), *args)
        for arg in args if out_of_band and rng.random() < 0.7 else ():
            # Where only the executor would read it, no such transport can be asked for.
            if not isinstance(arg, InputAttributeNode) and arg.actor != made.actor:
                arg.with_tensor_transport(OUT_OF_BAND)
        values.append(made)
        unread.append(made)
    return lower(MultiOutputNode(unread), Config(depth=depth, **options))


def chain(count: int, **options: Any) -> Plan:
    value: Any = InputNode()
    for i in range(count):
        value = call(Actor(i, f"s{i}"), "f", value)
    return lower(value, Config(**options))
