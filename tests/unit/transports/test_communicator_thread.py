"""The thread that a user's communicator is called on."""

import threading

from conveyor.codec.sealed import seal
from conveyor.exceptions import SystemLimitError
from conveyor.transport.communicator.thread import CommunicatorThread


def test_without_another_thread_it_is_given_no_time_to_end():
    started, ended = [], []

    def start(target, name):
        if started:
            raise SystemLimitError(11, "no thread for you")
        started.append(threading.Thread(target=target, name=name, daemon=True))
        started[0].start()

    thread = CommunicatorThread(seal(None), 0, start)
    thread.end(lambda: ended.append(thread.over))
    started[0].join(10)
    assert ended == [True]
