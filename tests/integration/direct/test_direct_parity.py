"""What Ray Direct Transport does, row by row, by our names and by Ray's.

Each test runs with ``conveyor`` and with ``conveyor.compat.ray``. Where Ray refuses what works here, the test
says so.
"""

import asyncio
import pickle
import time
import warnings
from dataclasses import dataclass
from typing import Any

import inside
import numpy as np
import pytest
from integration_helpers import WAIT, hold

import conveyor
import conveyor.compat.ray
from conveyor.exceptions import ActorDiedError, WaitTimeoutError

torch = pytest.importorskip("torch")
PRELOAD = ["torch"]
pytestmark = pytest.mark.filterwarnings("ignore:.*has no use for:UserWarning")


@dataclass
class Batch:
    tokens: Any
    step: int


@conveyor.remote
class Worker:
    def __init__(self):
        self.kept = None

    @conveyor.method(tensor_transport="NIXL")
    def make(self, size=4, value=1.0):
        import torch

        self.kept = torch.full((size,), value)
        return self.kept

    @conveyor.method(tensor_transport="gloo")
    def make_gloo(self):
        import torch

        return torch.ones(4)

    @conveyor.method(tensor_transport="nixl")
    def echo(self, value):
        return value

    @conveyor.method(tensor_transport="nixl")
    def fails(self, error):
        raise error

    @conveyor.method(tensor_transport="nixl", num_returns=2)
    def two(self):
        import torch

        return torch.ones(2), torch.zeros(2)

    @conveyor.method(tensor_transport="nixl")
    def items(self, count):
        import torch

        for i in range(count):
            yield torch.full((2,), float(i))

    @conveyor.method(tensor_transport="nixl")
    def nested(self):
        import torch

        shared = torch.ones(3)
        return {
            "twice": [shared, shared],
            "batch": Batch(torch.arange(3), 7),
            "parameter": torch.nn.Parameter(torch.zeros(2)),
            "text": "x",
        }

    def plain(self):
        import torch

        return torch.ones(4)

    def total(self, *values, named=None):
        return sum(float(value.sum()) for value in (*values, named) if value is not None)

    def is_kept(self, value):
        return value is self.kept

    def add(self, value):
        value += 1
        return float(value.sum())

    def get_of(self, refs):
        return [float(conveyor.get(ref).sum()) for ref in refs]

    def puts(self):
        import torch

        return [conveyor.put(torch.full((4,), 5.0), _tensor_transport="nixl")]

    def kept_total(self):
        return float(self.kept.sum())

    def stored(self):
        return inside.kept_values()

    def waits_for(self, timeout):
        conveyor.experimental.wait_tensor_freed(self.kept, timeout)
        return "freed"

    def hold(self, path):
        hold(path)


@conveyor.remote
class Consumer:
    """It has no method with a transport: Ray's consumers of such a class hang (#66264)."""

    def total(self, value, named=None):
        return float(value.sum()) + (float(named.sum()) if named is not None else 0)


@conveyor.remote(max_concurrency=4)
class Asynchronous:
    async def total(self, value):
        return float(value.sum())

    async def awaits(self, refs):
        return [float((await ref).sum()) for ref in refs]

    @conveyor.method(tensor_transport="nixl")
    async def make(self):
        import torch

        return torch.ones(3)


@pytest.fixture(params=["conveyor", "ray"])
def rt(request):
    return conveyor if request.param == "conveyor" else conveyor.compat.ray


@pytest.fixture(scope="module")
def actors(session):
    made = Worker.remote(), Worker.remote()
    yield made
    for actor in made:
        conveyor.kill(actor)


def got(rt, ref):
    return rt.get(ref, timeout=WAIT)


# 1.1: the core.


@pytest.mark.parametrize("name", ["gloo", "NCCL", "nixl", "Nixl", "cuda_ipc"])
def test_names_of_transports_in_any_case(rt, name):
    class Made:
        @rt.method(tensor_transport=name)
        def make(self):
            return 1

    rt.remote(Made)


