"""A descriptor that is kept for the moment when the process has no other."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from io import FileIO

from conveyor.local_sockets import hang_up

#: What keeps a connection from being accepted while all descriptors are used.
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


class Spare:
    """Who listens has one. Without a descriptor nobody can be accepted, nor refused, and the system would go
    on telling of whoever waits."""

    def __init__(self) -> None:
        self._file = FileIO(os.devnull)

    def turn_away(self, listener: socket.socket) -> int | None:
        """Drop who has waited longest at a listener that does not block, by way of the spare descriptor. How
        many were dropped; ``None``: another thread was quicker to take the descriptor."""
        self._file.close()
        try:
            hang_up(listener.accept()[0])
        except BlockingIOError:
            return 0  # the system looks for a descriptor before it looks whether anybody is there
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                return None
            raise
        finally:
            self.restore()
        return 1

    def restore(self) -> None:
        """Have one again, if another thread was quicker to take it and there is one to be had by now."""
        if self._file.closed:
            with suppress(OSError):  # the next time, then
                self._file = FileIO(os.devnull)

    def close(self) -> None:
        self._file.close()
