"""Collective groups that are nobody's any more."""

import os

import inside
import numpy as np
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import ActorDiedError, CollectiveBrokenError
from conveyor.experimental import collective


@conveyor.remote
class Rank:
    def make(self, actors):
        return collective.create_collective_group(actors).name

    def sum(self, group="default"):
        array = np.ones(4)
        collective.allreduce(array, group, timeout=WAIT)
        return array[0]

    def leave(self):
        os._exit(3)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_groups_of_actors_that_are_gone_leave_nothing(local, wait_until):
    def make_and_die():
        maker, ranks = Rank.remote(), [Rank.remote(), Rank.remote()]
        get(maker.make.remote(ranks))
        for actor in (maker, *ranks):
            conveyor.kill(actor)
        wait_until(lambda: inside.groups_known() == 0)

    make_and_die()
    held = descriptors()
    for _ in range(3):
        make_and_die()
    wait_until(lambda: descriptors() <= held)


def test_a_group_ends_with_the_actor_that_has_made_it(local, wait_until):
    maker, ranks = Rank.remote(), [Rank.remote(), Rank.remote()]
    name = get(maker.make.remote(ranks))
    assert [get(ref) for ref in [actor.sum.remote(name) for actor in ranks]] == [2.0, 2.0]
    waits = ranks[0].sum.remote(name)
    maker.leave.remote()
    with pytest.raises(CollectiveBrokenError, match="was destroyed"):
        get(waits)
    wait_until(lambda: inside.groups_known() == 0)


def test_a_group_ends_with_its_last_member(local, wait_until):
    ranks = [Rank.remote(), Rank.remote()]
    group = collective.create_collective_group(ranks, name="ours")
    conveyor.kill(ranks[0])
    with pytest.raises(CollectiveBrokenError, match="has died"):
        get(ranks[1].sum.remote("ours"))
    assert inside.groups_known() == 1
    conveyor.kill(ranks[1])
    wait_until(lambda: inside.groups_known() == 0)
    # Its name is its creator's to give up.
    with pytest.raises(ValueError, match="already"):
        collective.create_collective_group([Rank.remote()], name="ours")
    collective.destroy_collective_group(group)
    collective.create_collective_group([Rank.remote()], name="ours")


def test_the_death_of_others_ends_no_group(local):
    ranks, other = [Rank.remote(), Rank.remote()], Rank.remote()
    collective.create_collective_group(ranks)
    conveyor.kill(other)
    with pytest.raises(ActorDiedError):
        get(other.sum.remote())
    assert [get(ref) for ref in [actor.sum.remote() for actor in ranks]] == [2.0, 2.0]
