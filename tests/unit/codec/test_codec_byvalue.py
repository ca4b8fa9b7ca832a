"""Classes and functions that only one process has. Every script here runs as its ``__main__``."""

import gc
import sys
import types
import weakref

import cloudpickle
import pytest
from codec_transport import Channel, run, run_python

from conveyor.codec.encoded import FLAG_BOUND, FLAG_DEFINITIONS
from conveyor.codec.pickling import definitions, full_pickler


def test_instances_come_back_as_what_they_were():
    run("""
        from dataclasses import dataclass
        from codec_transport import Peer

        @dataclass
        class Message:
            x: int
            def double(self):
                return self.x * 2

        peer = Peer()
        for i in range(3):
            answer = peer.ask("echo", Message(i))
            assert type(answer) is Message and answer == Message(i) and answer.double() == 2 * i
        assert peer.definitions_sent == 1
        assert peer.ask("echo", Message) is Message
        assert peer.ask("call", Message, 5) == Message(5)
        assert peer.ask("same", Message, Message)
        peer.ask("keep", "class", Message)
        assert peer.ask("is kept", "class", Message)
        assert peer.definitions_sent == 1
        peer.close()
    """)


def test_relay_through_a_third_process():
    run("""
        from codec_transport import Peer

        class Base:
            tag = "base"

        class Message(Base):
            def __init__(self, x):
                self.x = x

        peer = Peer()
        for i in range(3):
            answer = peer.ask("relay", "echo", [Message(i), Base])
            assert type(answer[0]) is Message and answer[0].x == i and answer[1] is Base
        # The third process makes an instance of its own of a class that it got from the second.
        assert type(peer.ask("relay", "call", Message, 7)) is Message
        peer.ask("relay", "keep", "class", Message)
        assert peer.ask("relay", "is kept", "class", Message)
        peer.close()
    """)


def test_all_kinds_of_classes():
    run("""
        import abc, enum, sys, typing
        from collections import namedtuple
        from dataclasses import dataclass, field
        from codec_transport import Peer

        class Color(enum.Enum):
            RED = 1
            BLUE = "b"
            def pretty(self):
                return self.name.lower()

        class Bits(enum.IntFlag):
            A = 1
            B = 2

        Pair = namedtuple("Pair", "a b")

        class Named(typing.NamedTuple):
            x: int
            color: Color = Color.RED

        @dataclass(frozen=True, slots=True)
        class Frozen:
            x: int
            color: Color = Color.RED

        @dataclass(order=True)
        class Node:
            value: int
            children: list["Node"] = field(default_factory=list)
            @classmethod
            def leaf(cls, value):
                return cls(value)
            @property
            def total(self):
                return self.value + sum(c.total for c in self.children)

        class Shape(abc.ABC):
            @abc.abstractmethod
            def area(self): ...

        class Square(Shape):
            def __init__(self, a):
                self.a = a
            def area(self):
                return self.a ** 2

        class Meta(type):
            def __call__(cls, *args):
                made = super().__call__(*args)
                made.meta = True
                return made

        class WithMeta(metaclass=Meta):
            pass

        T = typing.TypeVar("T")

        class Box(typing.Generic[T]):
            def __init__(self, item):
                self.item = item

        UserId = typing.NewType("UserId", int)

        class Typed(typing.TypedDict):
            a: int

        class Outer:
            class Inner:
                pass

        class Descriptor:
            def __set_name__(self, owner, name):
                self.name = name
            def __get__(self, obj, owner=None):
                return self if obj is None else (self.name, type(obj).__name__)

        class Described:
            what = Descriptor()

        class Error(Exception):
            pass

        class Old:
            def __getnewargs_ex__(self):
                return (1,), {"b": 2}
            def __new__(cls, a, b):
                made = super().__new__(cls)
                made.args = a, b
                return made

        peer = Peer()
        values = [
            Color.RED, Color.BLUE, Color, Bits.A | Bits.B, Pair(1, 2), Named(3), Frozen(4),
            Node(1, [Node.leaf(2), Node.leaf(3)]), UserId(5), Typed(a=1), Named(1, Color.BLUE),
        ]
        for _ in range(2):
            for value in values:
                answer = peer.ask("echo", value)
                assert answer == value and type(answer) is type(value), value
        assert peer.ask("echo", Color.BLUE) is Color.BLUE
        assert peer.ask("call", Color.pretty, Color.RED) == "red"
        assert peer.ask("call", getattr, Node(1, [Node(2)]), "total") == 3
        assert peer.ask("call", Square(3).area) == 9
        assert isinstance(peer.ask("echo", Square(3)), Shape)
        assert peer.ask("call", isinstance, Square(1), Shape)
        assert peer.ask("call", WithMeta).meta and type(peer.ask("echo", WithMeta())) is WithMeta
        assert peer.ask("echo", Box(1)).item == 1 and peer.ask("echo", Box) is Box
        assert peer.ask("echo", Box[int]) == Box[int]
        assert peer.ask("call", UserId, 3) == 3
        assert type(peer.ask("echo", Outer.Inner())) is Outer.Inner
        assert peer.ask("call", getattr, Described(), "what") == ("what", "Described")
        assert type(peer.ask("echo", Error("x"))) is Error
        assert peer.ask("echo", Old(1, 2)).args == (1, 2)
        peer.close()
    """)


