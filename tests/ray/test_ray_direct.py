"""Objects that stay on the actor that made them, on several nodes: the ref travels, and whoever needs the
tensors fetches them from their maker's node."""

import gc
import os
import signal
import sys

import cloudpickle
import inside
import numpy as np
import pytest
import torch

import conveyor
from conveyor import get
from conveyor.cluster import fetches
from conveyor.exceptions import ActorDiedError, InjectedFault, TaskError, WaitTimeoutError
from conveyor.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
    wait_tensor_freed,
)
from conveyor.testing import fail_transfers

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT = 60
#: Of float32: more than lies in a frame, or in a message.
LARGE = 1 << 20
HERE, THERE, THIRD = [{"resources": {name: 0.01}} for name in ("first", "second", "third")]


@conveyor.remote
class Maker:
    def __init__(self):
        self.held = []

    def pid(self):
        return os.getpid()

    @conveyor.method(tensor_transport="auto")
    def make(self, n):
        self.tensor = torch.arange(n, dtype=torch.float32)
        return self.tensor

    @conveyor.method(tensor_transport="auto")
    def make_square(self, n):
        return torch.arange(float(n * n)).reshape(n, n)

    @conveyor.method(tensor_transport="auto")
    def make_dict(self, n):
        return {"weights": torch.arange(n, dtype=torch.float32), "step": 7}

    @conveyor.method(tensor_transport="auto", snapshot=True)
    def make_snapshot(self, n):
        self.tensor = torch.arange(n, dtype=torch.float32)
        return self.tensor

    def put(self, n):
        return [conveyor.put(torch.arange(n, dtype=torch.float32), tensor_transport="auto")]

    def add(self, x):
        self.tensor += x

    def is_mine(self, x):
        return x is self.tensor

    def total(self, x):
        return float(x.astype(float).sum() if isinstance(x, np.ndarray) else x.double().sum())

    def total_of(self, refs):
        return [(self.total(get(ref)), ref.route()) for ref in refs]

    def step(self, x):
        return x["step"], self.total(x["weights"])

    @conveyor.method(receive_into={"x": "target"})
    def receive(self, x):
        return x is self.target, self.total(x)

    def have_target(self, n):
        self.target = torch.zeros(n)

    def objects(self):
        return [(one.id, one.holder, one.route) for one in conveyor.objects()]

    def hold(self, refs):
        self.held = refs

    def wait_freed(self, timeout):
        wait_tensor_freed(self.tensor, timeout)
        return True

    def stay_until(self, path):
        with open(path) as fifo:
            return fifo.read()


def total(n):
    return float(torch.arange(n, dtype=torch.float32).double().sum())


@pytest.fixture(scope="module")
def session(two_nodes, leaves_nothing):
    """Three nodes, each of which is a host of its own."""
    node = two_nodes.add_node(num_cpus=1, resources={"third": 4})
    try:
        with leaves_nothing():
            conveyor.init(engine="ray", shared_memory="node", node_timeout=30)
            yield
            conveyor.shutdown()
    finally:
        two_nodes.remove_node(node)


@pytest.fixture(scope="module")
def makers(session):
    """On the driver's node, on another one (two), and on a third."""
    places = HERE, THERE, THERE, THIRD
    made = [Maker.options(**place).remote() for place in places]
    get([one.pid.remote() for one in made])
    yield made
    for one in made:
        conveyor.kill(one)


def test_the_ref_travels_and_the_tensors_stay(makers):
    _, maker, neighbour, _ = makers
    before = inside.hosts_memory().bytes
    pump = inside.pump()
    went, came = pump.counts(1)[2:4]
    ref = maker.make.remote(LARGE)
    assert get(neighbour.total.remote(ref)) == total(LARGE)
    assert get(neighbour.total_of.remote([ref])) == [(total(LARGE), "read")]
    assert get(maker.is_mine.remote(ref))
    # What has come to the driver's node is calls and answers.
    assert inside.hosts_memory().bytes == before
    assert sum(pump.counts(1)[2:4]) - went - came < LARGE
    assert ref.route() == "network"
    assert ref.tensor_transport() == "auto"


@pytest.mark.parametrize("n", [10, 5000, LARGE, 3 * LARGE + 1])
def test_whoever_needs_the_tensors_fetches_them(makers, n):
    here, maker, _, third = makers
    ref = maker.make.remote(n)
    assert torch.equal(get(ref), torch.arange(n, dtype=torch.float32))
    assert get([other.total.remote(ref) for other in (here, third)]) == [total(n)] * 2
    for other in (here, third):
        assert get(other.total_of.remote([ref])) == [(total(n), "network")]


