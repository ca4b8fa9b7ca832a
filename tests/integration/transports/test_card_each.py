"""Actors that see a simulated device each, and a driver that sees none: tensors go by the host's memory."""

from __future__ import annotations

import logging
import sys

import cloudpickle
import pytest

import conveyor
from conveyor.codec.tensors import staging
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, ConveyorWarning

torch = pytest.importorskip("torch")
accelerator = pytest.importorskip("accelerator")

if accelerator.cannot_simulate() is not None:
    pytest.skip(accelerator.cannot_simulate(), allow_module_level=True)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("session")]

PRELOAD = ["torch", "accelerator"]
BY_HOST = "by way of the host's memory"


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@conveyor.remote(num_cpus=0)
class Card:
    def __init__(self):
        self.sim = accelerator.install()
        self.lines = Lines()
        logging.getLogger("conveyor").addHandler(self.lines)

    def make(self, value, size=1000):
        return torch.full((size,), float(value), device="sim")

    def late(self, value):
        """A tensor whose values come long after the method has returned."""
        made = torch.zeros(1000, device="sim")
        accelerator.kernel(0.05, lambda tensor: tensor.fill_(value), made)
        return made

    def mixed(self, value):
        base = torch.arange(12.0, device="sim").reshape(3, 4) + value
        return {"views": [base, base[1], base.t()], "host": torch.ones(3), "half": base.bfloat16()}

    def again(self, value):
        """A tensor that the next call writes to."""
        if not hasattr(self, "buffer"):
            self.buffer = torch.zeros(1000, device="sim")
        return self.buffer.fill_(value)

    @conveyor.method(tensor_transport="auto")
    def keep(self, value):
        return self.late(value)

    @conveyor.method(tensor_transport="nccl")
    def keep_mixed(self, value):
        return self.mixed(value)

    def fail(self, _value):
        made = torch.zeros(1000, device="sim")
        accelerator.kernel(0, lambda _: 1 / 0, made)
        return made

    def total(self, value):
        return float(value.sum()), value.device.type, self.sim.identity(value.device.index)

    def sums(self, value):
        views = value["views"]
        shares = views[1].data_ptr() == views[0][1].data_ptr()
        kinds = [one.device.type for one in (*views, value["host"], value["half"])]
        return [float(view.sum()) for view in views], float(value["half"].sum()), shares, kinds

    def told(self):
        return [line for line in self.lines.lines if "host's memory" in line]


def card(visible):
    return Card.options(env_vars={"SIM_VISIBLE_DEVICES": visible}).remote()


@pytest.fixture(scope="module")
def cards(session):
    accelerator.install()
    made = card("0"), card("1")
    assert conveyor.get([made[1].total.remote(made[1].make.remote(1))]) == [
        (1000.0, "sim", "sim:1")
    ]
    return made


@pytest.fixture
def driver_without(monkeypatch):
    """The driver sees no device."""
    monkeypatch.setattr(accelerator.install().machine, "visible", ())
    monkeypatch.setattr(staging, "_found", set())
    staging._tell_once.cache_clear()


SUMS = ([66.0, 22.0, 66.0], 66.0, True, ["sim", "sim", "sim", "cpu", "sim"])


def test_a_handle_of_a_card_that_the_opener_does_not_see_is_refused(cards):
    @conveyor.remote(num_cpus=0)
    class Opener:
        def __init__(self):
            self.sim = accelerator.install()

        def export(self):
            self.tensor = torch.ones(8, device="sim")
            return self.sim.export_memory(self.tensor), self.sim.count()

        def open(self, handle):
            return self.sim.open_memory(handle).view(torch.float32).sum().item()

        def why_none(self):
            return self.sim.viable()

    first, second, both, none = [
        Opener.options(env_vars={"SIM_VISIBLE_DEVICES": visible}).remote()
        for visible in ("0", "1", "1,0", "")
    ]
    handle, count = conveyor.get(second.export.remote())
    assert count == 1
    with pytest.raises(RuntimeError, match="sim:1, which this process does not see"):
        conveyor.get(first.open.remote(handle))
    assert conveyor.get(both.open.remote(handle)) == 8.0
    assert "shows it no device" in conveyor.get(none.why_none.remote())
    with pytest.raises(RuntimeError, match="there is no device sim:0"):
        conveyor.get(none.export.remote())


