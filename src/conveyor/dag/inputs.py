"""The nodes of what ``execute`` will be given: the whole input, its arguments, and parts of those."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from conveyor.dag.hints import TransportHint
from conveyor.dag.node import DAGNode, Record, assign
from conveyor.exceptions import GraphError
from conveyor.weak import WeakValues


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
"""Used part of an input: an argument by position or by name, or a part of one."""


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


# Iterating over an input has no natural end; far beyond any real graph, stop with an error.
_MOST_PARTS = 4096


class InputNode(DAGNode):
    """The input of a graph, known only at ``execute``.

    Bind it whole, and ``execute(x)`` takes exactly one argument; or bind parts of it: ``inp[0]``
    is the first positional argument of ``execute``, ``inp.name`` and ``inp["name"]`` are its
    keyword argument ``name``::

        with InputNode() as inp:
            dag = actor.scale.bind(inp[0], factor=inp.factor)

        dag.compile().execute(x, factor=2)

    What is inside an argument is taken further: ``inp["batch"]["ids"][0]``, ``inp[0].shape``. It is
    taken apart where ``execute`` is called, and only the parts travel. Where a graph uses its input
    whole and in parts, the parts say which arguments there are; the whole is the argument itself if
    that is one without a name, else an ``InputData`` of all.

    A name that starts with an underscore, or that is a method of nodes (``compile``, ``execute``),
    can only be written ``inp["name"]``. The ``with`` block is for the eye; it may be left out.
    """

    __slots__ = ("_hints", "_parts")

    # The hints of its parts, which come and go.
    _hints: dict[Key, TransportHint]
    # Weak, because parts refer to this node. Two threads may still make the same part twice; that
    # harms nothing, since a part is known by its key.
    _parts: WeakValues[Key, InputAttributeNode]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            raise GraphError(
                "InputNode() takes no arguments: what the graph is given is said at execute(...)"
            )
        assign(self, _hint=None, _hints={}, _record=Record("input"), _parts=WeakValues())

    def __enter__(self) -> InputNode:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def __getitem__(self, key: int | str) -> InputAttributeNode:
        return self._part(_checked(key))

    def _part(self, key: Key) -> InputAttributeNode:
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = InputAttributeNode(self, key)
        return part

    def __getattr__(self, name: str) -> Any:
        # Underscored names are asked for by copy, pickle and notebooks: they are no keys.
        if name.startswith("_") or name in ("remote", "bind"):
            return super().__getattr__(name)
        return self[name]

    def __iter__(self) -> Iterator[InputAttributeNode]:
        """``inp[0]``, ``inp[1]``, ... without end, for ``zip(workers, inp)``."""
        for index in range(_MOST_PARTS):
            yield self[index]
        raise GraphError(
            "iterating over an InputNode does not end by itself: it has as many parts as one takes "
            "from it; write zip(actors, inp), or inp[0], inp[1], ..."
        )

    def __repr__(self) -> str:
        return "InputNode()"

    def _upstream(self) -> tuple[DAGNode, ...]:
        return ()


class InputAttributeNode(DAGNode):
    """An argument of ``execute`` or a part of one: ``inp[0]``, ``inp.name``, ``inp["a"][0].b``."""

    __slots__ = ("_input", "_key")

    _input: InputNode
    _key: Key

    def __init__(self, whole: InputNode, key: Key) -> None:
        assign(
            self,
            _hint=None,
            _record=whole._record,
            _input=whole,
            _key=key,
        )

    def __getitem__(self, key: Hashable) -> InputAttributeNode:
        if isinstance(key, DAGNode):
            raise GraphError(
                f"{self!r}[...]: the key is a graph node, and what an input is taken apart by must "
                f"be known when the graph is made; take it apart in a method that gets both"
            )
        try:
            hash(key)
        except TypeError:
            raise TypeError(
                f"{self!r}[{key!r}]: a part of an input is named by a hashable key, not by a "
                f"{type(key).__name__}; take it apart in the method that gets it"
            ) from None
        return self._further(True, key)

    def __getattr__(self, name: str) -> Any:
        # Underscored names are asked for by copy, pickle and notebooks: they are no parts.
        if name.startswith("_") or name in ("remote", "bind"):
            return super().__getattr__(name)
        return self._further(False, name)

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be iterated over: how many parts it has is not known when the graph is "
            f"made; write {self!r}[0], {self!r}[1], ..."
        )

    def _further(self, item: bool, key: Hashable) -> InputAttributeNode:
        steps = self._key.steps if isinstance(self._key, Path) else ()
        return self._input._part(Path(root_of(self._key), (*steps, (item, key))))

    def __repr__(self) -> str:
        return key_label(self._key, "InputNode()")

    def _set_hint(self, hint: TransportHint) -> None:
        self._input._hints[self._key] = hint

    def _get_hint(self) -> TransportHint | None:
        # A hint for the whole holds for parts without a hint of their own.
        hints, key = self._input._hints, self._key
        while key not in hints and isinstance(key, Path):
            key = Path(key.root, key.steps[:-1]) if len(key.steps) > 1 else key.root
        return hints.get(key, self._input._hint)

    def _upstream(self) -> tuple[DAGNode, ...]:
        return (self._input,)


def key_of(node: InputAttributeNode) -> Key:
    """Return the key of the part of the input that ``node`` is. (No property: ``inp["a"].key`` is the part's
    own.)"""
    return node._key


def _checked(key: Any) -> int | str:
    if isinstance(key, str):
        return key
    try:
        if isinstance(key, bool):
            raise TypeError
        index = operator.index(key)
    except TypeError:
        raise TypeError(
            f"an input is taken apart by position (int) or by name (str), not by "
            f"{type(key).__name__}: inp[{key!r}]"
        ) from None
    if index < 0:
        raise GraphError(
            f"inp[{index}]: positions count from 0; how many arguments execute() will get is not "
            f"known from the end"
        )
    return index