class Files(TensorTransportManager):
    """A program's own way, which only processes of one node take. What has come by it is negative."""

    folder = ""

    def tensor_transport_backend(self):
        return "files"

    @staticmethod
    def is_one_sided():
        return True

    @staticmethod
    def can_abort_transport():
        return False

    def actor_has_tensor_transport(self, actor):
        return True

    def extract_tensor_transport_metadata(self, obj_id, tensors):
        torch.save(tensors, f"{self.folder}/{obj_id}")
        return TensorTransportMetadata([(one.shape, one.dtype) for one in tensors], "cpu")

    def get_communicator_metadata(self, src_actor, dst_actor, backend):
        return CommunicatorMetadata()

    def recv_multiple_tensors(self, obj_id, meta, communicator, target_buffers=None):
        return [-one for one in torch.load(f"{self.folder}/{obj_id}")]

    def send_multiple_tensors(self, tensors, meta, communicator):
        raise NotImplementedError

    def garbage_collect(self, obj_id, meta, tensors):
        os.unlink(f"{self.folder}/{obj_id}")

    def abort_transport(self, obj_id, communicator):
        raise NotImplementedError


def test_a_transport_of_ones_own_is_taken_on_its_makers_node_alone(makers, tmp_path):
    here, maker, neighbour, third = makers
    manager = type("Files", (Files,), {"folder": str(tmp_path)})
    register_tensor_transport("ray-files", ["cpu"], manager)
    near, far = [
        one.make.options(tensor_transport="ray-files").remote(LARGE) for one in (here, maker)
    ]
    assert get(near).double().sum() == -total(LARGE)
    assert near.route() == "ray-files"
    # With the reference goes what has come to the driver.
    assert get(third.total_of.remote([near])) == [(-total(LARGE), "frame")]
    assert get(far).double().sum() == total(LARGE)
    assert far.route() == "network"
    assert get(third.total_of.remote([far])) == [(total(LARGE), "network")]
    assert get(neighbour.total_of.remote([far])) == [(total(LARGE), "read")]


def test_what_the_maker_writes_is_seen_by_who_fetches_afterwards(makers):
    here, maker, _, third = makers
    for n in (10, LARGE):
        ref = maker.make.remote(n)
        kept = get(ref)
        assert get([other.total.remote(ref) for other in (here, third)]) == [total(n)] * 2
        get(maker.add.remote(1))
        assert (
            get([other.total.remote(ref) for other in (here, third)])
            == [float((kept + 1).double().sum())] * 2
        )
        assert torch.equal(get(ref), kept + 1)
        assert kept[3] == 3
        ref = maker.make_snapshot.remote(n)
        get(maker.add.remote(1))
        assert torch.equal(get(ref), kept)


def test_of_a_part_only_that_is_fetched(makers):
    _, maker, _, third = makers
    ref = maker.make.remote(LARGE)
    get(third.total.remote(ref))
    before = inside.hosts_memory().bytes
    assert torch.equal(get(ref[100:200]), torch.arange(100, 200, dtype=torch.float32))
    assert inside.hosts_memory().bytes - before == 400
    assert get(third.total.remote(ref[:10])) == 45.0


def test_a_part_of_many_runs_into_memory_that_is_there(makers):
    _, maker, _, third = makers
    ref = maker.make_square.remote(1000)
    whole = torch.arange(1e6).reshape(1000, 1000)
    halves = [torch.zeros(1000, 500), torch.zeros(1000, 500)]
    get([ref[:, :500], ref[:, 500:]], into=halves)
    assert torch.equal(torch.cat(halves, 1), whole)
    get(third.have_target.remote((1000, 300)))
    expected = float(whole[:, 100:400].double().sum())
    assert get(third.receive.remote(ref[:, 100:400])) == (True, expected)


def test_who_waits_no_longer_is_told_so(makers, monkeypatch):
    _, maker, _, _ = makers
    ref = maker.make.remote(LARGE)
    get(maker.pid.remote())
    wanted = []
    # Nothing comes.
    monkeypatch.setattr(
        inside.hosts_memory(), "fetch", lambda *fetch: wanted.append(fetch) or wanted.clear
    )
    for more in {}, {"into": torch.zeros(LARGE)}:
        with pytest.raises(WaitTimeoutError, match="waiting for a value that"):
            get(ref, timeout=0.2, **more)
        assert not wanted  # and given up


def test_it_is_freed_with_its_last_ref(makers):
    _, maker, _, third = makers
    ref = maker.make.remote(LARGE)
    get(third.hold.remote([ref]))
    with pytest.raises(WaitTimeoutError):
        get(maker.wait_freed.remote(0.2))
    del ref
    gc.collect()
    with pytest.raises(WaitTimeoutError):
        get(maker.wait_freed.remote(0.2))
    get(third.hold.remote([]))
    assert get(maker.wait_freed.remote(WAIT))


