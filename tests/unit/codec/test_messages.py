"""Messages between processes: values, and a table at each end that knows all of a family."""

import inspect
import pickle
import socket

import pytest

from conveyor.cluster.fetches import RemoteMemoryService
from conveyor.cluster.node_agent import NodeAgent
from conveyor.driver import process_engine as far_orders
from conveyor.driver.process_engine import NodeOrder
from conveyor.driver.requests import Dispatcher
from conveyor.exceptions import RuntimeStateError
from conveyor.graph import handles as graph_exchange
from conveyor.graph.handles import FromOwner, GraphService, Requests, ToOwner
from conveyor.refs import imports
from conveyor.refs.actor_exports import ActorExports
from conveyor.refs.exports import Peer
from conveyor.refs.imports import FromRendezvous, ToRendezvous
from conveyor.runtime import messages as message
from conveyor.runtime.messages import (
    Message,
    after_version,
    members,
    receive_message,
    send_message,
    version_line,
)
from conveyor.worker import messages, remote_memory
from conveyor.worker import messages as requests
from conveyor.worker.control import Control
from conveyor.worker.messages import Accept, End, HangUp, Notice, Order, Request
from conveyor.worker.remote_memory import FromNode, RemoteMemoryClient, ToNode


def test_a_message_is_a_frozen_value():
    order = Accept(1, 2, 5, fds_id=6)
    assert (order.slot, order.bit, order.fds_id) == (1, 5, 6)
    assert repr(HangUp(5)) == "HangUp(bit=5)"
    assert HangUp(5) == HangUp(bit=5) != HangUp(6)
    assert hash(HangUp(5)) == hash(HangUp(5))
    assert End() == End()
    with pytest.raises(AttributeError, match="HangUp"):
        HangUp(5).bit = 6
    with pytest.raises(AttributeError):
        HangUp(5).other = 6


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"bit": 1}), ((), {"bot": 1})]
)
def test_a_message_has_all_of_its_fields_and_no_others(args, kwargs):
    with pytest.raises(TypeError, match=r"[Aa]rgument"):
        HangUp(*args, **kwargs)


def test_a_message_travels():
    order = Accept(1, 2, 5, 6)
    copy = pickle.loads(pickle.dumps(order))
    assert type(copy) is Accept
    assert copy == order


@pytest.mark.parametrize(
    "module", [messages, requests, imports, graph_exchange, far_orders, remote_memory]
)
def test_every_message_says_what_it_means(module):
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Message) and value is not Message
    ]
    assert found
    assert all(kind.__doc__ for kind in found)


def test_the_driver_knows_every_order_by_its_actors():
    assert set(Control.handlers) == members(Order)


def test_the_dispatcher_knows_every_request_and_notice():
    assert set(Dispatcher.answers) == members(Request)
    assert set(Dispatcher.notices) == members(Notice)


def test_both_ends_of_a_connection_to_the_host_know_what_comes():
    assert set(RemoteMemoryService.handlers) == members(ToNode)
    assert set(RemoteMemoryClient.handlers) == members(FromNode)


def test_another_host_knows_every_order_by_the_driver():
    assert set(NodeAgent.orders) == members(NodeOrder)


def test_both_ends_of_a_refs_connection_know_every_message():
    assert set(Peer.handlers) == members(ToRendezvous)
    assert set(ActorExports.handlers) == members(FromRendezvous)


def test_both_ends_of_a_handles_connection_know_every_message():
    assert set(GraphService.handlers) == members(ToOwner)
    assert set(Requests.handlers) == members(FromOwner)


def test_processes_of_one_version_understand_each_other():
    assert after_version(version_line() + b"rest") == b"rest"


@pytest.mark.parametrize("said", [b"", b"\x80\x05K\x01.", b"conveyor 0.0.1 protocol 1\nrest"])
def test_processes_of_other_versions_are_told_apart(said):
    with pytest.raises(
        RuntimeStateError, match=r"do not understand each other.*start the program again"
    ):
        after_version(said)


def test_a_change_of_what_is_said_is_another_protocol(monkeypatch):
    said = version_line()
    monkeypatch.setattr(message, "MESSAGES_VERSION", message.MESSAGES_VERSION + 1)
    with pytest.raises(RuntimeStateError, match=f"protocol {message.MESSAGES_VERSION - 1}"):
        after_version(said)


def test_what_a_side_has_sent_comes_though_it_died_with_something_unread():
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        with there:
            for i in range(3):
                send_message(there, i)
            send_message(here, "unread")
        assert [receive_message(here)[0] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ConnectionError):
            receive_message(here)
