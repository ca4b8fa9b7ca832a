"""One process that the fork server has been asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec import Struct, field

from conveyor import descriptors
from conveyor.engine.local.spec import ChildSpec, write_spec
from conveyor.flag import Flag
from conveyor.system_limits import hint


def why(error: OSError) -> str:
    """What the system has refused, and what can be done about it."""
    return "; ".join(filter(None, (str(error), hint(error))))


class SpawnRequest(Struct, eq=False):
    """A spawn that is not answered yet. Owns the pipes until there is a child to own them."""

    number: int
    spec: ChildSpec
    #: What the process gets duplicates of.
    fds: Sequence[int]
    on_spawned: Callable[[int], None] | None
    #: Whether the fork server has been asked, or will not be.
    sent: bool = False
    #: Pipes, each with the name of its stream: "stdout" or "stderr".
    outputs: dict[int, str] = field(default_factory=dict)
    #: Set once ``pid`` or ``error`` is.
    done: Flag = field(default_factory=Flag)
    pid: int = 0
    error: str = ""
    cause: OSError | None = None

    def refuse(self, error: str | OSError, context: str = "") -> None:
        """There will be no such process: that is the outcome."""
        if isinstance(error, OSError):
            self.cause = error
            self.error = context + why(error)
        else:
            self.error = context + error
        self.done.set()

    def prepare(self, theirs: list[int]) -> None:
        """Make what the process gets, and add it to ``theirs``: its spec and its ends of the pipes."""
        theirs.append(write_spec(self.spec))
        for stream in ("stdout", "stderr"):
            reader, writer = map(descriptors.own, os.pipe())
            theirs.append(writer)
            os.set_blocking(reader, False)
            self.outputs[reader] = stream

    def close(self) -> None:
        """Nobody will own the pipes."""
        with suppress(KeyError):  # of one that is empty, whoever has emptied it
            while True:
                os.close(self.outputs.popitem()[0])
