"""What peers may have written in shared memory is checked before it is used: an index, a ring's head."""

import mmap
import os
import struct

import pytest

from conveyor import _core
from conveyor.codec import set_up_codec
from conveyor.exceptions import ConveyorError
from conveyor.runtime.deadlock import WaitRegistry
from conveyor.runtime.wait_graph import CALLS, CONCURRENT, ONE, STEPS, call_of, steps_of

SLOTS = 4
RING_SLOTS = 8
HEAD = 64  # of a ring: where its head is


@pytest.fixture
def process_table():
    made = _core.ProcessTable.create(SLOTS)
    for slot in range(SLOTS):
        made.prepare(slot, f"process {slot}")
        made.alive_unwatched(slot)
    yield made
    made.close_fds()


@pytest.fixture
def event():
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("slot", [SLOTS, SLOTS + 1000, 2**32 - 1])
def test_a_slot_that_is_not_there(process_table, event, slot):
    inbox = _core.Inbox(process_table, 0, event, 0)
    uses = [
        lambda: process_table.set_eventfd(slot, event, 1),
        lambda: process_table.forget_eventfd(slot),
        lambda: process_table.prepare(slot, "x"),
        lambda: process_table.name(slot),
        lambda: process_table.live(slot),
        lambda: process_table.alive_unwatched(slot),
        lambda: process_table.guard_signals(slot),
        lambda: process_table.mark_exiting(slot),
        lambda: process_table.is_exiting(slot),
        lambda: process_table.death_number(slot),
        lambda: process_table.notify(slot, 1),
        lambda: process_table.announce_death(slot),
        lambda: process_table.free(slot),
        lambda: process_table.condition(slot),
        lambda: process_table.incarnation(slot),
        lambda: process_table.gone(slot, 1),
        lambda: process_table.pid(slot),
        lambda: process_table.waits(slot, STEPS),
        lambda: process_table.ask(slot),
        lambda: process_table.status(slot),
        lambda: inbox.note_waits([(STEPS, 1, 0, ONE, slot, STEPS, "")]),
        lambda: _core.Inbox(process_table, slot, event, 0),
    ]
    for use in uses:
        with pytest.raises(IndexError, match=f"no slot {slot} of a process table of {SLOTS}"):
            use()
    with pytest.raises(IndexError, match="no such bit"):
        process_table.notify(0, _core.DOORBELL_BITS)


def test_a_watch_of_a_slot_that_is_not_there(process_table):
    watch = _core.DeathWatch(process_table)
    with pytest.raises(IndexError, match="no slot 99"):
        watch.add(99)
    watch.stop()


def test_notes_of_waits(process_table, event):
    inbox = _core.Inbox(process_table, 1, event, 0)
    long = "ä" * 200
    graph, call = steps_of(7), call_of(3, 1, 5)
    inbox.note_waits(
        [
            (graph, 4, 9, CONCURRENT, 2, STEPS, "one"),
            (graph, 4, 9, CONCURRENT, 3, call, long),
            (call, 5, 0, CONCURRENT, 2, graph, "another"),
        ]
    )
    stamp, answered, mode, waits = process_table.waits(1, graph)
    assert (stamp, answered, mode, waits[0]) == (4, 9, CONCURRENT, (2, STEPS, "one"))
    assert waits[1][:2] == (3, call)
    assert long.startswith(waits[1][2].rstrip("\ufffd"))  # cut, not spilled
    assert process_table.waits(1, call) == (5, 0, CONCURRENT, [(2, graph, "another")])
    for free in (STEPS, CALLS, steps_of(8), call_of(3, 1, 6), call_of(3, 2, 5), 2**64 - 1):
        assert process_table.waits(1, free)[3] == []
    # Where a lane waits, so does all that it does.
    inbox.note_waits(
        [(call, 5, 0, CONCURRENT, 2, graph, "x"), (CALLS, 6, 0, ONE, 0, CALLS, "lane")]
    )
    for work in (CALLS, call, call_of(3, 1, 6)):
        assert process_table.waits(1, work) == (6, 0, ONE, [(0, CALLS, "lane")])
    assert process_table.waits(1, graph)[3] == []
    assert process_table.ask(1) == inbox.requested == 1
    with pytest.raises(ValueError, match="too many"):
        inbox.note_waits([(STEPS, 1, 0, ONE, 2, STEPS, "")] * (_core.WAIT_ROWS + 1))
    assert process_table.waits(1, call)[0] == 6
    # The next process has not noted anything.
    process_table.prepare(1, "another")
    assert process_table.waits(1, call)[3] == []


