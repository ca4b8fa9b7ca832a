"""Collective groups on the inline engine: there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from conveyor.exceptions import RuntimeStateError
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.ranks import Joined


class InlineCollectives:
    """Refuses groups; see ``runtime.ranks.Collectives``."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.entered: dict[str, Any] = {}
        self.until: Callable[[], int] | None = None

    def open(self, actors: Sequence[ActorId], driver: int | None = None) -> int:
        self._refuse()

    def join(self, number: int) -> Joined:
        self._refuse()

    def leave(self, joined: Joined) -> None:
        self._refuse()

    def close(self, number: int) -> None:
        self._refuse()

    def doing(self, joined: Joined, ranks: Sequence[int]) -> list[str]:
        self._refuse()

    def death(self, joined: Joined, rank: int) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeStateError(
            "the inline engine has no collective groups: it runs one method after the other, and the ranks "
            "of a group wait for each other in theirs. Use conveyor.init(engine='local')"
        )
