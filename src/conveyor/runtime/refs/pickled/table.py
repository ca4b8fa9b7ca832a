"""What other parts of the library ask of a process's refs that were pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from conveyor.codec import Reader
from conveyor.runtime.refs.pickled.exchange import ExportId
from conveyor.runtime.refs.ref import Ref


class RefTable(Protocol):
    """What a process knows of exported refs."""

    session: str

    def export(self, ref: Ref, readers: Sequence[Reader]) -> tuple[ExportId, int]:
        """The id of ``ref`` for a new pickle of it, and the pickle's ticket, good for one load by each of
        ``readers``, or by one that is not known if there are none."""
        ...

    def confirm(self, tickets: Sequence[int]) -> None:
        """Come back when pickles with these tickets, which were made here just now, can be loaded. Raises
        ``RuntimeStateError`` where one cannot."""
        ...

    def give_up(
        self, tickets: list[tuple[ExportId, int]], readers: Sequence[Reader] | None = None
    ) -> None:
        """``readers`` (``None``: this process) will not come with these. Called by finalizers: takes no
        lock."""
        ...

    def name(self, ref: Ref) -> ExportId:
        """The id that ``ref`` has, or will have when it is pickled."""
        ...

    def load(self, export: ExportId, ticket: int) -> Ref:
        """The ref that a pickle stands for: the original, or a copy."""
        ...

    def see_out(self) -> None:
        """Come back when the loads that there were are known to the driver, or will be whatever becomes of
        this process."""
        ...
