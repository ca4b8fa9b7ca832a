"""Ends that are used where somebody holds a lock: in a handler or a finalizer, and in a forked child."""

import os
import signal
import threading

import pytest
from integration_helpers import WAIT

import conveyor
from conveyor.exceptions import RuntimeStateError


class Slow:
    """Its encoding waits, with the lock of the end that sends it."""

    def __init__(self, encoding, go):
        self.encoding, self.go = encoding, go

    def __reduce__(self):
        self.encoding.set()
        assert self.go.wait(WAIT)
        return int, (1,)


@pytest.mark.parametrize(
    "use",
    [
        lambda sender, _: sender.close(),
        lambda sender, _: sender.send(1, timeout=1),
        lambda sender, _: sender.statistics(),
        lambda _, receiver: receiver.receive(timeout=1),
    ],
    ids=["close", "send", "statistics", "receive"],
)
def test_a_child_that_was_forked_while_a_thread_used_an_end(engine, use):
    sender, receiver = conveyor.channel.open()
    sender.send(0)
    encoding, go = threading.Event(), threading.Event()
    sending = threading.Thread(target=sender.send, args=(Slow(encoding, go),))
    sending.start()
    assert encoding.wait(WAIT)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # it would wait for ever
        code = 1
        try:
            use(sender, receiver)
        except RuntimeStateError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    go.set()
    sending.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [receiver.receive(), receiver.receive()] == [0, 1]