def test_a_name_that_is_none_is_refused_at_decoration(rt, actors):
    for use in (
        lambda: rt.method(tensor_transport="carrier_pigeon"),
        lambda: actors[0].plain.options(tensor_transport="carrier_pigeon"),
        lambda: rt.put(torch.ones(1), _tensor_transport="carrier_pigeon"),
        lambda: rt.get(actors[0].plain.remote(), _tensor_transport="carrier_pigeon"),
    ):
        with pytest.raises(ValueError, match=r"(?i)invalid tensor transport: 'carrier_pigeon'"):
            use()


def test_a_transport_for_one_call(rt, actors):
    # Ray wants enable_tensor_transport=True of the actor.
    one, other = actors
    ref = one.plain.options(tensor_transport="nixl").remote()
    assert got(rt, other.total.remote(ref)) == 4
    assert ref.tensor_transport().upper() == "NIXL"
    assert one.plain.remote().tensor_transport() is None
    assert one.make.options(tensor_transport="object_store").remote().tensor_transport() is None


def test_enable_tensor_transport(rt, actors):
    with pytest.raises(ValueError, match="enable_tensor_transport=False"):
        rt.remote(enable_tensor_transport=False)(Worker.__wrapped__)
    rt.remote(enable_tensor_transport=True)(Worker.__wrapped__)
    with pytest.raises(ValueError, match="enable_tensor_transport=False"):
        Worker.options(enable_tensor_transport=False)

    class Plain:
        def make(self):
            return torch.ones(4)

    plain = rt.remote(enable_tensor_transport=False)(Plain).remote()
    with pytest.raises(ValueError, match=r"Plain.*make cannot .* enable_tensor_transport=False"):
        plain.make.options(tensor_transport="gloo")
    assert got(rt, plain.make.options(tensor_transport="object_store").remote()).sum() == 4
    rt.kill(plain)


def test_tensors_anywhere_in_the_value(rt, actors):
    value = got(rt, actors[0].nested.remote())
    first, second = value["twice"]
    assert first is second
    assert value["batch"].tokens.tolist() == [0, 1, 2]
    assert (value["batch"].step, value["text"]) == (7, "x")
    assert type(value["parameter"]) is torch.nn.Parameter
    # With NIXL, Ray cannot receive it.
    assert got(rt, actors[0].echo.remote({"a": 1})) == {"a": 1}


def test_several_results_and_streams(rt, actors):
    # Ray has neither.
    one, other = actors
    first, second = one.two.remote()
    assert got(rt, other.total.remote(first, second)) == 2
    assert [float(got(rt, item).sum()) if not hasattr(item, "sum") else float(item.sum())
            for item in one.items.remote(3)] == [0, 2, 4]  # fmt: skip


def test_as_an_argument(rt, actors):
    one, other = actors
    ref = one.make.remote()
    assert got(rt, other.total.remote(ref)) == 4
    # Ray looks at arguments by position only.
    assert got(rt, other.total.remote(named=ref)) == 4
    consumer = Consumer.remote()
    assert got(rt, consumer.total.remote(ref, named=ref)) == 8
    rt.kill(consumer)

    @rt.remote
    def total(value):
        return float(value.sum())

    # In Ray, of actors only.
    assert got(rt, total.remote(ref)) == 4


def test_the_actor_that_made_it_has_the_very_object(rt, actors):
    assert got(rt, actors[0].is_kept.remote(actors[0].make.remote())) is True


def test_the_same_ref_several_times(rt, actors):
    one, other = actors
    ref = one.make.remote()
    assert got(rt, other.total.remote(ref, ref, ref)) == 12
    # Each call has its own.
    assert [got(rt, other.add.remote(ref)) for _ in range(3)] == [8, 8, 8]
    assert got(rt, one.kept_total.remote()) == 4


