"""Modules that are imported when one of their names is first asked for."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from conveyor.exceptions import RuntimeStateError

# Held across fork(): a child that found a module half imported, by a thread that it does not have, would wait
# for that thread for ever. Reentrant, for a module that forks while it is imported.
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
    if module is not None and not getattr(
        getattr(module, "__spec__", None), "_initializing", False
    ):
        return module
    if sys.is_finalizing():
        raise RuntimeStateError(f"the program is ending: {name} cannot be imported any more")
    with _importing:
        return import_module(name)


def names_later(
    names: dict[str, Any], where: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a module with ``names``. ``where``: the modules of names
    that are imported when they are asked for. A module's own name stands for the module."""

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {names['__name__']!r} has no attribute {name!r}")
        module = import_later(where[name])
        found = names[name] = getattr(module, name, module)
        return found

    return get, lambda: sorted({*names, *where})


class LaterModule:
    """Stand-in for a module that is slow to import, or of a higher layer: it is imported at the first use,
    also in annotations that are evaluated."""

    def __init__(self, name: str) -> None:
        self.__name = name

    def __getattr__(self, attribute: str) -> Any:
        found = self.__dict__[attribute] = getattr(import_later(self.__name), attribute)
        return found
