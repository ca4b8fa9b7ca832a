"""A signal handler that raises, at any bytecode of a call: the other end is told all the same."""

import ctypes
import signal
import sys

import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import ChannelClosedError, RuntimeStateError

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

#: Most of a call that waits for another thread is its wait.
MOMENTS = [*range(1, 400, 7), *range(400, 14_000, 500)]


class Interrupt(BaseException):
    pass


class Raiser:
    """Indexing it sends a signal to this thread, without any Python code, which would run the handler."""

    __getitem__ = ctypes.CDLL(None)["raise"]


@pytest.fixture
def interrupting():
    """Do a call whose n-th bytecode is preceded by a signal; whether the call was long enough."""
    raiser = Raiser()
    number = int(signal.SIGUSR1)

    def interrupted(call, moment):
        left = moment

        def trace(frame, event, _):
            nonlocal left
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    raiser[number]
                    return None
            return trace

        try:
            try:
                # Python 3.12 tells of opcodes only if some frame had asked before the tracing began.
                sys._getframe().f_trace_opcodes = True
                sys.settrace(trace)
                call()
            finally:
                sys.settrace(None)
        except Interrupt:
            pass
        return left <= 0

    def handler(*_):
        sys.settrace(None)
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handler)
    tracing = sys.gettrace()
    yield interrupted
    sys.settrace(tracing)
    signal.signal(signal.SIGUSR1, before)


@conveyor.remote
class Receiving:
    def all(self, receiver):
        values = []
        try:
            while True:
                values.append(receiver.receive(timeout=WAIT))
        except ChannelClosedError:
            return values


@pytest.mark.parametrize("met", [True, False])
def test_a_close_that_is_broken_off_is_done_by_the_next_one(local, interrupting, met):
    receiving = Receiving.remote()
    for moment in MOMENTS:
        sender, receiver = conveyor.channel.open()
        if met:
            received = receiving.all.remote(receiver)
            sender.send(1, WAIT)
        long_enough = interrupting(sender.close, moment)
        if not met:
            received = receiving.all.remote(receiver)
        sender.close()
        assert get(received) == ([1] if met else []), moment
        if not long_enough:
            break
    else:
        pytest.fail("not all moments were tried")


def test_a_close_that_is_broken_off_is_done_by_the_finalizer(local, interrupting):
    receiving = Receiving.remote()
    for moment in MOMENTS:
        sender, receiver = conveyor.channel.open()
        received = receiving.all.remote(receiver)
        sender.send(1, WAIT)
        long_enough = interrupting(sender.close, moment)
        del sender
        assert get(received) == [1], moment
        if not long_enough:
            break


def test_a_first_use_that_is_broken_off_can_be_tried_again(local, interrupting):
    receiving = Receiving.remote()
    for moment in MOMENTS:
        sender, receiver = conveyor.channel.open()
        received = receiving.all.remote(receiver)
        long_enough = interrupting(lambda sender=sender: sender.send(1, WAIT), moment)
        sender.send(2, WAIT)
        sender.close()
        assert get(received)[-1] == 2, moment
        if not long_enough:
            break


def test_an_end_that_cannot_be_opened_here_is_closed(local, monkeypatch):
    sender, receiver = conveyor.channel.open()
    received = Receiving.remote().all.remote(receiver)

    def refused(self, meeting):
        raise MemoryError

    monkeypatch.setattr(type(sender), "_open", refused)
    with pytest.raises(MemoryError):
        sender.send(1, WAIT)
    assert get(received) == []
    monkeypatch.undo()
    with pytest.raises((ChannelClosedError, RuntimeStateError), match="closed"):
        sender.send(1, WAIT)
