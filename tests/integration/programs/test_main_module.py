"""Classes and functions of ``__main__`` in actors: with slots, referring to themselves, in processes that
``multiprocessing`` starts there."""

import pytest

SLOTS = """
import abc, dataclasses, enum, typing
import conveyor

@dataclasses.dataclass(slots=True)
class Plain:
    a: int
    b: list = dataclasses.field(default_factory=list)

@dataclasses.dataclass(slots=True, frozen=True)
class Frozen:
    a: int

class Private:
    __slots__ = ("a", "__hidden", "__weakref__")
    def __init__(self, a):
        self.a, self.__hidden = a, 2 * a
    def values(self):
        return self.a, self.__hidden

class Derived(Private):
    __slots__ = "extra"

class Loose(Private):
    pass

class Documented:
    __slots__ = {"x": "What x is."}

class Both:
    __slots__ = ("__dict__", "x")

class Empty:
    __slots__ = ()

class Number(int):
    __slots__ = ()

class Pair(typing.NamedTuple):
    a: int

class Box(typing.Generic[typing.TypeVar("T")]):
    __slots__ = ("g",)

class Base(abc.ABC):
    __slots__ = ("z",)
    @abc.abstractmethod
    def f(self): ...

class Concrete(Base):
    __slots__ = ("y",)
    def f(self):
        return self.z, self.y

class Color(enum.Enum):
    RED = 1

class Cell:
    __slots__ = ("v",)
    def own(self):
        return __class__

class Link:
    __slots__ = ("next", "value")
    def __init__(self, value, next=None):
        self.value, self.next = value, next
    def longer(self):
        return Link(self.value + 1, self)

def make():
    derived, loose, documented, both = Derived(1), Loose(2), Documented(), Both()
    derived.extra, loose.free, documented.x, both.x, both.free = 3, 4, 5, 6, 7
    box, concrete, cell = Box(), Concrete(), Cell()
    box.g, concrete.z, concrete.y, cell.v = 8, 9, 10, 11
    return [
        Plain(1, [2]), Frozen(3), Private(4), derived, loose, documented, both, Empty(), Number(5),
        Pair(6), box, concrete, Color.RED, cell, Link(1).longer(),
    ]

def state(x):
    names = ("a", "b", "extra", "free", "x", "g", "z", "y", "v", "value")
    held = {name: getattr(x, name) for name in names if hasattr(x, name)}
    return type(x).__qualname__, held, hasattr(x, "__dict__")

@conveyor.remote
class Actor:
    def make(self):
        return make()
    def states(self, values):
        return [state(x) for x in values]
    def echo(self, x):
        return x

actor = Actor.remote()
here = make()
assert conveyor.get(actor.states.remote(here)) == [state(x) for x in here]
for received in (conveyor.get(actor.make.remote()), conveyor.get(actor.echo.remote(here))):
    assert [state(x) for x in received] == [state(x) for x in here]
    assert [type(x) for x in received] == [type(x) for x in here]
assert received[2].values() == (4, 8) and received[11].f() == (9, 10)
assert received[12] is Color.RED and received[13].own() is Cell and received[14].next.value == 1
"""

THEMSELVES = """
import inspect
import conveyor

@conveyor.remote
class Tree:
    "A tree of actors."
    def __init__(self, depth, *, width=2):
        self.below = [Tree.remote(depth - 1, width=width) for _ in range(width)] if depth else []
    def count(self):
        return 1 + sum(conveyor.get([tree.count.remote() for tree in self.below]))
    def names(self):
        return Tree.__doc__, Tree.__qualname__, Tree.__name__, Tree.__module__, str(inspect.signature(Tree))
    def wrong(self):
        Tree.remote(1, 2)

@conveyor.remote
def fibonacci(n, step=1):
    "Slowly."
    if n < 2:
        return n
    return sum(conveyor.get([fibonacci.remote(n - step), fibonacci.remote(n - 2, step=step)]))

@conveyor.remote
def doc():
    return fibonacci.__doc__, fibonacci.__name__

tree = Tree.remote(2)
assert conveyor.get(tree.count.remote()) == 7
expected = ("A tree of actors.", "Tree", "Tree", "__main__", "(depth, *, width=2)")
assert conveyor.get(tree.names.remote()) == expected
assert (Tree.__doc__, str(inspect.signature(Tree))) == (expected[0], expected[-1])
try:
    conveyor.get(tree.wrong.remote())
except TypeError as error:
    assert "Tree(depth, *, width=2)" in str(error), error
else:
    raise AssertionError("no error")
assert conveyor.get(fibonacci.remote(3)) == 2
assert conveyor.get(doc.remote()) == ("Slowly.", "fibonacci")
"""