def test_functions_and_recursion():
    run("""
        import functools, math
        from codec_transport import Peer

        LIMIT = 10

        def even(n):
            return True if n == 0 else odd(n - 1)

        def odd(n):
            return False if n == 0 else even(n - 1)

        def factorial(n):
            return 1 if n == 0 else n * factorial(n - 1)

        class Tree:
            def __init__(self, n):
                self.left = Leaf(n)
                self.right = Tree(n - 1) if n else None
            def count(self):
                return 1 + (self.right.count() if self.right else 0) + self.left.count()

        class Leaf:
            def __init__(self, n):
                self.n = n
            def count(self):
                return 1
            def grow(self):
                return Tree(self.n)

        def limited(x, *, by=LIMIT):
            return min(math.floor(x), by, LIMIT)

        peer = Peer()
        assert peer.ask("call", even, 10) is True
        assert peer.ask("call", odd, 10) is False
        assert peer.ask("call", factorial, 5) == 120
        assert peer.ask("echo", factorial) is factorial
        assert peer.ask("same", even, even)
        tree = peer.ask("call", Tree, 3)
        assert type(tree) is Tree and type(tree.left) is Leaf and tree.count() == 8
        tree = peer.ask("call", Leaf(2).grow)
        assert type(tree) is Tree and type(tree.right.left) is Leaf
        assert peer.ask("call", limited, 99.5) == 10
        assert peer.ask("call", functools.partial(limited, by=3), 99.5) == 3
        assert peer.ask("call", lambda: [type(Leaf(1)), Tree]) == [Leaf, Tree]
        assert [f(2) for f in peer.ask("echo", [lambda x: x + LIMIT, math.sqrt])][0] == 12
        peer.close()
    """)


def test_caches_of_functools():
    run("""
        import functools
        from codec_transport import Peer

        @functools.lru_cache(maxsize=3)
        def square(n):
            "Of a number."
            return n * n

        def double(n):
            return 2 * square(n)

        class Table:
            def __init__(self, n):
                self.n = n
            @functools.cached_property
            def rows(self):
                return list(range(self.n))
            @functools.lru_cache
            def row(self, i):
                return self.rows[i]
            def total(self):
                return sum(self.row(i) for i in range(self.n))

        peer = Peer()
        square(2)
        assert peer.ask("call", square, 3) == 9
        assert peer.ask("call", double, 3) == 18
        back = peer.ask("echo", square)
        assert back(4) == 16 and back.cache_parameters() == square.cache_parameters()
        assert back.__name__ == "square" and back.__doc__ == "Of a number."
        assert back.cache_info().misses == 1, "the cache itself stays here"
        assert peer.ask("call", Table(4).total) == 6
        table = Table(3)
        assert table.rows == [0, 1, 2]
        assert peer.ask("echo", table).__dict__ == {"n": 3, "rows": [0, 1, 2]}
        peer.close()
    """)


