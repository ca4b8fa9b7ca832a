"""Collective operations in methods that go wrong in other ways than usual."""

import os
import signal

import numpy as np
import pytest
from integration_collectives import await_rank
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import CollectiveBrokenError, RuntimeStateError
from conveyor.experimental import collective


class Nameless(type):
    @property
    def __name__(cls):
        raise ValueError("no name")


class NamelessError(Exception, metaclass=Nameless):
    pass


@conveyor.remote
class Rank:
    def sum(self, group="default", size=4):
        array = np.ones(size, np.float32)
        collective.allreduce(array, group, timeout=WAIT)
        return sorted({float(x) for x in array})

    def fail(self, words):
        raise LookupError(words)

    def make(self, actors, name=None):
        return collective.create_collective_group(actors, name=name).name

    def wait_and_raise(self):
        def handler(number, frame):
            raise NamelessError

        signal.signal(signal.SIGUSR1, handler)
        collective.barrier(timeout=WAIT)

    def sum_and_fork(self, size):
        def handler(number, frame):
            children.append(os.fork())

        children = []
        parent = os.getpid()
        signal.signal(signal.SIGUSR1, handler)
        try:
            return self.sum(size=size)
        except RuntimeStateError:
            if os.getpid() == parent:
                raise
            os._exit(0)
        finally:
            if os.getpid() == parent:
                status = os.waitpid(children[0], 0)[1]
                assert os.waitstatus_to_exitcode(status) == 0
            else:
                os._exit(1)  # it has taken part

    def pid(self):
        return os.getpid()


@pytest.fixture
def pair(local):
    actors = [Rank.remote(), Rank.remote()]
    collective.create_collective_group(actors)
    return actors


def strike_in_an_operation(actor, pid, ref, wait_until):
    """Send a signal to an actor that waits in an operation, and has a handler for it."""
    await_rank(actor, ref)
    wait_until(
        lambda: ref.done() or has_a_handler(pid)
    )  # where it is known only that its method runs
    os.kill(pid, signal.SIGUSR1)


def has_a_handler(pid):
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    return int(fields["SigCgt"], 16) >> (signal.SIGUSR1 - 1) & 1


def test_words_that_cannot_be_encoded_end_no_actor(pair):
    a, b = pair
    waits = a.sum.remote()
    with pytest.raises(LookupError):
        get(b.fail.remote("no file \udcff"))
    with pytest.raises(CollectiveBrokenError, match="has raised LookupError: no file"):
        get(waits)
    assert get(b.pid.remote()) > 0


def test_what_broke_a_group_stays_what_it_was(pair):
    a, b = pair
    waits = a.sum.remote()
    with pytest.raises(LookupError):
        get(b.fail.remote("the cause"))
    with pytest.raises(CollectiveBrokenError, match="the cause"):
        get(waits)
    with pytest.raises(LookupError):
        get(b.fail.remote("something else, later"))
    with pytest.raises(CollectiveBrokenError, match="the cause"):
        get(a.sum.remote())


def test_a_group_that_cannot_be_made_takes_nobody_out_of_another_one(pair):
    (group,) = collective.get_collective_groups(pair)
    maker = Rank.remote()
    with pytest.raises(RuntimeStateError, match="already"):
        get(maker.make.remote(pair, group.name))
    assert [get(ref) for ref in [one.sum.remote(group.name) for one in pair]] == [[2.0]] * 2
    # Groups without a name, whoever makes them, have different ones.
    assert get(maker.make.remote(pair)) != group.name


def test_an_interrupt_of_any_class_frees_the_others(pair, wait_until):
    a, b = pair
    pid = get(a.pid.remote())
    raises = a.wait_and_raise.remote()
    strike_in_an_operation(a, pid, raises, wait_until)
    with pytest.raises(Exception, match=r"NamelessError|interrupted"):
        get(raises)
    with pytest.raises(CollectiveBrokenError, match="interrupted"):
        get(b.sum.remote())


def test_a_handler_that_forks_makes_no_second_rank(pair, wait_until):
    a, b = pair
    pid = get(a.pid.remote())
    forks = a.sum_and_fork.remote(3 << 20)
    strike_in_an_operation(a, pid, forks, wait_until)
    assert get(b.sum.remote(size=3 << 20)) == [2.0]
    assert get(forks) == [2.0]
    assert [get(ref) for ref in [one.sum.remote() for one in pair]] == [[2.0]] * 2
