"""Flags that threads wait for."""

import os
import select
import signal
import sys
import threading
import time
from itertools import count

import pytest
from interrupted import WAIT, goes_on

from conveyor import flag as module
from conveyor.exceptions import RuntimeStateError
from conveyor.flag import Flag
from conveyor.futures import Future
from conveyor.runtime.uninterrupted import uninterrupted


def test_it_is_set_until_it_is_cleared():
    flag = Flag()
    assert not flag.is_set()
    assert not flag.wait(0)
    flag.set()
    flag.set()
    assert flag.is_set()
    assert flag.wait(0)
    assert flag.wait()
    flag.clear()
    assert not flag.wait(-1)
    assert not flag.wait(0.001)


def test_who_waits_is_woken():
    flag, come = Flag(), threading.Barrier(4)
    found = []

    def wait(timeout):
        come.wait(WAIT)
        found.append(flag.wait(timeout))

    threads = [threading.Thread(target=wait, args=(t,)) for t in (None, WAIT, 1e12)]
    for thread in threads:
        thread.start()
    come.wait(WAIT)
    flag.set()
    for thread in threads:
        thread.join(WAIT)
    assert found == [True, True, True]


def _broken_off_after(step, what):
    """Whether Ctrl-C has come before a flag's ``step``-th instruction."""
    left = count(step, -1)

    def trace(frame, event, _):
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(left) == 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    # Python 3.12 tells of opcodes only if some frame had asked for them before the tracing began.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        what()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("what", [Flag.set, Flag.clear, Flag.is_set, lambda flag: flag.wait(0.001)])
def test_others_go_on_wherever_one_is_broken_off(what):
    for step in count():
        flag = Flag()
        if not _broken_off_after(step, lambda flag=flag: what(flag)):
            break
        assert goes_on(lambda flag=flag: (flag.set(), flag.wait()))
        assert flag.is_set()
    assert step > 2


def test_who_sets_it_may_be_broken_off_in_the_middle():
    class Broken:
        """A waiter at whose turn Ctrl-C comes, once."""

        times = 0

        def release(self):
            self.times += 1
            if self.times == 1:
                raise KeyboardInterrupt

    flag, first, behind = Flag(), Broken(), threading.Lock()
    behind.acquire()
    flag._waiters += [first, behind]
    with pytest.raises(KeyboardInterrupt):
        flag.set()
    assert flag.is_set()
    assert not behind.locked()


def _sleeps():
    others = set(module._slept_for)  # of tests that have been broken off
    return lambda: module._slept_for - others


def _flag():
    flag = Flag()
    return flag.wait, _sleeps(), flag.set


def _future():
    future = Future()
    return future.result, _sleeps(), lambda: future.set_result(True)


def _uninterrupted():
    begun, over = threading.Event(), threading.Event()

    def work():
        begun.set()
        return over.wait(WAIT)

    return lambda: uninterrupted(work), begun.is_set, over.set


@pytest.mark.parametrize("made", [_flag, _future, _uninterrupted])
def test_a_child_that_a_handler_forks_in_the_wait_does_not_sleep_on(made):
    """Nobody would wake it."""
    wait, begun, end = made()
    parent, ended = os.getpid(), []

    def handler(*_):
        child = os.fork()
        if child:
            poll, ends = select.poll(), os.pidfd_open(child)
            poll.register(ends, select.POLLIN)
            poll.poll(WAIT * 1000)
            signal.pidfd_send_signal(ends, signal.SIGKILL)
            os.close(ends)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            end()

    def interrupt():
        while not begun():
            time.sleep(0.001)
        os.kill(parent, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert wait()
    except RuntimeStateError:
        if os.getpid() == parent:
            raise
        os._exit(7)
    finally:
        if os.getpid() != parent:
            os._exit(8)
        signal.signal(signal.SIGALRM, before)
        thread.join()
    assert ended[-1] == 7
