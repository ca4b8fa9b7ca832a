"""What the system refuses once: whoever needed it is told or gets it later, and nobody waits in vain.

The same for every call and allocation in turn is ``tests/faults``; these are the cases that it has found.
"""

import errno
import os
import pickle
import select
import signal
import socket
import sys
import threading
import types

import cloudpickle
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor import _core
from conveyor.calls.call import STOP
from conveyor.calls.links import Link
from conveyor.codec import SentDefinitions
from conveyor.dag import InputNode
from conveyor.driver.actors import ActorRecord
from conveyor.exceptions import (
    ActorDiedError,
    ActorStartError,
    OutOfMemoryError,
    RuntimeStateError,
    SystemLimitError,
    TaskError,
)
from conveyor.runtime import context, threads
from conveyor.runtime.events import EventLoop
from conveyor.runtime.messages import SHARE_FROM, receive_message, received, send_message
from conveyor.worker.control import Control
from conveyor.worker.messages import Done, Find, Numbered, Unload
from conveyor.worker.requests import RequestClient

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("local")


@conveyor.remote
class Actor:
    def add(self, x, y=1):
        return x + y

    def pid(self):
        return os.getpid()

    def ask(self, other, x):
        return conveyor.get(other.add.remote(x), timeout=WAIT)

    def open(self, refs):
        return conveyor.get(refs, timeout=WAIT)

    def late(self, latch, x):
        hold(latch)
        return x


@pytest.fixture
def refuse_thread(monkeypatch):
    """``refuse_thread(name)``: the next thread of the library's that is called so cannot be started."""
    refused = set()
    start = threading.Thread.start

    def start_or_refuse(thread):
        if thread.name in refused:
            refused.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threads.Background, "start", start_or_refuse)
    yield lambda name: refused.add(f"conveyor-{name}")
    assert not refused, "the thread was not wanted"


