"""Calls over nodes: streams, values that stay with their makers, waits that are given up, cancellations."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from chaos_nodes import Member
from chaos_nodes_actors import kept_of, made_of, number_of
from chaos_nodes_judge import PATIENCE, Judge

import conveyor
from conveyor.exceptions import (
    ActorDiedError,
    ExecutionCancelledError,
    ObjectLostError,
    WaitTimeoutError,
)


class Calls:
    """One after the other. ``members``: each asks only those behind it, so none waits for itself."""

    def __init__(self, rng: Random, members: list[Member], judge: Judge) -> None:
        self._rng, self._members, self._judge = rng, members, judge
        self.doing = ""

    def run(self) -> None:
        kinds = [self._ask, self._ask, self._stream, self._give_up, self._cancel]
        for i in range(self._rng.randint(3, 10)):
            kind = self._rng.choice(kinds)
            self.doing = f"{kind.__name__} {i}"
            try:
                kind(i)
            except (ActorDiedError, ObjectLostError) as error:  # by the call itself
                self._judge.check_death(error, self.doing)

    def _ask(self, i: int) -> None:
        size = self._rng.choice([0, 100, 300_000])
        if len(self._members) < 2:
            return
        first, second = sorted(self._rng.sample(range(len(self._members)), 2))
        ref = self._members[first].handle.ask.remote(self._members[second].handle, i, size)
        self._judge.get(self.doing, ref, made_of(i, [i], size))

    def _stream(self, i: int) -> None:
        stream = self._rng.choice(self._members).handle.items.remote(i, 20)
        taken = self._rng.choice([20, 20, 7])
        expected = [made_of(i, [n], 300 if n % 3 == 0 else 0) for n in range(taken)]
        self._judge.value(self.doing, lambda: [next(stream) for _ in range(taken)], expected)

    def _give_up(self, i: int) -> None:
        ref = self._rng.choice(self._members).handle.nap.remote(i, 0.05)
        try:
            conveyor.get(ref, timeout=0.001)
        except WaitTimeoutError:
            self._judge.found["waits given up"] += 1
        self._judge.get(self.doing, ref, i)

    def _cancel(self, i: int) -> None:
        handle = self._rng.choice(self._members).handle
        refs = [handle.nap.remote(i, 0.02) for _ in range(3)]
        others = (ExecutionCancelledError,) if refs[-1].cancel() else ()
        self._judge.get(self.doing, refs[-1], i, *others)
        for ref in refs[:-1]:
            self._judge.get(self.doing, ref, i)


class Kept:
    """Values that stay with their makers, and travel. ``members``: those of :class:`Calls`, who may wait
    for each other at the same time."""

    def __init__(self, rng: Random, members: list[Member], judge: Judge) -> None:
        self._rng, self._members, self._judge = rng, members, judge
        self.doing = ""

    def run(self) -> None:
        for i in range(self._rng.randint(0, 6)):
            try:
                self._one(i)
            except (ActorDiedError, ObjectLostError) as error:
                self._judge.check_death(error, self.doing)

    def _one(self, i: int) -> None:
        rng, judge = self._rng, self._judge
        size = rng.choice([10, 3000, 100_000, 1_000_000])
        value = kept_of(i, size)
        number = number_of(value)
        maker, *others = (rng.choice(self._members) for _ in range(3))
        self.doing = f"value {i} of {maker}, {size}"
        if rng.random() < 0.2:
            ref = conveyor.put(value, tensor_transport="auto")
        else:
            method = maker.handle.keep.options(tensor_transport="auto")
            ref = method.remote(i, size, rng.random() < 0.4)
        refs: list[tuple[Any, list[int]]] = []
        for other in others:
            self.doing += f", {other}"
            refs.append((other.handle.numbers.remote(ref, ref), [number] * 2))
        if rng.random() < 0.5:
            self._may_wait(others[0], maker, ref)
            refs.append((others[0].handle.numbers_of.remote([ref]), [number]))
        if len(self._members) > 1 and rng.random() < 0.5:
            first, second = sorted(rng.sample(range(len(self._members)), 2))
            near, far = self._members[first].handle, self._members[second].handle
            self._may_wait(self._members[second], maker, ref)
            refs.append((near.pass_on.remote(far, [ref]), [number]))
        if rng.random() < 0.5:
            judge.get(self.doing, ref, value)
        if rng.random() < 0.3:
            judge.get(f"part of {self.doing}", ref[2:7], value[2:7])
        if rng.random() < 0.3:
            into = np.zeros_like(value)

            def get_into(ref: Any = ref, into: Any = into) -> Any:
                return conveyor.get(ref, into=into, timeout=PATIENCE)

            judge.value(f"{self.doing}, into", get_into, value)
            del get_into
        del ref
        for requested, expected in refs:
            judge.get(self.doing, requested, expected)

    def _may_wait(self, who: Member, maker: Member, ref: Any) -> None:
        """``who`` is going to wait for ``ref`` in a method. The maker may wait for those behind it before it
        makes the value: who is one of these would close a cycle, and is asked when the value is there."""
        if self._members.index(who) >= self._members.index(maker):
            conveyor.wait([ref], timeout=PATIENCE)
