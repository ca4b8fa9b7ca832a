"""Limits of Ray's that objects that stay have not, where no other test shows it (``docs/limits.md``)."""

import copyreg
import os
import pickle
import signal

import pytest
from integration_helpers import WAIT, get, hold
from integration_managers import Files, Sockets
from nodes_apart import APART

import conveyor
from conveyor.exceptions import ActorDiedError
from conveyor.experimental import collective, register_tensor_transport

torch = pytest.importorskip("torch")
PRELOAD = ["torch"]


class Marked(torch.Tensor):
    """Of a class of the program's."""


class Worker:
    def __init__(self, path=None):
        if path is not None:
            hold(path)

    @conveyor.method(tensor_transport="nixl")
    def make(self, value=1.0):
        return torch.full((4,), value)

    def plain(self):
        return torch.full((4,), 2.0)

    @conveyor.method(tensor_transport="nixl")
    def computed(self):
        """A tensor that is no leaf of a graph, and one that is."""
        weight = torch.ones(4, requires_grad=True)
        return [weight, weight * 2]

    @conveyor.method(tensor_transport="nixl")
    def marked(self):
        return torch.arange(5.0).as_subclass(Marked)

    def total(self, *values):
        return sum(float(value.sum()) for value in values)

    def hold(self, path):
        hold(path)

    def pid(self):
        return os.getpid()

    def call(self, function):
        return function()


Actor = conveyor.remote(Worker)


@pytest.fixture
def actors(session):
    made = Actor.remote(), Actor.remote()
    yield made
    for actor in made:
        conveyor.kill(actor)


def test_a_producer_that_is_stopped_delays_nobody(actors):
    """Nothing of the way to its values leads through it."""
    one, other = actors
    pid, ref = get(one.pid.remote()), one.make.remote()
    conveyor.wait([ref], timeout=WAIT)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert get(other.total.remote(ref, ref)) == 8
        assert get(ref).tolist() == [1.0] * 4
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_value_is_let_go_of_while_its_actor_computes(actors, tmp_path, wait_until):
    one, _ = actors
    ref = one.make.remote()
    held = one.hold.remote(str(tmp_path / "go"))
    value = ref.value_id()
    assert value in [kept.id for kept in conveyor.objects()]
    del ref
    wait_until(lambda: value not in [kept.id for kept in conveyor.objects()], WAIT)
    assert not held.done()
    (tmp_path / "go").touch()
    get(held)


def test_calls_return_before_their_actors_are_there(session, tmp_path):
    one, other = Actor.remote(str(tmp_path / "go")), Actor.remote()
    ref = one.make.remote()
    usual = one.plain.options(tensor_transport="gloo").remote()
    total = other.total.remote(ref, usual)
    assert [ref.done(), usual.done(), total.done()] == [False] * 3
    (tmp_path / "go").touch()
    assert get(total) == 12
    for actor in (one, other):
        conveyor.kill(actor)


def changed():
    """What Ray changes in a process: pickling, and torch.distributed."""
    usual = torch.arange(3.0)
    return (
        usual.__reduce_ex__(5)[0].__qualname__,
        b"_load_from_bytes" in pickle.dumps(usual, 5),
        torch.Tensor in copyreg.dispatch_table,
        torch.distributed.is_initialized(),
        [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if name in os.environ],
    )


def test_pickling_and_process_groups_are_the_programs_own(actors):
    one, other = actors
    before = changed()
    assert before[-2:] == (False, [])
    group = collective.create_collective_group(list(actors), backend="torch_gloo")
    try:
        ref = one.make.remote()
        assert get(other.total.remote(ref)) == get(ref).sum()
        assert [changed(), *get([actor.call.remote(changed) for actor in actors])] == [before] * 3
    finally:
        collective.destroy_collective_group(group)


def test_an_actor_is_in_several_groups(actors):
    one, other = actors
    third = Actor.remote()
    groups = [
        collective.create_collective_group([one, peer], backend="torch_gloo")
        for peer in (other, third, other)
    ]
    try:
        assert len(collective.get_collective_groups([one], backend="torch_gloo")) == 3
        assert get(third.total.remote(one.make.remote(), other.make.remote())) == 8
    finally:
        for group in groups:
            collective.destroy_collective_group(group)
        conveyor.kill(third)


@pytest.mark.parametrize("manager", [Files, Sockets])
def test_an_actor_that_is_restarted_has_transports_of_ones_own(
    session, tmp_path, wait_until, manager
):
    name = f"restarted-{manager.__name__.lower()}-{os.getpid()}"
    folder = {"folder": str(tmp_path)}
    register_tensor_transport(name, ["cpu"], type(manager.__name__, (manager,), folder))
    one, other = Actor.options(max_restarts=1).remote(), Actor.remote()
    pid = get(one.pid.remote())
    ref = one.plain.options(tensor_transport=name).remote()
    assert get(other.total.remote(ref)) == 8
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        wait_until(lambda: get(other.total.remote(ref)) is None, WAIT)
    wait_until(lambda: is_there(one), WAIT)
    ref = one.plain.options(tensor_transport=name).remote()
    assert get(other.total.remote(ref)) == 8
    assert ref.route() == name or (APART and ref.route() == "network")
    for actor in (one, other):
        conveyor.kill(actor)


def is_there(actor):
    try:
        return get(actor.pid.remote())
    except conveyor.exceptions.ActorRestartedError:
        return False


def test_what_computed_a_tensor_stays_behind(actors):
    one, _ = actors
    weight, doubled = get(one.computed.remote())
    assert [weight.is_leaf, doubled.is_leaf, doubled.tolist()] == [True, True, [2.0] * 4]


def test_subclasses_stay(actors):
    one, other = actors
    ref = one.marked.remote()
    value = get(ref)
    assert (type(value), value.tolist()) == (Marked, [0.0, 1.0, 2.0, 3.0, 4.0])
    assert (ref.route(), get(other.total.remote(ref))) == ("read", 10)
