"""References inside of values between nodes that share no memory."""

import errno
import gc
import os
import pickle
import resource
import signal
from contextlib import contextmanager

import inside
import numpy as np
import pytest
from ray_nodes import HERE, THERE, WAIT, get
from ray_refs_helpers import LARGE, SMALL, holder, total

import conveyor
from conveyor.cluster import servers
from conveyor.exceptions import (
    ActorDiedError,
    OutOfMemoryError,
    SystemLimitError,
)


@pytest.fixture(scope="module")
def actors(far):
    return holder(HERE), holder(THERE)


@pytest.fixture
def pair(actors, wait_until):
    """One actor here, one there; and what a test leaves to the rendezvous is nothing."""
    yield actors
    get([actor.forget.remote() for actor in actors])
    gc.collect()
    wait_until(lambda: inside.kept() == 0, WAIT)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_in_arguments_and_results(pair, size):
    here, there = pair
    refs = [conveyor.put(np.arange(size)), here.make.remote(size), there.make.remote(size)]
    assert get(there.total.remote(refs)) == [total(size)] * 3
    assert get(there.pass_on.remote(here, refs)) == [total(size)] * 3
    assert get(here.pass_on.remote(there, refs)) == [total(size)] * 3
    for maker in pair:
        (ref,) = get(maker.put.remote(size))
        assert get(ref).sum() == total(size)
        assert get([a.total.remote([ref]) for a in pair]) == [[total(size)]] * 2
    (ref,) = get(there.requested.remote(here, size))
    assert get(there.total.remote([ref])) == [total(size)]
    assert get(ref).sum() == total(size)


@pytest.mark.parametrize("where", [(THERE, 0), (HERE, 1)], ids=["there", "here"])
def test_of_a_process_that_is_killed_while_it_pickles(pair, where, monkeypatch, wait_until):
    """Its node lives, and what it had sent before comes, of which the reader's host tells. For the rest the
    fixture waits."""
    place, reader = where
    maker = holder(place)
    dies = maker.end_half.remote(pair[reader], [conveyor.put(np.arange(SMALL))])
    with pytest.raises(ActorDiedError):
        get(dies)
    gc.collect()
    wait_until(lambda: inside.kept() == 0, WAIT)


def test_its_value_comes_to_a_node_once(pair, wait_until):
    _, there = pair
    others = [holder(THERE) for _ in range(2)]
    ref = conveyor.put(np.arange(LARGE))
    readers = [there, *others]
    assert get([a.total.remote([ref]) for a in readers]) == [[total(LARGE)]] * 3
    wait_until(lambda: inside.kept_files() == 0, WAIT)  # nobody there has it any more
    get([a.keep.remote([ref]) for a in readers])
    assert get([a.total.remote() for a in readers]) == [[total(LARGE)]] * 3
    wait_until(lambda: inside.kept_files() == 1, WAIT)
    get([a.forget.remote() for a in readers])
    wait_until(lambda: inside.kept_files() == 0, WAIT)
    for other in others:
        conveyor.kill(other)


def test_it_lives_as_long_as_somebody_anywhere_has_it(pair, wait_until):
    _, there = pair
    for maker, other in (pair, pair[::-1]):
        get(other.keep.remote(get(maker.put.remote(LARGE))))
        gc.collect()
        get(maker.through.remote(1))
        assert get(other.total.remote()) == [total(LARGE)]
        wait_until(lambda: inside.kept() == 1, WAIT)  # the pickle on its way is noted, too
        get(other.forget.remote())
        wait_until(lambda: inside.kept() == 0, WAIT)
    # Nor does a pickle that nobody has loaded yet.
    data = pickle.dumps(get(there.put.remote(SMALL)))
    assert get(pickle.loads(data)[0]).sum() == total(SMALL)


def test_its_holder_dies(pair, wait_until):
    here, _ = pair
    doomed = holder(THERE)
    get(doomed.keep.remote([conveyor.put(np.arange(LARGE)), *get(here.put.remote(LARGE))]))
    assert get(doomed.total.remote()) == [total(LARGE), total(LARGE)]
    wait_until(lambda: inside.kept() == 2, WAIT)
    os.kill(get(doomed.pid.remote()), signal.SIGKILL)
    wait_until(lambda: inside.kept() == 0, WAIT)


