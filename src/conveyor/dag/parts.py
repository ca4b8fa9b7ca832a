"""Arguments of ``execute``, and how their parts are named and taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Path(NamedTuple):
    """A part of an argument of ``execute``: ``root`` is the argument's position or name, ``steps``
    lead into it, each an item (``True``) or an attribute (``False``) with its key or name."""

    root: int | str
    steps: tuple[tuple[bool, Any], ...]

    def pick(self, argument: Any) -> Any:
        """Return the part of ``argument``. Raises ``TypeError`` if it has none of that kind."""
        value = argument
        for item, key in self.steps:
            try:
                value = value[key] if item else getattr(value, key)
            except Exception as error:
                raise TypeError(
                    f"{key_label(self)}: what execute() was given for {key_label(self.root)} has no "
                    f"such part: {type(error).__name__}: {error}"
                ) from error
        return value


Key = int | str | Path
"""What is used of an input: an argument by position or by name, or a part of one."""


def key_label(key: Key | None, whole: str = "inp") -> str:
    """Return ``key`` as a graph whose input is called ``whole`` writes it. ``None`` is the whole input."""
    if key is None:
        return whole
    if not isinstance(key, Path):
        return f"{whole}[{key!r}]"
    steps = (f"[{name!r}]" if item else f".{name}" for item, name in key.steps)
    return f"{whole}[{key.root!r}]{''.join(steps)}"


def root_of(key: Key) -> int | str:
    """Return the argument of ``execute`` that ``key`` is, or is a part of."""
    return key.root if isinstance(key, Path) else key


class InputData:
    """All arguments of one ``execute``, where a graph uses its input whole and takes several.

    ``data[0]`` is a positional argument, ``data.name`` and ``data["name"]`` are a keyword argument,
    as in the graph.
    """

    __slots__ = ("args", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs

    def __getitem__(self, key: int | str) -> Any:
        return self.kwargs[key] if isinstance(key, str) else self.args[key]

    def __getattr__(self, name: str) -> Any:
        if name in InputData.__slots__ or name not in self.kwargs:
            raise AttributeError(f"execute() was given no argument {name!r}")
        return self.kwargs[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InputData):
            return NotImplemented
        return (self.args, self.kwargs) == (other.args, other.kwargs)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return InputData, (self.args, self.kwargs)

    def __repr__(self) -> str:
        shown = [repr(arg) for arg in self.args]
        shown += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"InputData({', '.join(shown)})"


def given(key: Key | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the input's part ``key`` for a call of ``execute(*args, **kwargs)``.

    The whole input (``None``) is the argument itself if there is just one, without a name.

    Raises:
        TypeError: an argument has no such part.
    """
    if key is None:
        return args[0] if len(args) == 1 and not kwargs else InputData(args, dict(kwargs))
    if isinstance(key, Path):
        return key.pick(given(key.root, args, kwargs))
    return args[key] if isinstance(key, int) else kwargs[key]