def test_local_classes():
    run("""
        from dataclasses import dataclass
        from codec_transport import Peer

        def make(scale):
            @dataclass
            class Local:
                x: int
                def scaled(self):
                    return self.x * scale
                def again(self):
                    return Local(self.x)
            return Local

        peer = Peer()
        Two, Three = make(2), make(3)
        for _ in range(2):
            assert peer.ask("call", Two(1).scaled) == 2
            assert peer.ask("call", Three(1).scaled) == 3
            assert type(peer.ask("echo", Two(1))) is Two
            assert type(peer.ask("call", Three(1).again)) is Three
            assert peer.ask("same", Two, Two) and not peer.ask("same", Two, Three)
            assert type(peer.ask("relay", "echo", Two(1))) is Two
        peer.close()
    """)


def test_actor_class_and_messages_share_classes():
    run("""
        import enum
        from dataclasses import dataclass
        from codec_transport import Peer

        class Kind(enum.Enum):
            ADD = 1
            MUL = 2

        @dataclass
        class Op:
            kind: Kind
            by: int

        def apply(op, x):
            assert isinstance(op, Op)
            if op.kind is Kind.ADD:
                return x + op.by
            if op.kind is Kind.MUL:
                return x * op.by
            raise AssertionError(op)

        class Worker:
            def __init__(self, first):
                assert isinstance(first, Op)
                self.ops = [first]
            def push(self, op):
                assert type(op) is Op and type(op) is type(self.ops[0])
                self.ops.append(op)
                return Op(Kind.ADD, len(self.ops))
            def run(self, x):
                for op in self.ops:
                    x = apply(op, x)
                return x

        peer = Peer()
        peer.ask("start", Worker, Op(Kind.ADD, 1))
        answer = peer.ask("method", "push", Op(Kind.MUL, 5))
        assert type(answer) is Op and answer.kind is Kind.ADD and answer.by == 2
        assert peer.ask("method", "run", 1) == 10
        assert peer.ask("call", apply, Op(Kind.ADD, 1), 1) == 2
        peer.close()
    """)


def test_class_redefined_in_a_notebook_cell():
    run("""
        from codec_transport import Peer

        peer = Peer()
        cells = [
            "class Message:\\n    version = 1\\n    def which(self): return self.version",
            "class Message:\\n    version = 2\\n    def which(self): return self.version",
        ]
        exec(cells[0], globals())
        First, old = Message, Message()
        assert peer.ask("call", old.which) == 1
        peer.ask("keep", "old", old)
        exec(cells[1], globals())
        new = Message()
        assert peer.ask("call", new.which) == 2
        assert peer.ask("call", old.which) == 1
        assert type(peer.ask("echo", old)) is First
        assert type(peer.ask("echo", new)) is Message
        assert not peer.ask("same", First, Message)
        exec("def f(): return 1", globals())
        assert peer.ask("call", f) == 1
        g = f
        exec("def f(): return 2", globals())
        assert peer.ask("call", f) == 2 and peer.ask("call", g) == 1
        peer.close()
    """)


def test_definition_in_a_frame_that_was_skipped():
    run("""
        from codec_transport import Peer

        class Message:
            pass

        peer = Peer()
        peer.send(("skip",))
        peer.send([Message(), Message])
        assert peer.receive() == ("ok", None)
        assert peer.definitions_sent == 1
        assert type(peer.ask("echo", Message())) is Message
        assert peer.definitions_sent == 1
        peer.close()
    """)


def test_definition_that_did_not_arrive_is_an_error_there():
    run("""
        from codec_transport import Peer
        from conveyor.exceptions import SerializationError

        class Message:
            pass

        peer = Peer()
        peer.sent.groups.update(["x"])
        from conveyor.codec import frames as codec
        codec.encode(Message(), peer.sent)  # a frame that nobody receives
        try:
            peer.ask("echo", Message())
        except SerializationError as error:
            assert "did not reach this process" in str(error), error
        else:
            raise AssertionError
        assert peer.ask("echo", 1) == 1
        peer.close()
    """)


