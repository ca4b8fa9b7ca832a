"""Random steps of ranks of which some fail: no value may come of ranks that were in different ones."""

import random
import time

import numpy as np
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import (
    CollectiveBrokenError,
    ExecutionCancelledError,
)
from conveyor.experimental import collective

#: Of each number of ranks.
SEEDS = range(60)


@conveyor.remote
class Rank:
    def __init__(self):
        self.values = []

    def step(self, number, seconds, fails, _given=None):
        time.sleep(seconds)
        if fails == "before":
            raise LookupError("before")
        array = np.array([1, number, number * number], dtype=np.int64)
        collective.allreduce(array, timeout=5)  # so that a wait that nothing ends is seen
        self.values.append((number, array.tolist()))
        if fails == "behind":
            raise LookupError("behind")
        return array.tolist()

    def other(self, fails):
        if fails:
            raise LookupError("other")

    def take_values(self):
        values, self.values = self.values, []
        return values


@conveyor.remote
class Caller:
    def call(self, ranks, rows, pauses):
        return [row_of(ranks, row, pauses) for row in rows]


def row_of(ranks, row, pauses):
    """The calls of one step, in any order; ``row``: the place of the rank, and the arguments."""
    refs = []
    for place, args in row:
        time.sleep(pauses.pop())
        refs.append(ranks[place].step.remote(*args))
    return refs


class Program:
    """One that calls steps, gets some results, and lets go of others."""

    def __init__(self, seed, ranks, callers):
        self.random = random.Random(seed)
        self.ranks = ranks
        self.callers = callers
        self.number = seed * 1000
        self.made = []
        self.mine = []  # those that can be cancelled here
        self.broken = False

    def some_time(self):
        return self.random.choice([0, 0, 0, self.random.random() * 0.004])

    def row(self):
        self.number += 1
        row = []
        all_fail = self.random.choice(["before", "behind"]) if self.random.random() < 0.03 else ""
        for place in range(len(self.ranks)):
            fails = all_fail
            if not fails and self.random.random() < 0.02:
                fails = self.random.choice(["before", "behind"])
            row.append((place, (self.number, self.some_time(), fails)))
        self.random.shuffle(row)
        return row

    def call(self):
        rows = [self.row() for _ in range(self.random.choice([1, 1, 2, 3]))]
        pauses = [self.some_time() for row in rows for _ in row]
        caller = self.random.choice(self.callers)
        if caller is not self.caller:
            self.wait(self.made)  # calls of two processes are in no order
            self.caller = caller
        if caller is not None:
            for refs in get(caller.call.remote(self.ranks, rows, pauses)):
                self.made += refs
        else:
            for row in rows:
                self.mine = row_of(self.ranks, row, pauses)
                self.made += self.mine

    def call_with_argument(self):
        """One of the step fails with its argument, or waits for it."""
        self.take_the_call()
        given = self.random.choice(self.ranks).other.remote(self.random.random() < 0.5)
        fails = self.random.randrange(len(self.ranks))
        for place, args in self.row():
            more = [given] if place == fails else []
            self.made.append(self.ranks[place].step.remote(*args, *more))

    def call_something_else(self):
        self.take_the_call()
        self.made.append(self.random.choice(self.ranks).other.remote(self.random.random() < 0.5))

    def cancel(self):
        if self.mine:
            self.random.choice(self.mine).cancel()

    def take_the_call(self):
        if self.caller is not None:
            self.wait(self.made)
            self.caller = None

    def get(self):
        """The results of the last steps, or of any."""
        if self.random.random() < 0.5:
            some = self.made[-len(self.ranks) :]
        else:
            some = self.random.sample(self.made, min(len(self.made), self.random.randrange(6)))
        for ref in some:
            self.outcome(ref)

    def drop(self):
        some = self.random.sample(self.made, min(len(self.made), self.random.randrange(3)))
        self.wait(some)  # or nobody could wait for it before another process calls
        for ref in some:
            self.made.remove(ref)

    def wait(self, refs=None):
        some = self.made[-3:] if refs is None else refs
        if some:
            conveyor.wait(some, num_returns=len(some), timeout=WAIT)

    def outcome(self, ref):
        try:
            get(ref)
        except CollectiveBrokenError:
            self.broken = True
        except (LookupError, ExecutionCancelledError):
            pass

    caller = None

    def run(self, call_lock):
        steps = [self.call] * 5 + [self.get] * 3
        steps += [self.wait, self.drop, self.call_something_else, self.call_with_argument]
        if self.random.random() < 0.3:
            steps.append(self.cancel)
        for _ in range(call_lock):
            self.random.choice(steps)()
            time.sleep(self.some_time())
            if self.broken:
                break
        for ref in self.made:
            self.outcome(ref)


@pytest.mark.parametrize("count", [2, 3])
def test_every_value_is_of_one_step(local, count):
    callers = [None, Caller.remote()]
    ranks = [Rank.remote() for _ in range(count)]
    right = 0
    for seed in SEEDS:
        group = collective.create_collective_group(ranks)
        Program(seed * 10 + count, ranks, callers).run(25)
        collective.destroy_collective_group(group)
        for values in get([rank.take_values.remote() for rank in ranks]):
            for number, value in values:
                assert value == [count, count * number, count * number * number], (seed, number)
            right += len(values)
    assert right > 400
