"""What a graph's owner says to a handle's process that asks whom it waits for."""

import os
import socket
import sys
import time

import cloudpickle
import pytest
from integration_helpers import WAIT
from nodes_apart import APART

import conveyor
from conveyor import _core
from conveyor.codec import SentDefinitions
from conveyor.dag import InputNode
from conveyor.driver.graph_service import GraphService
from conveyor.graph.handles import Execute, HeldUp, Whom
from conveyor.runtime import context
from conveyor.runtime.messages import SHARE_FROM, Connection

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Waits:
    def until(self, path):
        end = time.monotonic() + WAIT
        while not os.path.exists(path):
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.002)
        return "done"


def arguments(value):
    return _core.Snapshot(((value,), {}), SentDefinitions(), SHARE_FROM)


def test_only_who_waits_for_room_is_told_who_holds_it_up(tmp_path):
    """Another question of the same handle waits for nobody meanwhile: its answer takes a while, no more."""
    path = tmp_path / "go"
    with InputNode() as inp:
        graph = Waits.remote().until.bind(inp).compile(depth=1)
    with graph:
        first = graph.execute(str(path))
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        said = []
        service = GraphService(graph, its, context.current().process.identity)
        handle = Connection(mine, "test", lambda message, _: said.append(message), lambda: None)
        try:
            for number in (1, 2):
                snapshot = arguments(str(path))
                asked = Execute(number, True, False, False, None, None, snapshot.parts)
                handle.send(asked, snapshot)
            deadline = time.monotonic() + WAIT
            while not service._busy and time.monotonic() < deadline:
                time.sleep(0.002)
            held = {}
            # Between hosts a young execution is held up by nobody, so who waits asks again.
            while not (held.get(1) and held.get(2)) and time.monotonic() < deadline:
                said.clear()
                for number in (1, 2, 3):
                    handle.send(Whom(number, 7))
                while len(said) < 3 and time.monotonic() < deadline:
                    time.sleep(0.002)
                held = {one.number: one.blockers for one in said if isinstance(one, HeldUp)}
                if not APART:
                    break
            assert [bool(held[number]) for number in (1, 2, 3)] == [True, True, False]
            path.touch()
            assert conveyor.get(first, timeout=WAIT) == "done"
            while len(said) < 5 and time.monotonic() < deadline:
                time.sleep(0.002)
            assert [one.ok for one in said[3:]] == [True, True]
        finally:
            path.touch()
            handle.close()
            service.connection.close()
