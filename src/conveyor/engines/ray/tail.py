"""Last lines that a process of Ray's has written to stderr, which Ray redirects to a file."""

from __future__ import annotations

import os

_BYTES = 8 << 10
_LINES = 20
#: Beginnings of the lines that Ray itself writes to the file.
_RAYS_LINES = (":job_id:", ":actor_name:", ":task_name:")


def tail(path: str) -> str:
    """Return the last lines of the file ``path``, without Ray's own; empty if there is no such file."""
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if not line.startswith(_RAYS_LINES)][-_LINES:])
