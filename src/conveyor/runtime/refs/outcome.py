"""What has become of a ref: its error, if it has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conveyor import _core
from conveyor.codec import add_sibling, afresh, completed
from conveyor.exceptions import SessionEndedError
from conveyor.runtime import ending


class Failure:
    """An outcome that is an exception."""

    __slots__ = ("_again", "_frame", "error")

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

    @property
    def may_have_others(self) -> bool:
        """Whether more may have failed in its execution."""
        return self._frame is not None and self._frame.others is not None

    def to_raise(self) -> BaseException:
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
    """The error, if ``outcome`` is one."""
    return outcome.error if type(outcome) is Failure else None
