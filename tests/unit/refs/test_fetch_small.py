"""Reading a small value of another process by what its frame says, which may be anything."""

import ctypes
import os
import struct

import pytest

from conveyor import _core
from conveyor.codec.direct import File, Located, names_of

SLOTS = 4


@pytest.fixture
def board():
    made = _core.Board.create(SLOTS)
    made.prepare(1, "keeper", 1)
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


def fetch(meta, board, own_slot=0):
    return _core.fetch_small(meta, board, own_slot)


def test_what_is_decoded(board):
    kept = Kept()
    codec, meta, [buffer] = fetch(kept.packed(), board)
    assert (codec, meta, bytes(buffer)) == (18, b"header", b"12345678")
    memoryview(buffer)[:] = b"x" * 8  # it is a copy, and nobody else's
    assert kept.memory.raw == b"12345678"


def test_several_ranges_and_none(board):
    kept, other = Kept(), ctypes.create_string_buffer(b"abc", 3)
    both = kept.where.ranges + _core.ranges_of([other])
    _, _, buffers = fetch(kept.packed(ranges=both), board)
    assert [bytes(one) for one in buffers] == [b"12345678", b"abc"]
    assert fetch(kept.packed(ranges=b""), board) == (18, b"header", [])


@pytest.mark.parametrize(
    "changes",
    [
        {"joined": True},
        {"beside": b"route"},
        {"lying": File(3, 4).pack()},
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
def test_what_takes_more_or_cannot_be_read_is_for_the_long_way(board, changes):
    assert fetch(Kept().packed(**changes), board) is None


def test_what_is_large_is(board):
    assert fetch(Kept(bytes(31 << 10)).packed(), board) is not None
    assert fetch(Kept(bytes(32 << 10)).packed(), board) is None
    kept = Kept()
    assert fetch(kept.packed(ranges=kept.where.ranges * 512), board) is None


def test_what_a_test_holds_back_is(board):
    kept = Kept()
    board.change_transfers(1, 1, 0)
    assert fetch(kept.packed(), board) is None
    board.change_transfers(1, -1, 1)
    assert fetch(kept.packed(), board) is None
    board.change_transfers(1, 0, -1)
    assert fetch(kept.packed(), board) is not None


def test_what_is_kept_no_more_is(board):
    kept = Kept()
    packed = kept.packed()
    kept.anchor = None
    assert fetch(packed, board) is None


def test_frames_that_are_cut_off(board):
    packed = Kept().packed()
    for end in range(len(packed) - len(b"header")):
        assert fetch(packed[:end], board) is None
    with pytest.raises(ValueError, match="a table of ranges"):
        fetch(Kept().packed(ranges=bytes(15)), board)


@pytest.mark.parametrize("lengths", [[2**64 - 1], [2**64 - 64, 128], [2**62] * 5])
def test_more_memory_than_there_can_be_is_not_taken_for_little(lengths):
    table = b"".join(struct.pack("QQ", 4096, length) for length in lengths)
    with pytest.raises(ValueError, match="more memory than there can be"):
        _core.packed_size(table)
