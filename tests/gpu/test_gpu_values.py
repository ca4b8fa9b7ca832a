"""Values with tensors of a GPU: whatever they are like, and wherever they go."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import cloudpickle
import pytest

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import SerializationError, TransportError
from conveyor.experimental import collective, wait_tensor_freed

torch = pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("on_gpu_preloaded", "limited")

KIND = "cuda"
MIB = 1 << 20
WAIT = 8
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


def zoo(seed):
    """Tensors of all kinds, of which ``seed`` decides what they hold."""
    base = (torch.arange(60.0, device=KIND) + seed).reshape(3, 4, 5)
    dtypes = {str(dtype): (torch.arange(7, device=KIND) + seed).to(dtype) for dtype in DTYPES}
    return {
        **dtypes,
        "turned": base.permute(2, 0, 1),
        "every other": base[:, ::2],
        "expanded": torch.full((1,), float(seed), device=KIND).expand(1 << 20),
        "no elements": torch.empty(0, 3, device=KIND),
        "no dimension": torch.tensor(float(seed), device=KIND),
        "one row of a large one": torch.full((1024, 1024), float(seed), device=KIND)[5],
        "at an odd place": torch.arange(9, dtype=torch.uint8, device=KIND)[3:] + seed,
        "conjugate": torch.tensor([1 + 2j, seed], device=KIND).conj(),
        "needs a gradient": torch.full((2,), float(seed), device=KIND).requires_grad_(),
        "made with a gradient": torch.full((2,), float(seed), device=KIND).requires_grad_() * 2,
        "parameter": torch.nn.Parameter(torch.full((2,), float(seed), device=KIND)),
        "on the host": torch.full((3,), float(seed)),
        "channels last": base.reshape(1, 3, 4, 5).to(memory_format=torch.channels_last),
    }


def oddities(value, seed):
    """What of a zoo has not come as it was sent."""
    wanted, wrong = zoo(seed), []
    for name, expected in wanted.items():
        got = value[name]
        same = (
            got.device.type == expected.device.type
            and got.dtype is expected.dtype
            and got.shape == expected.shape
            and got.requires_grad == expected.requires_grad
            and torch.equal(plain(got), plain(expected))
        )
        wrong += [] if same else [name]
    if type(value["parameter"]) is not torch.nn.Parameter:
        wrong.append("parameter")
    if value["expanded"].stride() != (0,):
        wrong.append("stride of expanded")
    return wrong


def plain(tensor):
    """As bytes on the host, since not all types know how to be compared."""
    there = tensor.detach().resolve_conj().contiguous().cpu()
    return there.reshape(-1).view(torch.uint8) if there.numel() else there


@conveyor.remote(num_gpus=0.05)
class Worker:
    def __init__(self):
        os.environ[SHARE] = "1"
        self.kept = None

    def make(self, seed):
        return zoo(seed)

    @conveyor.method(tensor_transport="auto")
    def keep(self, seed):
        self.kept = zoo(seed)
        return self.kept

    def oddities(self, value, seed):
        return oddities(value, seed)

    def many(self, count):
        return [torch.full((8,), float(n), device=KIND) for n in range(count)]

    @conveyor.method(tensor_transport="auto")
    def keep_many(self, count):
        self.kept = self.many(count)
        return self.kept

    def sums(self, tensors):
        return [int(one.sum()) for one in tensors]

    def views(self, nbytes):
        whole = torch.arange(nbytes, dtype=torch.uint8, device=KIND)
        return [whole, whole[: nbytes // 2], whole[nbytes // 4 :], whole.view(4, -1).t()]

    @conveyor.method(tensor_transport="auto")
    def keep_views(self, nbytes):
        self.kept = self.views(nbytes)
        return self.kept

    def one_storage(self, value):
        """Whether all lie in one storage, of how many bytes, and what is written is seen."""
        value[0].fill_(9)
        seen = all(int(one.min()) == int(one.max()) == 9 for one in value)
        storages = {one.untyped_storage().data_ptr() for one in value}
        return len(storages), value[0].untyped_storage().nbytes(), seen

    @conveyor.method(tensor_transport="auto")
    def table(self, value=1.0):
        self.kept = torch.arange(32.0, device=KIND).reshape(8, 4) * value
        return self.kept

    @conveyor.method(tensor_transport="auto")
    def host_table(self):
        return torch.arange(32.0).reshape(8, 4)

    def rows(self, tensor):
        return str(tensor.device.type), tensor.tolist()

    def fill_when_free(self):
        wait_tensor_freed(self.kept, WAIT)
        self.kept.fill_(0)
        return int(self.kept.sum())

    def items(self, count):
        for n in range(count):
            yield torch.full((MIB,), n, dtype=torch.uint8, device=KIND)

    def send_into(self, sender, count):
        with sender:
            for tensor in self.items(count):
                sender.send(tensor)

    def take_from(self, receiver):
        return [(one.device.type, int(one[0]), int(one[-1])) for one in receiver]

    def block(self, nbytes):
        return torch.ones(nbytes, dtype=torch.uint8, device=KIND)

    def sum_of(self, tensor):
        return int(tensor.sum(dtype=torch.int64))

    def reduce(self):
        collective.allreduce(torch.ones(4, device=KIND))

    def pid(self):
        return os.getpid()


@conveyor.remote(num_gpus=0.05)
class Async:
    async def doubled(self, tensor):
        await asyncio.sleep(0)
        return tensor * 2

    async def items(self, count):
        for n in range(count):
            await asyncio.sleep(0)
            yield torch.full((4,), float(n), device=KIND)

    @conveyor.method(tensor_transport="auto")
    async def keep(self, value):
        return torch.full((4,), float(value), device=KIND)

    async def sum_of(self, ref):
        return float((await ref[0]).sum())


@conveyor.remote
class Blind:
    """One that has asked for no GPU."""

    def took(self, tensor):
        return str(tensor.device)

    def nothing(self, *_):
        return None


def get(ref, timeout=WAIT):
    return conveyor.get(ref, timeout=timeout)


@pytest.fixture(scope="module")
def pair(on_gpu_preloaded):
    made = Worker.remote(), Worker.remote()
    yield made
    for worker in made:
        conveyor.kill(worker)


def skip_without(name):
    if name == "nccl":
        from conveyor.transport.nccl.group import can_share

        why_not = can_share()
        if why_not is not None:
            pytest.skip(f"two actors cannot be on one GPU: {why_not}")


def sent(a, b, name, method, reader, *given):
    """What ``reader`` of ``b`` says of what ``method`` of ``a`` makes, by a way of that name."""
    if name == "call":
        return get(getattr(b, reader).remote(getattr(a, method).remote(*given[:1]), *given[1:]))
    if name == "direct":
        ref = getattr(a, {"make": "keep"}.get(method, f"keep_{method}")).remote(*given[:1])
        conveyor.wait([ref], timeout=WAIT)
        assert ref.route() == "ipc"
        return get(getattr(b, reader).remote(ref, *given[1:]))
    with InputNode() as inp:
        made = getattr(a, method).bind(inp[0])
        made = made if name == "frame" else made.with_tensor_transport(name)
        rest = [inp[place] for place in range(1, len(given))]
        dag = getattr(b, reader).bind(made, *rest)
    with dag.compile() as graph:
        found = [get(graph.execute(*given)) for _ in range(3)]
    assert found == [found[0]] * 3
    return found[0]


ways = pytest.mark.parametrize("name", ["call", "frame", "direct", "cuda_ipc", "nccl"])


@ways
def test_tensors_of_all_kinds(pair, name):
    skip_without(name)
    assert sent(*pair, name, "make", "oddities", 3, 3) == []


@ways
def test_many_small_tensors_in_one_value(pair, name):
    skip_without(name)
    assert sent(*pair, name, "many", "sums", 1000) == [8 * n for n in range(1000)]


@ways
def test_views_of_one_memory_are_sent_once(pair, name):
    skip_without(name)
    several, nbytes, seen = sent(*pair, name, "views", "one_storage", 4 * MIB)
    assert (several, seen) == (1, True)
    assert nbytes < 5 * MIB


def test_between_the_driver_and_an_actor(pair):
    a, b = pair
    assert get(b.oddities.remote(zoo(2), 2)) == []
    assert oddities(get(a.make.remote(4)), 4) == []
    assert oddities(get(a.keep.remote(5)), 5) == []
    assert get(b.oddities.remote(conveyor.put(zoo(6)), 6)) == []
    stays = conveyor.put(zoo(7), tensor_transport="auto")
    assert get(b.oddities.remote(stays, 7)) == []
    with InputNode() as inp:
        dag = MultiOutputNode([b.oddities.bind(inp[0], inp[1]), a.make.bind(inp[1])])
    with dag.compile() as graph:
        for seed in range(3):
            wrong, made = get(graph.execute(zoo(seed), seed))
            assert wrong == oddities(made, seed) == []


def test_into_memory_that_is_there(pair):
    a, _ = pair
    wanted = torch.arange(32.0).reshape(8, 4)
    for source in (a.table.remote(), a.host_table.remote()):
        for device in (KIND, "cpu"):
            target = torch.zeros(8, 4, device=device)
            assert conveyor.get(source, into=target, timeout=WAIT) is target
            assert torch.equal(target.cpu(), wanted)
    half = torch.zeros(8, 4, device=KIND)[:, :2]
    with pytest.raises(ValueError, match="contiguous"):
        conveyor.get(a.table.remote(), into=half, timeout=WAIT)
    with pytest.raises(ValueError, match="shape"):
        conveyor.get(a.table.remote(), into=torch.zeros(4, 8, device=KIND), timeout=WAIT)


def test_parts_of_what_is_kept(pair):
    a, b = pair
    ref = a.table.remote()
    wanted = torch.arange(32.0).reshape(8, 4)
    rows = get(ref[2:4])
    assert rows.device.type == KIND
    assert torch.equal(rows.cpu(), wanted[2:4])
    assert get(b.rows.remote(ref[1, 2:])) == (KIND, wanted[1, 2:].tolist())
    assert get(a.rows.remote(ref[:, 1])) == (KIND, wanted[:, 1].tolist())
    target = torch.zeros(2, 4, device=KIND)
    conveyor.get(ref[:2], into=target, timeout=WAIT)
    assert torch.equal(target.cpu(), wanted[:2])


def test_memory_that_is_written_to_when_it_is_free(pair):
    a, b = pair
    ref = a.table.remote(2.0)
    filled = a.fill_when_free.remote()
    assert get(b.rows.remote(ref)) == (KIND, (torch.arange(32.0) * 2).reshape(8, 4).tolist())
    del ref
    assert get(filled) == 0


def test_streams_and_channels(pair):
    a, b = pair
    wanted = [(KIND, n, n) for n in range(5)]
    got = [(one.device.type, int(one[0]), int(one[-1])) for one in a.items.remote(5)]
    assert got == wanted
    with InputNode() as inp:
        dag = a.items.bind(inp)
    with dag.compile() as graph:
        assert [int(one[-1]) for one in graph.execute(5)] == [*range(5)]
    sender, receiver = conveyor.channel.open(depth=2)
    done = a.send_into.remote(sender, 5)
    assert get(b.take_from.remote(receiver)) == wanted
    get(done)
    sender, receiver = conveyor.channel.open()
    done = a.send_into.remote(sender, 5)
    assert [int(one[-1]) for one in receiver] == [*range(5)]
    get(done)


def test_an_actor_that_is_async(pair):
    a, b = pair
    actor = Async.remote()
    given = torch.arange(4.0, device=KIND)
    refs = [actor.doubled.remote(given + n) for n in range(5)]
    assert [float(one.sum()) for one in get(refs)] == [12.0 + 8 * n for n in range(5)]
    assert [float(one[0]) for one in actor.items.remote(3)] == [0.0, 1.0, 2.0]
    assert get(b.rows.remote(actor.keep.remote(3))) == (KIND, [3.0] * 4)
    assert get(actor.sum_of.remote([a.table.remote()])) == 496.0
    with InputNode() as inp:
        dag = b.sum_of.bind(actor.doubled.bind(inp).with_tensor_transport("cuda_ipc"))
    with dag.compile() as graph:
        assert [get(graph.execute(given + n)) for n in range(3)] == [12, 20, 28]
    conveyor.kill(actor)


def test_collectives_take_tensors_of_the_host_only():
    made = [Worker.remote() for _ in range(2)]
    collective.create_collective_group(made)
    refs = [one.reduce.remote() for one in made]
    for ref in refs:
        with pytest.raises(ValueError, match=f"on {KIND}"):
            get(ref)
    with InputNode() as inp:
        dag = MultiOutputNode(collective.allreduce.bind([one.block.bind(inp) for one in made]))
    with dag.compile() as graph:
        with pytest.raises(Exception, match=f"on {KIND}") as told:
            get(graph.execute(4))
        assert not isinstance(told.value, TimeoutError)
    for one in made:
        conveyor.kill(one)


def test_an_actor_that_has_requested_for_no_gpu(pair):
    a, _ = pair
    blind = Blind.remote()
    sees_none = r"num_gpus="
    with pytest.raises(SerializationError, match=sees_none):
        get(blind.took.remote(torch.ones(4, device=KIND)))
    with pytest.raises(TransportError, match=sees_none):
        get(blind.took.remote(a.table.remote()))
    with InputNode() as inp:
        of_input, of_actor = blind.took.bind(inp), blind.took.bind(a.block.bind(4))
        dag = MultiOutputNode([of_input, of_actor])
    with dag.compile(fail_fast=False) as graph:
        for ref in graph.execute(torch.ones(4, device=KIND)):
            with pytest.raises(SerializationError, match=sees_none):
                get(ref)
    with InputNode() as inp:
        dag = blind.took.bind(a.block.bind(inp).with_tensor_transport(device="cpu"))
    with dag.compile() as graph:
        assert get(graph.execute(4)) == "cpu"
    with InputNode() as inp:
        dag = blind.took.bind(a.block.bind(inp).with_tensor_transport("cuda_ipc"))
    with pytest.raises(Exception, match=sees_none) as told, dag.compile() as graph:
        get(graph.execute(4))
    assert not isinstance(told.value, TimeoutError)
    conveyor.kill(blind)


def test_no_memory_of_the_card_is_lost(pair, record):
    """Of all processes, as the driver of the card counts."""
    a, b = pair

    def executions(name, count):
        with InputNode() as inp:
            made = a.block.bind(inp)
            made = made if name == "frame" else made.with_tensor_transport(name)
            dag = b.sum_of.bind(made)
        with dag.compile(depth=4) as graph:
            for _ in range(count // 4):
                refs = [graph.execute(4 * MIB) for _ in range(4)]
                assert get(refs) == [4 * MIB] * 4

    def references(count):
        for number in range(count):
            assert get(b.rows.remote(a.table.remote(number)))[0] == KIND
            assert float(get(a.table.remote(number))[0, 1]) == number

    def given_back(actor):
        def empty(_self):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

        return actor.__ray_call__.remote(empty)

    def free():
        get([given_back(a), given_back(b)])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def everything(count):
        executions("frame", count)
        executions("cuda_ipc", count)
        references(count)

    everything(20)
    before = free()
    everything(200)
    end = time.monotonic() + WAIT
    while free() < before - 4 * MIB and time.monotonic() < end:
        time.sleep(0.1)
    lost = before - free()
    record("memory of the card that 200 executions and 400 references have left", f"{lost} bytes")
    assert lost <= 4 * MIB


def test_expandable_segments():
    """They cannot be exported: values that stay are brought to the host, and an edge is refused."""
    option = {"env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    a, b = [Worker.options(**option).remote() for _ in range(2)]
    ref = a.keep.remote(1)
    assert get(b.oddities.remote(ref, 1)) == []
    assert ref.route() == "read"
    assert sent(a, b, "frame", "make", "oddities", 2, 2) == []
    with pytest.raises(Exception, match="expandable_segments") as told:
        sent(a, b, "cuda_ipc", "make", "oddities", 3, 3)
    assert not isinstance(told.value, TimeoutError)
    assert get(b.sum_of.remote(a.block.remote(4))) == 4
    for one in (a, b):
        conveyor.kill(one)
