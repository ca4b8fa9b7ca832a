"""Communicators of the user's do the collectives of graphs."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    DeadlineExceededError,
    ExecutionCancelledError,
    GraphError,
    TransportError,
)
from conveyor.experimental import collective
from conveyor.experimental.channel import Communicator
from conveyor.experimental.collective import ReduceOp

torch = pytest.importorskip("torch")

PRELOAD = ["torch"]
pytestmark = pytest.mark.torch
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Hub(Communicator):
    """Rank 0 has a socket in a folder, where the others bring their tensors and get all of them. Two that are
    in use at a time, or operations in another order, would take each other's."""

    def __init__(self, folder: Any, actors: Any, fails: Any = (), stalls: Any = ()) -> None:
        self.folder = str(folder)
        self.actors = list(actors)
        self.fails = dict(fails)
        self.stalls = dict(stalls)
        self.rank: int | None = None
        self.over = False

    def initialize(self, rank: int) -> None:
        self.rank = rank
        self.note("initialized")
        self.check("initialize")

    def note(self, what: str) -> None:
        with open(f"{self.folder}/log", "a") as log:
            log.write(f"{self.rank} {what}\n")

    def check(self, what: str) -> None:
        # Once for all copies: a file says that it has happened.
        mark = Path(f"{self.folder}/{what}-{self.rank}")
        stalls = self.stalls.get(what) == self.rank
        if (stalls or self.fails.get(what) == self.rank) and not mark.exists():
            mark.touch()
            while stalls and not self.over:
                time.sleep(0.005)
            raise OSError(f"{what} of {self.rank} goes wrong")

    def get_actor_handles(self) -> Any:
        return self.actors

    def get_rank(self, actor: Any) -> int:
        return self.actors.index(actor)

    def get_self_rank(self) -> int | None:
        return self.rank

    def get_transport_name(self) -> str:
        return "hub"

    def send(self, value: Any, peer_rank: int) -> None:
        """Returns when it was taken. What is on its way goes by no number: two at a time would mix."""
        path = Path(f"{self.folder}/{self.rank}-{peer_rank}")
        assert not path.exists(), "two of these are in use at a time"
        torch.save(value.clone(), f"{path}.new")
        Path(f"{path}.new").rename(path)
        self._await(lambda: not path.exists())

    def recv(self, shape: Any, dtype: Any, peer_rank: int, allocator: Any) -> Any:
        path = Path(f"{self.folder}/{peer_rank}-{self.rank}")
        self._await(path.exists)
        value = torch.load(path)
        path.unlink()
        return allocator(shape, dtype).copy_(value)

    def _await(self, ready: Any) -> None:
        while not ready():
            if self.over:
                raise OSError("destroyed")
            time.sleep(0.0005)

    def destroy(self) -> None:
        self.over = True
        self.note("destroyed")

    def _all(self, what: str, value: Any) -> list[Any]:
        """Bring a tensor, and get those of all ranks. What they call must be the same."""
        self.check(what)
        size = value.numel() * value.element_size()
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        head = f"{what} {size}".encode().ljust(32)
        whole = self._serve(head, data) if self.rank == 0 else self._ask(head, data)
        parts = [whole[i : i + size] for i in range(0, len(whole), size)]
        return [
            torch.frombuffer(bytearray(part), dtype=value.dtype).reshape(value.shape)
            for part in parts
        ]

    def _serve(self, head: bytes, data: bytes) -> bytes:
        path = Path(f"{self.folder}/hub")
        others: dict[int, Any] = {}
        parts = {0: data}
        with socket.socket(socket.AF_UNIX) as listener:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(0.005)
            while len(others) < len(self.actors) - 1:
                if self.over:
                    raise OSError("destroyed")
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                rank, theirs = connection.recv(1)[0], self._take(connection, 32)
                assert theirs == head, f"{head!r} meets {theirs!r}"
                others[rank], parts[rank] = connection, self._take(connection, len(data))
        path.unlink(missing_ok=True)
        whole = b"".join(parts[rank] for rank in range(len(self.actors)))
        for connection in others.values():
            connection.sendall(whole)
            connection.close()
        return whole

    def _ask(self, head: bytes, data: bytes) -> bytes:
        while not self.over:
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(f"{self.folder}/hub")
                    connection.sendall(bytes([self.rank or 0]) + head + data)
                    return self._take(connection, len(data) * len(self.actors))
                except (OSError, TimeoutError):
                    time.sleep(0.0005)
        raise OSError("destroyed")

    def _take(self, connection: Any, size: int) -> bytes:
        came = b""
        connection.settimeout(0.01)
        while len(came) < size:
            if self.over:
                raise OSError("destroyed")
            try:
                more = connection.recv(size - len(came))
            except TimeoutError:
                continue
            if not more:
                raise ConnectionResetError("the hub is gone")
            came += more
        return came

    def allreduce(self, send_buf: Any, recv_buf: Any, op: Any = None) -> None:
        every = torch.stack(self._all(f"allreduce {op.name}", send_buf))
        recv_buf.copy_(every.amax(0) if op is ReduceOp.MAX else every.sum(0))

    def allgather(self, send_buf: Any, recv_buf: Any) -> None:
        recv_buf.copy_(torch.cat(self._all("allgather", send_buf)))

    def reducescatter(self, send_buf: Any, recv_buf: Any, op: Any = None) -> None:
        every = torch.stack(self._all("reducescatter", send_buf)).sum(0)
        recv_buf.copy_(every.chunk(len(self.actors))[self.rank])


