"""The last lines that a process of Ray's has written to stderr, which Ray keeps in a file."""

from __future__ import annotations

import os

_BYTES = 8 << 10
_LINES = 20
#: How lines begin that Ray itself writes to the file, for whoever reads it.
_RAYS_LINES = (":job_id:", ":actor_name:", ":task_name:")


def tail(path: str) -> str:
    """Those of the file ``path``; nothing where there is none."""
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if not line.startswith(_RAYS_LINES)][-_LINES:])