def test_definitions_that_need_each_other_in_later_frames():
    run("""
        from codec_transport import Peer

        class First:
            def second(self):
                return Second()

        peer, other = Peer(), Peer()
        assert type(peer.ask("echo", First())) is First  # Second is not there yet
        class Second(First):
            def first(self):
                return First()
        class Third(Second):
            pass
        for p in (peer, other):
            assert type(p.ask("echo", Third())) is Third
            assert type(p.ask("call", Third().first)) is First
            assert p.ask("call", issubclass, Third, First)
            assert type(p.ask("relay", "call", Second().first)) is First
        peer.close()
        other.close()
    """)


def test_module_made_in_memory():
    run("""
        import sys, types
        from codec_transport import Peer

        module = types.ModuleType("made_up")
        exec("class Thing:\\n    pass\\ndef f(x): return x, Thing", module.__dict__)
        sys.modules["made_up"] = module
        peer = Peer()
        for _ in range(2):
            assert type(peer.ask("echo", module.Thing())) is module.Thing
            assert peer.ask("call", module.f, 3) == (3, module.Thing)
        del sys.modules["made_up"]
        assert type(peer.ask("echo", module.Thing())) is module.Thing
        peer.close()
    """)


def test_module_registered_with_cloudpickle(tmp_path):
    (tmp_path / "only_here.py").write_text(
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class Thing:\n"
        "    x: int\n"
        "def make(x):\n"
        "    return Thing(x)\n"
    )
    run(
        """
        import sys
        from codec_transport import Peer
        from conveyor.exceptions import SerializationError

        peer = Peer()
        sys.path.append(sys.argv[1])
        import only_here
        for _ in range(2):
            try:
                peer.ask("echo", only_here.Thing(1))
            except SerializationError as error:
                assert "'only_here'" in str(error) and "register_pickle_by_value" in str(error)
            else:
                raise AssertionError
        import cloudpickle
        cloudpickle.register_pickle_by_value(only_here)
        for _ in range(2):
            assert peer.ask("echo", only_here.Thing(1)) == only_here.Thing(1)
            assert peer.ask("call", only_here.make, 2) == only_here.Thing(2)
        peer.close()
        """,
        str(tmp_path),
    )


def test_spawned_child_of_multiprocessing(tmp_path):
    script = tmp_path / "spawner.py"
    script.write_text("""
import multiprocessing
from codec_transport import Peer

class Message:
    pass

def child():
    assert Message.__module__ == "__mp_main__"
    peer = Peer()
    assert type(peer.ask("echo", Message())) is Message
    peer.close()

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
""")
    run_python(str(script))


def test_forked_child_makes_tokens_of_its_own():
    run("""
        import os
        from conveyor.codec.pickling import definitions as byvalue
        from conveyor.codec import frames as codec
        from codec_transport import Channel

        class Message:
            pass

        Channel().carry(Message())
        reading, writing = os.pipe()
        if os.fork() == 0:
            class Childs:
                pass
            Channel().carry([Message(), Childs()])
            mine, theirs = (byvalue.entry_of(c).token for c in (Message, Childs))
            os.write(writing, mine + theirs)
            os._exit(0)
        class Parents:
            pass
        Channel().carry(Parents())
        tokens = os.read(reading, 100)
        token = byvalue.entry_of(Message).token
        assert tokens[: len(token)] == token
        assert tokens[len(token) :] != byvalue.entry_of(Parents).token
    """)


def test_cloudpickle_of_the_users_own_finds_the_same_class():
    run("""
        import cloudpickle
        from codec_transport import Peer

        class Message:
            pass

        peer = Peer()
        def there(message):
            import cloudpickle
            return cloudpickle.dumps(message)
        assert type(cloudpickle.loads(peer.ask("call", there, Message()))) is Message
        peer.close()
    """)


def test_pydantic_model():
    pytest.importorskip("pydantic")
    run("""
        import pydantic
        from codec_transport import Peer

        class Model(pydantic.BaseModel):
            x: int
            tags: list[str] = []

        peer = Peer()
        for _ in range(2):
            answer = peer.ask("echo", Model(x=1, tags=["a"]))
            assert type(answer) is Model and answer == Model(x=1, tags=["a"])
        assert peer.ask("call", Model.model_validate, {"x": "3"}) == Model(x=3)
        peer.close()
    """)


