"""What attach says where Ray does not get an answer of the actor."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

import ray

from conveyor.api import attach
from conveyor.exceptions import ActorDiedError, ActorStartError


@pytest.fixture
def answer(monkeypatch):
    """Has the actor's answer raise what it is given; what comes of that."""
    call = SimpleNamespace(remote=lambda *_: SimpleNamespace(future=lambda: None))
    handle = SimpleNamespace(__ray_call__=SimpleNamespace(options=lambda **_: call))

    def described(error):
        def raises(*_):
            raise error

        monkeypatch.setattr(attach, "_answer", raises)
        return attach._described(None, ray, handle, "A")

    return described


def test_an_actor_that_cannot_be_reached_just_now_is_not_dead(answer):
    with pytest.raises(ActorStartError, match=r"cannot be reached just now .* may be tried again"):
        answer(ray.exceptions.ActorUnavailableError("its node is silent", b"0" * 16))


def test_an_actor_that_ray_cannot_place_cannot_be_attached(answer):
    with pytest.raises(ActorStartError, match=r"cannot attach actor A of Ray: .*no such node"):
        answer(ray.exceptions.ActorUnschedulableError("no such node"))


def test_a_dead_actor_is_dead(answer):
    with pytest.raises(ActorDiedError, match="actor A of Ray is dead"):
        answer(ray.exceptions.ActorDiedError())
