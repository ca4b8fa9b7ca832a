"""What an actor asks the driver for, while its signal handlers run and other requests are under way."""

import contextlib
import itertools
import os
import signal
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.dag import InputNode
from conveyor.driver.requests import Dispatcher
from conveyor.runtime import context
from conveyor.worker.messages import Connect, Create, Deploy, Find

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("local")


class Late(Exception):
    """No OSError, as TimeoutError is."""


@conveyor.remote
class Plain:
    def echo(self, x):
        return x


@conveyor.remote
class Asker:
    """``on_signal`` says what its handler of SIGUSR1 does."""

    def __init__(self):
        self.errors = []

    def pid(self):
        return os.getpid()

    def files(self):
        return sorted(os.readlink(entry) for entry in self._entries())

    def _entries(self):
        for entry in list(Path("/proc/self/fd").iterdir()):
            if entry.exists():
                yield entry

    def raise_on_signal(self, kind):
        def handler(*_):
            raise kind("too late")

        signal.signal(signal.SIGUSR1, handler)

    def ask_on_signal(self, what, other, told):
        def handler(*_):
            self.ask(what, other)
            Path(told).touch()

        signal.signal(signal.SIGUSR1, handler)

    def ask(self, what, other):
        if what == "find":
            return conveyor.get_actor("found")._id.name
        if what == "call":
            return conveyor.get(other.echo.remote("called"), timeout=WAIT)
        if what == "create":
            return conveyor.get(Plain.options(name="made").remote().echo.remote("made"))
        with InputNode() as inp:
            graph = other.echo.bind(inp).compile()
        value = conveyor.get(graph.execute("executed"), timeout=WAIT)
        graph.teardown()
        return value

    def interrupted(self, what, other, kind):
        """What comes out of ``ask``, which a handler breaks off, and of requests after that."""
        with contextlib.suppress(kind):
            self.ask(what, other)
            return "nothing was raised"
        return conveyor.get_actor("other")._id.name


_REQUESTS = {"find": Find, "call": Connect, "create": Create, "compile": Deploy}
_ANSWERS = {"find": "found", "call": "called", "create": "made", "compile": "executed"}


class Held:
    """The first request of one kind is answered, and its answer kept back until ``go`` is set."""

    def __init__(self, answer):
        self.answer = answer
        self.requested, self.go = threading.Event(), threading.Event()

    def __call__(self, dispatcher, caller, request):
        if self.requested.is_set():
            return self.answer(dispatcher, caller, request)
        answer = self.answer(dispatcher, caller, request)
        self.requested.set()
        assert self.go.wait(WAIT)
        return answer


@pytest.fixture
def held(monkeypatch):
    """``held(what)``: keeps back the answer to the request that is needed for that."""
    made = []

    def hold(what):
        kind = _REQUESTS[what]
        made.append(Held(Dispatcher.answers[kind]))
        monkeypatch.setitem(Dispatcher.answers, kind, made[-1])
        return made[-1]

    yield hold
    for one in made:
        one.go.set()


def _actors():
    asker, other = Asker.remote(), Plain.remote()
    named = [Plain.options(name=name).remote() for name in ("found", "other")]
    get([asker.pid.remote(), *[a.echo.remote(0) for a in (other, *named)]])
    return asker, other, named


@pytest.mark.parametrize("kind", [Late, TimeoutError])
@pytest.mark.parametrize("what", _REQUESTS)
def test_a_handler_that_raises_takes_no_answer_from_a_later_request(held, wait_until, what, kind):
    asker, other, _named = _actors()
    get(asker.raise_on_signal.remote(kind))
    pid, before = get(asker.pid.remote()), get(asker.files.remote())
    slow = held(what)
    result = asker.interrupted.remote(what, other, kind)
    assert slow.requested.wait(WAIT)
    os.kill(pid, signal.SIGUSR1)
    # The other request is answered although the first one's answer is still to come.
    assert get(result) == "other"
    slow.go.set()
    assert get(asker.ask.remote("find", other)) == "found"
    # What the first one has brought about is taken back, and its descriptors are closed.
    driver = context.current()
    wait_until(lambda: len(driver.deployer) == 0, what="the graph to be taken down")
    if what == "create":
        wait_until(lambda: not _is_there("made"), what="the actor to be ended")
    wait_until(lambda: get(asker.files.remote()) == before, what="the descriptors to be closed")
    if what != "create":  # whose name may not be free yet
        assert get(asker.ask.remote(what, other)) == _ANSWERS[what]


def _is_there(name):
    try:
        conveyor.get_actor(name)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("what", "nested"),
    # Not two actors of one name.
    [pair for pair in itertools.product(_REQUESTS, repeat=2) if pair != ("create", "create")],
)
def test_a_handler_may_ask_while_its_own_thread_waits_for_an_answer(
    held, wait_until, tmp_path, what, nested
):
    asker, other, _named = _actors()
    told = tmp_path / "told"
    get(asker.ask_on_signal.remote(nested, other, str(told)))
    pid = get(asker.pid.remote())
    slow = held(what)
    result = asker.ask.remote(what, other)
    assert slow.requested.wait(WAIT)
    os.kill(pid, signal.SIGUSR1)
    wait_until(told.exists, what="the handler to have its answer")
    assert not slow.go.is_set()
    slow.go.set()
    assert get(result) == _ANSWERS[what]
    assert get(asker.ask.remote(nested if nested != "create" else "find", other)) != ""


def test_answers_come_in_any_order(held):
    asker = Asker.options(max_concurrency=2).remote()
    other = Plain.remote()
    named = [Plain.options(name=name).remote() for name in ("found", "other")]
    get([a.echo.remote(0) for a in (other, *named)])
    slow = held("find")
    first = asker.ask.remote("find", other)
    assert slow.requested.wait(WAIT)
    assert get(asker.ask.remote("call", other)) == "called"
    slow.go.set()
    assert get(first) == "found"
