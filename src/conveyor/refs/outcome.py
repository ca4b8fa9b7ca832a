"""Outcome of a ref that has failed: its error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from conveyor import _core
from conveyor.codec import add_sibling, afresh, completed
from conveyor.exceptions import ConstructorError, SessionEndedError
from conveyor.runtime import context, ending


class Unseen:
    """An error that is logged once it is garbage, unless somebody has got it by then."""

    __slots__ = ("error", "got")

    def __init__(self, error: BaseException) -> None:
        self.error = error.with_traceback(None)
        self.got = False

    def __del__(self) -> None:
        if not (self.got or sys.is_finalizing()):
            tell_unseen(self.error)


def tell_unseen(error: BaseException) -> None:
    """Log ``error``, which nobody gets any more."""
    runtime = context.running()
    if runtime is not None:
        runtime.process.sweeper.tell(error)


class Failure:
    """An outcome that is an exception."""

    __slots__ = ("_again", "_frame", "error", "unseen")

    def __init__(
        self,
        error: BaseException,
        again: Callable[[], BaseException] | None = None,
        frame: _core.ErrorFrame | None = None,
    ) -> None:
        """``again`` makes what a task has raised anew for each ``get``: it may change as any other value may,
        and it holds the frames that it was raised in. ``frame`` is what it came as, which knows what else
        has failed in its execution."""
        self.error = error.with_traceback(None)
        self._again = again
        self._frame = frame
        #: Object that logs the error, where nothing else does; several outcomes may have the same.
        self.unseen: Unseen | None = None

    @property
    def may_have_others(self) -> bool:
        """Whether more may have failed in its execution."""
        return self._frame is not None and self._frame.others is not None

    def to_raise(self) -> BaseException:
        if self.unseen is not None:
            self.unseen.got = True
        if isinstance(self.error, ConstructorError) and (runtime := context.running()) is not None:
            runtime.process.sweeper.failed_actors.append(self.error.actor)
        if self._again is None:
            self.error = completed(self.error)
            if type(self.error) is SessionEndedError:
                return ending.ended()
            return afresh(self.error)
        error = self._again()
        for other in (self._frame and self._frame.others) or ():
            add_sibling(error, other)
        return error


def failure_of(outcome: Any) -> BaseException | None:
    """Return the error, if ``outcome`` is one."""
    return outcome.error if type(outcome) is Failure else None
