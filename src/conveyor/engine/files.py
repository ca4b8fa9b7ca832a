"""Files that processes pass to each other, and that have no name."""

from __future__ import annotations

import os


def anonymous_file(name: str) -> int:
    """A new file without a place in any directory; the caller closes it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    # Pythons built for old C libraries do not have it.
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