def test_put(rt, actors):
    ref = rt.put(torch.ones(4), _tensor_transport="nixl")
    assert ref.tensor_transport().upper() == "NIXL"
    assert got(rt, actors[0].total.remote(ref)) == 4
    [made] = got(rt, actors[0].puts.remote())
    assert got(rt, actors[1].total.remote(made)) == 20
    assert got(rt, made).tolist() == [5.0] * 4
    assert rt.put(torch.ones(4)).tensor_transport() is None


def test_put_for_a_transport_of_groups(rt):
    if rt is conveyor:
        assert rt.put(torch.ones(2), _tensor_transport="gloo").tensor_transport() == "gloo"
    else:
        for name in ("gloo", "NCCL"):
            with pytest.raises(ValueError, match="two-sided"):
                rt.put(torch.ones(2), _tensor_transport=name)


def test_get(rt, actors):
    one, _ = actors
    refs = [one.make.remote(value=float(i)) for i in range(3)]
    assert [float(value[0]) for value in got(rt, refs)] == [0, 1, 2]
    usual = rt.get(refs[0], timeout=WAIT, _use_object_store=True)
    assert usual.tolist() == [0.0] * 4
    own = torch.ones(2)
    assert got(rt, rt.put(own, _tensor_transport="nixl")) is own


def test_get_for_a_transport_of_groups(rt, actors):
    ref = actors[0].make_gloo.remote()
    if rt is conveyor:
        assert got(rt, ref).sum() == 4
    else:
        with pytest.raises(ValueError, match=r"ray.get\(\) only supports"):
            got(rt, ref)
    assert rt.get(ref, timeout=WAIT, _use_object_store=True).sum() == 4


def test_get_with_a_timeout(rt, actors, tmp_path):
    one, _ = actors
    held = one.hold.remote(str(tmp_path / "go"))
    ref = one.make.remote()
    with pytest.raises(WaitTimeoutError):
        rt.get(ref, timeout=0.01)
    assert issubclass(rt.exceptions.GetTimeoutError, TimeoutError)
    (tmp_path / "go").touch()
    got(rt, held)
    assert got(rt, ref).sum() == 4


def test_get_of_several_ends_with_the_first_error_and_with_its_timeout(rt, actors, tmp_path):
    # In Ray the timeout begins anew for each.
    one, other = actors
    held = one.hold.remote(str(tmp_path / "go"))
    try:
        with pytest.raises(ValueError, match="no tensors"):
            rt.get([one.make.remote(), other.fails.remote(ValueError("no tensors"))])
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError):
            rt.get([one.make.remote() for _ in range(300)], timeout=0.1)
        assert time.monotonic() - began < 30
    finally:
        (tmp_path / "go").touch()
    got(rt, held)


def test_wait(rt, actors):
    ref = actors[0].make.remote()
    assert rt.wait([ref], timeout=WAIT) == ([ref], [])


def test_await_and_gather(rt, actors):
    # Ray has neither yet.
    async def program():
        refs = [actors[0].make.remote(value=float(i)) for i in range(3)]
        return await refs[0], await asyncio.gather(*refs)

    one, all_of_them = asyncio.run(program())
    assert one.tolist() == [0.0] * 4
    assert [float(value[0]) for value in all_of_them] == [0, 1, 2]


def test_refs_inside_of_containers(rt, actors):
    one, other = actors
    # Also those that are not there yet: in Ray an error (#59644).
    assert got(rt, other.get_of.remote([one.make.remote(), one.make.remote(value=2.0)])) == [4, 8]
    copied = pickle.loads(pickle.dumps(one.make.remote()))
    assert got(rt, copied).sum() == 4


def test_options_of_retries(rt, actors):
    ref = actors[0].make.options(max_task_retries=2, retry_exceptions=True).remote()
    assert got(rt, ref).sum() == 4
    method = rt.method(tensor_transport="gloo", max_task_retries=2, retry_exceptions=True)

    class Late:
        tries = 0

        def make(self):
            self.tries += 1
            if self.tries < 3:
                raise ValueError("not yet")
            return torch.full((4,), float(self.tries))

        make = method(make)

    late = rt.remote(Late).remote()
    assert got(rt, actors[1].total.remote(late.make.remote())) == 12


