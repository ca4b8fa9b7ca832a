"""Tracebacks that users get show their own frames, and of the library's the function that was called."""

import asyncio
import os

import pytest
from integration_helpers import WAIT, get

import conveyor
import conveyor.exceptions
from conveyor.dag import InputNode, MultiOutputNode

_OURS = os.path.dirname(conveyor.__file__) + os.sep


class Unsendable:
    def __reduce__(self):
        raise KeyError("not to be sent")


class Unreadable:
    def __reduce__(self):
        return rebuilt, ()


def rebuilt():
    raise LookupError("not to be read")


@conveyor.remote
class Actor:
    def __init__(self, fails=False):
        if fails:
            raise ValueError("no")

    def fail(self, x=0):
        raise ValueError(x)

    def echo(self, x):
        return x

    def items(self):
        yield 1
        raise ValueError("no more")

    def unreadable(self):
        return Unreadable()


@conveyor.remote
def fails():
    raise ValueError("no")


def compiled(actor, method):
    with InputNode() as inp:
        return MultiOutputNode([getattr(actor, method).bind(inp), actor.echo.bind(inp)]).compile()


async def awaited(actor):
    await actor.fail.remote()


async def iterated(actor):
    async for _ in actor.items.remote():
        pass


def after_death(actor, use):
    conveyor.kill(actor)
    return use(actor)


def torn_down(graph):
    graph.teardown()
    return graph.execute(1)


WAYS = {
    "get": lambda a: get(a.fail.remote()),
    "ref.get": lambda a: a.fail.remote().get(timeout=WAIT),
    "get of several": lambda a: get([a.echo.remote(1), a.fail.remote()]),
    "get of an execution": lambda a: get(compiled(a, "fail").execute(1)),
    "get of one of an execution": lambda a: get(compiled(a, "fail").execute(1)[1]),
    "get of what is no ref": lambda a: conveyor.get([1]),
    "get of a function": lambda a: get(fails.remote()),
    "get of a retried call": lambda a: get(a.fail.options(max_task_retries=1).remote()),
    "get after the constructor": lambda a: get(Actor.remote(True).echo.remote(1)),
    "get of an argument's": lambda a: get(a.echo.remote(a.fail.remote())),
    "get of the dead": lambda a: get(after_death(a, lambda a: a.echo.remote(1))),
    "await": lambda a: asyncio.run(awaited(a)),
    "items": lambda a: list(a.items.remote()),
    "async items": lambda a: asyncio.run(iterated(a)),
    "future": lambda a: a.fail.remote().future().result(WAIT),
    "remote": lambda a: a.echo.remote(Unsendable()),
    "remote, arguments": lambda a: a.echo.remote(),
    "remote of a function": lambda a: fails.remote(1),
    "remote of a class": lambda a: Actor.remote(Unsendable()),
    "put": lambda a: conveyor.put(Unsendable()),
    "wait": lambda a: conveyor.wait([1]),
    "execute": lambda a: compiled(a, "echo").execute(Unsendable()),
    "execute, arguments": lambda a: compiled(a, "echo").execute(),
    "execute after the end": lambda a: torn_down(compiled(a, "echo")),
}


def frames_of(error):
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame
        at = at.tb_next


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("way", WAYS)
def test_few_frames_of_the_library_and_none_in_pytest(way):
    with pytest.raises((conveyor.exceptions.ConveyorError, TypeError)) as caught:
        WAYS[way](Actor.remote())
    ours = [f for f in frames_of(caught.value) if f.f_code.co_filename.startswith(_OURS)]
    assert len(ours) <= 2, ours
    assert all(f.f_locals.get("__tracebackhide__") for f in ours), ours
    assert sum(f.f_code.co_filename == __file__ for f in frames_of(caught.value)) >= 2


@pytest.mark.usefixtures("engine")
def test_frames_of_the_users_below_the_library_stay():
    with pytest.raises((conveyor.exceptions.ConveyorError, TypeError)) as caught:
        get(Actor.remote().unreadable.remote())
    error = caught.value
    while error is not None:
        if "rebuilt" in [f.f_code.co_name for f in frames_of(error)]:
            return
        error = error.__cause__ or error.__context__
    pytest.fail("the frame that has raised is nowhere")


class NoBool(Exception):
    def __bool__(self):
        raise RuntimeError("neither")


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("nothing")


def chain(length):
    error = None
    for i in range(length):
        made = LookupError(i)
        made.__cause__, error = error, made
    return error


UNUSUAL = {
    "no truth": lambda: NoBool("it"),
    "no truth, many lines": lambda: NoBool("it\nand\nmore"),
    "no text": lambda: NoText("it"),
    "a long chain": lambda: chain(3000),
    "a chain": lambda: chain(10),
}


@conveyor.remote
class Unusual:
    def fail(self, what, cause=None):
        error = UNUSUAL[what]()
        if cause is None:
            raise error
        raise KeyError("outer") from UNUSUAL[cause]()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("what", UNUSUAL)
def test_frames_of_an_error_that_is_hard_to_print(what):
    actor = Unusual.remote()
    with pytest.raises(conveyor.exceptions.TaskError) as caught:
        get(actor.fail.remote(what))
    told = caught.value.remote_traceback
    assert "Traceback (most recent call last):\n" in told
    assert "in fail\n    raise error\n" in told
    assert "calls" + os.sep not in told
    assert type(UNUSUAL[what]()).__name__ in told
    with pytest.raises(conveyor.exceptions.TaskError) as caught:
        get(actor.fail.remote("a chain", what))
    told = caught.value.remote_traceback
    assert "in fail\n    raise KeyError" in told
    assert "KeyError: 'outer'" in told
