"""Values between processes: zero-copy arrays and tensors, what may be held, classes of scripts."""

import gc
import os
import sys

import cloudpickle
import numpy as np
import pytest
from integration_helpers import WAIT

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import SerializationError, TaskError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")

MB = 1 << 20


def is_shared(address):
    """Whether ``address`` lies in the arena of some process."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return "conveyor-arena" in line
    return False


@conveyor.remote
class Worker:
    def __init__(self):
        self.kept = []

    def echo(self, x):
        return x

    def ones(self, n):
        return np.full(n, 1.0)

    def count(self, i):
        return np.full(MB // 8, float(i))

    def made_here(self, i):
        array = conveyor.empty(MB // 8)
        array[:] = i
        return array

    def made_and_kept(self, i):
        array = conveyor.empty(MB // 8)
        array[:] = i
        self.kept.append(array)
        return array

    def made_tensor(self, i):
        import torch

        tensor = conveyor.empty_tensor((4, 1000), dtype=torch.float32)
        tensor.fill_(i)
        return tensor

    def look(self, x):
        """Where the argument lies, and whether it may be written."""
        return is_shared(x.ctypes.data), bool(x.flags.writeable)

    def write(self, x):
        x += 1
        return float(x.sum())

    def write_tensor(self, x):
        x += 1
        return float(x.sum())

    def total(self, x):
        return float(x.sum())

    def keep(self, x):
        self.kept.append(x)

    def kept_totals(self):
        return [float(x.sum()) for x in self.kept]

    def forget(self):
        self.kept.clear()

    def unpicklable(self, x):
        return (i for i in range(3)) if x == "bad" else x

    def overwrite_kept(self):
        for x in self.kept:
            x[:] = -1

    def scale_made(self, x):
        return float(x[0]), float(x[-1])


@pytest.fixture(scope="module")
def worker(session):
    return Worker.remote()


@pytest.fixture(scope="module")
def other(session):
    return Worker.remote()


@pytest.fixture
def through(worker):
    """Graphs of one task, by the method's name."""
    graphs = {}

    def run(method, *values):
        if method not in graphs:
            with InputNode() as inp:
                graphs[method] = getattr(worker, method).bind(inp).compile()
        return conveyor.get([graphs[method].execute(value) for value in values], timeout=WAIT)

    yield run
    while graphs:
        graphs.popitem()[1].teardown()


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        1.5,
        "text \N{SNOWMAN}",
        b"\0bytes",
        (1, "two", (3.0, None)),
        [1, {"k": {1, 2}}],
        {"nested": [np.arange(3).tolist()]},
        range(5),
        "x" * 5_000_000,
        [b"y" * 300_000] * 3,
        float("inf"),
        Ellipsis,
        complex(1, 2),
    ],
    ids=lambda v: repr(v)[:20],
)
def test_round_trips(through, worker, value):
    [back] = through("echo", value)
    assert back == value
    assert type(back) is type(value)
    assert conveyor.get(worker.echo.remote(value), timeout=WAIT) == value


