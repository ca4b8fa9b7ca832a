"""One program, the same results: each of these runs on local processes and inline."""

from __future__ import annotations

import asyncio
import copy
import datetime
import os
import re
import sys
import threading
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    DeadlockError,
    GraphError,
    GraphTornDownError,
    SerializationError,
    TaskError,
    WaitTimeoutError,
)

# Actors need not import this file, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT = 60
BIG = 1 << 16  # elements of an array that does not fit a ring's slot

Pair = namedtuple("Pair", "left right")


class AppError(Exception):
    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.hint = hint


@dataclass
class Point:
    x: int
    y: int


class Unsendable:
    def __reduce__(self) -> Any:
        raise RuntimeError("stays here")


def _refuse() -> None:
    raise RuntimeError("cannot be rebuilt")


class Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


class Stage:
    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.seen: list[Any] = []
        self.thread = threading.local()
        self.thread.set = True

    def echo(self, x: Any) -> Any:
        return x

    def add(self, x: Any, y: Any = 0, *, z: Any = 0) -> Any:
        return x + y + z + self.offset

    def pack(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def same(self, x: Any, y: Any) -> bool:
        return x is y

    def change(self, x: Any, *values: Any, **named: Any) -> Any:
        """Change all that can be changed; what it was before."""
        before = [repr(value) for value in (*values, *named.values())]
        for value in (*values, *named.values()):
            if isinstance(value, np.ndarray):
                value += x
            elif isinstance(value, list):
                value[0] += x
                value.append(x)
            elif isinstance(value, dict):
                value[x] = x
            elif isinstance(value, (set, bytearray)):
                (value.add if isinstance(value, set) else value.append)(x)
            else:
                value.items.append(x)
        return before

    def identity(self, *values: Any) -> list[int]:
        return [id(value) for value in values]

    def alike(self, packed: Any) -> bool:
        (_, first, second), _ = packed
        return first is second

    def append(self, items: list[Any], x: Any) -> list[Any]:
        items.append(x)
        return items

    def note(self, x: Any) -> int:
        self.seen.append(x)
        return len(self.seen)

    def noted(self) -> list[Any]:
        return self.seen

    def forget(self) -> None:
        self.seen = []

    @conveyor.method(num_returns=2)
    def split(self, x: Any) -> Any:
        return x, [x]

    def several(self, n: int) -> Any:
        return tuple(range(n))

    def fail(self, x: Any) -> Any:
        raise ValueError(f"no {x}")

    def fail_if(self, x: int, bad: int) -> int:
        if x == bad:
            raise KeyError(x)
        return x

    def fail_app(self, code: int) -> None:
        raise AppError(code, hint="try again")

    def fail_chained(self) -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    def fail_with(self, error: BaseException) -> None:
        raise error

    def fail_unsendable(self) -> None:
        raise ValueError(Unsendable())

    def unsendable(self, _x: Any = None) -> Unsendable:
        return Unsendable()

    def unreadable(self, _x: Any = None) -> Unreadable:
        return Unreadable()

    def leave(self, code: Any) -> None:
        sys.exit(code)

    def flags(self, array: Any) -> Any:
        return array.flags.writeable, array.flags.c_contiguous, array.dtype.str, array.shape

    def write(self, array: Any) -> Any:
        array[0] = -1
        return array.sum()

    def total(self, array: Any) -> Any:
        return array.sum()

    def ones(self, n: int) -> Any:
        return np.ones(n)

    def call(self, handle: Any, method: str, *args: Any) -> Any:
        return conveyor.get(getattr(handle, method).remote(*args))

    def call_later(self, handle: Any, x: Any) -> None:
        handle.note.remote(x)
        self.seen.append("before")

    def make(self, offset: int) -> Any:
        child = conveyor.remote(Stage).remote(offset)
        return child, conveyor.get(child.add.remote(1))

    def end(self, handle: Any) -> None:
        conveyor.kill(handle)

    def compiles(self, handle: Any, value: Any) -> Any:
        with handle.echo.bind(InputNode()).compile() as graph:
            return conveyor.get(graph.execute(value))

    def thread_local(self) -> bool:
        return hasattr(self.thread, "set")

    def tensor(self, x: Any) -> Any:
        x.add_(1)
        return x * 2, x.requires_grad, x.is_contiguous(), tuple(x.stride())

    @staticmethod
    def twice(x: Any) -> Any:
        return 2 * x

    @classmethod
    def class_name(cls) -> str:
        return cls.__name__

    def __call__(self, x: Any) -> Any:
        return "called", x

    @property
    def size(self) -> int:
        return 1


class Async:
    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.running = asyncio.get_running_loop().is_running()

    async def echo(self, x: Any) -> Any:
        await asyncio.sleep(0)
        return x

    async def nap(self, x: Any) -> Any:
        await asyncio.sleep(0.01)
        return x

    async def fail(self, x: Any) -> None:
        await asyncio.sleep(0)
        raise ValueError(f"no {x}")

    async def wait(self, x: Any = None) -> Any:
        await self.event.wait()
        return "met", x

    async def come(self) -> None:
        self.event.set()

    def plain(self) -> bool:
        return self.running

    async def ask(self, handle: Any, x: Any) -> Any:
        return await handle.echo.remote(x), await handle.add.remote(x, y=1)

    async def ask_all(self, handle: Any, n: int) -> Any:
        return await asyncio.gather(*[handle.echo.remote(i) for i in range(n)])

    async def around(self, handle: Any, me: Any) -> Any:
        return await handle.call.remote(me, "echo", "back")

    async def blocking(self, handle: Any) -> Any:
        return conveyor.get(handle.echo.remote(1))

    async def cancel(self) -> None:
        raise asyncio.CancelledError

    async def in_thread(self, x: Any) -> Any:
        return await asyncio.to_thread(lambda: x + 1)


class Tools:
    """What a program finds: actors that live as long as the session."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.a, self.b, self.c = (conveyor.remote(Stage).remote() for _ in range(3))
        self.m = conveyor.remote(Async).remote()

    def new(self, *args: Any, **options: Any) -> Any:
        return conveyor.remote(Stage).options(**options).remote(*args)


def get(refs: Any) -> Any:
    return conveyor.get(refs, timeout=WAIT)


def once(dag: Any, *args: Any, **kwargs: Any) -> Any:
    with dag.compile() as graph:
        return get(graph.execute(*args, **kwargs))


# The programs. Each is given Tools, and gives a value, or raises.

PROGRAMS: list[Any] = []


def program(
    expected: Any = None,
    *,
    raises: Any = None,
    match: str = "",
    torch: bool = False,
    known_bug: str = "",
) -> Any:
    """``raises``: the classes of which the error must be an instance, all of them."""

    def add(function: Any) -> Any:
        marks: list[Any] = [pytest.mark.torch] if torch else []
        if known_bug:
            marks.append(pytest.mark.xfail(reason=known_bug))
        PROGRAMS.append(
            pytest.param(function, expected, raises, match, id=function.__name__, marks=marks)
        )
        return function

    return add


# Values


@program(True)
def values_come_back_equal(t):
    values = [
        None, True, 0, -1, 1 << 80, 1.5, float("inf"), 1j, "", "häß", "\ud800", b"", b"\0" * 9999,
        (), (1, ("a", None)), [], [[1], {2: {3}}], {"k": (1, 2)}, {1, 2}, frozenset([3]),
        range(3), slice(1, 2), ..., datetime.date(2020, 2, 29), Point(1, 2), Pair(1, [2]),
        ValueError, int, len, "x" * 100_000, [b"y" * 5000] * 3, bytearray(b"z"),
    ]  # fmt: skip
    for value in values:
        got = get(t.a.echo.remote(value))
        assert got == value, value
        assert type(got) is type(value)
    return get(t.a.echo.remote(values)) == values


@program((3, True, "x"))
def functions_classes_and_errors_as_values(t):
    function, kind, error = get(t.a.echo.remote((lambda x: x + 1, AppError, KeyError("x"))))
    return function(2), kind is AppError, error.args[0]


@program(([1, 2], [1, 2, 3], True))
def arguments_are_copies(t):
    items = [1, 2]
    longer = get(t.a.append.remote(items, 3))
    return items, longer, get(t.a.same.remote(items, items))


@program(([[1]], [[1], "mine"]))
def results_are_copies(t):
    actor = t.new()
    get(actor.note.remote([1]))
    mine = get(actor.noted.remote())
    mine.append("mine")
    return get(actor.noted.remote()), mine


@program((False, [7]))
def a_result_got_again_is_another_value(t):
    ref = t.a.echo.remote([7])
    return get(ref) is get(ref), ref.get()


@program([0, 1])
def a_put_value_is_a_snapshot(t):
    items = [0]
    ref = conveyor.put(items)
    items.append("later")
    return get(t.a.append.remote(ref, 1))


@program([0.0, 0.0])
def writing_into_a_put_value_changes_it_for_nobody_else(t):
    ref = conveyor.put(np.zeros(BIG))
    first, second = get(ref), get(ref)
    _may_write(first)
    return [second[0], get(ref)[0]]


# Calls


@program([1, 3, 6, ((1,), {"k": 2}), 8, "Stage", ("called", 9)])
def kinds_of_arguments_and_methods(t):
    a = t.a
    refs = [a.add.remote(1), a.add.remote(1, 2), a.add.remote(y=2, x=1, z=3), a.pack.remote(1, k=2)]
    refs += [a.twice.remote(4), a.class_name.remote(), a.__call__.remote(9)]
    return get(refs)


@program(list(range(1, 101)))
def calls_run_in_order(t):
    actor = t.new()
    return get([actor.note.remote(i) for i in range(100)])


@program((1, [1], [0, 1, 2]))
def several_results(t):
    first, second = t.a.split.remote(1)
    return get(first), get(second), get(t.a.several.options(num_returns=3).remote(3))


@program(raises=(TaskError, ValueError), match="num_returns=3 .* returned a tuple")
def several_results_of_another_number(t):
    get(t.a.several.options(num_returns=3).remote(2)[0])


@program((6, [5], 14))
def refs_as_arguments(t):
    one, two = t.a.split.remote(5)
    total = t.b.add.remote(t.a.echo.remote(1), y=t.c.echo.remote(2), z=conveyor.put(3))
    chain = conveyor.put(4)
    for _ in range(10):
        chain = t.a.add.remote(chain, 1)
    assert get(one) == 5
    return get(total), get(t.c.echo.remote(two)), get(chain)


@program(raises=(TaskError, ValueError), match="no 1")
def a_failed_argument(t):
    get(t.b.echo.remote(t.a.fail.remote(1)))


@program([1])
def a_ref_inside_a_container(t):
    (ref,) = get(t.a.echo.remote([t.b.echo.remote(1)]))
    return [get(ref)]


@program((([0, 1, 2], []), ([0], [1, 2]), 0))
def waiting(t):
    refs = [t.a.echo.remote(i) for i in range(3)]
    get(refs)

    def numbers(lists):
        return tuple([refs.index(r) for r in some] for some in lists)

    all_of_them = conveyor.wait(refs, num_returns=3, timeout=WAIT)
    return numbers(all_of_them), numbers(conveyor.wait(refs)), len(conveyor.wait(refs[:1])[1])


@program(["ArgumentsError"] * 2 + ["ValueError", "ValueError", "TypeError", "TypeError"])
def wrong_uses_of_the_verbs(t):
    ref = t.a.echo.remote(1)
    uses = [
        lambda: conveyor.get(1),
        lambda: conveyor.get([ref, 2]),
        lambda: conveyor.wait([ref, ref]),
        lambda: conveyor.wait([ref], num_returns=2),
        lambda: conveyor.put(ref),
        lambda: t.a.add.remote(),
    ]
    return [_error_of(use) for use in uses]


def _error_of(use: Any) -> str:
    try:
        use()
    except Exception as error:
        return type(error).__name__
    return "nothing"


@program(raises=SerializationError)
def an_unsendable_argument(t):
    t.a.echo.remote(Unsendable())


@program([1])
def an_unsendable_argument_leaves_nothing(t):
    actor = t.new()
    for value in (threading.Lock(), (1, threading.Lock()), Unsendable()):
        with pytest.raises(SerializationError):
            actor.note.remote(value)
    return [get(actor.note.remote("only this"))]


@program(raises=(TaskError, SerializationError))
def an_unsendable_result(t):
    get(t.a.unsendable.remote())


@program(raises=(TaskError, SerializationError), match="cannot be rebuilt")
def an_unreadable_argument(t):
    get(t.a.echo.remote(Unreadable()))


@program(raises=SerializationError, match="cannot be rebuilt")
def an_unreadable_result(t):
    get(t.a.unreadable.remote())


# Errors


@program(raises=(TaskError, ValueError), match="no luck")
def an_error(t):
    get(t.a.fail.remote("luck"))


@program((7, "try again", True, "Stage", "Stage.fail_app"))
def an_error_of_the_users_class(t):
    with pytest.raises(AppError, match="code 7") as caught:
        get(t.a.fail_app.remote(7))
    error: Any = caught.value
    return error.code, error.hint, isinstance(error, TaskError), error.actor, error.node


@program((True, True, True, False))
def the_traceback_of_an_error(t):
    with pytest.raises(ValueError, match="second") as caught:
        get(t.a.fail_chained.remote())
    text = caught.value.remote_traceback
    return (
        "fail_chained" in text,
        "KeyError: 'first'" in text,
        "direct cause" in text,
        "engine" in text,
    )


@program(
    [
        "TaskError(AssertionError)",
        "TaskError",
        "TaskError",
        "TaskError(FileNotFoundError)",
        "TaskError(MemoryError)",
    ]
)
def errors_of_special_classes(t):
    errors = [
        AssertionError("x"),
        StopIteration(1),
        GeneratorExit(),
        OSError(2, "x"),
        MemoryError(),
    ]
    names = []
    for error in errors:
        with pytest.raises(TaskError) as caught:
            get(t.a.fail_with.remote(error))
        names.append(type(caught.value).__name__)
    return names


@program(raises=(TaskError, ValueError))
def an_error_that_cannot_be_sent(t):
    get(t.a.fail_unsendable.remote())


@program((True, "Stage#2", "Stage#2.fail"))
def an_error_through_another_actor(t):
    with pytest.raises(ValueError, match="no way") as caught:
        get(t.a.call.remote(t.b, "fail", "way"))
    error: Any = caught.value
    return isinstance(error, TaskError), error.actor, error.node


@program((False, True))
def an_error_got_again(t):
    ref = t.a.fail.remote(1)
    caught = []
    for _ in range(2):
        with pytest.raises(ValueError, match="no 1") as info:
            get(ref)
        caught.append(info.value)
    return caught[0] is caught[1], ref.done()


# Actors


class Broken:
    def __init__(self, x: Any) -> None:
        raise AppError(x, hint="never")

    def echo(self, x: Any) -> Any:
        return x


@program([(1, True), (1, True)])
def a_constructor_that_fails(t):
    actor = conveyor.remote(Broken).remote(1)
    found = []
    for _ in range(2):
        with pytest.raises(AppError) as caught:
            get(actor.echo.remote(1))
        found.append((caught.value.code, isinstance(caught.value, TaskError)))
    return found


@program(raises=(TaskError, AppError))
def a_constructor_that_fails_in_a_graph(t):
    actor = conveyor.remote(Broken).remote(1)
    with InputNode() as inp:
        dag = actor.echo.bind(inp)
    once(dag, 1)


@program(raises=SerializationError)
def a_constructor_with_an_unsendable_argument(t):
    t.new(Unsendable())


@program(raises=TypeError, match="Stage")
def a_constructor_with_wrong_arguments(t):
    t.new(1, 2, 3)


@program(12)
def a_constructor_with_a_ref(t):
    return get(t.new(t.a.echo.remote(10)).add.remote(2))


@program((True, "Stage", ["ValueError", "ValueError", "TypeError"]))
def names(t):
    actor = t.new(name="teller")
    found = conveyor.get_actor("teller")
    uses = [
        lambda: t.new(name="teller"),
        lambda: conveyor.get_actor("nobody"),
        lambda: conveyor.get_actor(1),
    ]
    return found == actor, get(found.class_name.remote()), [_error_of(use) for use in uses]


@program(raises=AttributeError, match="has no method 'ehco'; did you mean")
def a_method_that_does_not_exist(t):
    t.a.ehco.remote(1)


@program(raises=AttributeError)
def a_property_is_no_method(t):
    t.a.size.remote()


@program(True)
def thread_locals_of_the_constructor(t):
    return get(t.a.thread_local.remote())


@program(raises=ActorDiedError, match="kill")
def kill(t):
    actor = t.new()
    conveyor.kill(actor)
    conveyor.kill(actor)
    get(actor.echo.remote(1))


@program(raises=ActorDiedError)
def kill_by_another_actor(t):
    actor = t.new()
    get(t.a.end.remote(actor))
    get(actor.echo.remote(1))


@program(raises=ActorDiedError)
def kill_by_itself(t):
    actor = t.new()
    get(actor.end.remote(actor))


@program((3, None))
def an_actor_that_exits(t):
    actor = t.new()
    with pytest.raises(ActorDiedError) as caught:
        get(actor.leave.remote(3))
    with pytest.raises(ActorDiedError):
        get(actor.echo.remote(1))
    return caught.value.exit_code, caught.value.signal


@program((11, [True, True], 1))
def handles_as_values(t):
    child, made = get(t.a.make.remote(10))
    back = get(t.b.echo.remote([t.a, t.b]))
    return made, [back[0] == t.a, back[1] == t.b], get(t.b.call.remote(child, "note", 1))


@program(6)
def compiling_inside_an_actor(t):
    return get(t.a.compiles.remote(t.b, 6))


@program(raises=(TaskError, GraphError), match="cannot execute a graph that it is itself a part of")
def compiling_ones_own_graph_inside_an_actor(t):
    get(t.a.compiles.remote(t.a, 6))


@program(["before", "later"])
def an_actor_that_calls_itself_for_later(t):
    actor = t.new()
    get(actor.call_later.remote(actor, "later"))
    while len(noted := get(actor.noted.remote())) < 2:  # calls of two callers have no order
        pass
    return noted


@program((True, 2, True))
def a_cycle_of_waiting_actors(t):
    with pytest.raises(DeadlockError, match=r"Stage.* waits for Stage.*") as caught:
        get(t.a.call.remote(t.b, "call", t.a, "echo", 1))
    error: Any = caught.value
    again = get(t.a.echo.remote(1)) == get(t.b.echo.remote(1))
    return isinstance(error, TaskError), len(error.cause.cycle), again


@program(raises=(TaskError, DeadlockError))
def an_actor_that_waits_for_itself(t):
    get(t.a.call.remote(t.a, "echo", 1))


@program("fine")
def a_cycle_with_room_for_it(t):
    actor = t.new(max_concurrency=2)
    return get(actor.call.remote(t.b, "call", actor, "echo", "fine"))


# Async methods


@program([1, 2, True, 4])
def async_and_plain_methods(t):
    return get([t.m.echo.remote(1), t.m.nap.remote(2), t.m.plain.remote(), t.m.in_thread.remote(3)])


@program((False, [("met", None)] * 3))
def async_methods_that_wait_for_a_later_call(t):
    actor = conveyor.remote(Async).remote()
    refs = [actor.wait.remote() for _ in range(3)]
    get(actor.plain.remote())
    early = refs[0].done()
    actor.come.remote()
    return early, get(refs)


@program((False, False, [("met", None), "behind"]))
def a_call_whose_argument_comes_later(t):
    actor = conveyor.remote(Async).remote()
    first = t.b.echo.remote(actor.wait.remote())
    second = t.b.echo.remote("behind")
    early = first.done(), second.done()
    actor.come.remote()
    return *early, get([first, second])


@program(raises=WaitTimeoutError, match=r"timed out after 0.05 s")
def a_timeout(t):
    actor = conveyor.remote(Async).remote()
    conveyor.get(actor.wait.remote(), timeout=0.05)


@program(([], 1))
def waiting_in_vain(t):
    actor = conveyor.remote(Async).remote()
    ready, rest = conveyor.wait([actor.wait.remote()], timeout=0.05)
    return ready, len(rest)


@program(((1, 2), list(range(20)), "back", 1))
def async_methods_that_call_others(t):
    return (
        get(t.m.ask.remote(t.a, 1)),
        get(t.m.ask_all.remote(t.b, 20)),
        get(t.m.around.remote(t.c, t.m)),
        get(t.m.blocking.remote(t.a)),
    )


@program(raises=(TaskError, ValueError), match="no way")
def an_async_error(t):
    get(t.m.fail.remote("way"))


@program("TaskError")
def an_async_method_that_is_cancelled(t):
    with pytest.raises(TaskError) as caught:
        get(t.m.cancel.remote())
    return type(caught.value).__name__


@program((1, [0, 1, 2], (2, 3)))
def awaiting_in_the_driver(t):
    async def main():
        one = await t.a.echo.remote(1)
        some = await asyncio.gather(*[t.m.nap.remote(i) for i in range(3)])
        return one, some, await t.m.ask.remote(t.b, 2)

    return asyncio.run(main())


# Arrays


@program(True)
def arrays_come_back_equal(t):
    base = np.arange(24.0)
    structured = np.zeros(3, [("a", "i4"), ("b", "f8")])
    arrays = [
        base, base.reshape(2, 3, 4), np.asfortranarray(base.reshape(4, 6)), base[::2],
        np.float32(3) * np.ones(()), np.zeros((0, 3)), np.array(["a", "bc"]), structured,
        np.array([{"k": 1}, None], object), np.array([1, 2], ">i4"), np.ones(BIG, np.uint8),
        np.array(["2020-01-01"], "M8[D]"), np.ones((2, BIG))[:, ::2],
    ]  # fmt: skip
    for array in arrays:
        for got in (get(t.a.echo.remote(array)), get(t.a.echo.remote([array]))[0]):
            assert got.dtype == array.dtype
            assert got.shape == array.shape
            np.testing.assert_array_equal(got, array)
    return type(get(t.a.echo.remote(np.int16(3)))) is np.int16


@program([(True, True)] * 3)
def results_are_writable(t):
    small, big = get(t.a.echo.remote(np.ones(4))), get(t.a.ones.remote(BIG))
    nested = get(t.a.echo.remote([np.ones(BIG)]))[0]
    return [(x.flags.writeable, _may_write(x)) for x in (small, big, nested)]


def _may_write(array: Any) -> bool:
    try:
        array[0] = 1
    except ValueError:
        return False
    return True


@program((BIG - 2.0, BIG - 2.0, 1.0))
def arguments_are_writable_copies(t):
    array = np.ones(BIG)
    return get(t.a.write.remote(array)), get(t.a.write.remote(conveyor.put(array))), array[0]


@program([True, BIG, BIG - 2.0])
def arrays_in_graphs(t):
    # One that two read lies on private pages; one that only one reads is its to write.
    with InputNode() as inp:
        ones = t.a.ones.bind(inp)
        dag = MultiOutputNode(
            [t.b.flags.bind(ones), t.c.total.bind(ones), t.b.write.bind(t.a.ones.bind(inp))]
        )
    flags, total, written = once(dag, BIG)
    return [flags[0], total, written]


@program([BIG - 2.0, BIG])
def writing_into_what_others_read(t):
    with InputNode() as inp:
        ones = t.a.ones.bind(inp)
        dag = MultiOutputNode([t.b.write.bind(ones), t.c.total.bind(ones)])
    return once(dag, BIG)


@program(12.0)
def an_array_made_in_place(t):
    array = conveyor.empty(BIG)
    array[:] = 0
    array[:12] = 1
    return get(t.a.total.remote(array))


@program((True, False, True, [2.0, 2.0], True, True), torch=True)
def tensors(t):
    import torch

    small, big = torch.zeros(2, 3), torch.zeros(BIG)
    made, grad, contiguous, _ = get(t.a.tensor.remote(small))
    result = get(t.a.echo.remote(big))
    result += 1  # one's own pages
    transposed = torch.arange(6.0).view(2, 3).t()
    return (
        bool((made == 2).all()),
        grad,
        contiguous and not small.any() and get(t.a.echo.remote(transposed)).stride() == (1, 3),
        get(t.a.echo.remote(torch.ones(2) * 2)).tolist(),
        get(t.a.echo.remote(torch.nn.Parameter(small))).requires_grad,
        not big.any()
        and get(t.a.echo.remote(torch.ones(2, dtype=torch.bfloat16))).dtype == torch.bfloat16,
    )


@program([2.0 * BIG, 2.0, True], torch=True)
def tensors_in_graphs(t):
    import torch

    with InputNode() as inp:
        x = t.a.echo.bind(inp)
        dag = MultiOutputNode([t.a.tensor.bind(x), t.a.same.bind(x, x)])
    (value, *_), same = once(dag, torch.zeros(BIG))
    return [float(value.sum()), float(value[0]), same]


# Graphs


@program("hello")
def hello(t):
    with InputNode() as inp:
        dag = t.a.echo.bind(inp)
    return once(dag, "hello")


@program([3, 4, 5])
def a_chain_there_and_back(t):
    with InputNode() as inp:
        x = t.a.add.bind(t.c.add.bind(t.b.add.bind(t.a.add.bind(inp, 1), 1)), 1)
    with x.compile() as graph:
        return [get(graph.execute(i)) for i in range(3)]


@program([1, 2, 3, 6, 1])
def fan_out_and_in(t):
    with InputNode() as inp:
        x, y, z = t.a.add.bind(inp), t.b.add.bind(inp, 1), t.c.add.bind(inp, 2)
        dag = MultiOutputNode([x, y, z, t.a.add.bind(x, y, z=z), x])
    return once(dag, 1)


@program([(1, "k", 2), [1]])
def parts_of_the_input(t):
    with InputNode() as inp:
        packed = t.a.pack.bind(inp[0], inp.name, inp[1])
        dag = MultiOutputNode([t.b.echo.bind(packed), t.c.pack.bind(inp[0])])
    with dag.compile() as graph:
        first, second = get(graph.execute(1, 2, name="k"))
    return [first[0], list(second[0])]


@program(((1, [2, {"k": 1}], (3, 1)), {"named": [1, 1]}))
def nodes_inside_containers(t):
    with InputNode() as inp:
        x = t.a.echo.bind(inp)
        dag = t.b.pack.bind(x, [2, {"k": x}], Pair(3, x), named=[inp, x])
    return once(dag, 1)


@program([["c", 0], ["c", 1], ["c"]])
def constants_are_fresh_in_each_execution(t):
    constant = ["c"]
    with InputNode() as inp:
        dag = t.a.append.bind(constant, inp)
    with dag.compile() as graph:
        return [*(list(get(graph.execute(i))) for i in range(2)), constant]


class Held:
    def __init__(self, items: Any) -> None:
        self.items = items

    def __repr__(self) -> str:
        return f"Held({self.items!r})"


@dataclass
class Fielded:
    x: Any
    items: Any = None


@program([True, True, True])
def constants_that_methods_change(t):
    node = t.a.echo
    with InputNode() as inp:
        dag = t.b.change.bind(
            inp,
            [1],
            [np.zeros(3), [2]],
            {"k": {1}},
            np.zeros(4),
            np.zeros(BIG),
            {1},
            bytearray(b"abc"),
            Held([1, np.zeros(3)]),
            Fielded(node.bind(inp), [1]),
            [np.ones(2), node.bind(inp), Held([])],
            named=[3],
            held=Held([Held([])]),
        )
    with dag.compile() as graph:
        first, *later = (get(graph.execute(5)) for _ in range(3))
    return [*(one == first for one in later), get(dag.execute(5)) == first]


@program([True, True])
def constants_that_nobody_can_change_are_one_object(t):
    constants = "x" * 1000, b"x" * 100_000, 10**30, (1, ("a", 2.5)), frozenset({10**20}), t.b
    with InputNode() as inp:
        # Also beside one that can be changed, and inside of it.
        dag = MultiOutputNode(
            [
                t.a.identity.bind(*constants, node := t.a.echo.bind(inp)),
                t.a.identity.bind(*constants, [], node),
            ]
        )
    with dag.compile() as graph:
        (first, out_of_band), *later = (get(graph.execute(5)) for _ in range(3))
    count = len(constants)
    return [
        all(one[:count] == first[:count] for one, _ in later),
        all(other[:count] == out_of_band[:count] for _, other in later),
    ]


@program(["Fielded(x=5, items=[5, 'c'])"] * 3)
def results_in_a_dataclass(t):
    with InputNode() as inp:
        dag = MultiOutputNode(Fielded(t.a.echo.bind(inp), [inp, "c"]))
    with dag.compile() as graph:
        return [repr(get(graph.execute(5))) for _ in range(2)] + [repr(get(dag.execute(5)))]


@program([True, False])
def constants_shared_between_arguments(t):
    constant = ["c"]
    with InputNode() as inp:
        shared = t.a.pack.bind(inp, constant, constant)
        dag = MultiOutputNode([t.a.alike.bind(shared), t.a.same.bind(constant, inp)])
    return once(dag, 1)


@program(["SerializationError", 1])
def an_unsendable_constant(t):
    actor = t.new()
    with InputNode() as inp:
        bad = actor.pack.bind(inp, Unsendable())
    with InputNode() as inp:
        good = actor.echo.bind(inp)
    return [_error_of(bad.compile), once(good, 1)]


@program([7, [7], 7, [7], (7, [7])])
def tasks_with_several_results(t):
    with InputNode() as inp:
        one, two = t.a.split.bind(inp)
        _, three = t.a.split.bind(one)
        dag = MultiOutputNode(
            [one, t.b.echo.bind(two), t.a.echo.bind(one), three, t.c.echo.bind([one, two])]
        )
    *values, last = once(dag, 7)
    return [*values, tuple(last)]


@program(raises=(TaskError, ValueError), match=r"num_returns=2 .* returned a tuple of 3")
def tasks_with_another_number_of_results(t):
    with InputNode() as inp:
        one, _two = t.a.several.options(num_returns=2).bind(inp)
        dag = t.b.echo.bind(one)
    once(dag, 3)


@program([True, [1, "x"]])
def edges_within_an_actor_share_the_object(t):
    with InputNode() as inp:
        x = t.a.echo.bind(inp)
        y = t.a.append.bind(x, "x")
        dag = MultiOutputNode([t.a.same.bind(x, y), t.b.echo.bind(y)])
    return once(dag, [1])


@program([[(0, "a"), (0, "b"), (1, "a"), (1, "b")]])
def tasks_of_an_actor_run_in_bind_order(t):
    actor = t.new()
    with InputNode() as inp:
        first = actor.note.bind([inp, "a"])
        dag = MultiOutputNode([first, actor.note.bind([inp, "b"])])
    with dag.compile() as graph:
        for i in range(2):
            get(graph.execute(i))
    return [[tuple(x) for x in get(actor.noted.remote())]]


@program([0, (True, "Stage#2.fail_if"), 2])
def an_error_in_one_execution(t):
    with InputNode() as inp:
        dag = t.c.echo.bind(t.b.fail_if.bind(t.a.echo.bind(inp), 1))
    with dag.compile() as graph:
        first, second, third = [graph.execute(i) for i in range(3)]
        with pytest.raises(KeyError) as caught:
            get(second)
        error: Any = caught.value
        return [get(first), (isinstance(error, TaskError), error.node), get(third)]


@program([1, "ValueError", "ValueError", 2])
def an_error_in_one_branch(t):
    with InputNode() as inp:
        failed = t.b.fail.bind(inp)
        dag = MultiOutputNode(
            [t.a.echo.bind(inp), failed, t.c.pack.bind([failed]), t.c.add.bind(inp, 1)]
        )
    with dag.compile(fail_fast=False) as graph:
        refs = graph.execute(1)
        return [_result(ref) for ref in refs]


@program(["ValueError"] * 4)
def an_execution_fails_as_one(t):
    with InputNode() as inp:
        before = t.a.echo.bind(inp)
        failed = t.b.fail.bind(before)
        after = t.c.pack.bind([failed])
        dag = MultiOutputNode([before, failed, after, t.c.add.bind(after, 1)])
    with dag.compile() as graph:
        refs = graph.execute(1)
        return [_result(ref) for ref in refs]


@program(["ValueError", "ValueError"])
def an_effect_that_fails_fails_its_execution(t):
    with InputNode() as inp:
        first = t.a.echo.bind(inp)
        dag = MultiOutputNode([first], effects=[t.b.fail.bind(first)])
    with dag.compile() as graph:
        (ref,) = graph.execute(1)
        return [_result(ref.parts()[0]), _result(ref)]


def _result(ref: Any) -> Any:
    try:
        return get(ref)
    except ValueError:
        return "ValueError"


@program(["SerializationError", [], 5])
def an_unsendable_input(t):
    actor = t.new()
    with InputNode() as inp:
        dag = MultiOutputNode([actor.note.bind(inp[0]), t.b.echo.bind(inp[1])])
    with dag.compile() as graph:
        failed = _error_of(lambda: graph.execute(1, Unsendable()))
        return [failed, get(actor.noted.remote()), get(graph.execute(2, 5))[1]]


@program([True, True, 1])
def an_unsendable_result_in_a_graph(t):
    with InputNode() as inp:
        direct = t.a.unsendable.bind(inp)
    with InputNode() as inp:
        through = t.b.echo.bind(t.a.unsendable.bind(inp))
    with InputNode() as inp:
        fine = t.a.echo.bind(inp)
    return [*(_serialization_task_error(dag) for dag in (direct, through)), once(fine, 1)]


@program([True, False])
def unreadable_values_in_a_graph(t):
    with InputNode() as inp:
        inner = t.b.echo.bind(t.a.unreadable.bind(inp))
    with InputNode() as inp:
        outer = t.a.unreadable.bind(inp)
    return [_serialization_task_error(dag) for dag in (inner, outer)]


def _serialization_task_error(dag: Any) -> bool:
    with dag.compile() as graph:
        ref = graph.execute(1)
        with pytest.raises(SerializationError) as caught:
            get(ref)
        with pytest.raises(SerializationError):
            get(ref)
        return isinstance(caught.value, TaskError)


@program(raises=(TaskError, SerializationError))
def an_unreadable_input(t):
    with InputNode() as inp:
        dag = t.a.echo.bind(inp)
    once(dag, Unreadable())


@program(["GraphTornDownError", "GraphTornDownError", "GraphTornDownError", True, 1, 2])
def teardown(t):
    with InputNode() as inp:
        graph = t.a.echo.bind(inp).compile()
    ref = graph.execute(1)
    get(ref)
    graph.teardown()
    graph.teardown()
    uses = [
        lambda: graph.execute(2),
        lambda: graph.try_execute(2),
        lambda: asyncio.run(graph.execute_async(2)),
    ]
    return [*(_error_of(use) for use in uses), graph.is_teardown, get(ref), get(t.a.echo.remote(2))]


@program(raises=GraphTornDownError, match="mine has been torn down")
def use_after_the_with_block(t):
    with InputNode() as inp, t.a.echo.bind(inp).compile(name="mine") as graph:
        pass
    graph.execute(1)


@program(["ArgumentsError"] * 6)
def wrong_arguments(t):
    with InputNode() as inp:
        whole = t.a.echo.bind(inp).compile()
    with InputNode() as inp:
        parts = t.a.pack.bind(inp[0], inp.k).compile()
    uses = [
        lambda: whole.execute(),
        lambda: whole.execute(1, 2),
        lambda: whole.execute(1, k=2),
        lambda: parts.execute(1, 2, k=3),
        lambda: parts.execute(1),
        lambda: parts.execute(1, k=2, j=3),
    ]
    with whole, parts:
        return [_error_of(use) for use in uses]


@program(["GraphError", "GraphError", "GraphError", "TypeError", "GraphError"])
def graphs_that_are_not_valid(t):
    with InputNode() as inp:
        used = t.a.echo.bind(inp)
        t.b.echo.bind(used)
    with InputNode() as other:
        good = t.a.echo.bind(other)
    uses = [
        InputNode().compile,
        used.compile,
        lambda: MultiOutputNode([t.a.echo.bind(other), t.a.echo.bind(InputNode())]).compile(),
        lambda: good.compile(colour="red"),
        lambda: good.compile(depth=0),
    ]
    return [_error_of(use) for use in uses]


@program([False, [1, [2]], ([0, 1], []), 3])
def refs_of_graphs(t):
    with InputNode() as inp:
        dag = MultiOutputNode([t.a.echo.bind(inp), t.b.pack.bind(inp)])
    with dag.compile() as graph:
        one, two = graph.execute(1)
        assert isinstance(one, conveyor.GraphRef)
        both = conveyor.wait([one, two], num_returns=2, timeout=WAIT)
        numbers = tuple([[one, two].index(r) for r in some] for some in both)
        eager = t.c.add.remote(one, y=graph.execute(2)[0])
        return [get(two) is get(two), [get(one), [2]], numbers, get(eager)]


@program([0, 1, 2, 3, [0, 1, 2, 3], "KeyError"])
def graphs_in_asyncio(t):
    with InputNode() as inp:
        dag = t.b.fail_if.bind(t.a.echo.bind(inp), 99)

    async def main(graph):
        one_by_one = [await (await graph.execute_async(i)) for i in range(4)]
        refs = [await graph.execute_async(i) for i in range(4)]
        together = list(await asyncio.gather(*refs))
        try:
            await (await graph.execute_async(99))
        except KeyError:
            return [*one_by_one, together, "KeyError"]

    with dag.compile() as graph:
        return asyncio.run(main(graph))


@program([1, 2, 6])
def async_methods_in_graphs(t):
    with InputNode() as inp:
        x = t.m.nap.bind(inp)
        dag = MultiOutputNode([x, t.a.add.bind(x, 1), t.m.echo.bind(t.a.add.bind(x, 5))])
    return once(dag, 1)


@program(raises=(TaskError, ValueError), match="no 1")
def an_async_error_in_a_graph(t):
    with InputNode() as inp:
        dag = t.a.echo.bind(t.m.fail.bind(inp))
    once(dag, 1)


@program([[2, 3], [2, 3], 12])
def eager_execution_of_a_graph(t):
    with InputNode() as inp:
        dag = MultiOutputNode([t.b.add.bind(t.a.echo.bind(inp), 1), t.a.add.bind(inp, 2)])
    with InputNode() as inp:
        nested = t.a.add.bind(t.c.add.bind(inp[0], inp.k), 1)
    return [get(dag.execute(1)), once(dag, 1), get(nested.execute(1, k=10))]


@program([[0, 10, 1, 11], 5])
def two_graphs_and_calls_on_the_same_actors(t):
    with InputNode() as inp:
        one = t.b.echo.bind(t.a.echo.bind(inp)).compile()
    with InputNode() as inp:
        two = t.a.add.bind(t.b.echo.bind(inp), 10).compile()
    with one, two:
        refs = [graph.execute(i) for i in range(2) for graph in (one, two)]
        eager = t.a.echo.remote(5)
        return [get(refs), get(eager)]


@program([0, 1, 2, 3])
def many_executions_on_their_way(t):
    with InputNode() as inp:
        dag = t.b.echo.bind(t.a.echo.bind(inp))
    with dag.compile(depth=2) as graph:
        refs = [graph.execute(i) for i in range(500)]
        assert get(refs) == list(range(500))
        return get(refs[:4])


@program([100, 100])
def executions_from_several_threads(t):
    with InputNode() as inp:
        dag = t.b.echo.bind(t.a.echo.bind(inp))
    right = []
    with dag.compile() as graph:

        def work(k):
            right.append(sum(get(graph.execute((k, i))) == (k, i) for i in range(100)))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return right


@program(["ActorDiedError", 1])
def an_actor_of_a_graph_is_killed(t):
    actor = t.new()
    with InputNode() as inp:
        dag = t.a.echo.bind(actor.echo.bind(inp))
    with dag.compile() as graph:
        get(graph.execute(1))
        conveyor.kill(actor)
        return [_error_of(lambda: get(graph.execute(1))), get(t.a.echo.remote(1))]


@program(["ActorDiedError", "ActorDiedError", True, False])
def an_actor_exits_in_a_graph(t):
    actor = t.new()
    with InputNode() as inp:
        dag = t.a.echo.bind(actor.leave.bind(inp))
    graph = dag.compile()
    ref = graph.execute(3)
    with pytest.raises(ActorDiedError) as caught:
        get(ref)
    found = ["ActorDiedError", _error_of(lambda: get(graph.execute(3)))]
    # On a busy machine it may not be known yet.
    found += [caught.value.exit_code in (None, 3), graph.is_teardown]
    graph.teardown()
    return found


@program("ActorDiedError")
def teardown_that_kills(t):
    actor = t.new()
    with InputNode() as inp:
        graph = actor.echo.bind(inp).compile()
    graph.teardown(kill_actors=True)
    return _error_of(lambda: get(actor.echo.remote(1)))


@program(["still", "ActorDiedError", "ActorDiedError"])
def teardown_that_kills_what_an_earlier_one_has_left(t):
    actor = t.new()
    with InputNode() as inp:
        graph = actor.echo.bind(inp).compile()
    graph.teardown()
    found = [get(actor.echo.remote("still"))]
    for _ in range(2):
        graph.teardown(kill_actors=True)
        found.append(_error_of(lambda: get(actor.echo.remote(1))))
    return found


@program(raises=ActorDiedError)
def compiling_with_a_dead_actor(t):
    actor = t.new()
    conveyor.kill(actor)
    with InputNode() as inp:
        actor.echo.bind(inp).compile()


@program([True] * 3)
def a_ref_says_that_it_is_done(t):
    with InputNode() as inp:
        graph = t.a.echo.bind(inp).compile()
    refs = [t.a.echo.remote(1), graph.execute(2), t.a.fail.remote("x")]
    conveyor.wait(refs, num_returns=3, timeout=WAIT)
    return ["done>" in repr(ref) for ref in refs if ref.done()]


@program([5, 6, 7, True, [(8, 9), {}], 10])
def methods_of_actors_as_values(t):
    method, two = t.a.echo, t.a.pack.options(num_returns=2)
    return [
        get(t.b.__ray_call__.remote(lambda _, m, x: get(m.remote(x)), method, 5)),
        get(t.b.__ray_call__.remote(lambda _, ms, x: get(ms["m"].remote(x)), {"m": method}, 6)),
        get(t.b.__ray_call__.remote(lambda _: get(method.remote(7)))),  # in a closure
        get(t.b.echo.remote(method)) == method and hash(method) == hash(t.a.echo),
        get(t.b.__ray_call__.remote(lambda _, m: get(m.remote(8, 9)), two)),
        get(copy.copy(copy.deepcopy(method)).remote(10)),
    ]


@program([5, 5])
def a_graph_keeps_its_actors(t):
    def make():
        with InputNode() as inp:
            return t.new().echo.bind(inp).compile()

    with make() as graph:
        return [get(graph.execute(5)), get(graph.execute(5))]


@program(True)
def a_plan_can_be_read(t):
    with InputNode() as inp:
        dag = MultiOutputNode([t.b.echo.bind(t.a.echo.bind(inp)), t.c.add.bind(inp, 1)])
    with dag.compile(name="plan") as graph:
        text = graph.explain()
        return all(name in text for name in ("Stage.echo", "Stage#2.echo", "Stage#3.add"))


@program([3, (1, 2)])
def timeouts_of_executions(t):
    with InputNode() as inp:
        plain = t.a.add.bind(inp, 1).compile()
    with InputNode() as inp:
        named = t.a.pack.bind(inp[0], inp.timeout).compile()
    with plain, named:
        return [get(plain.execute(2, timeout=WAIT)), get(named.execute(1, timeout=2))[0]]


# Running them

_seen: dict[str, Any] = {}
# With CONVEYOR_ENGINE=ray that one is compared; see `make test-ray`.
_PROCESSES = "ray" if os.environ.get("CONVEYOR_ENGINE") == "ray" else "local"


@pytest.fixture(scope="module", params=[_PROCESSES, "inline"])
def tools(request, leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine=request.param)
        made = Tools(request.param)
        yield made
        del made.a, made.b, made.c, made.m
        conveyor.shutdown()


@pytest.mark.parametrize(("run", "expected", "raises", "match"), PROGRAMS)
def test_same(tools, run, expected, raises, match):
    if raises is None:
        value = run(tools)
        assert value == expected
        return
    kinds = raises if isinstance(raises, tuple) else (raises,)
    with pytest.raises(kinds[0]) as caught:
        run(tools)
    error = caught.value
    assert all(isinstance(error, kind) for kind in kinds), type(error).__mro__
    assert re.search(match, str(error)), str(error)
    # Not only an error of these classes: the very same.
    kind = [owner.__name__ for owner in type(error).__mro__]
    where = [getattr(error, name, None) for name in ("actor", "node")]
    if isinstance(error, TaskError):
        kind += where
    assert _seen.setdefault(run.__name__, kind) == kind
