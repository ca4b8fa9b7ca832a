"""Where an inline actor comes from, so that it can be made again."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.runtime.calls.constructor import Kept
from conveyor.runtime.protocol import ActorSpec


@dataclass(eq=False)
class Origin:
    """``spec``: without its arguments, which are in ``kept`` (``None``: too large to keep)."""

    spec: ActorSpec
    kept: Kept | None
    restarts: int = 0

    @property
    def restarts_left(self) -> bool:
        return self.spec.max_restarts < 0 or self.restarts < self.spec.max_restarts
