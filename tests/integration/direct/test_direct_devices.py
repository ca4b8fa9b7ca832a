"""Tensors of devices that stay on the actor that made them, on their device."""

import asyncio
import gc
import re
import threading
import weakref

import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.dag import InputNode
from conveyor.direct import devices as opened_memory
from conveyor.exceptions import (
    ActorDiedError,
    ObjectLostError,
    WaitTimeoutError,
)
from conveyor.experimental import wait_tensor_freed

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

import accelerator  # noqa: E402
from accelerator.streams import SimEvent  # noqa: E402

PRELOAD = ["torch"]
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]


class Holder:
    def __init__(self):
        self.sim = accelerator.install()
        self.tensor = None
        self.goes_on = threading.Event()

    @conveyor.method(tensor_transport="auto")
    def make(self, size=1000, where="sim", value=1.0):
        self.tensor = torch.full((size,), value, device=where)
        return self.tensor

    @conveyor.method(tensor_transport="auto")
    def alone(self, size):
        return torch.ones(size, device="sim")

    @conveyor.method(tensor_transport="auto")
    def mixed(self):
        base = torch.arange(12.0, device="sim").reshape(3, 4)
        return {
            "views": [base, base[1], base.t()],
            "host": torch.ones(3),
            "other device": torch.full((5,), 2.0, device="sim:1"),
            "parameter": torch.nn.Parameter(torch.ones(2, device="sim")),
            "half": torch.ones(4, device="sim").bfloat16(),
            "every other": base[:, ::2],
            "empty": torch.empty(0, 3, device="sim"),
            "text": "out_of_band",
        }

    @conveyor.method(tensor_transport="auto", snapshot=True)
    def copy(self):
        self.tensor = torch.ones(10, device="sim")
        return self.tensor

    @conveyor.method(tensor_transport="auto")
    def late(self):
        """A tensor whose values are there when somebody says so."""
        self.tensor = torch.zeros(10, device="sim")
        accelerator.kernel(0, lambda t: (self.goes_on.wait(WAIT), t.fill_(7)), self.tensor)
        return self.tensor

    @conveyor.method(tensor_transport="auto", num_returns=2)
    def two(self):
        return torch.zeros(3, device="sim"), torch.ones(4, device="sim")

    def add(self):
        self.tensor += 1
        self.sim.synchronize()

    def add_when_free(self):
        wait_tensor_freed(self.tensor[2:5], WAIT)
        self.add()
        return self.tensor.tolist()

    def go_on(self):
        self.goes_on.set()

    def is_same(self, value):
        return value is self.tensor

    def total(self, value):
        return value.sum().item(), str(value.device)

    def room(self):
        self.sim.synchronize()
        gc.collect()
        return self.sim.memory()[0]

    def stored(self):
        return [(one.nbytes, one.transport) for one in conveyor.objects() if one.route == "here"]

    def ask(self, other):
        return get(other.answer.remote())


class Loop:
    def __init__(self):
        accelerator.install()

    async def total(self, value):
        return value.sum().item()

    async def answer(self):
        return "runs on"


Remote = conveyor.remote(Holder)
Concurrent = conveyor.remote(max_concurrency=2)(Holder)


@pytest.fixture(scope="module")
def pair(leaves_nothing):
    sim = accelerator.install()
    torch.zeros(1, device="sim"), torch.zeros(1, device="sim:1")
    with leaves_nothing():
        conveyor.init(preload=["torch"])
        actors = Remote.remote(), Remote.remote()
        yield actors
        del actors
        conveyor.shutdown()
        for index in range(2):
            sim.synchronize(index)


def test_a_tensor_stays_on_its_device(pair):
    maker, other = pair
    ref = maker.make.remote()
    assert get(other.total.remote(ref)) == (1000.0, "sim:0")
    got = get(ref)
    assert (got.device.type, got.sum().item()) == ("sim", 1000.0)
    assert get(maker.stored.remote()) == [(4000, "auto")]
    assert ref.route() == "ipc"


def test_it_is_not_copied_to_the_host(pair):
    maker, _ = pair
    ref = maker.make.remote()
    conveyor.wait([ref])
    sim = accelerator.install()
    with accelerator.watching() as works:
        get(ref)
        sim.synchronize()
    assert [work.name for work in works if "copy" in work.name] != []
    assert not any("host" in work.name or "cpu" in work.name for work in works)


def test_on_its_own_actor_it_is_the_same_object(pair):
    maker, _ = pair
    assert get(maker.is_same.remote(maker.make.remote())) is True


