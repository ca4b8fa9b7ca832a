"""Surroundings of a program, as its actors are to find them: directory, import path, arguments, main
module."""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Sequence

from msgspec import Struct

from conveyor.exceptions import ConveyorWarning
from conveyor.user_frames import users_level

#: Set to 1 for actors, unless it is said otherwise: torch asks for huge pages for its large tensors,
#: as NumPy does anyway. Who fetches one that stays looks up each of its pages, and where they are small that
#: takes longer than to copy them.
HUGE_TENSORS = "THP_MEM_ALLOC_ENABLE"


class Surroundings(Struct, frozen=True):
    """Surroundings of the driver, as they are when an actor is started.

    main_file, main_module: where the driver's ``__main__`` comes from, as far as it has a file or was
        run as a module; processes that ``multiprocessing`` starts in the actor import it again.
    """

    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    main_file: str = ""
    main_module: str = ""


def surroundings() -> Surroundings:
    """Return the surroundings of this process."""
    file, module = _main()
    path: list[object] = list(sys.path)
    return Surroundings(
        _working_directory(),
        tuple(str(entry) for entry in path if isinstance(entry, (str, os.PathLike))),
        tuple(str(argument) for argument in sys.argv),
        file,
        module,
    )


def _main() -> tuple[str, str]:
    """Return the file that ``__main__`` comes from and the module that was run as it; empty if there is
    none."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    module = getattr(getattr(main, "__spec__", None), "name", None)
    try:
        return os.path.abspath(file) if file else "", module or ""
    except OSError:  # a relative path, and the working directory is gone
        return "", module or ""


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        text = f"this process's working directory is gone ({error.strerror}): actors start in /"
        warnings.warn(text, ConveyorWarning, stacklevel=users_level())
        return "/"


def import_from(path: Sequence[str]) -> None:
    """Have this process import from ``path`` from now on."""
    sys.path[:] = path
    # Finders remember directories as they were, and relative ones by an earlier working directory.
    sys.path_importer_cache.clear()
    for finder in sys.meta_path:
        # That was all for the finder of paths, whose own way imports a lot since Python 3.12.
        if finder is not importlib.machinery.PathFinder and hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()


def main_module(file: str, module: str) -> types.ModuleType:
    """Make an actor's ``__main__``, in place of the one that its process was started with. It is empty but
    for names received of the driver's (``codec.pickling.definitions.name_in``), and for what
    ``multiprocessing`` must know to import the driver's."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if file:
        main.__file__ = file
    if module:
        main.__spec__ = importlib.machinery.ModuleSpec(module, None, origin=file)
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        # Set by multiprocessing where it was imported: how the main module is called in processes
        # that it starts, and so in what they send back.
        sys.modules["__mp_main__"] = main
    return main
