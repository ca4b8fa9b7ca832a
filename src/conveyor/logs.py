"""The logger ``conveyor`` in programs that have not set up logging.

Python's last resort prints the bare message there. Ours names the library before it. A program that has a
handler of its own, of the root logger or of this one, never sees this one's.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class LastResort(logging.StreamHandler[TextIO]):
    """Handler that prints warnings to ``sys.stderr`` where no other handler gets them."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # as it is when something is printed
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether no other handler gets the record."""
        logger: logging.Logger | None = logging.getLogger("conveyor")
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return super().filter(record) is not False


def install() -> None:
    """Have the logger ``conveyor`` name itself where the program has not set up logging."""
    logger = logging.getLogger("conveyor")
    if not any(isinstance(handler, LastResort) for handler in logger.handlers):
        logger.addHandler(LastResort())
