"""Where a process that Ray has started runs, as seen by who waits for it."""

import pwd
import socket
import threading

import pytest
from msgspec.structs import replace

from conveyor.engines.ray.bootstrap import Bootstrap, Locality
from conveyor.exceptions import ActorStartError
from conveyor.local_sockets import new_key, new_name

shell = pytest.importorskip("conveyor.engines.ray.ray_actor")
pytest.importorskip("ray")

OWN = Locality.own()


def bootstrap(waits, **more):
    return Bootstrap(new_name(), 1, new_key(), {}, waits, **more)


@pytest.fixture
def taken(monkeypatch):
    """Whether the process connects to anybody."""
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("it connects"))


@pytest.mark.parametrize("part", ["boot", "network", "pids"])
def test_another_machine_or_namespace_is_another_node_and_nobody_is_connected_to(taken, part):
    waits = replace(OWN, **{part: "another"})
    assert shell.meet_at(bootstrap(waits)) is None
    assert shell.meet_at(bootstrap(replace(waits, user=OWN.user + 1))) is None
    with pytest.raises(ActorStartError, match="in another network or PID namespace"):
        shell.meet_at(bootstrap(waits, stay=True))


@pytest.mark.parametrize(("stay", "who"), [(False, "the driver"), (True, "the agent")])
def test_another_user_on_one_machine_is_named(taken, stay, who):
    other = next(one for one in pwd.getpwall() if one.pw_uid != OWN.user)
    with pytest.raises(ActorStartError) as caught:
        shell.meet_at(bootstrap(replace(OWN, user=other.pw_uid), stay=stay))
    text = str(caught.value)
    assert f"as user {pwd.getpwuid(OWN.user).pw_name} ({OWN.user})" in text
    assert f"{other.pw_name} ({other.pw_uid})" in text
    assert who in text
    with pytest.raises(ActorStartError, match="as user 4294967"):  # it has no name
        shell.meet_at(bootstrap(replace(OWN, user=4294967), stay=stay))


def test_who_says_that_it_is_here_and_is_not_is_on_another_node():
    """Copies of one virtual machine may say the same."""
    assert shell.meet_at(bootstrap(OWN)) is None
    with pytest.raises(ActorStartError, match="cannot be reached"):
        shell.meet_at(bootstrap(OWN, stay=True))


def test_who_has_the_name_and_not_the_key_learns_nothing_of_the_key():
    one, said = bootstrap(OWN), []

    def listen():
        came, _ = listener.accept()
        with came:
            said.append(came.recv(4096))
            came.send(said[0])
            said.append(came.recv(4096))

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + one.address)
        listener.listen()
        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(ActorStartError, match="does not know the key"):
            shell.meet_at(one)
        thread.join(60)
    assert one.key not in said[0]
    assert said[1] == b""
