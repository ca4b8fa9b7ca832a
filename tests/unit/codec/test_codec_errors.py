import asyncio
import builtins
import collections
import copy
import gc
import io
import pickle
import signal
import sys
import threading
import traceback
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from codec_transport import Channel, run
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.codec.errors import decode_error, encode_error
from conveyor.exceptions import (
    ActorDiedError,
    ConveyorError,
    DeadlockError,
    SerializationError,
    TaskError,
)


def caught(error):
    try:
        raise error
    except BaseException as raised:
        return raised


def carry(error, actor="worker", node="worker.step"):
    return decode_error(encode_error(caught(error), actor, node))


class Plain(Exception):
    pass


class KeywordOnly(Exception):
    def __init__(self, *, code, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class ManyArguments(Exception):
    def __init__(self, code, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class SideEffect(Exception):
    made = 0

    def __init__(self, text):
        type(self).made += 1
        super().__init__(text)


class OwnStr(Exception):
    def __str__(self):
        return f"own text of {self.args[0]}"

    def __repr__(self):
        return "own repr"


class BrokenStr(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class WithSlots(Exception):
    __slots__ = ("extra",)

    def __init__(self, text, extra):
        super().__init__(text)
        self.extra = extra


class WithProperty(Exception):
    def __init__(self, text, value):
        super().__init__(text)
        self._value = value

    @property
    def value(self):
        return self._value


class OwnNames(Exception):
    """Has attributes of the names that TaskError uses."""

    def __init__(self):
        super().__init__("own")
        self.node = "mine"
        self.__dict__["cause"] = "mine"


class ReadOnly(Exception):
    @property
    def cause(self):
        return "mine"

    def __setattr__(self, name, value):
        raise AttributeError("frozen")


@dataclass
class Data(Exception):
    code: int
    tags: list


@dataclass(frozen=True)
class FrozenData(Exception):
    code: int


class OwnReduce(Exception):
    def __init__(self, text, lock):
        super().__init__(text)
        self.lock = lock

    def __reduce__(self):
        return OwnReduce, (self.args[0], None)


class BadReduce(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.b = b

    def __reduce__(self):
        return BadReduce, (1,)


class OwnNew(Exception):
    def __new__(cls, *, a):
        made = super().__new__(cls, a)
        made.a = a
        return made

    def __init__(self, *, a):
        pass


class NoSubclasses(Exception):
    def __init_subclass__(cls):
        raise TypeError("no subclasses")


class FinalMeta(type):
    def __new__(mcs, name, bases, namespace):
        if any(isinstance(base, FinalMeta) for base in bases):
            raise TypeError("final")
        return super().__new__(mcs, name, bases, namespace)


class Final(Exception, metaclass=FinalMeta):
    pass


class FileMissing(FileNotFoundError):
    pass


class Multiple(ValueError, KeyError):
    pass


ERRORS = [
    Plain("boom"),
    Plain(),
    Plain("a", 1, None),
    ValueError("boom"),
    KeyError("key"),
    KeywordOnly(code=3, detail="d"),
    ManyArguments(3, "d"),
    OwnStr("x"),
    WithSlots("t", [1]),
    WithProperty("t", 5),
    Data(3, ["a"]),
    FrozenData(4),
    OwnReduce("t", 1),
    BadReduce(1, 2),
    OwnNew(a=5),
    NoSubclasses("n"),
    OSError("plain"),
    OSError(28, "No space"),
    FileNotFoundError(2, "No such file", "/a/b"),
    OSError(18, "Cross", "/a", None, "/b"),
    FileMissing(2, "gone", "/x"),
    BlockingIOError(11, "again", 5),
    io.UnsupportedOperation("read"),
    UnicodeDecodeError("utf-8", b"\xff\xfe", 0, 1, "bad"),
    UnicodeEncodeError("ascii", "\xe9", 0, 1, "bad"),
    ImportError("no", name="mod", path="/p"),
    ModuleNotFoundError("no", name="mod"),
    SyntaxError("bad", ("file.py", 1, 2, "x =", 1, 3)),
    AttributeError("no attr", name="x", obj=object()),
    NameError("no name", name="x"),
    ZeroDivisionError("division by zero"),
    AssertionError(),
    NotImplementedError("later"),
    RecursionError("deep"),
    MemoryError("full"),
    TimeoutError("late"),
    Multiple("both"),
    asyncio.TimeoutError("late"),
    Warning("w"),
    SerializationError("cannot"),
    DeadlockError("cycle", ("a", "b")),
    ActorDiedError("gone", "a", "n", 1, 9),
]


FIELDS = [
    *("code", "detail", "value", "extra", "tags", "a", "b", "name", "path", "msg", "lineno"),
    *("errno", "strerror", "filename", "filename2", "characters_written", "text"),
    *("encoding", "object", "start", "end", "reason", "cycle", "exit_code"),
]


@pytest.mark.parametrize("added", [{}, {"added": {"a": [1]}}], ids=["as it is", "with more"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_error_is_both_and_keeps_its_attributes(error, added, monkeypatch):
    kind = type(error)
    made = SideEffect.made
    for name, value in added.items():
        monkeypatch.setitem(error.__dict__, name, value)
    text = str(error)
    carried = carry(error)
    for _ in range(2):
        assert isinstance(carried, TaskError)
        assert isinstance(carried, kind)
        assert type(carried).__name__ == f"TaskError({kind.__qualname__})"
        assert str(carried).startswith(text)
        assert "actor 'worker' and node 'worker.step'" in str(carried)
        assert "Traceback (most recent call last)" in str(carried)
        assert carried.args == error.args
        if added and ("__reduce__" not in kind.__dict__ or kind is BadReduce):
            assert carried.added == {"a": [1]}
        *_, last = traceback.format_exception_only(kind, error)
        assert last.rstrip("\n") in carried.remote_traceback
        assert (carried.actor, carried.node) == ("worker", "worker.step")
        assert type(carried.cause) is kind
        assert carried.__cause__ is carried.cause
        assert carried.cause.args == error.args
        assert str(carried.cause) == text
        for name in FIELDS:
            try:
                expected = getattr(error, name)
            except AttributeError:
                continue
            assert getattr(carried, name) == expected
            assert getattr(carried.cause, name) == expected
        with pytest.raises(kind):
            raise carried
        repr(carried)
        "".join(traceback.format_exception(carried))
        # And once more, after it has travelled on.
        carried = Channel().carry(carried)
    assert SideEffect.made == made


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    "again",
    [
        lambda e: pickle.loads(pickle.dumps(e)),
        lambda e: pickle.loads(pickle.dumps(e, 2)),
        copy.copy,
        copy.deepcopy,
        lambda e: carry(e, "other", "other.step"),
        lambda e: Channel().carry({"errors": [e]})["errors"][0],
    ],
    ids=["pickle", "pickle 2", "copy", "deepcopy", "raised again", "value"],
)
def test_carried_error_travels_on(error, again):
    first = carry(error)
    second = again(first)
    assert type(second) is type(first)
    assert str(second) == str(first)
    assert second.args == first.args
    assert (second.actor, second.node) == ("worker", "worker.step")
    assert type(second.cause) is type(error)
    assert second.__cause__ is second.cause


def test_constructor_is_not_run():
    error = SideEffect("x")
    made = SideEffect.made
    assert isinstance(carry(error), SideEffect)
    assert SideEffect.made == made


def test_arguments_of_a_key_error_and_its_text():
    carried = carry(KeyError("key"))
    assert carried.args == ("key",)
    assert str(carried).startswith("'key'")


def test_names_of_task_error_win():
    carried = carry(OwnNames())
    assert carried.node == "worker.step"
    assert isinstance(carried.cause, OwnNames)
    assert carried.cause.node == "mine"
    carried = carry(ReadOnly("r"))
    carried.seen = True  # as contextlib does it with __traceback__
    assert isinstance(carried, ReadOnly)
    assert isinstance(carried.cause, ReadOnly)
    assert carried.cause.cause == "mine"


def test_error_without_a_text():
    carried = carry(BrokenStr("x"))
    assert isinstance(carried, BrokenStr)
    assert "str() of the exception failed: RuntimeError" in str(carried)
    repr(carried)


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopIteration(5),
        StopAsyncIteration(),
        asyncio.CancelledError(),
        BaseException("base"),
        Final("f"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_what_comes_as_a_plain_task_error(error):
    carried = carry(error)
    for _ in range(2):
        assert type(carried) is TaskError
        assert type(carried.cause) is type(error)
        assert carried.cause.args == error.args
        assert type(error).__name__ in str(carried)
        carried = pickle.loads(pickle.dumps(carried))


def test_code_of_system_exit_and_value_of_stop_iteration():
    assert carry(SystemExit(3)).cause.code == 3
    assert carry(StopIteration(5)).cause.value == 5


def test_exception_itself():
    carried = carry(Exception("just this"))
    assert type(carried) is TaskError
    assert str(carried).startswith("just this\n")
    assert carried.args == ("just this",)
    assert type(carried.cause) is Exception


def test_attributes_that_cannot_be_pickled_are_left_out_and_named():
    error = Plain("boom", threading.Lock())
    error.lock = threading.Lock()
    error.good = 5
    carried = carry(error)
    for _ in range(2):
        assert isinstance(carried, Plain)
        assert carried.good == 5
        assert not hasattr(carried, "lock")
        assert carried.args[0] == "boom"
        assert "lock object" in carried.args[1]
        assert "not carried over, since it cannot be pickled: args[1], .lock" in str(carried)
        carried = pickle.loads(pickle.dumps(carried))


def test_own_reduction_is_used():
    carried = carry(OwnReduce("t", threading.Lock()))
    assert isinstance(carried, OwnReduce)
    assert carried.lock is None
    assert "not carried over" not in str(carried)


class NoReduction(Exception):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


def test_an_exception_inside_that_cannot_be_reduced_is_taken_apart():
    error = Plain("t")
    error.__dict__["part"] = [NoReduction(1)]
    error.__dict__["lock"] = threading.Lock()
    carried = carry(error)
    assert isinstance(carried, Plain)
    assert isinstance(carried.part[0], NoReduction)
    assert carried.part[0].args == (1,)


class OwnTaskError(TaskError):
    def __init__(self, code):
        self.code = code


def test_a_task_error_of_the_users_own_that_is_half_made():
    error = OwnTaskError(3)
    holder = ValueError("holds")
    holder.part = [error]
    assert isinstance(carry(error), TaskError)
    assert isinstance(carry(holder), ValueError)


class LoadsBy(Exception):
    """Pickles as a call, in its own way and as an attribute."""

    def __init__(self, call, *args):
        super().__init__()
        self.part = Call(call, *args)
        self.call = call, args

    def __reduce__(self):
        return self.call


class Call:
    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


def test_code_that_exits_where_an_error_is_rebuilt():
    carried = carry(LoadsBy(sys.exit, 3))
    for _ in range(2):
        assert type(carried) is TaskError
        assert carried.cause is None
        why = "the exception itself has not come over: a received value cannot be rebuilt here: "
        assert str(carried).count(f"({why}SystemExit: 3)") == 1
        carried = pickle.loads(pickle.dumps(carried))


def test_ctrl_c_while_an_error_is_rebuilt():
    meta = encode_error(caught(LoadsBy(signal.raise_signal, signal.SIGINT)), "a", "a.b")
    with pytest.raises(KeyboardInterrupt):
        decode_error(meta)


def test_class_that_the_reader_cannot_load(tmp_path):
    script = """
        import sys, types
        from conveyor.codec.errors import encode_error
        sys.path.insert(0, sys.argv[1])
        import only_there
        try:
            raise only_there.Lost("boom")
        except Exception as error:
            sys.stdout.buffer.write(encode_error(error, "worker", "worker.step"))
    """
    (tmp_path / "only_there.py").write_text("class Lost(Exception): pass\n")
    carried = decode_error(run(script, str(tmp_path), capture_output=True).stdout)
    for _ in range(2):
        assert type(carried) is TaskError
        assert carried.cause is None
        assert carried.__cause__ is None
        assert str(carried).startswith("only_there.Lost: boom")
        assert "only_there.Lost: boom" in carried.remote_traceback
        carried = pickle.loads(pickle.dumps(carried))


def test_class_that_cannot_be_pickled():
    lock = threading.Lock()

    class Locked(Exception):
        def get(self):
            return lock

    carried = carry(Locked("boom"))
    assert type(carried) is TaskError
    assert carried.cause is None
    assert "Locked: boom" in str(carried)


def test_local_class():
    class Local(Exception):
        pass

    carried = carry(Local("boom"))
    assert isinstance(carried, Local)


def test_class_for_one_error_does_not_outlive_it():
    def make():
        class Local(Exception):
            pass

        return Local("x")

    error = make()
    carried = carry(error)
    gone = weakref.ref(type(carried)), weakref.ref(type(error))
    del error, carried
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None


def test_classes_are_shared():
    assert type(carry(ValueError(1))) is type(carry(ValueError(2)))


# Groups, notes, chains


needs_311 = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11")


@needs_311
def test_exception_group():
    group = builtins.ExceptionGroup(
        "several",
        [
            ValueError("a"),
            KeywordOnly(code=1, detail="d"),
            builtins.ExceptionGroup("in", [KeyError("k")]),
        ],
    )
    carried = carry(group)
    for _ in range(2):
        assert isinstance(carried, builtins.ExceptionGroup)
        assert isinstance(carried, TaskError)
        assert carried.message == "several"
        assert [type(e) for e in carried.exceptions] == [
            ValueError,
            KeywordOnly,
            builtins.ExceptionGroup,
        ]
        assert carried.exceptions[1].detail == "d"
        assert carried.exceptions[2].exceptions[0].args == ("k",)
        matching, rest = carried.split(ValueError)
        assert len(matching.exceptions) == 1
        assert len(rest.exceptions) == 2
        assert "ValueError: a" in carried.remote_traceback
        carried = pickle.loads(pickle.dumps(carried))


@needs_311
def test_exception_group_with_carried_and_unpicklable_members():
    bad = Plain("bad")
    bad.lock = threading.Lock()
    group = builtins.ExceptionGroup("several", [carry(ValueError("a"), "first", "first.f"), bad])
    carried = carry(group)
    first, second = carried.exceptions
    assert isinstance(first, ValueError)
    assert first.actor == "first"
    assert isinstance(second, Plain)
    assert not hasattr(second, "lock")


@needs_311
def test_base_exception_group():
    carried = carry(builtins.BaseExceptionGroup("several", [KeyboardInterrupt()]))
    assert type(carried) is TaskError
    assert type(carried.cause.exceptions[0]) is KeyboardInterrupt


@needs_311
def test_notes_travel():
    error = Plain("boom")
    error.add_note("first note")
    carried = carry(error)
    assert carried.__notes__ == ["first note"]
    assert "first note" in carried.remote_traceback
    carried.add_note("second note")
    assert carried.cause.__notes__ == ["first note"]
    again = carry(carried)
    assert again.__notes__ == ["first note", "second note"]
    assert pickle.loads(pickle.dumps(again)).__notes__ == ["first note", "second note"]


def test_chain_is_in_the_traceback():
    def fail():
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("outer") from error

    try:
        fail()
    except ValueError as error:
        carried = decode_error(encode_error(error, "a", "a.b"))
    assert "KeyError: 'missing'" in carried.remote_traceback
    assert "direct cause" in carried.remote_traceback
    assert "in fail" in carried.remote_traceback


def test_error_raised_while_handling_a_carried_one():
    first = carry(ValueError("inner"), "first", "first.f")
    try:
        raise RuntimeError("outer") from first
    except RuntimeError as error:
        carried = decode_error(encode_error(error, "second", "second.g"))
    assert carried.actor == "second"
    assert isinstance(carried, RuntimeError)
    assert "actor 'first'" in carried.remote_traceback


def test_attribute_that_is_an_exception():
    error = Plain("outer")
    error.inner = KeywordOnly(code=1, detail="d")
    error.several = [KeywordOnly(code=2, detail="d"), 3]
    error.travelled = carry(ValueError("v"), "first", "first.f")
    carried = carry(error)
    assert carried.inner.code == 1
    assert carried.several[0].code == 2
    assert carried.several[1] == 3
    assert isinstance(carried.travelled, ValueError)
    assert carried.travelled.actor == "first"


def itself():
    error = Plain("first")
    error.me = error
    return error


def in_its_arguments():
    error = Plain("first")
    error.args = ("first", error, [error, 1], (2, error), {"it": error})
    return error


def two_that_know_each_other():
    error, other = Plain("first"), KeyError("other")
    error.other, other.other = other, error
    error.__cause__, other.__cause__ = other, error
    return error


def children_with_a_parent():
    error = Plain("first")
    error.children = [Plain("child", i) for i in range(3)]
    error.by_name = {"a": error.children[0], "b": 2}
    for child in error.children:
        child.parent = error
    return error


def a_long_chain():
    error = last = Plain("first")
    for i in range(2000):
        last.next = Plain(i)
        last = last.next
    last.next = error
    return error


def each_with_the_one_before_twice():
    error = Plain("last")
    for _ in range(40):
        error = Plain("first", error, error) if _ % 2 else Wraps("first", error)
    return error


class Wraps(Plain):
    def __init__(self, text, error):
        super().__init__(text)
        self.left = self.right = error


def a_group_that_its_members_know():
    error = builtins.ExceptionGroup(
        "first", [Plain(1), builtins.ExceptionGroup("in", [OSError(2, "no")])]
    )
    error.exceptions[0].group = error
    error.exceptions[1].exceptions[0].group = error
    return error


class Holder:
    """An object that refers to others."""


class Pair(NamedTuple):
    """A tuple, whose pickle has what it refers to before it."""

    one: object
    two: object


def a_list_in_itself_that_has_it():
    error = ValueError(1)
    error.it = []
    error.it += [error.it, error]
    return error


def a_list_in_its_arguments():
    error = ValueError(1)
    it = [error]
    it.append(it)
    error.args = (it, (it, (error,)), frozenset([error]), Pair(error, it))
    return error


def a_dict_in_itself_that_has_it():
    error = Plain("first")
    error.it = {"error": error}
    error.it["it"] = error.it
    return error


def nested_deques():
    error = Plain("first")
    error.it = collections.deque([collections.deque([error])])
    error.it[0].append(error.it)
    return error


def an_object_that_has_both():
    error = Plain("first")
    error.it = it = Holder()
    it.it, it.error, it.several = it, error, [it, error]
    it.other = OSError(2, "no", "file")
    it.other.it = it
    return error


def shape(value, seen):
    """All that can be reached from an exception, each object once."""
    if value is None or isinstance(value, (str, int)):
        return value
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    kind = type(value).__name__
    if isinstance(value, BaseException):
        args = [shape(arg, seen) for arg in value.args]
        return kind, args, attributes_seen(value, seen)
    if isinstance(value, dict):
        return kind, {name: shape(one, seen) for name, one in value.items()}
    if isinstance(value, Holder):
        return kind, attributes_seen(value, seen)
    return kind, [shape(one, seen) for one in value]


def attributes_seen(value, seen):
    return {name: shape(one, seen) for name, one in sorted(vars(value).items()) if name[0] != "_"}


@pytest.mark.parametrize("lost", [False, True], ids=["whole", "with parts that cannot be pickled"])
@pytest.mark.parametrize(
    "make",
    [
        itself,
        in_its_arguments,
        two_that_know_each_other,
        children_with_a_parent,
        each_with_the_one_before_twice,
        a_group_that_its_members_know,
        a_list_in_itself_that_has_it,
        a_list_in_its_arguments,
        a_dict_in_itself_that_has_it,
        nested_deques,
        an_object_that_has_both,
    ],
)
def test_exceptions_that_refer_to_each_other(make, lost):
    if make is a_group_that_its_members_know and not hasattr(builtins, "ExceptionGroup"):
        pytest.skip("groups of exceptions came with Python 3.11")
    error = make()
    wanted = shape(error, {})
    if lost:
        error.lock = threading.Lock()
    carried = carry(error)
    assert isinstance(carried, type(error))
    assert isinstance(carried, TaskError)
    assert type(carried.cause) is type(error)
    assert shape(carried.cause, {}) == wanted
    assert ("not carried over" in str(carried)) == lost
    again = carry(carried)
    assert shape(again.cause, {}) == wanted


MAKERS = {
    "list": list,
    "dict": dict,
    "deque": collections.deque,
    "object": Holder,
    "exception": lambda: Plain("an argument"),
    "os error": lambda: OSError(2, "no", "file"),
}


def refer(value, other):
    """Have ``value`` refer to ``other``."""
    if isinstance(value, dict):
        value[f"it{len(value)}"] = other
    elif isinstance(value, (list, collections.deque)):
        value.append(other)
    else:
        setattr(value, f"it{len(vars(value))}", other)


@st.composite
def tangled_exceptions(draw):
    """Exceptions that refer, through all kinds of things, to whatever there is."""
    kinds = draw(st.lists(st.sampled_from(sorted(MAKERS)), max_size=6))
    nodes = [Plain("first"), *(MAKERS[kind]() for kind in kinds)]
    places = st.integers(0, len(nodes) - 1)
    for source, target, way in draw(
        st.lists(st.tuples(places, places, st.sampled_from(["", "tuple", "args"])), max_size=16)
    ):
        value, other = nodes[source], nodes[target]
        if way == "args" and isinstance(value, Plain):
            value.args = (*value.args, other)
        else:
            refer(value, (other, 1) if way == "tuple" else other)
    return nodes[0]


@given(tangled_exceptions())
@settings(deadline=None)
def test_whatever_exceptions_refer_to_it_arrives_as_it_was(error):
    wanted = shape(error, {})
    carried = carry(error)
    assert isinstance(carried, Plain)
    assert shape(carried.cause, {}) == wanted


def test_a_long_chain_of_exceptions_that_comes_back_to_its_first():
    cause = carry(a_long_chain()).cause
    last = cause
    for i in range(2000):
        last = last.next
        assert last.args == (i,)
    assert last.next is cause


def test_attribute_error_does_not_bring_the_object():
    class Actor:
        def __init__(self):
            self.big = b"x" * 1_000_000

    try:
        print(Actor().missing)
    except AttributeError as error:
        meta = encode_error(error, "a", "a.b")
    assert len(meta) < 10_000
    assert decode_error(meta).name == "missing"


# Traceback


def test_frames_of_the_runtime_are_left_out():
    import conveyor.exceptions as anchor

    package = anchor.__file__.rpartition("/")[0]
    space = {}
    code = "def run(f):\n    return f()\n"
    exec(compile(code, f"{package}/worker/worker.py", "exec"), space)

    def user():
        try:
            space["run"](lambda: {}["inner"])
        except KeyError as error:
            raise ValueError("x") from error

    try:
        space["run"](user)
    except ValueError as error:
        carried = decode_error(encode_error(error, "a", "a.b"))
    assert "in user" in carried.remote_traceback
    assert "KeyError: 'inner'" in carried.remote_traceback
    assert "worker.py" not in carried.remote_traceback

    exec(compile("def fail():\n    1/0\n", f"{package}/worker/worker.py", "exec"), space)
    try:
        exec(compile("fail()", f"{package}/engines/local.py", "exec"), space)
    except ZeroDivisionError as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this test's own frame
        carried = decode_error(encode_error(error, "a", "a.b"))
    assert "worker.py" in carried.remote_traceback  # there is nothing else to show


def test_endless_recursion_and_very_long_texts():
    def deep():
        return deep()

    try:
        deep()
    except RecursionError as error:
        meta = encode_error(error, "a", "a.b")
    assert len(meta) < 100_000
    assert isinstance(decode_error(meta), RecursionError)
    carried = carry(ValueError("x" * 1_000_000))
    assert len(carried.remote_traceback) < 110_000
    assert len(carried.args[0]) == 1_000_000


def test_text_of_an_error_at_the_top_level():
    carried = carry(ValueError("boom"))
    shown = "".join(traceback.format_exception(carried))
    assert "conveyor.exceptions.TaskError(ValueError): boom" in shown


def test_task_error_made_by_hand():
    error = TaskError("message", ValueError("v"), "actor", "node", "the traceback")
    assert error.args == ("message",)
    assert "the traceback" in str(error)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), carry(error, "x", "y")):
        assert other.actor == "actor"
        assert isinstance(other.cause, ValueError)
        assert other.remote_traceback == "the traceback"
        assert str(other) == str(error)
    assert str(TaskError("only")) == "only"
    assert isinstance(TaskError("m"), ConveyorError)


def test_error_made_again_by_its_class():
    carried = carry(KeywordOnly(code=1, detail="d"))
    again = type(carried)("another text")
    assert isinstance(again, KeywordOnly)
    assert str(again) == "another text"


def test_classes_of_main():
    run("""
        from codec_transport import Peer
        from conveyor.exceptions import TaskError

        class Base(Exception):
            def __init__(self, *, code):
                super().__init__(f"code {code}")
                self.code = code

        class Special(Base, ValueError):
            pass

        class Worker:
            def fail(self, n):
                raise Special(code=n)
            def encoded(self, n):
                from conveyor.codec.errors import encode_error
                try:
                    self.fail(n)
                except Exception as error:
                    return encode_error(error, "worker", "worker.fail")
            def again(self, meta):
                from conveyor.codec.errors import decode_error, encode_error
                try:
                    raise decode_error(meta)
                except Base as error:
                    assert type(error.cause) is Special
                    return encode_error(error, "other", "other.again")

        from conveyor.codec.errors import decode_error
        one, two = Peer(), Peer()
        one.ask("start", Worker)
        two.ask("start", Worker)
        for meta in (m := one.ask("method", "encoded", 3)), two.ask("method", "again", m):
            error = decode_error(meta)
            assert isinstance(error, TaskError) and isinstance(error, Special)
            assert type(error.cause) is Special
            assert error.code == 3 and error.actor == "worker"
            assert "in fail" in error.remote_traceback
            assert type(one.ask("echo", error)) is type(error)
            try:
                raise error
            except Base:
                pass
        one.close()
        two.close()
    """)
