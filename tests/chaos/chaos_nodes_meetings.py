"""What actors of several nodes do together: collective operations and channels."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
from chaos_nodes import Member
from chaos_nodes_actors import made_of, number_of
from chaos_nodes_judge import PATIENCE, Judge

import conveyor
from conveyor import collective
from conveyor.exceptions import ActorDiedError, ChannelClosedError, CollectiveError

_numbers = itertools.count()


class Meetings:
    """``ranks`` are asked nothing that waits for others. ``spoilt``: steps of theirs may fail meanwhile."""

    def __init__(self, rng: Random, ranks: list[Member], judge: Judge, spoilt: bool) -> None:
        self._rng, self._ranks, self._judge, self._spoilt = rng, ranks, judge, spoilt
        self.doing = ""

    def run(self) -> None:
        if len(self._ranks) < 2:
            return
        kinds = [self._group, self._channel, self._to_driver, self._from_driver]
        for i in range(self._rng.randint(0, 4)):
            kind = self._rng.choice(kinds)
            self.doing = f"{kind.__name__} {i}"
            try:
                kind(i)
            except (ActorDiedError, CollectiveError, ChannelClosedError) as error:
                self._judge.check_death(error, self.doing)

    def _group(self, i: int) -> None:
        name = f"group-{next(_numbers)}"
        group = collective.create_collective_group(
            [member.handle for member in self._ranks], name=name
        )
        try:
            for turn in range(self._rng.randint(1, 5)):
                size = self._rng.choice([1, 3000, 400_000])
                number, count = self._rng.randrange(100), len(self._ranks)
                self.doing = f"operation {turn} of {name}, {size}"
                refs = [
                    member.handle.meet.remote(name, rank, number, size)
                    for rank, member in enumerate(self._ranks)
                ]
                expected = np.full(size, count * number + count * (count - 1) // 2)
                good = [
                    self._judge.of_group(self.doing, ref, expected, self._spoilt) for ref in refs
                ]
                if not all(good):
                    return
        finally:
            self.doing = f"the end of {name}"
            collective.destroy_collective_group(group)

    def _sizes(self) -> tuple[int, int, int]:
        rng = self._rng
        return rng.choice([1, 2, 8]), rng.randint(0, 30), rng.choice([0, 100, 100_000])

    def _channel(self, i: int) -> None:
        depth, count, size = self._sizes()
        sender, receiver = conveyor.channel.open(depth=depth)
        sends = self._ranks[0].handle.send.remote(sender, i, count, size)
        receives = self._ranks[1].handle.receive.remote(receiver)
        del sender, receiver
        closed = (ChannelClosedError,) if self._judge.endangered() else ()
        self._judge.get(self.doing, sends, count, *closed)
        expected = [number_of(made_of(i, [n], size)) for n in range(count)]
        if self._judge.endangered():
            self._some(receives, expected)
        else:
            self._judge.get(self.doing, receives, expected)

    def _to_driver(self, i: int) -> None:
        depth, count, size = self._sizes()
        sender, receiver = conveyor.channel.open(depth=depth)
        sends = self._ranks[0].handle.send.remote(sender, i, count, size)
        del sender
        for n in range(count):
            value = made_of(i, [n], size)
            if not self._judge.value(self.doing, lambda: receiver.receive(PATIENCE), value):
                break
        receiver.close()
        closed = (ChannelClosedError,) if self._judge.endangered() else ()
        self._judge.get(self.doing, sends, count, *closed)

    def _from_driver(self, i: int) -> None:
        depth, count, size = self._sizes()
        sender, receiver = conveyor.channel.open(depth=depth)
        receives = self._ranks[0].handle.receive.remote(receiver)
        del receiver
        expected = []
        with sender:
            for n in range(count):
                value = made_of(i, [n], size)
                sender.send(value, PATIENCE)
                expected.append(number_of(value))
        if self._judge.endangered():
            self._some(receives, expected)
        else:
            self._judge.get(self.doing, receives, expected)

    def _some(self, receives: object, expected: list[int]) -> None:
        """Whose sender may have died gets the first of them."""
        try:
            got = conveyor.get(receives, timeout=PATIENCE)
        except ActorDiedError as error:
            self._judge.check_death(error, self.doing)
            return
        self._judge.value(self.doing, lambda: got, expected[: len(got)])
