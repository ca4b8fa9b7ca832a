"""Modules of ours that are imported when something of theirs is first asked for."""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from types import ModuleType

from conveyor.exceptions import RuntimeStateError

# It is held across fork(): a child that found a module half imported, by a thread that it does not have,
# would wait for that thread for ever. Reentrant, for a module that forks while it is imported.
_importing = threading.RLock()
os.register_at_fork(
    before=_importing.acquire,
    after_in_parent=_importing.release,
    after_in_child=_importing.release,
)


def import_later(name: str) -> ModuleType:
    """Import the module ``name``.

    Raises:
        RuntimeStateError: the interpreter is ending, and imports nothing any more.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        return module
    if sys.is_finalizing():
        raise RuntimeStateError(f"the program is ending: {name} cannot be imported any more")
    with _importing:
        return import_module(name)