# 1.2: groups.


def test_groups(rt, actors):
    collective = rt.experimental.collective
    group = collective.create_collective_group(list(actors), backend="torch_gloo", name="rdt")
    try:
        assert group.actors == list(actors)
        assert (group.name, group.backend) == ("rdt", "torch_gloo")
        assert [group.get_rank(actor) for actor in actors] == [0, 1]
        assert [one.name for one in collective.get_collective_groups([actors[0]])] == ["rdt"]
        assert collective.get_collective_groups(list(actors), backend="torch_gloo") != []
        assert got(rt, actors[1].total.remote(actors[0].make_gloo.remote())) == 4
        with pytest.raises(ValueError, match="rdt"):
            collective.create_collective_group(list(actors), "torch_gloo", "rdt")
    finally:
        collective.destroy_collective_group(group)
    for wrong in (lambda: collective.destroy_collective_group("rdt"),
                  lambda: collective.create_collective_group([actors[0]] * 2, "torch_gloo"),
                  lambda: collective.create_collective_group(list(actors), "pigeon")):  # fmt: skip
        with pytest.raises(ValueError, match=r"."):
            wrong()
    collective.create_collective_group(list(actors), backend="gloo")
    collective.destroy_all_collective_groups()
    assert collective.get_collective_groups(list(actors)) == []


# 1.3: lifetime, and who writes.


def test_it_is_freed_with_its_last_reference(rt, actors, wait_until):
    one, other = actors
    ref = one.make.remote()
    assert got(rt, other.total.remote(ref)) == 4
    del ref
    wait_until(lambda: got(rt, one.stored.remote()) == 0, WAIT)
    assert got(rt, one.waits_for.remote(WAIT)) == "freed"


def test_waiting_for_a_tensor_that_is_needed(rt, actors):
    ref = actors[0].make.remote()
    waiting = actors[0].waits_for.remote(0.01)
    with pytest.raises(TimeoutError, match="freed"):
        got(rt, waiting)
    del ref
    own = torch.ones(3)
    put = rt.put(own, _tensor_transport="nixl")
    with pytest.raises(TimeoutError, match="freed"):
        rt.experimental.wait_tensor_freed(own, timeout=0)
    # In Ray a view is another tensor, which is free.
    with pytest.raises(TimeoutError):
        rt.experimental.wait_tensor_freed(own[1:], timeout=0)
    del put
    rt.experimental.wait_tensor_freed(own, timeout=WAIT)


def test_who_passes_it_back_and_on_is_warned_once(rt, actors):
    one, other = actors
    ref = one.make.remote()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            got(rt, [one.total.remote(ref), other.total.remote(ref)])
    assert len(seen) == 1
    assert "is being passed back to the actor that created it" in str(seen[0].message)


def test_what_its_actor_writes_is_seen(rt, actors):
    one, other = actors
    ref = one.make.remote()
    got(rt, one.add.remote(ref))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert got(rt, other.total.remote(ref)) == 8


# 1.4: receiving into memory. More of it in test_direct_targets.py.


def test_targets(rt, actors):
    ref = actors[0].make.remote()
    buffer = torch.zeros(4)
    rt.experimental.set_target_for_ref(ref, [buffer])
    assert got(rt, ref) is buffer
    for wrong in (torch.zeros(5), torch.zeros(4, dtype=torch.int32), torch.zeros(8)[::2]):
        rt.experimental.set_target_for_ref(ref, [wrong])
        with pytest.raises(ValueError, match=r"."):
            got(rt, ref)
    rt.experimental.set_target_device_for_ref(ref, "cpu")
    assert got(rt, ref) is not buffer
    with pytest.raises(ValueError, match="there is no device"):
        rt.experimental.set_target_device_for_ref(ref, "cuda:77")