def test_the_death_of_who_has_the_last_ref_frees_it(makers):
    _, maker, _, _ = makers
    owner = Maker.options(**THIRD).remote()
    ref = maker.make.remote(LARGE)
    get(owner.hold.remote([ref]))
    del ref
    gc.collect()
    os.kill(get(owner.pid.remote()), signal.SIGKILL)
    assert get(maker.wait_freed.remote(WAIT))


def test_the_makers_death(makers):
    here, _, neighbour, third = makers
    maker = Maker.options(name="the maker", **THERE).remote()
    ref = maker.make.remote(LARGE)
    get(third.hold.remote([ref]))
    os.kill(get(maker.pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        get(maker.pid.remote())
    with pytest.raises(ActorDiedError, match="the maker"):
        get(ref)
    assert ref.route() == "lost"
    for other in (here, neighbour, third):
        with pytest.raises(ActorDiedError, match="the maker"):
            get(other.total.remote(ref))
        with pytest.raises(ActorDiedError, match="the maker"):
            get(other.total_of.remote([ref]))
    get(third.hold.remote([]))


def test_a_maker_that_computes_delays_nobody(makers, tmp_path):
    here, maker, _, third = makers
    path = tmp_path / "fifo"
    os.mkfifo(path)
    ref = maker.make.remote(LARGE)
    get(ref)
    busy = maker.stay_until.remote(str(path))
    assert float(get(ref).double().sum()) == total(LARGE)
    assert get([other.total.remote(ref) for other in (here, third)]) == [total(LARGE)] * 2
    path.write_text("on")
    assert get(busy) == "on"


def test_several_on_one_node_cost_one_transfer(makers, monkeypatch, wait_until):
    _, maker, _, _ = makers
    monkeypatch.setattr(fetches, "LINGER", 60.0)
    bring = fetches.Source.run

    def brought(source, flight):
        wait_until(lambda: len(flight.waiting + flight.late) == 4, WAIT)
        return bring(source, flight)

    others = [Maker.options(**HERE).remote() for _ in range(4)]
    ref = maker.make.remote(LARGE)
    get([other.pid.remote() for other in others])
    before = inside.hosts_memory().transfers
    with monkeypatch.context() as patch:
        patch.setattr(fetches.Source, "run", brought)
        assert get([other.total.remote(ref) for other in others]) == [total(LARGE)] * 4
    assert inside.hosts_memory().transfers == before + 1
    # They have it still, for others.
    assert get(others[0].total.remote(ref)) == total(LARGE)
    assert inside.hosts_memory().transfers == before + 1
    # What has been written since is no part of what is there.
    get(maker.add.remote(1))
    assert get(others[0].total.remote(ref)) == float(
        (torch.arange(LARGE, dtype=torch.float32) + 1).double().sum()
    )
    assert inside.hosts_memory().transfers == before + 2
    for other in others:
        conveyor.kill(other)


def test_a_transfer_that_fails_fails_nothing_else(makers):
    here, maker, _, _ = makers
    ref, other = maker.make.remote(LARGE), maker.make_dict.remote(10)
    with fail_transfers(maker):
        with pytest.raises(InjectedFault):
            get(ref)
        with pytest.raises((InjectedFault, TaskError)):
            get(here.total.remote(ref))
    assert get(ref).double().sum() == total(LARGE)
    assert get(here.total.remote(ref)) == total(LARGE)
    assert get(other)["step"] == 7


def test_a_connection_that_breaks_frees_what_is_let_go_of_meanwhile(makers):
    _, maker, _, third = makers
    pump = inside.pump()
    for _ in range(4):
        ref = maker.make.remote(LARGE)
        assert get(third.total.remote(ref)) == total(LARGE)
        pump.disconnect(1, "by the test")
        del ref
        gc.collect()
        assert get(maker.wait_freed.remote(WAIT))


def test_all_of_them_are_listed_on_every_node(makers, wait_until):
    here, maker, neighbour, third = makers
    ref = maker.make.remote(LARGE)
    get(third.hold.remote([ref]))

    def told_by(objects):
        """What a listing tells of it; a node that has no time to answer is left out of one."""
        found = []
        wait_until(
            lambda: found.extend(one for one in objects() if one[0] == ref.value_id()) or found,
            WAIT,
        )
        (told,) = found
        return told

    of = told_by(lambda: [(one.id, one) for one in conveyor.objects()])[1]
    assert (of.holder, of.nbytes, of.route) == ("Maker#2", 4 * LARGE, "network")
    assert "driver" in of.holders
    for other, route in ((here, "network"), (maker, "here"), (neighbour, "read")):
        told = told_by(lambda other=other: get(other.objects.remote()))
        assert told == (ref.value_id(), "Maker#2", route)
    get(third.hold.remote([]))