def test_it_goes_with_its_last_reference(pair, wait_until):
    maker, other = pair
    before = get(maker.room.remote())
    ref = maker.make.remote(1 << 20)
    get(other.total.remote(ref))
    del ref
    get(maker.make.remote(1))
    wait_until(lambda: get(maker.stored.remote()) == [], WAIT, "all to be let go of")
    assert get(maker.room.remote()) >= before - 4096


def test_nothing_but_its_references_keeps_it(pair, wait_until):
    """No pickler either, which gets no other value here: numbers are not pickled."""
    maker, _ = pair
    before = get(maker.room.remote())
    ref = maker.alone.remote(1 << 20)
    conveyor.wait([ref], timeout=WAIT)
    del ref
    wait_until(lambda: get(maker.room.remote()) >= before, WAIT, "its memory to be free")


def test_a_value_of_many_kinds(pair):
    maker, _ = pair
    value = get(maker.mixed.remote())
    assert value["host"].tolist() == [1, 1, 1]
    assert value["host"].device.type == "cpu"
    assert value["other device"].tolist() == [2.0] * 5
    assert type(value["parameter"]) is torch.nn.Parameter
    assert value["parameter"].requires_grad
    assert value["half"].dtype is torch.bfloat16
    assert value["every other"].tolist() == [[0, 2], [4, 6], [8, 10]]
    assert tuple(value["empty"].shape) == (0, 3)
    assert value["text"] == "out_of_band"
    whole, row, turned = value["views"]
    row[0] = 50  # they lie in one storage, as they did
    assert whole[1, 0].item() == turned[0, 1].item() == 50


def test_several_results(pair):
    maker, _ = pair
    zeros, ones = maker.two.remote()
    assert get(zeros).tolist() == [0] * 3
    assert get(ones).tolist() == [1] * 4


def test_what_its_actor_writes_is_seen(pair):
    maker, other = pair
    ref = maker.make.remote(10)
    get(maker.add.remote())
    assert get(other.total.remote(ref)) == (20.0, "sim:0")


def test_a_snapshot_is_what_it_was(pair):
    maker, other = pair
    ref = maker.copy.remote()
    get(maker.add.remote())
    assert get(other.total.remote(ref)) == (10.0, "sim:0")
    assert get(maker.is_same.remote(ref)) is False


def test_who_has_a_snapshot_gets_copies_of_it(pair):
    sim, goes_on = accelerator.install(), threading.Event()
    tensor = torch.zeros(10, device="sim:1")
    accelerator.kernel(0, lambda t: (goes_on.wait(WAIT), t.fill_(7)), tensor)
    ref = conveyor.put([tensor, tensor[2:4]], tensor_transport="auto", snapshot=True)
    with pytest.raises(WaitTimeoutError, match="do not have their values yet"):
        conveyor.get(ref, timeout=0.1)
    goes_on.set()
    for _ in range(2):
        whole, some = get(ref)
        assert (whole.tolist(), some.tolist()) == ([7] * 10, [7] * 2)
        whole.fill_(3)  # nobody else has it
        assert some.tolist() == [3] * 2
    del ref, whole, some
    sim.synchronize(1)


def test_whoever_fetches_waits_for_the_values(leaves_nothing, pair):
    maker = Concurrent.remote()
    ref = maker.late.remote()
    conveyor.wait([ref])
    got = []
    fetching = threading.Thread(target=lambda: got.append(get(ref).tolist()))
    fetching.start()
    get(maker.go_on.remote())
    fetching.join(WAIT)
    assert got == [[7.0] * 10]


def test_an_event_is_made_only_for_values_that_are_not_there(pair, monkeypatch):
    _, other = pair
    sim, made, goes_on = accelerator.install(), [], threading.Event()
    new_event = type(sim).new_event

    def noted(self, index=None, *, interprocess=False):
        made.append(interprocess)
        return new_event(self, index, interprocess=interprocess)

    monkeypatch.setattr(type(sim), "new_event", noted)
    tensor = torch.ones(10, device="sim")
    sim.synchronize()
    there = conveyor.put(tensor, tensor_transport="auto")
    assert True not in made
    accelerator.kernel(0, lambda t: (goes_on.wait(WAIT), t.fill_(5)), tensor)
    late = conveyor.put(tensor, tensor_transport="auto")
    assert made.count(True) == 1
    goes_on.set()
    assert get(other.total.remote(late)) == (50.0, "sim:0")
    assert get(other.total.remote(there)) == (50.0, "sim:0")


def noting(opened):
    """What opens memory, and notes what it has opened, weakly."""
    open_memory = type(accelerator.install()).open_memory

    def noted(self, handle):
        tensor = open_memory(self, handle)
        opened.append(weakref.ref(tensor))
        return tensor

    return noted


