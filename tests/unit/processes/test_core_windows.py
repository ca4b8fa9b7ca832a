"""Gates whose doorbell never rests, and whose submissions are nested by what runs in them."""

import os
import signal
import sys
import textwrap
import threading
import time

import pytest

from conveyor import _core
from conveyor.codec import set_up_codec


@pytest.fixture
def process_table():
    set_up_codec()
    made = _core.ProcessTable.create(2)
    for slot in range(2):
        made.prepare(slot, f"process {slot}")
        made.alive_unwatched(slot)
    yield made
    made.close_fds()


@pytest.fixture
def inbox(process_table):
    event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    yield _core.Inbox(process_table, 0, event, threading.main_thread().ident)
    os.close(event)


@pytest.fixture
def window(process_table, inbox):
    fd = _core.Arena.create_fd(1 << 30)
    arena = _core.Arena(fd, 1 << 30, 1 << 28, process_table, 0)
    view = _core.ArenaView(fd, 1 << 30, process_table, 0)
    os.close(fd)
    size = _core.Segment.ring_bytes(8, 1024, 1)
    segment = _core.Segment.create(2 * size)
    for offset in (0, size):
        segment.make_ring(offset, 8, 1024, 1)
    calls = _core.Writer(segment, 0, process_table, [(1, 1)], arena, None)
    results = _core.Reader(segment, size, 0, process_table, (1, 1), view, False)
    yield _core.InFlightWindow([calls], [results], 4, _core.KIND_VALUE, inbox)
    arena.close()


@pytest.fixture
def busy_bell(process_table):
    """The bell of the process that waits is rung all the time."""
    stop, tell = os.pipe()
    notifier = os.fork()
    if notifier == 0:
        os.close(tell)
        os.set_blocking(stop, False)
        while True:
            for _ in range(1000):
                process_table.notify(0, 5)
            try:
                if os.read(stop, 1) == b"":
                    os._exit(0)
            except BlockingIOError:
                pass
    os.close(stop)
    yield
    os.close(tell)
    os.waitpid(notifier, 0)


@pytest.mark.usefixtures("busy_bell")
def test_a_wait_on_a_busy_bell_ends_in_time(window):
    ref = _core.RefCore(None, window, window.submit(None), 0)
    begin = time.monotonic()
    assert window.get(ref, 0.1) is _core.EMPTY
    assert time.monotonic() - begin < 60


@pytest.mark.usefixtures("busy_bell")
def test_a_wait_on_a_busy_bell_is_interrupted(window):
    ref = _core.RefCore(None, window, window.submit(None), 0)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def wait():
        timer.start()  # here, so that it is awaited when it comes
        window.get(ref, 60)

    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def test_no_more_than_depth_is_granted_to_who_submits_while_others_do():
    """A program of its own, since the codec is the process's."""
    import subprocess
    import sys

    program = textwrap.dedent(NESTED)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


NESTED = """
import os
from conveyor import _core
from conveyor.codec import set_up_codec

set_up_codec()
nested = False

def encode(value, sent):
    global nested
    if value == ["nests"]:  # a finalizer submits while this is encoded
        window.submit(None)
        nested = True
    return 17, 1, repr(value).encode(), None  # every result brings definitions

def decode(codec, meta, buffers):
    return eval(meta)

def announce(meta):
    global nested
    if nested:
        nested = False
        window.submit(None)

_core.set_codec(
    encode, decode, announce, announce, ValueError, lambda m, h: MemoryError(m), lambda v: False,
    RuntimeError, lambda n, t: OSError(n, t),
)
DEPTH = 2
board = _core.ProcessTable.create(2)
for slot in range(2):
    board.prepare(slot, "")
    board.alive_unwatched(slot)
inbox = _core.Inbox(board, 0, os.eventfd(0, os.EFD_NONBLOCK), 0)
fd = _core.Arena.create_fd(1 << 30)
arena = _core.Arena(fd, 1 << 30, 1 << 28, board, 0)
view = _core.ArenaView(fd, 1 << 30, board, 0)
size = _core.Segment.ring_bytes(8, 1024, 1)
segment = _core.Segment.create(2 * size)
segment.make_ring(0, 8, 1024, 1)
segment.make_ring(size, DEPTH, 1024, 1)

def writer(offset, slot):
    return _core.Writer(segment, offset, board, [(slot, 1)], arena, None)

def reader(offset, slot):
    return _core.Reader(segment, offset, 0, board, (slot, 1), view, False)

calls, requests, replies, results = writer(0, 1), reader(0, 0), writer(size, 0), reader(size, 1)
window = _core.InFlightWindow([calls], [results], DEPTH, _core.KIND_VALUE, inbox)

def answer():
    while requests.receive() is not _core.EMPTY:
        assert replies.send(["result", requests.tag], requests.tag)

assert [window.submit(None) for _ in range(3)] == [0, 1, -1]
answer()
window.submit(["nests"])
assert window.submitted - results.count <= DEPTH
answer()
for number in range(window.submitted):
    assert window.get(_core.RefCore(None, window, number, 0), 10) is not _core.EMPTY
print("done")
"""


def test_ends_own_no_objects_of_python(process_table):
    """Native threads let go of what C++ shares, and those have no GIL."""
    fd = _core.Arena.create_fd(1 << 30)
    arena = _core.Arena(fd, 1 << 30, 1 << 24, process_table, 0)
    view = _core.ArenaView(fd, 1 << 30, process_table, 0)
    assert _core.ArenaView(fd, 1 << 30, process_table, 0) is view
    os.close(fd)
    segment = _core.Segment.create(_core.Segment.ring_bytes(4, 1024, 1))
    segment.make_ring(0, 4, 1024, 1)
    budget = _core.MemoryBudget(1 << 20)
    shared = [process_table, arena, view, segment, budget]
    before = [sys.getrefcount(one) for one in shared]
    writer = _core.Writer(segment, 0, process_table, [(1, 1)], arena, None, 0, 0, "", budget)
    reader = _core.Reader(segment, 0, 0, process_table, (0, 1), view, False)
    assert [sys.getrefcount(one) for one in shared] == before
    del shared, arena, view, segment, budget
    payload = bytes(100_000)
    assert writer.send(payload, 0)
    assert reader.receive() == payload