@conveyor.remote(max_restarts=1)
class Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        torch.set_num_threads(1)

    def ramp(self, size: Any) -> Any:
        size = size[self.rank] if isinstance(size, tuple) else size
        if isinstance(size, str):
            raise RuntimeError(size)
        return torch.arange(size, dtype=torch.float32) + self.rank

    def two(self, size: int) -> Any:
        return torch.ones(size) * self.rank, torch.ones(size, 2, dtype=torch.int64)

    def freed(self, size: int) -> Any:
        made = torch.ones(size)
        if self.rank == 1:
            made.untyped_storage().resize_(4)
        return made

    def word(self, size: int) -> Any:
        return "no tensor" if self.rank else torch.ones(size)

    def sizes(self, tensors: Any) -> Any:
        return [tuple(tensor.shape) for tensor in tensors]

    def total(self, value: Any) -> float:
        return float(value.sum())

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture(scope="module")
def ranks(session: Any) -> list[Any]:
    return [Rank.options(name=f"r{i}").remote(i) for i in range(3)]


def got(ref: Any) -> Any:
    return conveyor.get(ref, timeout=30)


def every(actors: Any, inp: Any, method: str = "ramp") -> list[Any]:
    return [getattr(actor, method).bind(inp) for actor in actors]


def summed(hub: Any, actors: Any, **options: Any) -> Any:
    """A graph that sums what the actors have."""
    with InputNode() as inp:
        made = collective.allreduce.bind(every(actors, inp), transport=hub)
    return MultiOutputNode(made).compile(**options)


def log_of(folder: Any) -> list[str]:
    return Path(f"{folder}/log").read_text().splitlines()


def wanted(size: int) -> list[float]:
    return [3.0 * i + 3 for i in range(size)]


