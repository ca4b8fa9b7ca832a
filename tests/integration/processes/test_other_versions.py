"""Processes of one session that are of different versions of the library."""

import os

import pytest
from integration_helpers import get

import conveyor
from conveyor.exceptions import ActorDiedError
from conveyor.runtime import messages

pytestmark = pytest.mark.usefixtures("local")


@conveyor.remote
class Actor:
    def pid(self):
        return os.getpid()


def test_an_actor_that_speaks_another_protocol_says_so(monkeypatch):
    first = Actor.remote()
    get(first.pid.remote())  # the fork server has imported what actors need
    with monkeypatch.context() as patch:
        patch.setattr(messages, "MESSAGES_VERSION", messages.MESSAGES_VERSION + 1)
        other = Actor.remote()
        with pytest.raises(ActorDiedError, match="do not understand each other") as caught:
            get(other.pid.remote())
    assert f"protocol {messages.MESSAGES_VERSION}'" in str(caught.value)
    assert f"protocol {messages.MESSAGES_VERSION + 1}'" in str(caught.value)
    assert "start the program again" in str(caught.value)
    get(first.pid.remote())
    get(Actor.remote().pid.remote())