def test_a_process_that_says_it_waits_for_nobody_s_slot(process_table, event):
    """One that is broken must not end others who only look whether they wait for each other."""
    broken = _core.Inbox(process_table, 1, event, 0)
    inbox = _core.Inbox(process_table, 0, event, 0)
    broken.note_waits([(STEPS, 1, 0, ONE, 0, STEPS, "it waits for this one")])
    wait_registry = WaitRegistry(inbox, process_table, 0)
    wait_registry.open(ONE, 1, lambda: "this one")
    with wait_registry.waiting(lambda _: ((1, STEPS, "the broken one"),)) as wait:
        assert wait is not None
        assert wait.look(inbox.requested) is not None  # it is suspected
        with mmap.mmap(process_table.fd, 0) as memory:
            text = memory.find(b"it waits for this one\0")
            slot = text - 16
            row = text - 40
            count = row - 4
            assert struct.unpack_from("<II", memory, count - 4) == (4, 1)  # its version comes first
            for wrong in (SLOTS, 123456, 2**31, 2**32 - 1):
                struct.pack_into("<I", memory, slot, wrong)
                assert process_table.waits(1, STEPS)[3] == []
                assert wait.look(inbox.requested) is None
            # As many waits as it likes: no more than there is room for are read.
            struct.pack_into("<I", memory, slot, 0)
            struct.pack_into("<I", memory, count, 2**32 - 1)
            assert (
                len(process_table.waits(1, STEPS)[3]) == _core.WAIT_ROWS
            )  # those that are zero are of it, too
            # It has died while it wrote, or is about to go on: that is looked at again.
            struct.pack_into("<I", memory, count - 4, 3)
            assert process_table.waits(1, STEPS) is None
            assert wait.look(inbox.requested) is not None
            process_table.announce_death(1)
            assert wait.look(inbox.requested) is None


@pytest.fixture
def channel(process_table, event):
    """A window on a ring from this process to itself; and the segment's memory."""
    set_up_codec()
    fd = _core.Arena.create_fd(1 << 30)
    arena = _core.Arena(fd, 1 << 30, 1 << 24, process_table, 0)
    view = _core.ArenaView(fd, 1 << 30, process_table, 0)
    os.close(fd)
    size = _core.Segment.ring_bytes(RING_SLOTS, 256, 1)
    segment = _core.Segment.create(size)
    segment.make_ring(0, RING_SLOTS, 256, 1)
    writer = _core.Writer(segment, 0, process_table, [(0, 3)], arena, None)
    reader = _core.Reader(
        segment, 0, 0, process_table, (0, 3), view, False, "graph 1, edge #2 (A.f)"
    )
    inbox = _core.Inbox(process_table, 0, event, 0)
    window = _core.InFlightWindow([writer], [reader], 4, _core.KIND_VALUE, inbox)
    with mmap.mmap(segment.fd, 0) as memory:
        yield window, reader, memory


@pytest.mark.parametrize("head", [RING_SLOTS + 3, 2**40, 2**64 - 1, 0])
def test_a_ring_whose_head_somebody_has_written_over(channel, head):
    """Its reader gets an error that names the edge, wherever it looks, and comes to an end."""
    window, reader, memory = channel
    for i in range(2):
        assert window.submit(i) == i
    assert reader.receive() == 0
    ref = _core.RefCore(None, window, 1, 0)
    memory[HEAD : HEAD + 8] = struct.pack("<Q", head)
    uses = [
        window.drain,
        lambda: window.ready(1, 0),
        lambda: window.take(1, 0),
        lambda: window.get(ref, 1.0),
        lambda: window.completed,
        reader.receive,
        reader.skip,
        lambda: reader.empty,
        lambda: reader.available,
        lambda: reader.front,
    ]
    for use in uses:
        with pytest.raises(
            (OSError, ConveyorError), match=r"graph 1, edge #2 \(A.f\), written by process 0"
        ):
            use()
    # Mended, nothing is lost.
    memory[HEAD : HEAD + 8] = struct.pack("<Q", 2)
    assert window.ready(1, 0)
    assert window.take(1, 0) == 1


def test_a_submission_that_needs_a_broken_ring_to_move(channel):
    window, _, memory = channel
    for i in range(4):
        assert window.submit(i) == i
    memory[HEAD : HEAD + 8] = struct.pack("<Q", 2**50)
    with pytest.raises((OSError, ConveyorError), match="edge #2"):
        window.submit(4)
    assert window.submitted == 4