def test_a_restart_that_gets_no_thread_says_so_and_can_be_tried_again(refuse_thread):
    actor = Actor.remote()
    with InputNode() as inp:
        graph = actor.add.bind(inp).compile()
    os.kill(get(actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        get(graph.execute(1))
    refuse_thread("restart")
    with pytest.raises(ActorDiedError, match="could not be started again: cannot start the thread"):
        graph.restart()
    graph.restart()
    assert get(graph.execute(1)) == 2


def test_an_actor_is_dead_if_there_is_no_thread_to_restart_it(refuse_thread, wait_until):
    actor = Actor.options(max_restarts=-1).remote()
    pid = get(actor.pid.remote())
    refuse_thread("restart")
    os.kill(pid, signal.SIGKILL)
    driver = context.current()
    wait_until(lambda: not driver.table.record(actor._id).alive, what="its death to be known")
    with pytest.raises(ActorDiedError, match="ulimit -u"):
        get(actor.add.remote(1))


def test_what_an_actor_asks_the_driver_for_is_answered_without_a_thread(refuse_thread):
    a, b = Actor.remote(), Actor.remote()
    assert get([a.add.remote(1), b.add.remote(1)]) == [2, 2]
    refuse_thread("request")
    with pytest.raises(TaskError, match="cannot start the thread 'conveyor-request'"):
        get(a.ask.remote(b, 1))
    assert get(a.ask.remote(b, 1)) == 2


@pytest.mark.parametrize("thread", ["refs-out", "refs-in"])
def test_a_connection_that_gets_no_thread_is_opened_the_next_time(refuse_thread, thread):
    a, b = Actor.remote(), Actor.remote()
    refuse_thread(thread)
    with pytest.raises(TaskError, match="cannot start the thread"):
        get(a.open.remote([b.add.remote(1)]))
    assert get(a.open.remote([b.add.remote(1)])) == [2]


def test_an_outcome_without_a_thread_of_its_own_is_sent(refuse_thread, latches, wait_until):
    a, b = Actor.remote(), Actor.remote()
    latch = latches()
    value = "x" * 50_000  # what fits into a message needs no thread
    ref = b.late.remote(latch.path, value)
    opened = a.open.remote([ref])
    wait_until(lambda: context.current().exports._entries, what="the ref to be asked for")
    refuse_thread("export")
    latch.open()
    assert get(opened) == [value]


def test_who_waits_for_a_ref_is_told_that_nobody_can_watch_it(refuse_thread, latches):
    a, b = Actor.remote(), Actor.remote()
    latch = latches()
    ref = b.late.remote(latch.path, 1)
    refuse_thread("watcher")
    with pytest.raises(TaskError, match="cannot start the thread 'conveyor-watcher'"):
        get(a.open.remote([ref]))
    latch.open()
    # Who was told keeps to it as long as it has the ref.
    assert get(Actor.remote().open.remote([ref])) == [1]


def test_a_ref_without_a_descriptor_gets_one_the_next_time(refuse_thread, latches):
    actor = Actor.remote()
    latch = latches()
    ref = actor.late.remote(latch.path, 1)
    refuse_thread("watcher")
    with pytest.raises(SystemLimitError):
        ref.fileno()
    fd = ref.fileno()
    latch.open()
    assert select.select([fd], [], [], WAIT)[0] == [fd]


def test_a_call_that_nobody_would_send_is_not_made(refuse_thread, latches):
    a, b = Actor.remote(), Actor.remote()
    latch = latches()
    ref = b.late.remote(latch.path, 1)
    refuse_thread("pump")
    with pytest.raises(SystemLimitError):
        a.add.remote(ref)
    latch.open()
    assert get(ref) == 1
    assert not context.current().link(a._id).has_pending
    assert get(a.add.remote(1)) == 2


def test_those_who_wait_for_other_refs_are_told_if_one_cannot_be(latches, caplog, wait_until):
    actor = Actor.remote()
    latch = latches()
    first, second = actor.late.remote(latch.path, 1), actor.late.remote(latch.path, 2)
    told = threading.Event()

    def fail():
        raise RuntimeError("it cannot be told")

    watcher = context.current().watcher
    watcher.watch(first, fail)
    watcher.watch(second, told.set)
    latch.open()
    assert told.wait(WAIT)
    # Both may be done between the watcher's looks at the first and at the second.
    wait_until(lambda: "could not be told" in caplog.text, WAIT)
    caplog.clear()  # it has the error, and its traceback the ref


@pytest.mark.parametrize("what", ["send_fds", "recv_fds"])
def test_a_message_that_the_kernel_refuses_for_the_moment_comes_all_the_same(monkeypatch, what):
    a, b = Actor.remote(), Actor.remote()
    assert get(a.open.remote([b.add.remote(1)])) == [2]
    real, refused = getattr(socket, what), []

    def refuse_once(sock, *args):
        if sock.type == socket.SOCK_SEQPACKET and not refused:
            refused.append(sock)
            raise OSError(errno.ENOBUFS, "no room")
        return real(sock, *args)

    monkeypatch.setattr(socket, what, refuse_once)
    for _ in range(2):  # a thread may be inside of the real one
        assert get(a.open.remote([b.add.remote(1)])) == [2]
    assert refused


def test_an_answer_that_cannot_be_read_is_not_that_to_the_next_request(monkeypatch):
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    real = socket.recv_fds

    def refuse(sock, *args):
        if sock is here:
            raise OSError(errno.ENOBUFS, "no room")
        return real(sock, *args)

    with here, there:
        client = RequestClient(here)
        send_message(there, Numbered(1, pickle.dumps(Done("first"))))
        with monkeypatch.context() as patched:
            patched.setattr(socket, "recv_fds", refuse)
            with pytest.raises(RuntimeStateError, match=r"does not answer: .*no room"):
                client.ask(Find("first"))
        with pytest.raises(RuntimeStateError, match="does not answer"):
            client.ask(Find("second"))


def test_an_answer_is_read_where_there_is_no_thread_for_it(refuse_thread):
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        client = RequestClient(here)
        for number in 1, 2:
            send_message(there, Numbered(number, pickle.dumps(Done(number))))
        refuse_thread("answers")
        # The second one's is there already, and is kept for it.
        assert client.ask(Find("first")) == (1, [])
        assert client.ask(Find("second")) == (2, [])


def test_where_there_is_no_thread_who_has_his_answer_has_another_one_read(
    refuse_thread, wait_until
):
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    got = {}

    def ask(number):
        got[number], _ = client.ask(Find(str(number)))

    with here, there:
        client = RequestClient(here)
        refuse_thread("answers")
        asking = [threading.Thread(target=ask, args=(number,)) for number in range(1, 5)]
        for number, thread in enumerate(asking, 1):
            thread.start()
            wait_until(lambda n=number: n in client._awaited, WAIT)
        wait_until(client._reading.locked, WAIT)
        for number in (1, 3, 4, 2):  # the first one reads
            send_message(there, Numbered(number, pickle.dumps(Done(number))))
            asking[number - 1].join(WAIT)
            assert got[number] == number


def test_a_reader_that_fails_leaves_nobody_waiting(monkeypatch):
    def fail(_answer):
        raise ZeroDivisionError("a fault of the library's")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    errors = []

    def ask():
        try:
            client.ask(Find("second"))
        except RuntimeStateError as error:
            errors.append(str(error))

    with here, there:
        client = RequestClient(here)
        client.ask_later(Find("first"), fail)
        asking = threading.Thread(target=ask)
        asking.start()
        there.settimeout(WAIT)
        assert [receive_message(there)[0].number for _ in range(2)] == [1, 2]
        send_message(there, Numbered(1, pickle.dumps(Done("first"))))
        asking.join(WAIT)
    assert errors == ["the driver does not answer: a fault of the library's"]


def test_a_value_whose_descriptor_did_not_come_says_so():
    """The kernel drops those for which a process has no number left."""
    snapshot = _core.Snapshot(bytes(SHARE_FROM), SentDefinitions(), SHARE_FROM)
    assert snapshot.parts[-1] is None
    with pytest.raises(SystemLimitError, match=r"cannot receive a value: .*ulimit -n"):
        received(snapshot.parts, [])


@pytest.mark.parametrize("wish", [Unload, STOP])
def test_what_cannot_be_said_to_an_actor_is_said_later(monkeypatch, wait_until, wish):
    actor = Actor.remote()
    pid = get(actor.pid.remote())
    record = context.current().table.record(actor._id)
    refused = []
    cls, name = (ActorRecord, "order") if wish is Unload else (Link, "call")
    say = getattr(cls, name)

    def refuse_once(self, said, *args, **kwargs):
        if not refused and (isinstance(said, Unload) if wish is Unload else said[4] == STOP):
            refused.append(said)
            raise OutOfMemoryError("no memory")
        return say(self, said, *args, **kwargs)

    with InputNode() as inp:
        graph = actor.add.bind(inp).compile()
    bit = record.bits.take()
    record.bits.give_back(bit)
    monkeypatch.setattr(cls, name, refuse_once)
    graph.teardown()
    other = Actor.remote()
    assert get(other.add.remote(1)) == 2  # whatever the driver does next, it says what it had to
    if wish is Unload:
        assert refused
        with InputNode() as inp:
            again = actor.add.bind(inp).compile()
        assert record.bits.take() == bit
        record.bits.give_back(bit)
        assert get(again.execute(1)) == 2
        return
    del actor, graph
    wait_until(lambda: refused, what="the last handle's end")
    Actor.remote()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), what="the actor's end")