PROCESSES = """
import concurrent.futures, multiprocessing, sys
import conveyor

class Item:
    def __init__(self, x):
        self.x = x

def square(item):
    return Item(item.x * item.x)

def put(queue, item):
    queue.put(square(item))

@conveyor.remote
class Actor:
    def pool(self, how):
        context = multiprocessing.get_context(how)
        with context.Pool(1) as pool:
            return pool.map(square, [Item(2), Item(3)])
    def executor(self, how):
        context = multiprocessing.get_context(how)
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            return [pool.submit(square, Item(x)).result() for x in (2, 3)]
    def process(self, how):
        context = multiprocessing.get_context(how)
        queue, found = context.Queue(), []
        for x in (2, 3):
            process = context.Process(target=put, args=(queue, Item(x)))
            process.start()
            found.append(queue.get())
            process.join()
        return found

if __name__ == "__main__":
    actor = Actor.remote()
    how = sys.argv[1]
    for method in ("pool", "executor", "process"):
        items = conveyor.get(getattr(actor, method).remote(how), timeout=60)
        assert [type(item) for item in items] == [Item, Item], items
        assert [item.x for item in items] == [4, 9], items
"""

LOADER = """
import torch
import conveyor

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.tensor(i * i)

@conveyor.remote
class Actor:
    def sums(self, how):
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=2, num_workers=1, multiprocessing_context=how
        )
        return [int(batch.sum()) for batch in loader]

if __name__ == "__main__":
    actor = Actor.remote()
    for how in ("fork", "spawn"):
        assert conveyor.get(actor.sums.remote(how), timeout=100) == [1, 13], how
"""

CHILDREN = """
import multiprocessing
import sys
import conveyor

@conveyor.remote
class Parent:
    def child(self):
        return Parent.remote()
    def name(self):
        return Parent.__wrapped__.__name__

def session():
    child = conveyor.get(Parent.remote().child.remote(), timeout=60)
    return conveyor.get(child.name.remote(), timeout=60)

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        assert pool.apply(session) == "Parent"
"""


def test_instances_with_slots_come_and_go(scripts):
    scripts.run(SLOTS)


def test_what_refers_to_itself_works_in_actors(scripts):
    scripts.run(THEMSELVES)


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_multiprocessing_in_actors_knows_main(scripts, how):
    scripts.run(PROCESSES, how)


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_classes_that_refer_to_themselves_in_children_of_multiprocessing(scripts, how):
    scripts.run(CHILDREN, how)


@pytest.mark.torch
def test_data_loaders_in_actors_know_main(scripts):
    pytest.importorskip("torch")
    scripts.run(LOADER)


LATEST = """
import pickle
import conveyor

@conveyor.remote
class Actor:
    def by_name(self, function):
        return pickle.loads(pickle.dumps(function))()

actor = Actor.remote()
def f():
    return 1
assert conveyor.get(actor.by_name.remote(f)) == 1
def f():
    return 2
assert conveyor.get(actor.by_name.remote(f)) == 2
"""


def test_the_latest_definition_of_a_name_is_found(scripts):
    # As when a notebook's cell is run again.
    scripts.run(LATEST)


def test_a_program_run_as_a_module(scripts, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text(PROCESSES)
    scripts.run(
        "import runpy, sys; runpy.run_module('package.program', run_name='__main__', alter_sys=True)",
        "spawn",
    )
