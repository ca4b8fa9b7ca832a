"""Which calls were made before whoever made them can have known that an earlier one has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from conveyor import _core
from conveyor.runtime.process import CALL_SLOTS


class Awareness:
    """Of an actor whose calls run one after the other."""

    def __init__(self) -> None:
        #: Hears, whenever it changes, whether the call that begins now was made before.
        self.on_change: Callable[[bool], object] = lambda _: None
        #: By mailbox, how many calls had come from there at the last failure; ``None``: so many that more
        #: may have waited at the caller.
        self._behind: dict[_core.Reader, int | None] = {}
        self._unaware = False

    def failed(self, mailboxes: Iterable[_core.Reader]) -> None:
        """A call has failed, and nobody has been told of it yet."""
        for reader in mailboxes:
            waiting = reader.available
            if waiting:
                # One more is the one that has failed.
                full = waiting >= CALL_SLOTS - 1
                self._behind[reader] = None if full else reader.count + waiting

    def begins(self, mailbox: _core.Reader) -> None:
        """A call that was just taken from ``mailbox`` begins."""
        unaware = bool(self._behind) and self._is_behind(mailbox)
        if unaware != self._unaware:
            self._unaware = unaware
            self.on_change(unaware)

    def forget(self, mailbox: _core.Reader) -> None:
        """Nothing comes from there any more."""
        self._behind.pop(mailbox, None)

    def _is_behind(self, mailbox: _core.Reader) -> bool:
        if mailbox not in self._behind:
            return False
        last = self._behind[mailbox]
        if last is None:
            if mailbox.empty:
                del self._behind[mailbox]  # it is the last of those
            return True
        if mailbox.count >= last:
            del self._behind[mailbox]
        return mailbox.count <= last