@pytest.mark.parametrize(
    "array",
    [
        np.arange(10),
        np.zeros((0, 3)),
        np.array(5.0),
        np.arange(MB, dtype=np.int32).reshape(1024, -1),
        np.asfortranarray(np.arange(60000.0).reshape(200, 300)),
        np.arange(100_000)[::3],
        np.array(["a", "bc"]),
        np.array([1, "x", None], dtype=object),
        np.zeros(5000, dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.arange(5).astype(">i8"),
    ],
    ids=lambda a: f"{a.dtype.str if a.dtype.names is None else 'record'}{a.shape}",
)
def test_arrays(through, array):
    [back] = through("echo", array)
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape


def test_large_results_lie_in_shared_memory_and_are_ones_own(through, worker):
    [array] = through("ones", MB)
    assert is_shared(array.ctypes.data)
    array[0] = 2
    assert array.sum() == MB + 1
    ref = worker.ones.remote(MB)
    first = conveyor.get(ref, timeout=WAIT)
    first[:] = 7
    assert conveyor.get(ref, timeout=WAIT).sum() == MB


def test_a_sole_consumer_may_write_its_argument(through):
    data = np.zeros(MB)
    assert through("look", data) == [(True, True)]
    assert through("write", data) == [float(MB)]
    assert data.sum() == 0


def test_two_consumers_may_as_well_and_see_nothing_of_each_other(worker, other):
    with InputNode() as inp:
        dag = MultiOutputNode([worker.look.bind(inp), other.look.bind(inp)])
    with dag.compile() as graph:
        for _ in range(3):
            results = conveyor.get(graph.execute(np.zeros(MB)), timeout=WAIT)
            assert results == [(True, True), (True, True)]
    with InputNode() as inp:
        dag = MultiOutputNode([worker.write.bind(inp), other.write.bind(inp)])
    with dag.compile() as graph:
        for _ in range(3):
            results = conveyor.get(graph.execute(np.zeros(MB)), timeout=WAIT)
            assert results == [float(MB)] * 2


def test_a_writer_in_place_disturbs_nobody(worker, other):
    # `other` writes what it alone gets; the driver reads the same value of `worker`.
    with InputNode() as inp:
        x = worker.ones.bind(inp)
        dag = MultiOutputNode([x, other.total.bind(x), worker.total.bind(x)])
    with dag.compile() as graph:
        for _ in range(5):
            array, a, b = conveyor.get(graph.execute(100_000), timeout=WAIT)
            assert (array.sum(), a, b) == (100_000, 100_000, 100_000)


class Tree:
    """Builds itself over memory that it writes to, as models of Cython's do."""

    def __init__(self, size):
        self.nodes = np.arange(float(size))
        self.block = np.ones((3, size), order="F")  # as DataFrames have them
        self.masked = np.ma.masked_array(np.ones(size), mask=np.zeros(size, bool))

    def __getstate__(self):
        return {"nodes": self.nodes, "block": self.block, "masked": self.masked}

    def __setstate__(self, state):
        self.__dict__.update(state)
        if memoryview(self.nodes).readonly:
            raise ValueError("buffer source array is read-only")
        self.nodes[0] = 5

    def change(self):
        """What a program does with it; its sum before that."""
        found = self.nodes.sum() + self.block.sum() + self.masked.sum()
        self.nodes += 1
        self.block[0] = 7
        self.masked[:] = 0
        return float(found)


def sum_of_tree(size):
    return 5 + size * (size - 1) / 2 + 4 * size


@conveyor.remote
class Trees:
    def make(self, size):
        return Tree(size)

    def change(self, tree):
        return tree.change()

    def broken(self):
        return Broken()

    def many(self, count):
        return [np.full(10_000, float(i)) for i in range(count)]

    def mixed(self, size):
        return {"small": np.arange(3.0), "other": np.arange(float(size)), "tree": Tree(3)}


@pytest.fixture(scope="module")
def trees(session):
    return Trees.remote(), Trees.remote()


@pytest.mark.parametrize("size", [100, 1000, 100_000])
def test_what_builds_itself_over_its_memory_can_be_sent_got_and_changed(trees, size):
    first, second = trees
    with InputNode() as inp:
        made = first.make.bind(inp)
        dag = MultiOutputNode([second.change.bind(made), made])
    with dag.compile() as graph:
        for _ in range(2):
            made, put = first.make.remote(size), conveyor.put(Tree(size))
            got = [
                conveyor.get(second.change.remote(Tree(size)), timeout=WAIT),
                conveyor.get(second.change.remote(made), timeout=WAIT),
                conveyor.get(second.change.remote(put), timeout=WAIT),
                *(conveyor.get(ref, timeout=WAIT).change() for ref in (made, made, put, put)),
            ]
            seen, tree = conveyor.get(graph.execute(size), timeout=WAIT)
            assert [*got, seen, tree.change()] == [sum_of_tree(size)] * 9


def test_whether_an_array_may_be_written_depends_on_nothing(trees):
    first, second = trees
    for size in (3, 200, 300, 3000, 100_000):
        ref = first.mixed.remote(size)
        with InputNode() as inp:
            made = first.mixed.bind(inp)
            dag = MultiOutputNode([made, made, second.mixed.bind(inp)])
        with dag.compile() as graph:
            results = conveyor.get(graph.execute(size), timeout=WAIT)
        results += [conveyor.get(ref, timeout=WAIT) for _ in range(3)]
        for result in results:
            for array in (result["small"], result["other"], result["tree"].nodes):
                array += 100
        again = conveyor.get(ref, timeout=WAIT)
        assert again["small"].tolist() == [0, 1, 2]
        assert again["other"].sum() == size * (size - 1) / 2


class Broken:
    def __setstate__(self, state):
        raise ValueError("not here")

    def __init__(self):
        self.state = 1


def test_what_cannot_be_rebuilt_as_an_argument_is_not_named_by_a_class_of_the_librarys(trees):
    for given, named in ((((conveyor.put(Broken()),), {})), ((), {"tree": conveyor.put(Broken())})):
        with pytest.raises(SerializationError, match="ValueError: not here") as raised:
            conveyor.get(trees[0].change.remote(*given, **named), timeout=WAIT)
        assert "Snapshot" not in str(raised.value)
    with pytest.raises(
        SerializationError, match=r"argument 0 of .*change, the value of a reference"
    ):
        conveyor.get(trees[0].change.remote(trees[1].broken.remote()), timeout=WAIT)


def test_a_value_of_many_arrays_has_private_pages_once(trees):
    held = [conveyor.get(trees[0].many.remote(200), timeout=WAIT) for _ in range(2)]
    with open("/proc/self/maps") as maps:
        private = [line for line in maps if "conveyor-arena" in line and " rw-p " in line]
    assert len(private) < 100
    for arrays in held:
        for i, array in enumerate(arrays):
            array += 1
            assert array[0] == array[-1] == i + 1


def test_results_held_neither_block_nor_change(through, worker):
    with InputNode() as inp:
        dag = worker.count.bind(inp)
    with dag.compile(depth=2) as graph:
        held = [conveyor.get(graph.execute(i), timeout=WAIT) for i in range(50)]
        slices = [array[::1000] for array in held[:10]]
        for i, array in enumerate(held):
            assert array.min() == array.max() == i
    del held
    gc.collect()
    through("count", *range(100, 120))
    for i, part in enumerate(slices):
        assert part.min() == part.max() == i


def test_results_stay_after_teardown_and_the_makers_death():
    worker = Worker.remote()
    with InputNode() as inp:
        dag = worker.count.bind(inp)
    with dag.compile() as graph:
        held = [conveyor.get(graph.execute(i), timeout=WAIT) for i in range(5)]
    conveyor.kill(worker)
    for i, array in enumerate(held):
        assert array.min() == array.max() == i


def test_arguments_held_by_an_actor_neither_block_nor_change(worker):
    with InputNode() as inp:
        dag = worker.keep.bind(inp)
    with dag.compile(depth=2) as graph:
        for i in range(30):
            conveyor.get(graph.execute(np.full(MB // 8, float(i))), timeout=WAIT)
    totals = conveyor.get(worker.kept_totals.remote(), timeout=WAIT)
    assert totals == [i * (MB // 8) for i in range(30)]
    conveyor.get(worker.forget.remote(), timeout=WAIT)


def test_memory_of_dropped_results_is_used_again(through, worker):
    with InputNode() as inp:
        dag = worker.count.bind(inp)
    addresses = set()
    with dag.compile(depth=1) as graph:
        for i in range(200):
            array = conveyor.get(graph.execute(i), timeout=WAIT)
            addresses.add(array.ctypes.data)
            del array
    assert len(addresses) < 50


def test_an_array_made_in_place(through, worker, other):
    for i, array in enumerate(through("made_here", *range(10))):
        assert is_shared(array.ctypes.data)
        assert array.min() == array.max() == i
    with InputNode() as inp:
        dag = other.total.bind(worker.made_here.bind(inp))
    with dag.compile() as graph:
        refs = [graph.execute(i) for i in range(10)]
        assert conveyor.get(refs, timeout=WAIT) == [i * (MB // 8) for i in range(10)]


def test_an_array_made_in_place_by_the_driver(worker):
    def make(i):
        array = conveyor.empty((8, 1000), dtype="int64")
        assert is_shared(array.ctypes.data)
        array[:] = i
        return array

    with InputNode() as inp:
        dag = worker.total.bind(inp)
    with dag.compile() as graph:
        assert [conveyor.get(graph.execute(make(i)), timeout=WAIT) for i in range(20)] == [
            8000.0 * i for i in range(20)
        ]
        mine = make(3)
        ref = graph.execute(mine)
        mine[:] = 100
        assert conveyor.get(ref, timeout=WAIT) == 24000
        assert conveyor.get(worker.total.remote(make(2)), timeout=WAIT) == 16000


def test_an_array_made_in_place_and_kept_is_copied(through, worker):
    arrays = through("made_and_kept", *range(5))
    conveyor.get(worker.overwrite_kept.remote(), timeout=WAIT)
    for i, array in enumerate(arrays):
        assert array.min() == array.max() == i
    conveyor.get(worker.forget.remote(), timeout=WAIT)


def test_empty_of_strange_shapes():
    assert conveyor.empty(0).shape == (0,)
    assert conveyor.empty((3, 0, 2), dtype="i1").shape == (3, 0, 2)
    assert conveyor.empty((), dtype=bool).shape == ()
    assert conveyor.empty([2, 3]).dtype == np.float64
    with pytest.raises(TypeError, match="object"):
        conveyor.empty(3, dtype=object)


def test_tensors(through):
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.arange(10),
        torch.zeros(0, 3),
        torch.tensor(5.0),
        torch.arange(1 << 20, dtype=torch.int32).reshape(1024, -1),
        torch.randn(300, 200).t(),
        torch.randn(1000).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(64, 64).to(torch.float16)[::2],
    ):
        [back] = through("echo", tensor)
        assert torch.equal(back, tensor)
        assert back.dtype == tensor.dtype
        assert back.shape == tensor.shape
    # In containers, with gradients asked for, and as a parameter.
    [back] = through("echo", {"a": [torch.ones(70_000), torch.zeros(1)]})
    assert float(back["a"][0].sum()) == 70_000
    [leaf] = through("echo", torch.ones(3, requires_grad=True))
    assert leaf.requires_grad
    [parameter] = through("echo", torch.nn.Parameter(torch.ones(50_000)))
    assert isinstance(parameter, torch.nn.Parameter)


def test_writing_a_tensor_disturbs_nobody(worker, other):
    torch = pytest.importorskip("torch")
    with InputNode() as inp:
        x = worker.echo.bind(inp)
        dag = MultiOutputNode([x, other.write_tensor.bind(x), worker.write_tensor.bind(x)])
    given = torch.zeros(100_000)
    with dag.compile() as graph:
        for _ in range(5):
            ref, a, b = graph.execute(given)
            first = conveyor.get(ref, timeout=WAIT)
            assert conveyor.get([a, b], timeout=WAIT) == [100_000, 100_000]
            first += 5
            assert float(first.sum()) == 500_000
            assert float(given.sum()) == 0


def test_a_tensor_got_twice_and_written():
    torch = pytest.importorskip("torch")
    worker = Worker.remote()
    ref = conveyor.put(torch.zeros(100_000))
    conveyor.get(ref).add_(1)
    assert float(conveyor.get(ref).sum()) in (0.0, 100_000.0)
    assert conveyor.get(worker.total.remote(conveyor.put(torch.zeros(100_000))), timeout=60) == 0


def test_tensors_held_do_not_change(worker):
    torch = pytest.importorskip("torch")
    with InputNode() as inp:
        dag = worker.echo.bind(inp)
    with dag.compile(depth=2) as graph:
        held = [
            conveyor.get(graph.execute(torch.full((MB // 4,), float(i))), timeout=WAIT)
            for i in range(50)
        ]
        for i, tensor in enumerate(held):
            assert float(tensor.min()) == float(tensor.max()) == i


def test_a_tensor_made_in_place(through):
    torch = pytest.importorskip("torch")
    for i, tensor in enumerate(through("made_tensor", *range(5))):
        assert torch.equal(tensor, torch.full((4, 1000), float(i)))
    mine = conveyor.empty_tensor((3, 5), dtype=torch.int64)
    assert mine.shape == (3, 5)
    assert conveyor.empty_tensor(0).numel() == 0


# What cannot be pickled


def test_an_unpicklable_argument_leaves_nothing_sent(worker):
    with InputNode() as inp:
        dag = worker.echo.bind(inp)
    with dag.compile() as graph:
        for _ in range(20):
            with pytest.raises(SerializationError):
                graph.execute(i for i in range(3))
        assert conveyor.get([graph.execute(i) for i in range(20)], timeout=WAIT) == list(range(20))
    with pytest.raises(SerializationError):
        worker.echo.remote(i for i in range(3))
    assert conveyor.get(worker.echo.remote(1), timeout=WAIT) == 1


def test_an_unpicklable_second_argument_leaves_nothing_sent(worker, other):
    # Two actors, two inputs: the first one must not be half an execution ahead.
    with InputNode() as inp:
        dag = MultiOutputNode([worker.echo.bind(inp[0]), other.echo.bind(inp[1])])
    with dag.compile(depth=2) as graph:
        for i in range(10):
            with pytest.raises(SerializationError):
                graph.execute(f"lost {i}", (x for x in ()))
            assert conveyor.get(graph.execute(i, -i), timeout=WAIT) == [i, -i]


def test_an_unpicklable_result_fails_that_execution_only(worker, other):
    with InputNode() as inp:
        dag = other.echo.bind(worker.unpicklable.bind(inp))
    with dag.compile() as graph:
        good, bad, after = (graph.execute(x) for x in ("good", "bad", "after"))
        assert conveyor.get(good, timeout=WAIT) == "good"
        with pytest.raises(SerializationError, match="unpicklable") as caught:
            conveyor.get(bad, timeout=WAIT)
        assert isinstance(caught.value, TaskError | SerializationError)
        assert conveyor.get(after, timeout=WAIT) == "after"
    with pytest.raises(SerializationError):
        conveyor.get(worker.unpicklable.remote("bad"), timeout=WAIT)
    assert conveyor.get(worker.unpicklable.remote("good"), timeout=WAIT) == "good"


class Moody:
    """Fails while it is pickled or unpickled."""

    def __init__(self, where):
        self.where = where

    def __getstate__(self):
        if self.where == "pickle":
            raise RuntimeError("not in the mood to go")
        return {"where": self.where}

    def __setstate__(self, state):
        raise RuntimeError("not in the mood to come")


def test_an_argument_that_fails_to_unpickle_fails_that_execution_only(worker, other):
    with InputNode() as inp:
        dag = other.echo.bind(worker.echo.bind(inp))
    with dag.compile() as graph:
        with pytest.raises((SerializationError, RuntimeError), match="go"):
            graph.execute(Moody("pickle"))
        bad, after = graph.execute(Moody("unpickle")), graph.execute("after")
        with pytest.raises((SerializationError, RuntimeError), match="mood to come"):
            conveyor.get(bad, timeout=WAIT)
        assert conveyor.get(after, timeout=WAIT) == "after"
    with pytest.raises((SerializationError, RuntimeError), match="mood to come"):
        conveyor.get(worker.echo.remote(Moody("unpickle")), timeout=WAIT)
    assert conveyor.get(worker.echo.remote(1), timeout=WAIT) == 1


# Classes and functions of the program itself

MAIN_PROGRAM = """
    import dataclasses, enum, typing
    import conveyor
    from conveyor.dag import InputNode

    @dataclasses.dataclass
    class Point:
        x: int
        y: int

    class Color(enum.Enum):
        RED = 1

    class Pair(typing.NamedTuple):
        a: object
        b: object

    class Error(Exception):
        def __init__(self, *, code):
            super().__init__(code)
            self.code = code

    COUNTER = 10

    def helper(p):
        return Point(p.x + COUNTER, p.y)

    @conveyor.remote
    class Mover:
        def __init__(self):
            self.point = None

        def move(self, p):
            assert type(p) is Point
            if self.point is not None:
                assert type(self.point) is type(p)
            self.point = p
            return helper(p)

        def color(self, c):
            return c is Color.RED, c

        def apply(self, f, x):
            return f(x)

        def fail(self, x):
            raise Error(code=x)

        def pair(self, p):
            return Pair(p.b, p.a)

    a, b = Mover.remote(), Mover.remote()
    with InputNode() as inp:
        dag = b.move.bind(a.move.bind(inp))
    graph = dag.compile()
    for i in range(5):
        p = conveyor.get(graph.execute(Point(i, 0)), timeout=60)
        assert type(p) is Point and p == Point(i + 20, 0), p
    flag, color = conveyor.get(a.color.remote(Color.RED), timeout=60)
    assert flag and color is Color.RED
    assert conveyor.get(a.apply.remote(lambda x: x + COUNTER, 1), timeout=60) == 11
    assert conveyor.get(a.pair.remote(Pair(1, Color.RED)), timeout=60) == Pair(Color.RED, 1)
    try:
        conveyor.get(a.fail.remote(7), timeout=60)
    except Error as error:
        assert error.cause.code == 7, error
        assert isinstance(error, conveyor.exceptions.TaskError)
    else:
        raise AssertionError("no error")
    graph.teardown()
    print("done")
"""


def test_classes_of_a_script(scripts):
    assert scripts.run(MAIN_PROGRAM) == "done\n"


def test_classes_in_functions_of_the_program(worker):
    class Local:
        def __init__(self, x):
            self.x = x

    back = conveyor.get(worker.echo.remote(Local(3)), timeout=WAIT)
    assert type(back) is Local
    assert back.x == 3


def test_the_arenas_cap_is_a_clear_error(scripts):
    program = """
        import numpy as np
        import conveyor
        from conveyor.dag import InputNode
        from conveyor.exceptions import ArenaFullError

        conveyor.init(arena_bytes=8 << 20)

        @conveyor.remote
        class Maker:
            def make(self, i):
                return np.full(1 << 17, float(i))
            def total(self, x):
                return float(x.sum())

        maker = Maker.remote()
        with InputNode() as inp:
            dag = maker.make.bind(inp)
        held = []
        with dag.compile() as graph:
            try:
                for i in range(100):
                    held.append(conveyor.get(graph.execute(i), timeout=60))
            except ArenaFullError as error:
                print("full after", len(held))
                assert isinstance(error, MemoryError)
            assert [x[0] for x in held] == list(range(len(held)))
            del held[:]
            assert conveyor.get(graph.execute(5), timeout=60)[0] == 5
        try:
            conveyor.get(maker.total.remote(np.zeros(4 << 20)), timeout=60)
        except ArenaFullError:
            print("too large")
        assert conveyor.get(maker.total.remote(np.ones(1000)), timeout=60) == 1000
    """
    lines = scripts.run(program).splitlines()
    assert lines[0].startswith("full after ")
    assert 3 <= int(lines[0].split()[-1]) <= 8
    assert lines[1] == "too large"


def test_values_stay_after_shutdown(scripts):
    program = """
        import numpy as np
        import conveyor

        @conveyor.remote
        class Maker:
            def make(self):
                return np.arange(100_000)

        value = conveyor.get(Maker.remote().make.remote(), timeout=60)
        conveyor.shutdown()
        assert (value == np.arange(100_000)).all()
        print("right")
    """
    assert scripts.run(program) == "right\n"
    assert os.path.exists("/dev/shm")
