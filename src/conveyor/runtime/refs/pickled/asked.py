"""What is asked of the process that has made a ref: who has to do something before it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from conveyor.runtime import context
from conveyor.runtime.refs.ref import Ref, blockers_of
from conveyor.runtime.waiting.works import Again, Blockers, tell_another


class Asked:
    """About one ref, by this process."""

    __slots__ = ("_answered", "_blockers", "_last", "_told")

    def __init__(self) -> None:
        #: The last question, and to which one the answer is.
        self._last = self._answered = -1
        self._blockers: Blockers = ()
        self._told: list[tuple[int, Again]] = []

    def known(self, question: int) -> Blockers | None:
        """The answer, if it is there. Several threads may wait for the ref: the answer to a later question
        is as good."""
        return self._blockers if self._answered >= question else None

    def begin(self, question: int) -> bool:
        """Whether the question is to be sent."""
        if self._last >= question:
            return False
        self._last = question
        return True

    def tell(self, question: int, again: Again) -> None:
        """``again`` is among those to call when that question is answered, or need not be."""
        self._told.append((question, again))

    def answer(self, question: int, blockers: Blockers) -> Sequence[Again]:
        """An answer has come; whom to call now."""
        if self._answered < question:
            self._blockers, self._answered = blockers, question
        told = [again for of, again in self._told if of <= question]
        self._told = [(of, again) for of, again in self._told if of > question]
        return told

    def end(self) -> Sequence[Again]:
        """The ref is done; whom to call now."""
        told, self._told = self._told, []
        return [again for _, again in told]


def tell_of(ref: Ref | None, tell: Callable[[Blockers], object]) -> None:
    """Have ``tell`` told, now or later, on any thread, who has to do something before this process's ref is
    done. ``None``: it is not needed any more."""
    if ref is None:
        tell(())
    else:
        tell_another(partial(blockers_of, ref), context.current().lanes.next_question(), tell)
