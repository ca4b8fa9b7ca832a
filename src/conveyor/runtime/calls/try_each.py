"""Steps that are each tried, whatever the one before has raised: of an actor's end, and of others."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable


def try_each(*steps: Callable[[], object], name: str = "") -> KeyboardInterrupt | None:
    """Take all steps. What one raises is printed, as a failure of ``name`` if that is given, and ends no
    other: not even ``SystemExit``, since the end is under way.

    A ``KeyboardInterrupt`` is printed and returned (the first of several), for whom it may have meant
    more: in an actor's process, which Ctrl-C does not reach, only user code raises it.
    """
    interrupt: KeyboardInterrupt | None = None
    try:
        for step in steps:
            try:
                step()
            except BaseException as error:
                head = f"{name} has failed:\n" if name else ""
                print(head + traceback.format_exc(), file=sys.stderr)
                if isinstance(error, KeyboardInterrupt):
                    # Its traceback has this frame, and so the steps, and what they are to end: in a circle,
                    # of which a collection closes files in any order.
                    interrupt = interrupt or error.with_traceback(None)
        return interrupt
    finally:
        # The error in whose handling it was raised may have the frame of a generator that was closed. From
        # Python 3.12 on that leads back to this frame, which would close the same circle.
        del interrupt
