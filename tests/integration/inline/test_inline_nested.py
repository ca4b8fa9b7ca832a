"""What a signal handler or a finalizer does between any two lines of the inline engine: calls, or Ctrl-C."""

import gc
import linecache
import sys
import weakref

import pytest
from integration_helpers import get

import conveyor
from conveyor.dag import InputNode
from conveyor.runtime import context


@conveyor.remote
class Echo:
    def __init__(self, behind=None):
        self.behind = behind

    def echo(self, x):
        return x if self.behind is None else conveyor.get(self.behind.echo.remote(x))


@pytest.fixture
def inline():
    conveyor.init(engine="inline")
    yield
    conveyor.shutdown()


class AtLine:
    """Runs ``what`` before the ``number``-th line that the engine executes."""

    def __init__(self, number, what):
        self.left, self.what = number, what

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, arg):
        if "/engines/inline/" not in frame.f_code.co_filename:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # Where a `try` begins, and a `with` ends, no handler runs: what is raised there would not be in it.
        if event == "line" and line != "try:" and not line.startswith("with "):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.what()
        return self._trace


def every_line(work, what):
    """Do ``work`` again and again, with ``what`` at another line each time, until all had their turn."""
    number = 0
    while True:
        number += 1
        with AtLine(number, what) as at:
            yield number, work
        if at.left > 0:
            assert number > 50
            return
        assert number < 2000


def made(kind):
    if kind == "graph":
        with InputNode() as x:
            return Echo.remote(), Echo.remote().echo.bind(x).compile().execute
    actor = {
        "call": lambda: Echo.remote(),
        "calls in a row": lambda: Echo.remote(Echo.remote(Echo.remote())),
        "two at a time": lambda: Echo.options(max_concurrency=2).remote(),
    }[kind]()
    return actor, actor.echo.remote


KINDS = ["call", "calls in a row", "two at a time", "graph"]


@pytest.mark.parametrize("kind", KINDS)
def test_another_actor_is_called_at_any_line(inline, kind):
    _, work = made(kind)
    other = Echo.remote()
    seen = []
    for number, do in every_line(work, lambda: seen.append(get(other.echo.remote("other")))):
        assert get(do(number)) == number
    assert set(seen) == {"other"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_actor_is_called_at_any_line(inline, kind):
    actor, work = made(kind)
    refs = []
    for number, do in every_line(work, lambda: refs.append(actor.echo.remote("again"))):
        assert get(do(number)) == number
    assert set(get(refs)) == {"again"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "graph"])
def test_ctrl_c_at_any_line_leaves_all_as_it_was(inline, caplog, kind):
    actor, work = made(kind)

    def interrupt():
        raise KeyboardInterrupt

    for number, do in every_line(work, interrupt):
        try:
            assert get(do(number)) == number
        except KeyboardInterrupt:
            sys.settrace(None)
            assert get(do("next")) == "next"
            assert get(actor.echo.remote("own")) == "own"
    del actor, work, do
    gc.collect()
    if kind == "call":
        assert not context.running()._actors
    assert "nobody has got" not in caplog.text


@pytest.mark.parametrize("sent", ["class", "function"])
def test_definitions_are_let_go_of(inline, sent):
    actor, left = Echo.remote(), []
    for _ in range(50):
        if sent == "class":

            class Local:
                pass

            got = type(get(actor.echo.remote(Local())))
            assert got is Local
            left.append(weakref.ref(Local))
            del Local, got
        else:
            function = conveyor.remote(lambda x: x)
            left.append(weakref.ref(function.__wrapped__))
            assert get(function.remote(1)) == 1
            del function
    gc.collect()
    get(actor.echo.remote(1))
    get(conveyor.remote(abs).remote(1))
    gc.collect()
    assert sum(one() is not None for one in left) <= 1