def test_its_maker_dies(pair):
    here, there = pair
    doomed = holder(THERE)
    (made,) = get(doomed.put.remote(LARGE))
    assert get(here.total.remote([made])) == [total(LARGE)]
    (pending,) = get(doomed.requested.remote(here, SMALL))
    assert get(pending).sum() == total(SMALL)
    os.kill(get(doomed.pid.remote()), signal.SIGKILL)
    # What was there stays: it is the session's.
    assert get(there.total.remote([made])) == [total(LARGE)]
    with pytest.raises(ActorDiedError):
        get(doomed.make.remote(1))


def test_what_it_was_to_make_when_it_died(pair, tmp_path, wait_until):
    doomed, slow = holder(THERE), holder(HERE)
    path = tmp_path / "there"
    (pending,) = get(doomed.requested_to_stay.remote(slow, str(path)))
    wait_until(path.exists, WAIT)
    waiting = [a.total.remote([pending]) for a in pair]
    os.kill(get(doomed.pid.remote()), signal.SIGKILL)
    for ref in [pending, *waiting]:
        with pytest.raises(ActorDiedError):
            get(ref)
    conveyor.kill(slow)


@pytest.mark.parametrize("gets", [False, True])
def test_references_inside_of_a_value_that_has_stayed_end_with_it(pair, wait_until, gets):
    """Each node that has loaded it has tickets of its own for them, whether or not it takes them."""
    _, there = pair
    inner = conveyor.put(np.arange(LARGE))
    value = {"large": np.arange(LARGE), "inner": inner}
    outer = conveyor.put(value, tensor_transport="auto")
    for _ in range(2):
        get(there.keep.remote([outer]))
        if gets:
            assert get(there.inner_totals.remote()) == [total(LARGE)]
        get(there.forget.remote())
    del inner, outer, value
    gc.collect()
    wait_until(lambda: inside.kept() == 0, WAIT)


def test_a_connection_that_breaks_costs_no_ref(pair):
    _, there = pair
    refs = [conveyor.put(np.arange(LARGE)) for _ in range(8)]
    wanted = []
    for ref in refs:
        inside.pump().disconnect(1, "by the test")
        wanted.append(there.total.remote([ref]))
    assert get(wanted) == [[total(LARGE)]] * 8


@contextmanager
def files_of_an_agent(most):
    """Files of the other node's agent may have so many bytes, and no more."""
    import ray

    (host,) = inside.agents()
    pid = ray.get(host.agent.__ray_call__.remote(lambda agent: os.getpid()))
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def test_a_value_for_which_a_node_has_no_room_is_that_values_error(pair):
    _, there = pair
    kept_there = [conveyor.put(np.arange(size)) for size in (SMALL, LARGE)]
    get(there.keep.remote(kept_there))
    assert get(there.total.remote()) == [total(SMALL), total(LARGE)]
    ref = conveyor.put(np.arange(LARGE))
    with files_of_an_agent(4 * LARGE):  # and so has no room for 8 bytes each
        with pytest.raises(SystemLimitError, match=r"agent of node .*ulimit -f"):
            get(there.total.remote([ref]))
        assert get(there.total.remote([conveyor.put(np.arange(SMALL))])) == [total(SMALL)]
        assert get(there.total.remote()) == [total(SMALL), total(LARGE)]
    assert get(there.total.remote([ref])) == [total(LARGE)]


def test_a_value_for_which_the_driver_has_no_room_is_that_values_error(pair, monkeypatch):
    here, there = pair
    (waits,) = get(there.requested.remote(here, SMALL))

    def refuse(*_):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(servers.os, "posix_fallocate", refuse)
    (ref,) = get(there.put.remote(LARGE))
    with pytest.raises(OutOfMemoryError, match="fetch a value"):
        get(ref)
    monkeypatch.undo()
    assert get(waits).sum() == total(SMALL)
    (ref,) = get(there.put.remote(LARGE))
    assert get(ref).sum() == total(LARGE)