def test_torch_module_of_main():
    pytest.importorskip("torch")
    run("""
        import torch
        from codec_transport import Peer

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 2)
            def forward(self, x):
                return self.layer(x).relu()

        peer = Peer()
        net = Net()
        x = torch.ones(3)
        assert torch.equal(peer.ask("call", net, x), net(x))
        assert type(peer.ask("echo", net)) is Net
        peer.ask("start", Net)
        assert peer.ask("method", "forward", x).shape == (2,)
        peer.close()
    """)


def test_two_threads_that_load_the_same_definitions():
    run("""
        import sys, threading
        from codec_transport import Link, Peer
        from conveyor.codec import frames as codec

        class A:
            def b(self):
                return B()

        class B(A):
            pass

        def race(frames):
            import threading
            from conveyor.codec import frames as codec
            start, seen = threading.Barrier(8), []
            def work():
                start.wait()
                value = codec.decode(frames[0], frames[1], None)
                seen.append((type(value[0]), type(value[1]), type(value[0].b())))
            threads = [threading.Thread(target=work) for _ in range(8)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            return len(set(seen)) == 1 and len(seen) == 8 and seen[0][1] is seen[0][2]

        peer = Peer()
        frame = codec.encode([A(), B()], codec.SentDefinitions())
        race.__qualname__ = "not_by_token"
        assert peer.ask("call", race, (frame[0], frame[2]))
        peer.close()
    """)


# In this process: lifetimes


def forget(obj):
    """Make this process one that has not defined ``obj``."""
    entry = definitions.entry_of(obj)
    del definitions._entries[id(obj)]
    for token in entry.group.tokens:
        definitions._refs.pop(token, None)
        definitions._groups._refs.pop(token, None)
    forget_by_cloudpickle()


def forget_by_cloudpickle():
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.clear()


def make_local():
    class Local:
        pass

    return Local


def test_loaded_once_and_kept_by_the_channel(monkeypatch):
    cls = make_local()
    channel = Channel()
    first, second = channel.send(cls()), channel.send(cls())
    assert first[1] & FLAG_DEFINITIONS
    assert second[1] == FLAG_BOUND
    forget(cls)
    monkeypatch.setattr(definitions, "_prefix", b"another.")
    loaded = type(channel.receive(first))
    assert loaded is not cls
    gone = weakref.ref(loaded)
    del loaded
    gc.collect()
    assert type(channel.receive(second)) is gone()
    channel = None
    gc.collect()
    assert gone() is None


def test_a_class_that_is_gone_leaves_nothing():
    gc.collect()  # classes of earlier tests
    before = len(definitions._entries), len(definitions._refs), len(definitions._groups)
    for _ in range(20):
        Channel().carry(make_local()())
    gc.collect()
    assert (len(definitions._entries), len(definitions._refs), len(definitions._groups)) == before


def test_part_of_a_group_that_is_still_here_is_kept():
    def make():
        class A:
            def b(self):
                return B()

        class B:
            def a(self):
                return A()

        return A, B

    a, b = make()
    channel = Channel()
    frame = channel.send([a(), b()])
    a.mark = "original"
    # As if only B had been collected.
    entry = definitions.entry_of(b)
    definitions._entries.pop(id(b))
    definitions._refs.pop(entry.token)
    forget_by_cloudpickle()
    carried_a, carried_b = channel.receive(frame)
    assert type(carried_a) is a
    assert type(carried_a).mark == "original"
    assert type(carried_b) is not b
    assert type(carried_b.a()) is a


def test_large_data_in_a_definition_warns(monkeypatch):
    monkeypatch.setattr(full_pickler, "_LARGE_DEFINITION", 1000)
    data = b"x" * 2000

    class Local:
        def get(self):
            return data

    with pytest.warns(UserWarning, match=r"Local is sent by value"):
        Channel().carry(Local())


def test_modules_in_memory_are_only_those(monkeypatch):
    assert "sys" not in definitions.modules_in_memory()
    monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
    assert "made_here" in definitions.modules_in_memory()