def test_an_actor_whose_output_nobody_could_read_is_not_started(monkeypatch):
    kept = Actor.remote()
    assert get(kept.add.remote(1)) == 2
    add, refused = EventLoop.add, []

    def refuse_once(self, fd, callback):
        if self._name == "output" and not refused:
            refused.append(fd)
            raise OSError(errno.ENOMEM, "no memory")
        add(self, fd, callback)

    monkeypatch.setattr(EventLoop, "add", refuse_once)
    with pytest.raises(ActorStartError, match="its output cannot be read"):
        Actor.remote()
    assert get(Actor.remote().add.remote(1)) == 2
    assert get(kept.add.remote(1)) == 2


class Wishes:
    """A control link's reading end that has no memory at first."""

    def __init__(self, failures):
        self.failures = failures

    def receive_or_leave(self):
        if self.failures:
            self.failures -= 1
            raise MemoryError
        return "wish"

    receive = receive_or_leave


def read_wish(wishes):
    control = Control.__new__(Control)
    control._link = types.SimpleNamespace(reader=wishes)
    return control._receive()


def test_a_wish_of_the_drivers_that_cannot_be_read_is_tried_again():
    assert read_wish(Wishes(1)) == "wish"
    with pytest.raises(MemoryError):  # whoever waits for it is told
        read_wish(Wishes(100))


def test_arguments_of_the_native_core_are_what_they_should_be():
    """Its casters are its own."""
    board = _core.Board.create(4)
    with pytest.raises(TypeError):
        board.prepare(1, 5)
    with pytest.raises(UnicodeEncodeError):
        board.prepare(1, "\udc80")
    board.prepare(1, "näme")
    assert board.name(1) == "näme"
    segment = _core.Segment.create(1 << 20)
    segment.make_ring(0, 4, 256, 1)
    fd = _core.Arena.create_fd(1 << 30)
    arena = _core.Arena(fd, 1 << 30, 1 << 20, board, 1)
    os.close(fd)
    for targets in ("ab", [(1,)], [(1, 2, 3)], [1], None):
        with pytest.raises(TypeError):
            _core.Writer(segment, 0, board, targets, arena, None, 0, 0, "", None)
    writer = _core.Writer(segment, 0, board, ((1, 2),), arena, None, 0, 0, "", None)
    del board, segment, arena
    assert writer.send(1, 0)