def test_targets_of_what_has_not_stayed(rt, actors):
    ref, buffer = actors[0].plain.remote(), torch.zeros(4)
    if rt is conveyor:
        rt.experimental.set_target_for_ref(ref, [buffer])
        assert got(rt, ref) is buffer
    else:
        with pytest.raises(ValueError, match="is not an RDT object"):
            rt.experimental.set_target_for_ref(ref, [buffer])


def test_targets_where_the_object_store_is_requested_for(rt, actors):
    # Ray ignores them then; here the way makes no difference.
    ref, buffer = actors[0].make.remote(), torch.zeros(4)
    rt.experimental.set_target_for_ref(ref, [buffer])
    assert rt.get(ref, timeout=WAIT, _use_object_store=True) is buffer


# 1.7, 1.8: failures and misuse.


def test_an_error_of_the_producer(rt, actors):
    one, other = actors
    failed = one.fails.remote(ValueError("no tensors"))
    for use in (failed, other.total.remote(failed)):
        with pytest.raises(ValueError, match="no tensors"):
            got(rt, use)
    assert got(rt, other.total.remote(one.make.remote())) == 4


def test_its_actor_dies(rt, actors, wait_until):
    dying = Worker.remote()
    ref = dying.make.remote()
    rt.wait([ref], timeout=WAIT)
    rt.kill(dying)
    wait_until(lambda: is_lost(rt, ref), WAIT)
    with pytest.raises(ActorDiedError):
        got(rt, ref)
    # In Ray, also the consumer dies.
    with pytest.raises(ActorDiedError):
        got(rt, actors[1].total.remote(ref))
    assert got(rt, actors[1].total.remote(actors[0].make.remote())) == 4


def is_lost(rt, ref):
    try:
        got(rt, ref)
    except ActorDiedError:
        return True
    return False


def test_a_consumer_dies(rt, actors):
    # In Ray, also the producer does.
    one, _ = actors
    ref = one.make.remote()
    consumer = Consumer.remote()
    assert got(rt, consumer.total.remote(ref)) == 4
    rt.kill(consumer)
    assert got(rt, ref).sum() == 4


def test_what_lies_in_another_order(rt, actors):
    # NIXL refuses it, and with gloo both actors die.
    value = torch.arange(6.0).reshape(2, 3).T
    assert got(rt, actors[0].echo.remote(value)).tolist() == value.tolist()
    assert got(rt, actors[0].echo.remote([torch.ones(0), np.ones(2)]))[1].tolist() == [1, 1]


def test_misused_words(rt, actors):
    with pytest.raises(TypeError, match="name of a transport"):
        rt.method(tensor_transport=5)
    with pytest.raises(TypeError, match="unexpected keyword"):
        conveyor.get(actors[0].make.remote(), _tensor_transports="nixl")
    with pytest.raises(TypeError, match="put takes a value"):
        rt.put(rt.put(1), _tensor_transport="nixl")
    with pytest.raises(TypeError, match="and not both"):
        rt.put(1, tensor_transport="auto", _tensor_transport="nixl")


# 1.9: actors that do several things at a time.


def test_asynchronous_actors(rt, actors):
    asynchronous = Asynchronous.remote()
    ref = asynchronous.make.remote()
    assert got(rt, actors[0].total.remote(ref)) == 3
    assert got(rt, asynchronous.total.remote(actors[0].make.remote())) == 4
    assert got(rt, asynchronous.awaits.remote([ref, actors[0].make.remote()])) == [3, 4]
    rt.kill(asynchronous)


def test_actors_with_threads(rt, actors):
    threaded = Worker.options(max_concurrency=3).remote()
    refs = [threaded.make.remote(value=float(i)) for i in range(6)]
    assert [got(rt, actors[0].total.remote(ref)) for ref in refs] == [0, 4, 8, 12, 16, 20]
    rt.kill(threaded)


def test_nothing_is_left(actors, wait_until):
    wait_until(lambda: inside.kept_values() == 0)
    wait_until(lambda: conveyor.get([one.stored.remote() for one in actors]) == [0, 0])