@pytest.mark.parametrize("overlap", [False, True])
def test_an_edge_between_two_cards(cards, overlap, request):
    if overlap:
        request.getfixturevalue("driver_without")
    maker, reader = cards
    before = len(conveyor.get(reader.told.remote()))
    with InputNode() as inp:
        late = maker.late.bind(inp).with_tensor_transport("sim_ipc")
        again = maker.again.bind(inp).with_tensor_transport("sim_ipc")
        mixed = maker.mixed.bind(inp).with_tensor_transport("sim_ipc")
        dag = MultiOutputNode(
            [reader.total.bind(late), reader.total.bind(again), reader.sums.bind(mixed)]
        )
    with dag.compile(overlap=overlap, depth=4) as graph:
        refs = [graph.execute(value) for value in range(8)]
        for value, got in enumerate(refs):
            total = (1000.0 * value, "sim", "sim:1")
            sums = [66.0 + 12 * value, 22.0 + 4 * value, 66.0 + 12 * value]
            assert conveyor.get(got)[:2] == [total, total]
            assert conveyor.get(got)[2][0] == sums
    assert len(conveyor.get(reader.told.remote())) == before + 3  # one for each edge


def test_readers_of_which_some_see_the_card(cards):
    (maker, far), near = cards, card("0,1")
    with InputNode() as inp:
        made = maker.make.bind(inp).with_tensor_transport("sim_ipc")
        dag = MultiOutputNode([near.total.bind(made), far.total.bind(made)])
    with dag.compile() as graph:
        for value in range(5):
            got = conveyor.get(graph.execute(value))
            assert got == [(1000.0 * value, "sim", "sim:0"), (1000.0 * value, "sim", "sim:1")]
    assert conveyor.get(near.told.remote()) == []
    assert BY_HOST in conveyor.get(far.told.remote())[-1]


def test_auto_says_so_in_its_plan(cards):
    maker, reader = cards
    with InputNode() as inp:
        made = maker.make.bind(inp).with_tensor_transport(device="sim")
        with reader.total.bind(made).compile() as graph:
            assert "by the host's memory where a reader sees another device" in graph.explain()
            assert conveyor.get(graph.execute(2)) == (2000.0, "sim", "sim:1")


def test_an_error_of_the_card_is_the_executions(cards):
    maker, reader = card("0"), cards[1]
    with InputNode() as inp:
        made = maker.fail.bind(inp).with_tensor_transport("sim_ipc")
        with reader.total.bind(made).compile() as graph, pytest.raises(Exception, match="division"):
            conveyor.get(graph.execute(1))


def test_a_maker_that_dies_meanwhile(cards):
    maker, reader = card("0"), cards[1]
    with InputNode() as inp:
        made = maker.make.bind(inp).with_tensor_transport("sim_ipc")
        with reader.total.bind(made).compile() as graph:
            assert conveyor.get(graph.execute(1)) == (1000.0, "sim", "sim:1")
            conveyor.kill(maker)
            with pytest.raises(ActorDiedError):
                conveyor.get(graph.execute(2))


def test_a_direct_object_of_another_card(cards):
    maker, reader = cards
    ref = maker.keep.remote(3)
    assert conveyor.get(reader.total.remote(ref)) == (3000.0, "sim", "sim:1")
    with pytest.warns(ConveyorWarning, match="passed back to the actor"):
        assert conveyor.get(maker.total.remote(ref)) == (3000.0, "sim", "sim:0")
    assert conveyor.get(reader.sums.remote(maker.keep_mixed.remote(0)))[:3] == SUMS[:3]
    told = [line for line in conveyor.get(reader.told.remote()) if "keeps" in line]
    assert len(told) == 1
    assert BY_HOST in told[0]


def test_a_direct_object_for_a_driver_without_any(cards, driver_without, caplog):
    ref = cards[1].keep.remote(3)
    got = conveyor.get(ref)
    assert (got.device.type, float(got.sum())) == ("cpu", 3000.0)
    assert ref.route() == "host"
    assert float(conveyor.get(cards[1].keep.remote(4)).sum()) == 4000.0
    assert caplog.text.count(BY_HOST) == 1
    del ref


def test_a_direct_object_whose_keeper_has_died(cards, driver_without):
    holder = card("1")
    ref = holder.keep.remote(3)
    conveyor.wait([ref])
    conveyor.kill(holder)
    with pytest.raises(ActorDiedError):
        conveyor.get(ref)


def test_a_driver_without_any_gets_tensors_of_a_card(cards, driver_without, caplog):
    """As results of calls and of graphs; it compiles what its actors can do."""
    for value in (1, 2):
        got = conveyor.get(cards[1].make.remote(value))
        assert (got.device.type, float(got.sum())) == ("cpu", 1000.0 * value)
    assert caplog.text.count("stay in memory of the host") == 1
    with InputNode() as inp:
        made = cards[0].make.bind(inp).with_tensor_transport(device="sim")
        dag = MultiOutputNode([made, cards[1].total.bind(made)])
    with dag.compile() as graph:
        got, total = conveyor.get(graph.execute(2))
        assert (got.device.type, float(got.sum())) == ("cpu", 2000.0)
        assert total == (2000.0, "sim", "sim:1")


def test_a_driver_gives_a_tensor_to_a_card(cards, driver_without):
    with InputNode() as inp:
        dag = cards[1].total.bind(inp.with_tensor_transport(device="sim"))
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(torch.ones(10))) == (10.0, "sim", "sim:1")
