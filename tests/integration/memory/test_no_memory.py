"""The system refuses memory: that is the error of the step, the call or the item that it has met."""

import asyncio
import gc
import resource
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from integration_helpers import WAIT, compiled, get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import OutOfMemoryError, TaskError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("local")

#: Mapped on its own, and more than what a limited process has left.
BIG = 32 << 20


def leave(addresses):
    """Let this process map no more than ``addresses`` bytes; what undoes it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + addresses, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_AS, before)


class _Limited:
    def __init__(self):
        self.big = np.ones(BIG, np.uint8)

    def limit(self):
        leave(8 << 20)

    def send(self, _):
        return self.big

    def receive(self, x):
        return x.nbytes

    def small(self, x):
        return x

    def count(self, n):
        for i in range(n):
            yield self.big if i == 1 else i


@conveyor.remote
class Limited(_Limited):
    pass


@conveyor.remote
class Async(_Limited):
    async def receive(self, x):
        await asyncio.sleep(0)
        return x.nbytes

    async def send(self, _):
        return self.big


def limited(cls=Limited, **options):
    actor = (cls.options(**options) if options else cls).remote()
    get(actor.small.remote(0))
    return actor


def out_of_memory(ref, where):
    with pytest.raises(OutOfMemoryError, match="no addresses") as caught:
        get(ref)
    assert isinstance(caught.value, TaskError)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.actor
    assert where in caught.value.node
    return caught.value


@pytest.mark.parametrize("cls", [Limited, Async])
@pytest.mark.parametrize("method", ["send", "receive"])
def test_a_graph_says_so_and_goes_on(cls, method):
    actor = limited(cls)
    graph = compiled(lambda x: getattr(actor, method).bind(x))
    small = compiled(lambda x: actor.small.bind(x))
    get(actor.limit.remote())
    argument = 1 if method == "send" else np.ones(BIG, np.uint8)
    for _ in range(3):
        out_of_memory(graph.execute(argument), "send" if method == "send" else "input")
        assert get(small.execute(4)) == 4


@pytest.mark.parametrize(
    ("cls", "options"), [(Limited, {}), (Async, {}), (Limited, {"max_concurrency": 3})]
)
def test_a_call_says_so_and_others_are_answered(cls, options):
    actor = limited(cls, **options)
    get([actor.small.remote(i) for i in range(9)])  # threads
    get(actor.limit.remote())
    before = actor.small.remote("before")
    ref = actor.receive.remote(np.ones(BIG, np.uint8))
    behind = [actor.small.remote(i) for i in range(100)]
    out_of_memory(ref, "call")
    out_of_memory(actor.send.remote(1), "send")
    assert get(before) == "before"
    assert get(behind) == list(range(100))


def test_each_of_several_readers_on_its_own():
    short, plain = limited(), Limited.remote()
    with InputNode() as inp:
        dag = MultiOutputNode([short.receive.bind(inp), plain.receive.bind(inp)])
    graph = dag.compile(fail_fast=False)
    get(short.limit.remote())
    array = np.ones(BIG, np.uint8)
    for _ in range(3):
        first, second = graph.execute(array)
        out_of_memory(first, "input")
        assert get(second) == BIG


def test_leases_of_what_cannot_be_mapped_end():
    actor = limited()
    graph = compiled(lambda x: actor.receive.bind(x))
    get(actor.limit.remote())
    array = np.ones(BIG, np.uint8)
    arena = conveyor.runtime.context.running().process.arena
    for _ in range(5):
        out_of_memory(graph.execute(array), "input")
        out_of_memory(actor.receive.remote(array), "call")
    arena.give_back()
    assert arena.blocks_out == 0


def test_an_item_that_cannot_be_sent_ends_the_stream():
    actor = limited()
    graph = compiled(lambda x: actor.count.bind(x))
    get(actor.limit.remote())
    for stream in (graph.execute(3), actor.count.remote(3)):
        assert stream.next(timeout=WAIT) == 0
        with pytest.raises(OutOfMemoryError):
            stream.next(timeout=WAIT)
    assert get(actor.small.remote(1)) == 1


def test_definitions_that_were_lost_are_sent_again():
    class Boxed:
        def __init__(self, value):
            self.value = value

    @conveyor.remote
    class Opener:
        def limit(self):
            leave(8 << 20)

        def open(self, box):
            return len(box.value)

    actor = Opener.remote()
    graph = compiled(lambda x: actor.open.bind(x))
    get(actor.limit.remote())
    with pytest.raises(OutOfMemoryError):
        get(graph.execute(Boxed(np.ones(BIG, np.uint8))))
    assert get(graph.execute(Boxed("abc"))) == 3


# The driver's side.


@conveyor.remote
class Maker:
    def make(self, n):
        return np.ones(n, np.uint8)

    def in_place(self, n):
        array = conveyor.empty(n, np.uint8)
        array[:] = 1
        return array

    def fail(self, n):
        raise ValueError("x" * n)

    def boxed(self, n):
        """Of a class that the first of them brings."""
        if not hasattr(self, "box"):

            class Box:
                def __init__(self, array):
                    self.array = array

            self.box = Box
        return self.box(self.make(n))

    def paired(self, refs_and_size):
        ref, n = refs_and_size
        return ref, self.make(n)

    def held(self):
        """How many values of this process others still hold."""
        arena = conveyor.runtime.context.current().process.arena
        arena.give_back()
        return arena.blocks_out

    def count(self, n):
        for i in range(n):
            yield np.ones(BIG, np.uint8) if i == 1 else i


def nothing_is_held(maker):
    gc.collect()
    assert get(maker.held.remote()) == 0


def test_a_result_that_cannot_be_mapped_can_be_had_later():
    maker, other = Maker.remote(), Maker.remote()  # the mapping of a block stays
    graph = compiled(lambda x: maker.make.bind(x))
    for start in (graph.execute, other.make.remote):
        get(start(1))
        undo = leave(8 << 20)
        try:
            ref = start(BIG)
            for _ in range(2):
                with pytest.raises(OutOfMemoryError, match="no addresses"):
                    get(ref)
        finally:
            undo()
        assert get(ref).sum() == BIG


def test_a_result_that_cannot_be_mapped_is_in_nobody_s_way():
    maker = Maker.remote()
    graph = compiled(lambda x: maker.make.bind(x), depth=2)
    get(graph.execute(1))
    undo = leave(8 << 20)
    try:
        big = graph.execute(BIG)
        for _ in range(6):
            assert get(graph.execute(3)).sum() == 3
        assert big.done()
        for _ in range(2):
            with pytest.raises(OutOfMemoryError, match="no addresses"):
                get(big)
    finally:
        undo()
    # That there was no memory when others passed it is nothing to it.
    assert get(big).sum() == get(big).sum() == BIG
    del big
    nothing_is_held(maker)


@pytest.mark.parametrize("how", ["dropped", "torn down", "cancelled"])
def test_a_result_that_could_not_be_mapped_and_is(how):
    maker = Maker.remote()
    graph = compiled(lambda x: maker.make.bind(x), depth=2)
    get(graph.execute(1))
    undo = leave(8 << 20)
    try:
        refs = [graph.execute(BIG)]
        assert get(graph.execute(3)).sum() == 3
        if how == "torn down":
            graph.teardown()
        elif how == "cancelled":
            assert not refs[0].cancel()  # it has come
        else:
            refs.clear()
    finally:
        undo()
    if refs:
        assert get(refs.pop()).sum() == BIG
    nothing_is_held(maker)


def test_an_error_that_could_not_be_mapped():
    maker = Maker.remote()
    get(maker.make.remote(1))
    undo = leave(8 << 20)
    try:
        big = maker.fail.remote(BIG)
        assert get(maker.make.remote(3)).sum() == 3
        with pytest.raises(OutOfMemoryError, match="no addresses"):
            get(big)
    finally:
        undo()
    with pytest.raises(TaskError, match="ValueError: xxx"):
        get(big)
    del big
    nothing_is_held(maker)


@pytest.mark.parametrize("drop", [False, True])
def test_definitions_of_a_result_that_cannot_be_mapped_are_known(drop):
    maker = Maker.remote()
    graph = compiled(lambda x: maker.boxed.bind(x), depth=4)
    undo = leave(8 << 20)
    try:
        big, small = graph.execute(BIG), graph.execute(3)
        small = get(small)
        assert small.array.sum() == 3
        if drop:
            del big
        assert type(get(graph.execute(4))) is type(small)
    finally:
        undo()
    if not drop:
        box = get(big)
        assert box.array.sum() == BIG
        assert type(box) is type(small)
        del box, big
    nothing_is_held(maker)


def test_refs_in_a_result_that_could_not_be_mapped(wait_until):
    exports = conveyor.runtime.context.running().exports
    maker = Maker.remote()
    graph = compiled(lambda x: maker.paired.bind(x), depth=2)
    get(graph.execute([conveyor.put(0), 1]))
    for drop in (False, True):
        undo = leave(8 << 20)
        try:
            big = graph.execute([conveyor.put("inside"), BIG])
            assert get(get(graph.execute([conveyor.put("small"), 3]))[0]) == "small"
            if drop:
                del big
        finally:
            undo()
        if not drop:
            ref, array = get(big)
            assert get(ref) == "inside"
            assert array.sum() == BIG
            del ref, array, big
    wait_until(lambda: exports.tidy() or exports.entry_count == 0, what="the end of exported refs")
    nothing_is_held(maker)


def test_a_call_s_result_that_could_not_be_mapped():
    maker = Maker.remote()
    get(maker.make.remote(1))
    undo = leave(8 << 20)
    try:
        big = maker.make.remote(BIG)
        assert get(maker.make.remote(3)).sum() == 3
        kept = maker.in_place.remote(BIG)
        assert get([maker.make.remote(i) for i in range(50)])[-1].size == 49
        with pytest.raises(OutOfMemoryError, match="no addresses"):
            get([big, kept])
    finally:
        undo()
    assert [int(array.sum()) for array in get([big, kept])] == [BIG, BIG]
    del big, kept
    nothing_is_held(maker)


def test_an_argument_for_which_there_is_no_memory_is_not_sent():
    maker = Limited.remote()
    graph = compiled(lambda x: maker.receive.bind(x))
    array = np.ones(BIG, np.uint8)
    get(maker.small.remote(1))
    undo = leave(8 << 20)
    try:
        for start in (graph.execute, maker.receive.remote):
            with pytest.raises(OutOfMemoryError):
                start(array)
    finally:
        undo()
    assert get(graph.execute(array)) == get(maker.receive.remote(array)) == BIG


def test_items_of_a_stream_that_cannot_be_mapped():
    maker = Maker.remote()
    graph = compiled(lambda x: maker.count.bind(x))
    for stream in (graph.execute(3), maker.count.remote(3)):
        assert stream.next(timeout=WAIT) == 0
        undo = leave(8 << 20)
        try:
            with pytest.raises(OutOfMemoryError):
                stream.next(timeout=WAIT)
        finally:
            undo()
    assert get(maker.make.remote(2)).sum() == 2


def test_async_gets_of_a_result_that_cannot_be_mapped():
    maker = Maker.remote()
    graph = compiled(lambda x: maker.make.bind(x))
    get(graph.execute(1))

    async def main():
        undo = leave(8 << 20)
        try:
            ref = graph.execute(BIG)
            with pytest.raises(OutOfMemoryError):
                await ref
        finally:
            undo()
        return await ref

    assert asyncio.run(main()).sum() == BIG
