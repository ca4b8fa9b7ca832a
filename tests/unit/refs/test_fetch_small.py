"""Reading a small value of another process by what its frame says, which may be anything."""

import ctypes
import os
import struct

import pytest

from conveyor import _core
from conveyor.codec.direct import File, Located, names_of

SLOTS = 4


@pytest.fixture
def process_table():
    made = _core.ProcessTable.create(SLOTS)
    made.prepare(1, "holder", 1)
    return made


class Kept:
    """A value of this process's, as another one would have it."""

    def __init__(self, data=b"12345678", number=77):
        self.memory = ctypes.create_string_buffer(data, len(data))
        self.anchor = _core.Anchor(number)
        ranges = _core.ranges_of([self.memory])
        place = 1, 1, os.getpid(), number, self.anchor.address
        self.where = Located(*place, names_of("auto", "A", False), ranges, 18, b"header")

    def packed(self, **changes):
        return self.where._replace(**changes).pack()


def fetch(meta, process_table, own_slot=0):
    return _core.fetch_small(meta, process_table, own_slot)


def test_what_is_decoded(process_table):
    kept = Kept()
    codec, meta, [buffer] = fetch(kept.packed(), process_table)
    assert (codec, meta, bytes(buffer)) == (18, b"header", b"12345678")
    memoryview(buffer)[:] = b"x" * 8  # it is a copy, and nobody else's
    assert kept.memory.raw == b"12345678"


def test_several_ranges_and_none(process_table):
    kept, other = Kept(), ctypes.create_string_buffer(b"abc", 3)
    both = kept.where.ranges + _core.ranges_of([other])
    _, _, buffers = fetch(kept.packed(ranges=both), process_table)
    assert [bytes(one) for one in buffers] == [b"12345678", b"abc"]
    assert fetch(kept.packed(ranges=b""), process_table) == (18, b"header", [])


@pytest.mark.parametrize(
    "changes",
    [
        {"joined": True},
        {"out_of_band": b"route"},
        {"arena_ranges": File(3, 4).pack()},
        {"slot": 0},
        {"slot": 2},
        {"incarnation": 2},
        {"slot": SLOTS},
        {"slot": 2**32 - 1},
        {"number": 78},
        {"anchor": 8},
        {"pid": 2**31 - 1},
        {"ranges": (8).to_bytes(8, "little") + (4).to_bytes(8, "little")},
        {"ranges": (8).to_bytes(8, "little") + (2**63).to_bytes(8, "little")},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_what_takes_more_or_cannot_be_read_is_for_the_long_way(process_table, changes):
    assert fetch(Kept().packed(**changes), process_table) is None


def test_what_is_large_is(process_table):
    assert fetch(Kept(bytes(31 << 10)).packed(), process_table) is not None
    assert fetch(Kept(bytes(32 << 10)).packed(), process_table) is None
    kept = Kept()
    assert fetch(kept.packed(ranges=kept.where.ranges * 512), process_table) is None


def test_what_a_test_holds_back_is(process_table):
    kept = Kept()
    process_table.change_transfers(1, 1, 0)
    assert fetch(kept.packed(), process_table) is None
    process_table.change_transfers(1, -1, 1)
    assert fetch(kept.packed(), process_table) is None
    process_table.change_transfers(1, 0, -1)
    assert fetch(kept.packed(), process_table) is not None


def test_what_is_kept_no_more_is(process_table):
    kept = Kept()
    packed = kept.packed()
    kept.anchor = None
    assert fetch(packed, process_table) is None


def test_frames_that_are_cut_off(process_table):
    packed = Kept().packed()
    for end in range(len(packed) - len(b"header")):
        assert fetch(packed[:end], process_table) is None
    with pytest.raises(ValueError, match="a table of ranges"):
        fetch(Kept().packed(ranges=bytes(15)), process_table)


@pytest.mark.parametrize("lengths", [[2**64 - 1], [2**64 - 64, 128], [2**62] * 5])
def test_more_memory_than_there_can_be_is_not_taken_for_little(lengths):
    table = b"".join(struct.pack("QQ", 4096, length) for length in lengths)
    with pytest.raises(ValueError, match="more memory than there can be"):
        _core.packed_size(table)
