"""The verbs, and the start and end of a session, on the inline engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

import conveyor
from conveyor.exceptions import RuntimeStateError


@conveyor.remote
class Teller:
    def pid(self) -> int:
        return os.getpid()

    def tell(self, x: int) -> int:
        return x


@pytest.fixture(autouse=True)
def inline(monkeypatch) -> Iterator[None]:
    """Sessions that name no engine are inline ones. None is left."""
    monkeypatch.setenv("CONVEYOR_ENGINE", "inline")
    yield
    conveyor.shutdown()


def is_inline() -> bool:
    return conveyor.get(Teller.remote().pid.remote()) == os.getpid()


# Verbs


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        (("ref",), TypeError, "takes a list of references, not str"),
        ((object(),), TypeError, "takes a list of references, not object"),
    ],
)
def test_wait_for_something_else(args, error, text):
    with pytest.raises(error, match=text):
        conveyor.wait(*args)


def test_wait_for_nothing():
    assert conveyor.wait([]) == ([], [])
    assert conveyor.wait([], num_returns=3, timeout=0) == ([], [])


@pytest.mark.parametrize(
    ("num_returns", "error"),
    [(0, ValueError), (3, ValueError), ("1", TypeError), (True, TypeError)],
)
def test_wait_for_a_wrong_number(num_returns, error):
    with pytest.raises(error, match="num_returns must be"):
        conveyor.wait([conveyor.put(1), conveyor.put(2)], num_returns=num_returns)


def test_wait_takes_any_sequence():
    one, two = conveyor.put(1), conveyor.put(2)
    assert conveyor.wait((one, two), num_returns=2, timeout=0.5) == ([one, two], [])


def test_get_actor_and_kill():
    kept = Teller.options(name="teller").remote()
    actor = conveyor.get_actor("teller")
    assert repr(actor).startswith("Actor(teller, ")
    assert conveyor.get(actor.tell.remote(1)) == 1
    conveyor.kill(kept, no_restart=True)
    with pytest.raises(conveyor.exceptions.ActorDiedError):
        conveyor.get(actor.tell.remote(1))


def test_an_actor_that_is_not_there():
    with pytest.raises(ValueError, match="no actor named 'nobody'"):
        conveyor.get_actor("nobody")
    with pytest.raises(TypeError, match="is a str, not int"):
        conveyor.get_actor(3)


def test_kill_something_else():
    with pytest.raises(TypeError, match="takes an actor's handle, not str"):
        conveyor.kill("teller")


# Sessions


def test_a_session_starts_by_itself():
    assert not conveyor.is_initialized()
    ref = conveyor.put(1)
    assert conveyor.is_initialized()
    assert conveyor.get(ref) == 1


def test_init_takes_what_ray_programs_pass():
    conveyor.init(
        address="auto", num_cpus=4, logging_level=10, log_to_driver=False, include_dashboard=False
    )
    assert is_inline()


def test_local_mode_is_the_inline_engine(monkeypatch):
    conveyor.init("inline", local_mode=False)
    assert is_inline()
    conveyor.shutdown()
    conveyor.init(local_mode=False)  # the default, which the environment says
    assert is_inline()
    conveyor.shutdown()
    monkeypatch.delenv("CONVEYOR_ENGINE")
    conveyor.init(local_mode=True)
    assert is_inline()
    conveyor.shutdown()
    with pytest.raises(
        ValueError, match="local_mode=True is engine=\"inline\", and not engine='local'"
    ):
        conveyor.init("local", local_mode=True)


def test_a_second_init():
    conveyor.init()
    with pytest.raises(RuntimeStateError, match="running already"):
        conveyor.init()
    with pytest.raises(RuntimeStateError, match="running already"):
        conveyor.init("local")
    conveyor.init(ignore_reinit_error=True)


@pytest.mark.parametrize("again", [{}, {"ignore_reinit_error": True}])
@pytest.mark.parametrize("running", [False, True])
def test_an_option_that_does_not_exist(running, again):
    """It is named, whether or not there is a session, which stays as it was."""
    if running:
        conveyor.init()
    with pytest.raises(TypeError, match="the inline engine has no option 'bogus'"):
        conveyor.init("inline", bogus=1, **again)
    assert conveyor.is_initialized() is running


def test_an_engine_that_does_not_exist():
    with pytest.raises(ValueError, match="unknown engine 'cluster'; known are local, inline"):
        conveyor.init("cluster")


def test_an_engine_that_does_not_start():
    with pytest.raises(TypeError, match="broken"):
        conveyor.init(broken=1)
    assert not conveyor.is_initialized()
    conveyor.init()


def test_only_one_session_starts_whoever_asks():
    barrier, started, refs = threading.Barrier(8), [], []

    def work() -> None:
        barrier.wait()
        try:
            started.append(conveyor.init())
        except RuntimeStateError:
            refs.append(conveyor.put(1))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(started) <= 1
    assert conveyor.get(refs) == [1] * len(refs)


def test_a_session_ends_with_its_block():
    with conveyor.init() as session:
        assert repr(session) == "<conveyor session, running>"
    assert not conveyor.is_initialized()
    assert repr(session) == "<conveyor session, ended>"


def test_a_block_that_raises_ends_its_session():
    with pytest.raises(KeyError), conveyor.init():
        raise KeyError
    assert not conveyor.is_initialized()


def test_a_block_ends_no_session_that_is_not_its_own():
    with conveyor.init():
        conveyor.shutdown()
        conveyor.init()
        ref = conveyor.put(1)
    assert conveyor.get(ref) == 1
    with conveyor.init(ignore_reinit_error=True):
        assert conveyor.get(ref) == 1
    assert not conveyor.is_initialized()


def test_public_names():
    assert all(hasattr(conveyor, name) for name in conveyor.__all__)
