"""What may be the end of anything in a round over nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from chaos_nodes import Member

import conveyor
from conveyor.exceptions import ActorDiedError, CollectiveBrokenError, ObjectLostError

#: s for what must come.
PATIENCE = 60.0
#: What whoever needs a dead one, or what it had, is told.
_OF_DEATHS = (ActorDiedError, ObjectLostError)


class WrongError(AssertionError):
    """Something that must not happen has happened."""


class Judge:
    """Of one round. ``found``: what has come of what, so often."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self.found: Counter[str] = Counter()

    def endangered(self) -> bool:
        return any(member.struck or member.shaken for member in self._members)

    def check_death(self, error: BaseException, what: str) -> None:
        """Something fails since somebody has died."""
        if not self.endangered():
            raise WrongError(f"nobody was struck, and {what} fails: {error!r}") from error
        self.found[type(error).__name__] += 1

    def value(
        self,
        what: str,
        get: Callable[[], Any],
        expected: Any,
        *others: type[BaseException],
    ) -> bool:
        """Whether ``get()`` has given that. It may fail by a death, if there was one, or with ``others``."""
        try:
            got = get()
        except _OF_DEATHS as error:
            self.check_death(error, what)
            return False
        except others as error:
            self.found[type(error).__name__] += 1
            return False
        if not _same(got, expected):
            raise WrongError(f"{what} is {got!r} instead of {expected!r}")
        self.found["values"] += 1
        return True

    def get(self, what: str, ref: Any, expected: Any, *others: type[BaseException]) -> bool:
        """The same of a reference, or of several."""
        return self.value(what, lambda: conveyor.get(ref, timeout=PATIENCE), expected, *others)

    def of_group(self, what: str, ref: Any, expected: Any, spoilt: bool) -> bool:
        """The same of what a rank has made with others. ``spoilt``: calls of theirs may have failed."""
        try:
            return self.get(what, ref, expected)
        except CollectiveBrokenError as error:
            if not spoilt:
                self.check_death(error, what)
            return False

    def see(self, member: Member) -> None:
        """What has become of it: the dead are dead or have come back, all others are as they were."""
        if not (member.struck or member.shaken):
            if (pid := self._pid(member)) != member.pid:
                raise WrongError(f"another process ({pid}) answers for {member}")
            return
        end = time.monotonic() + PATIENCE
        pid = 0
        while True:
            if time.monotonic() > end:
                raise WrongError(
                    f"{member} has neither died nor come back: {pid or 'nobody'} answers"
                )
            try:
                pid = self._pid(member)
            except ActorDiedError:
                if member.returns:
                    continue
                member.struck = True
                return
            if pid != member.pid and (member.returns or member.revived):
                member.struck = member.shaken = member.revived = False
                return
            if pid == member.pid and not member.struck:
                member.shaken = False
                return

    def _pid(self, member: Member) -> int:
        return int(conveyor.get(member.handle.where.remote(), timeout=PATIENCE)[0])


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(got) == len(expected) and all(map(_same, got, expected))
    with suppress(ValueError):  # of other shapes
        return bool(np.array_equal(got, expected))
    return False
