"""One value of another host's process on its way here, and who of this host wants it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct

from conveyor import descriptors
from conveyor.engine.net.answering import break_off
from conveyor.runtime.far_memory import Brought, Room, RoomAt, Wanted

#: Bytes that are copied from one file to another at a time.
_COPIED = 1 << 20


class Waiter:
    """One process that wants it."""

    __slots__ = ("_fd", "at", "gave_up", "progress", "refused", "tell")

    def __init__(
        self,
        room: Room | RoomAt | None,
        tell: Callable[[Brought], object],
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        """``room``: where it is to be put; ``None``: it is told with the news. ``tell(brought)`` is called
        once, by any thread. ``progress(done)`` is told how many bytes there are."""
        self._fd = -1 if room is None else descriptors.duplicate(room.fd)
        self.at = 0 if room is None else room.at
        self.tell, self.progress = tell, progress
        #: It wants it no more, and its room is not written to once it has been told so.
        self.gave_up = False
        #: What it is told where its room could not be written to.
        self.refused: Brought | None = None

    @property
    def has_room(self) -> bool:
        return self._fd >= 0

    @property
    def waits(self) -> bool:
        """Whether it is still to be given what comes."""
        return not self.gave_up and self.refused is None

    def put(self, piece: memoryview | bytes, at: int) -> None:
        """Write a piece of it. Where its room takes none, it alone has failed: the others go on."""
        if self._fd >= 0:
            try:
                _write(self._fd, piece, self.at + at)
            except (OSError, OverflowError) as error:
                self.refused = failure(error)
                return
        self.progress(at + len(piece))

    def read(self, size: int, at: int) -> bytes:
        """Of what has been put."""
        return os.pread(self._fd, size, self.at + at)

    def done(self, brought: Brought) -> None:
        """It has come, or never will. Nothing is written to the room from now on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        # Who is told may hold this, and has the room: no cycle is to keep that.
        tell, self.tell = self.tell, lambda _: None
        tell(brought)


def failure(error: Exception) -> Brought:
    """What those who wait are told then."""
    number = getattr(error, "errno", None) or errno.EIO
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Brought(None, number, why)


NOBODY_WAITS = Brought(None, errno.ECANCELED, "nobody waits for it any more")


class Flight(Struct, eq=False):
    """waiting: who gets what is on its way. late: who has come meanwhile. shared: others may want it soon
    after. file: where a copy is, that nobody writes to; -1: nowhere. keeps_until: that is kept so long for
    others; 0: it is on its way. talks: the connection over which it comes."""

    wanted: Wanted
    size: int
    waiting: list[Waiter]
    late: list[Waiter]
    shared: bool
    file: int = -1
    keeps_until: float = 0.0
    talks: socket.socket | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for what is on its way."""
        return any(one.waits for one in self.waiting)

    def give_up(self, waiter: Waiter) -> bool:
        """Its process wants it no more. Whether nothing is written to its room, so that it may be told at
        once; else it is by who writes there."""
        if waiter in self.late:
            self.late.remove(waiter)
            return True
        waiter.gave_up = True
        if waiter in self.waiting and not self.is_wanted and self.talks is not None:
            break_off(self.talks)
        return False

    def put(self, piece: memoryview, at: int) -> None:
        """A piece has come."""
        if self.file >= 0:
            try:
                _write(self.file, piece, at)
            except OSError:  # no memory for a copy: whoever comes later fetches it, too
                self.close()
        for one in self.waiting:
            if one.waits:
                one.put(piece, at)

    def copy(self) -> None:
        """Put it where it is wanted, from the file."""
        at = 0
        while at < self.size:
            piece = os.pread(self.file, min(_COPIED, self.size - at), at)
            if not piece:
                raise OSError(errno.EIO, "a part of the copy that was kept of it is gone")
            for one in self.waiting:
                if one.waits:
                    one.put(piece, at)
            at += len(piece)

    def small(self) -> bytes | None:
        """What is in the file, where somebody is to be told it with the news."""
        if all(one.has_room for one in self.waiting):
            return None
        return os.pread(self.file, self.size, 0)

    def keep(self, data: bytes | None) -> None:
        """Have a copy in a file, if there is room for one: of ``data``, or of what has been put into the
        room of one who waits."""
        self.open()
        if self.file < 0:
            return
        source = next((one for one in self.waiting if one.waits), None)
        try:
            if data is not None:
                _write(self.file, data, 0)
            elif source is None:  # just now: nobody has all of it
                self.close()
            else:
                for at in range(0, self.size, _COPIED):
                    _write(self.file, source.read(min(_COPIED, self.size - at), at), at)
        except OSError:
            self.close()

    def open(self) -> None:
        """Have a file, if one is to be had."""
        if self.file < 0:
            with suppress(OSError):
                self.file = descriptors.memory_file("conveyor-value")

    def close(self) -> None:
        """Have none."""
        fd, self.file = self.file, -1
        if fd >= 0:
            os.close(fd)


def _write(fd: int, piece: memoryview | bytes, at: int) -> None:
    while piece:
        done = os.pwrite(fd, piece, at)
        piece, at = piece[done:], at + done
