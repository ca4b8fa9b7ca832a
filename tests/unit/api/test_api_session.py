"""The verbs, and the start and end of a session, over engines made up here."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

import conveyor
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime import context
from conveyor.runtime.protocol import ActorId, MethodInfo


class FakeRuntime:
    def __init__(self, engine: str = "", **options: Any) -> None:
        self.engine = engine
        self.options = options
        self.log: list[Any] = []
        self.fails = False
        self.ending = False

    def create_actor(self, spec):
        return ActorId(0, spec.name or spec.cls.__name__)

    def find_actor(self, name):
        if name != "teller":
            raise ValueError(f"there is no actor named {name!r}")
        return ActorId(5, "teller"), "Teller", {"tell": MethodInfo("tell", 2, False, False, None)}

    def call(self, *args):
        self.log.append(args)
        return "ref"

    def get(self, refs, timeout):
        self.log.append(("get", refs, timeout))
        return "value"

    def put(self, value, transport=None, snapshot=False):
        return ("ref", value)

    def wait(self, refs, num_returns, timeout):
        self.log.append(("wait", refs, num_returns, timeout))
        return refs[:num_returns], refs[num_returns:]

    def kill(self, actor, no_restart, graceful):
        self.log.append(("kill", actor, no_restart, graceful))

    def retain(self, actor): ...

    def release(self, actor): ...

    def shutdown(self):
        self.log.append("shutdown")
        context.install(None)
        if self.fails:
            raise RuntimeError("cannot")


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    before = context.running()
    context.install(None)
    yield
    context.install(before)


@pytest.fixture
def runtime() -> FakeRuntime:
    fake = FakeRuntime()
    context.install(fake)
    return fake


@pytest.fixture(autouse=True)
def engines(monkeypatch) -> list[FakeRuntime]:
    started: list[FakeRuntime] = []
    for name in ("local", "inline"):
        module = types.ModuleType(f"conveyor.engines.{name}.engine")

        def start(_name: str = name, **options: Any) -> FakeRuntime:
            if "broken" in options:
                raise TypeError("start() got an unexpected keyword argument 'broken'")
            started.append(FakeRuntime(_name, **options))
            return started[-1]

        module.start = start
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return started


# Verbs


def test_get(runtime):
    assert conveyor.get("ref") == "value"
    assert conveyor.get(["a", "b"], timeout=3) == "value"
    assert runtime.log == [("get", "ref", None), ("get", ["a", "b"], 3)]


def test_put(runtime):
    assert conveyor.put(3) == ("ref", 3)


def test_wait(runtime):
    assert conveyor.wait(["a", "b"]) == (["a"], ["b"])
    assert conveyor.wait(("a", "b"), num_returns=2, timeout=0.5) == (["a", "b"], [])
    assert runtime.log == [("wait", ["a", "b"], 1, None), ("wait", ["a", "b"], 2, 0.5)]


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        (("ref",), TypeError, "takes a list of references, not str"),
        ((object(),), TypeError, "takes a list of references, not object"),
        (([],), ValueError, "from 1 to the number of references, which is 0"),
    ],
)
def test_wait_for_something_else(runtime, args, error, text):
    with pytest.raises(error, match=text):
        conveyor.wait(*args)


@pytest.mark.parametrize(
    ("num_returns", "error"),
    [(0, ValueError), (3, ValueError), ("1", TypeError), (True, TypeError)],
)
def test_wait_for_a_wrong_number(runtime, num_returns, error):
    with pytest.raises(error, match="num_returns must be"):
        conveyor.wait(["a", "b"], num_returns=num_returns)


def test_get_actor_and_kill(runtime):
    actor = conveyor.get_actor("teller")
    assert repr(actor) == "Actor(teller, 5)"
    actor.tell.remote(1, x=2)
    assert runtime.log.pop() == (ActorId(5, "teller"), "tell", (1,), {"x": 2}, 2)
    conveyor.kill(actor, no_restart=True)
    conveyor.kill(actor, no_restart=False, graceful=True)
    teller = ActorId(5, "teller")
    assert runtime.log == [("kill", teller, True, False), ("kill", teller, False, True)]


def test_an_actor_that_is_not_there(runtime):
    with pytest.raises(ValueError, match="no actor named 'nobody'"):
        conveyor.get_actor("nobody")
    with pytest.raises(TypeError, match="is a str, not int"):
        conveyor.get_actor(3)


def test_kill_something_else(runtime):
    with pytest.raises(TypeError, match="takes an actor's handle, not str"):
        conveyor.kill("teller")
    assert runtime.log == []


# Sessions


def test_a_session_starts_by_itself(engines):
    assert not conveyor.is_initialized()
    assert conveyor.put(1) == ("ref", 1)
    assert conveyor.is_initialized()
    assert [(e.engine, e.options) for e in engines] == [("local", {})]
    conveyor.get("ref")
    assert len(engines) == 1


def test_init_picks_an_engine(engines):
    conveyor.init("inline", size=3)
    assert context.running() is engines[0]
    assert (engines[0].engine, engines[0].options) == ("inline", {"size": 3})


def test_init_takes_what_ray_programs_pass(engines):
    conveyor.init(
        address="auto", num_cpus=4, logging_level=10, log_to_driver=False, include_dashboard=False
    )
    assert (engines[0].engine, engines[0].options) == ("local", {"log_to_driver": False})
    conveyor.shutdown()
    conveyor.init(log_to_driver=True)
    assert engines[1].options == {}


def test_local_mode_is_the_inline_engine(engines, monkeypatch):
    conveyor.init(local_mode=False)
    assert (engines[0].engine, engines[0].options) == ("local", {})
    conveyor.shutdown()
    conveyor.init(local_mode=True)
    assert (engines[1].engine, engines[1].options) == ("inline", {})
    conveyor.shutdown()
    conveyor.init("inline", local_mode=False)
    assert engines[2].engine == "inline"
    conveyor.shutdown()
    with pytest.raises(
        ValueError, match="local_mode=True is engine=\"inline\", and not engine='local'"
    ):
        conveyor.init("local", local_mode=True)
    monkeypatch.setenv("CONVEYOR_ENGINE", "inline")
    conveyor.init(local_mode=False)  # the default, which that says
    assert engines[3].engine == "inline"


def test_a_second_init(engines):
    conveyor.init()
    with pytest.raises(RuntimeStateError, match="running already"):
        conveyor.init()
    with pytest.raises(RuntimeStateError, match="running already"):
        conveyor.init("inline")
    conveyor.init(ignore_reinit_error=True)
    assert len(engines) == 1
    conveyor.shutdown()
    conveyor.init("inline")
    assert [e.engine for e in engines] == ["local", "inline"]


def test_an_engine_that_does_not_exist(engines):
    with pytest.raises(ValueError, match="unknown engine 'cluster'; known are local, inline"):
        conveyor.init("cluster")


def test_an_engine_that_does_not_start(engines):
    with pytest.raises(TypeError, match="broken"):
        conveyor.init(broken=1)
    assert not conveyor.is_initialized()
    conveyor.init()


def test_only_one_session_starts_whoever_asks(engines):
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        try:
            conveyor.init()
        except RuntimeStateError:
            conveyor.put(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(engines) == 1


def test_a_session_ends_with_its_block(engines):
    with conveyor.init() as session:
        running = context.running()
        assert repr(session) == "<conveyor session, running>"
    assert running.log == ["shutdown"]
    assert not conveyor.is_initialized()
    assert repr(session) == "<conveyor session, ended>"


def test_a_block_that_raises_ends_its_session(engines):
    with pytest.raises(KeyError), conveyor.init():
        raise KeyError
    assert not conveyor.is_initialized()


def test_a_block_ends_no_session_that_is_not_its_own(engines):
    with conveyor.init():
        conveyor.shutdown()
        conveyor.init()
        other = context.running()
    assert context.running() is other
    with conveyor.init(ignore_reinit_error=True):
        assert context.running() is other
    assert not conveyor.is_initialized()


def test_shutdown(runtime):
    conveyor.shutdown()
    conveyor.shutdown()
    assert runtime.log == ["shutdown"]
    assert not conveyor.is_initialized()


def test_a_shutdown_that_fails_still_ends_the_session(runtime):
    runtime.fails = True
    with pytest.raises(RuntimeError, match="cannot"):
        conveyor.shutdown()
    assert not conveyor.is_initialized()


def test_public_names():
    assert all(hasattr(conveyor, name) for name in conveyor.__all__)