def test_memory_is_opened_once_and_closed_when_it_is_not_used(pair, monkeypatch, wait_until):
    maker, _ = pair
    ref, opened = maker.make.remote(10), []
    monkeypatch.setattr(type(accelerator.install()), "open_memory", noting(opened))
    for value in range(1, 4):
        assert get(ref).tolist() == [float(value)] * 10
        get(maker.add.remote())
    assert len(opened) == 1
    monkeypatch.setattr(opened_memory, "IDLE", 0.0)  # the thread sleeps for 3 s by now
    wait_until(lambda: opened[0]() is None, WAIT, "what is not used to be closed")
    assert get(ref).tolist() == [4.0] * 10
    assert len(opened) == 2


def test_what_is_open_gives_way_to_what_cannot_be_opened_beside_it(pair, monkeypatch):
    maker, _ = pair
    first, opened = maker.make.remote(10), []
    noted = noting(opened)
    assert get(first).tolist() == [1.0] * 10

    def refuses(self, handle):
        if opened_memory.OPENED._open:
            raise RuntimeError("other memory is open at its address")
        return noted(self, handle)

    monkeypatch.setattr(type(accelerator.install()), "open_memory", refuses)
    assert get(maker.make.remote(20)).tolist() == [1.0] * 20
    assert len(opened) == 1


def test_what_copies_still_use_outlives_a_fetch_that_is_interrupted(pair, monkeypatch, wait_until):
    maker, _ = pair
    sim, goes_on, opened = accelerator.install(), threading.Event(), []
    ref, next_one = maker.make.remote(10), maker.make.remote(10)
    conveyor.wait([ref, next_one], num_returns=2)
    noted = noting(opened)
    monkeypatch.setattr(opened_memory, "IDLE", 0.05)

    class Interrupted(BaseException):
        pass

    def interrupt(self):
        raise Interrupted

    accelerator.kernel(0, lambda: goes_on.wait(WAIT))  # the copy is behind it
    with monkeypatch.context() as patched:
        patched.setattr(type(sim), "open_memory", noted)
        patched.setattr(SimEvent, "synchronize", interrupt)
        with pytest.raises(Interrupted):
            get(ref)
    wait_until(lambda: not opened_memory.OPENED._open, WAIT, "what is not used to be closed")
    gc.collect()
    assert [one() is None for one in opened] == [False]
    goes_on.set()
    sim.synchronize()
    assert get(next_one).sum().item() == 10
    wait_until(lambda: all(one() is None for one in opened), WAIT, "the memory to be closed")


def test_waiting_until_it_is_freed(pair):
    maker, other = pair
    ref = maker.make.remote(10)
    added = maker.add_when_free.remote()
    with pytest.raises(WaitTimeoutError):
        conveyor.get(added, timeout=0.05)
    assert get(other.total.remote(ref)) == (10.0, "sim:0")
    del ref
    assert get(added) == [2.0] * 10


def test_a_dead_actor_is_named(pair, wait_until):
    maker = Remote.remote()
    ref = maker.make.remote()
    conveyor.wait([ref])
    conveyor.kill(maker)

    def is_named():  # until it is gone, its memory is there
        try:
            get(ref)
        except (ActorDiedError, ObjectLostError) as error:
            return "Holder" in str(error)
        return False

    wait_until(is_named, WAIT, "the death to be told")


def test_an_actor_that_dies_while_it_computes_is_named(pair):
    maker = Concurrent.remote()
    ref = maker.late.remote()
    conveyor.wait([ref])
    errors = []

    def fetch():
        try:
            conveyor.get(ref)
        except ActorDiedError as error:
            errors.append(error)

    fetching = threading.Thread(target=fetch)
    fetching.start()
    conveyor.kill(maker)
    fetching.join(WAIT)
    assert ["Holder" in str(error) for error in errors] == [True]


def test_a_device_that_cannot_be_reached_is_named(pair, monkeypatch, caplog):
    maker, _ = pair
    ref = maker.make.remote(1234)  # in memory that is not open here
    conveyor.wait([ref])
    sim = accelerator.install()

    def refuse(_self, _handle):
        raise RuntimeError("it is hidden here")

    with monkeypatch.context() as patch:
        patch.setattr(type(sim), "open_memory", refuse)
        assert get(ref).tolist() == [1.0] * 1234
    assert re.search(r"Holder.*by way of the host's memory.*it is hidden here", caplog.text)
    assert get(ref).tolist() == [1.0] * 1234