def test_a_communicator_does_the_operations(ranks, tmp_path, wait_until):
    hub = Hub(tmp_path, ranks)
    with InputNode() as inp:
        made = every(ranks, inp)
        sums = collective.allreduce.bind(made, transport=hub)
        largest = collective.allreduce.bind(made, op=ReduceOp.MAX, transport=hub)
        gathered = collective.allgather.bind(made, hub)
        apart = collective.allgather.bind(made, hub, join=False)
        shares = collective.reducescatter.bind(made, transport=hub)
        sizes = [r.sizes.bind(x) for r, x in zip(ranks, apart, strict=True)]
        results = [*sums, *largest, *gathered, *sizes, *shares]
        graph = MultiOutputNode(results).compile()
    text = graph.explain()
    assert (
        "allreduce(SUM) by the communicator hub of r0.ramp, r1.ramp, r2.ramp on r0, r1, r2" in text
    )
    assert "its ranks meet" in text
    refs = [graph.execute(size) for size in (3, 6, 9)]
    for size, each in zip((3, 6, 9), refs, strict=True):
        found = got(each)
        ramps = [torch.arange(size, dtype=torch.float32) + rank for rank in range(3)]
        for rank in range(3):
            assert found[rank].tolist() == wanted(size)
            assert torch.equal(found[3 + rank], ramps[2])
            assert torch.equal(found[6 + rank], torch.cat(ramps))
            assert found[9 + rank] == [(size,)] * 3
            assert found[12 + rank].tolist() == wanted(size)[rank * size // 3 :][: size // 3]
    graph.teardown()
    wait_until(lambda: len(log_of(tmp_path)) == 6)  # one copy in each process for all of them
    assert sorted(log_of(tmp_path)) == sorted(
        f"{rank} {what}" for rank in range(3) for what in ("initialized", "destroyed")
    )


def test_several_tensors_and_unused_ranks(ranks, tmp_path):
    hub = Hub(tmp_path, ranks)
    with InputNode() as inp:
        pairs = [r.two.options(num_returns=2).bind(inp) for r in ranks]
        made = collective.allreduce.bind([list(x) for x in zip(*pairs, strict=True)], transport=hub)
        # Nobody uses what the others get, who take part all the same.
        graph = MultiOutputNode(made[1]).compile()
    first, second = got(graph.execute(2))
    assert first.tolist() == [3.0, 3.0]
    assert second.tolist() == [[3, 3], [3, 3]]
    assert second.dtype == torch.int64
    graph.teardown()


def test_graphs_that_meet_in_opposite_orders(ranks, tmp_path):
    """Eight graphs of one communicator are executed from threads. In each actor their tasks are bound in
    another order, and the communicator would take one operation's tensors for another's."""
    hub = Hub(tmp_path, ranks)
    graphs = [summed(hub, ranks[i % 3 :] + ranks[: i % 3], depth=4) for i in range(4)]
    wrong: list[Any] = []

    def run(place: int) -> None:
        for number in range(8):
            size = place * 10 + number + 1
            try:
                found = got(graphs[place].execute(size))
                wrong.extend(each for each in found if each.tolist() != wanted(size))
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    for graph in graphs:
        graph.teardown()
    # They share one copy in each process.
    assert sum("initialized" in line for line in log_of(tmp_path)) == 3


@pytest.mark.parametrize("first", ["edges", "collectives"])
def test_edges_and_collectives_of_all_graphs_share_a_copy(ranks, tmp_path, wait_until, first):
    """In one order: the ranks send to each other in a ring, and reduce, in several graphs at once."""
    hub = Hub(tmp_path, ranks)
    with InputNode() as inp:
        reduced = collective.allreduce.bind(every(ranks, inp), transport=hub)
        sent = [one.with_tensor_transport(transport=hub) for one in every(ranks, inp)]
        passed = [ranks[(i + 1) % 3].total.bind(one) for i, one in enumerate(sent)]
        dag = MultiOutputNode([*passed, *reduced] if first == "edges" else [*reduced, *passed])
        ring = MultiOutputNode(passed)
    with dag.compile() as one, ring.compile() as other, dag.compile() as third:
        refs = [(n, graph.execute(n)) for n in range(1, 6) for graph in (one, other, third)]
        for n, ref in refs:
            found = got(ref)
            totals = [value for value in found if isinstance(value, float)]
            assert totals == [n * (n - 1) / 2 + n * i for i in range(3)]
            sums = [value.tolist() for value in found if not isinstance(value, float)]
            assert sums in ([], [wanted(n)] * 3)
        assert sorted(log_of(tmp_path)) == [f"{i} initialized" for i in range(3)]
    wait_until(lambda: len(log_of(tmp_path)) == 6)  # each is destroyed once


@pytest.mark.parametrize("fail_fast", [True, False])
@pytest.mark.parametrize("failing", [("allreduce SUM", 0), ("allreduce SUM", 2), ("initialize", 1)])
def test_one_that_fails_fails_its_execution_for_all(ranks, tmp_path, failing, fail_fast):
    hub = Hub(tmp_path, ranks, fails=[failing])
    graph = summed(hub, ranks, depth=4, fail_fast=fail_fast)
    refs = graph.execute(2)
    for ref in refs:
        with pytest.raises(
            TransportError, match=r"allreduce over r0, r1, r2 by the communicator hub"
        ):
            got(ref)
    with pytest.raises(TransportError, match=rf"{failing[0]} of {failing[1]} goes wrong"):
        got(refs[failing[1]])
    for size in range(1, 5):
        assert [each.tolist() for each in got(graph.execute(size))] == [wanted(size)] * 3
    graph.teardown()


def test_ranks_that_do_not_fit_never_come_to_it(ranks, tmp_path):
    hub = Hub(tmp_path, ranks)
    graph = summed(hub, ranks)
    with pytest.raises(
        ValueError, match=r"allreduce over 3 actors: the ranks differ: r0 has a tensor"
    ):
        got(graph.execute((2, 3, 2)))
    with pytest.raises(RuntimeError, match="no gradient"):
        got(graph.execute((2, "no gradient", 2)))
    assert [each.tolist() for each in got(graph.execute(2))] == [wanted(2)] * 3
    graph.teardown()
    with InputNode() as inp:
        words = collective.allreduce.bind(every(ranks, inp, "word"), transport=hub)
    with InputNode() as inp:
        freed = collective.allreduce.bind(every(ranks, inp, "freed"), transport=hub)
    with InputNode() as inp:
        shares = collective.reducescatter.bind(every(ranks, inp), transport=hub)
    with (
        MultiOutputNode(words).compile() as graph,
        pytest.raises(TypeError, match=r"by the communicator hub it takes tensors: .*r1 has a str"),
    ):
        got(graph.execute(2))
    with (
        MultiOutputNode(freed).compile() as graph,
        pytest.raises(ValueError, match=r"its storage has 4 bytes and the tensor needs 8\."),
    ):
        got(graph.execute(2))
    with MultiOutputNode(shares).compile() as graph:
        with pytest.raises(ValueError, match="must be a multiple of 3"):
            got(graph.execute(4))
        assert got(graph.execute(3))[1].tolist() == [6.0]
    assert "2 initialized" in log_of(tmp_path)
    assert not any("wrong" in line for line in log_of(tmp_path))


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_an_operation_that_nobody_waits_for(ranks, tmp_path, how, wait_until):
    hub = Hub(tmp_path, ranks, stalls=[("allreduce SUM", 1)])
    graph = summed(hub, ranks)
    begun = tmp_path / "allreduce SUM-1"
    for deadline in (0.3, 3, 30):  # which may be over before it could begin
        refs = graph.execute(2, **({"deadline": deadline} if how == "deadline" else {}))
        wait_until(lambda refs=refs: begun.exists() or refs[0].done(), 60)
        if begun.exists():
            break
    # The actors serve calls meanwhile.
    assert got(ranks[1].total.remote(torch.ones(2))) == 2
    if how == "cancel":
        conveyor.cancel(refs[0])
    with pytest.raises(DeadlineExceededError if how == "deadline" else ExecutionCancelledError):
        got(refs[0])
    assert [each.tolist() for each in got(graph.execute(3))] == [wanted(3)] * 3
    graph.teardown()


def test_a_graph_that_is_torn_down_leaves_the_others(ranks, tmp_path, wait_until):
    hub = Hub(tmp_path, ranks, stalls=[("allreduce SUM", 2)])
    stuck, other = summed(hub, ranks), summed(hub, ranks)
    stuck.execute(2)
    wait_until((tmp_path / "allreduce SUM-2").exists)
    began = time.monotonic()
    stuck.teardown()
    assert time.monotonic() - began < 5
    assert [each.tolist() for each in got(other.execute(4))] == [wanted(4)] * 3
    other.teardown()


def test_a_rank_that_dies(ranks, tmp_path, wait_until):
    hub = Hub(tmp_path, ranks, stalls=[("allreduce SUM", 1)])
    graph, other = summed(hub, ranks), summed(hub, ranks)
    refs = graph.execute(2)
    wait_until((tmp_path / "allreduce SUM-1").exists)
    conveyor.kill(ranks[1], no_restart=False)
    began = time.monotonic()
    with pytest.raises(ActorDiedError):
        got(refs[0])
    assert time.monotonic() - began < 5
    # It is started again, and both graphs go on with it; what had begun when that was known may fail.
    for each in (graph, other):
        found: Any = None
        for _ in range(5):
            try:
                found = got(each.execute(3))
                break
            except (ActorDiedError, TransportError):
                continue
        assert [value.tolist() for value in found] == [wanted(3)] * 3
    graph.teardown()
    other.teardown()


def test_bad_communicators_are_refused_when_they_are_bound(ranks, tmp_path):
    a, b, c = ranks
    inp = InputNode()
    made = every(ranks, inp)

    def refused(
        said: str, actors: Any, bind: Any = collective.allreduce.bind, **options: Any
    ) -> None:
        with pytest.raises(GraphError, match=said):
            bind(made, transport=Hub(tmp_path, actors), **options)

    refused("has r0, r1, and bound are nodes of r0, r1, r2", [a, b])
    refused("has none", [])
    refused("has no actor, and bound", ["r0"])
    refused(
        r"the ranks \[1, 0, 2\]: bind the nodes in the order", [b, a, c], collective.allgather.bind
    )
    refused("in the order of its ranks", [c, b, a], collective.reducescatter.bind)
    refused("rounds is for host memory", [a, b, c], rounds=1)
    with pytest.raises(GraphError, match="or give a Communicator of your own"):
        collective.allreduce.bind(made, transport="hub")
    unsendable = Hub(tmp_path, ranks)
    unsendable.note = (n for n in ())  # type: ignore[assignment]
    root = MultiOutputNode(collective.allreduce.bind(made, transport=unsendable))
    with pytest.raises(GraphError, match="cannot be sent to its actors"):
        root.compile()


def test_the_graph_that_is_not_compiled(ranks, tmp_path):
    with InputNode() as inp:
        made = collective.allreduce.bind(every(ranks, inp), transport=Hub(tmp_path, ranks))
    assert [each.tolist() for each in got(MultiOutputNode(made).execute(2))] == [wanted(2)] * 3
    assert not (tmp_path / "log").exists()


def test_one_actor_needs_no_communicator(ranks, tmp_path):
    with InputNode() as inp:
        made = collective.allreduce.bind(
            [ranks[0].ramp.bind(inp)], transport=Hub(tmp_path, ranks[:1])
        )
    with made[0].compile() as graph:
        assert got(graph.execute(2)).tolist() == [0.0, 1.0]


def test_an_actor_compiles_with_overlap(ranks, tmp_path):
    @conveyor.remote
    class Compiler:
        def run(self, hub: Any, ranks: Any) -> Any:
            with InputNode() as inp:
                made = [rank.ramp.bind(inp) for rank in ranks]
                sums = collective.allreduce.bind(made, transport=hub)
            with MultiOutputNode(sums).compile(overlap=True) as graph:
                refs = [graph.execute(size) for size in range(1, 20)]
                return [[x.tolist() for x in conveyor.get(each, timeout=30)] for each in refs]

    found = got(Compiler.remote().run.remote(Hub(tmp_path, ranks), ranks))
    assert found == [[wanted(size)] * 3 for size in range(1, 20)]
