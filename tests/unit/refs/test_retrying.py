"""The order in which calls of one actor are made again."""

import threading

from conveyor.calls.retrying import Retrying


class Call:
    """One whose last try is over, or not, and which has lost its actor, or not."""

    def __init__(self, line, seen, name, over=True, lost=True):
        self.line, self.seen, self.name = line, seen, name
        self.over, self.lost = over, lost
        line.begun(self)

    def is_over(self):
        return self.over

    def has_lost_its_actor(self):
        return self.lost

    def see(self):
        self.seen.append(self.name)
        self.over = False
        self.line.begun(self)


def looked_at(line, *calls):
    """When that has been done."""
    for call in calls:
        line.see_soon(call)
    done = threading.Event()
    last = Call(line, [], "last")
    last.has_lost_its_actor = lambda: done.set()
    line.see_soon(last)
    assert done.wait(60)


def test_those_of_a_dead_actor_come_in_their_order_whoever_is_told_of_first():
    line, seen = Retrying(), []
    calls = [Call(line, seen, i) for i in range(4)]
    looked_at(line, calls[2], calls[0], calls[1], calls[3])
    assert seen == [0, 1, 2, 3]


def test_each_comes_by_itself_where_its_method_has_raised_or_another_is_not_over():
    line, seen = Retrying(), []
    calls = [Call(line, seen, 0), Call(line, seen, 1, lost=False), Call(line, seen, 2)]
    looked_at(line, calls[1])
    assert seen == [1]
    calls[0].over = False
    looked_at(line, calls[2])
    assert seen == [1, 2]
    calls[0].over = True
    line.ended(calls[0])
    calls[2].over = True
    looked_at(line, calls[2])
    assert seen == [1, 2, 2]