def test_into_memory_of_the_host(pair):
    maker, _ = pair
    target = torch.zeros(10)
    assert conveyor.get(maker.make.remote(10), into=target) is target
    assert target.tolist() == [1.0] * 10


def test_the_driver_keeps_some_too(pair):
    _, other = pair
    mine = torch.ones(10, device="sim")
    ref = conveyor.put(mine, tensor_transport="auto")
    assert get(other.total.remote(ref)) == (10.0, "sim:0")
    assert get(ref) is mine


def test_a_result_of_a_graph_stays(pair):
    maker, other = pair
    with InputNode() as size:
        graph = maker.make.bind(size).compile()
    try:
        ref = graph.execute(10)
        assert get(other.total.remote(ref)) == (10.0, "sim:0")
        assert ref.route() == "ipc"
    finally:
        graph.teardown()


def test_where_memory_cannot_be_opened_by_others_it_is_copied(pair, monkeypatch, caplog):
    _, other = pair
    sim = accelerator.install()

    def refuse(_tensor):
        raise RuntimeError("no handle for memory of this kind")

    monkeypatch.setattr(type(sim), "export_memory", lambda self, tensor: refuse(tensor))
    ref = conveyor.put({"one": torch.ones(10, device="sim")}, tensor_transport="auto")
    assert ref.route() in ("here", "read")
    assert get(other.total.remote(ref["one"]))[0] == 10.0
    assert "no handle" in caplog.text


def test_a_timeout_ends_a_fetch_of_values_that_are_not_there(leaves_nothing, pair):
    maker = Concurrent.remote()
    ref = maker.late.remote()
    conveyor.wait([ref])
    for _ in range(2):  # also when it has come before
        with pytest.raises(WaitTimeoutError, match="do not have their values yet"):
            conveyor.get(ref, timeout=1)
    get(maker.go_on.remote())
    assert get(ref).tolist() == [7.0] * 10


def test_an_event_loop_runs_on_while_values_are_computed(leaves_nothing, pair):
    maker = Concurrent.remote()
    ref = maker.late.remote()
    conveyor.wait([ref])
    # A loop that stands still cannot let its own values be computed, and the test is to end all the same.
    at_last = threading.Timer(WAIT, lambda: conveyor.get(maker.go_on.remote()))
    at_last.start()

    async def of(ref):
        return await ref

    async def main():
        fetching = asyncio.ensure_future(of(ref))
        await asyncio.sleep(0)
        given_up = asyncio.ensure_future(of(ref))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(given_up, 0.01)
        await maker.go_on.remote()
        return at_last.is_alive(), (await fetching).tolist()

    try:
        assert asyncio.run(main()) == (True, [7.0] * 10)
    finally:
        at_last.cancel()
        at_last.join()


def test_an_actors_loop_runs_on_while_an_argument_is_computed(leaves_nothing, pair):
    _, other = pair
    maker, loop = Concurrent.remote(), conveyor.remote(Loop).remote()
    ref = maker.late.remote()
    conveyor.wait([ref])
    got = loop.total.remote(ref)
    assert conveyor.get(other.ask.remote(loop), timeout=WAIT) == "runs on"
    get(maker.go_on.remote())
    assert get(got) == 70.0


def test_who_waits_for_values_says_so(leaves_nothing, pair, wait_until):
    _, other = pair
    maker = Concurrent.remote()
    ref = maker.late.remote()
    conveyor.wait([ref])
    total = other.total.remote(ref)

    def said():
        with pytest.raises(WaitTimeoutError) as error:
            conveyor.get(total, timeout=0.1)
        return str(error.value)

    # It may not have come to it yet.
    wait_until(lambda: "fetching a value that Holder" in said())
    text = said()
    assert "keeps, which has not come yet" in text
    assert "0 of 40 bytes" in text
    get(maker.go_on.remote())
    assert get(total) == (70.0, "sim:0")


def test_one_thread_looks_for_all_values_and_ends(pair, wait_until):
    maker = Concurrent.remote()
    refs = [maker.late.remote() for _ in range(3)]
    conveyor.wait(refs, num_returns=3)

    def looks():
        return [one.name for one in threading.enumerate()].count("conveyor-device-fills")

    async def of(ref):
        return await ref

    async def main():
        coming = [asyncio.ensure_future(of(ref)) for ref in refs]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert looks() == 1
        for one in coming:
            one.cancel()
        await asyncio.gather(*coming, return_exceptions=True)

    asyncio.run(main())
    wait_until(lambda: looks() == 0, WAIT, "the thread that looks to end")
    get(maker.go_on.remote())
    assert [get(ref).tolist() for ref in refs] == [[7.0] * 10] * 3
