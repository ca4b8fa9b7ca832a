"""Classes and functions that exist only in the process that made them.

A class of ``__main__`` pickles by name without an error, and the reader does not find it. So such
a class (or function) is *defined*: pickled by value once, together with everything of its kind
that it refers to, as one **group**. Each member of a group has a **token**, unique among all
processes. A channel carries a group once, inside the first frame that needs it, and tokens from
then on. A process that received a group may send it on: it keeps the bytes.

Here is the registry of one process; what a channel has carried is in ``definitions``. How a group is
pickled, which needs cloudpickle, is in ``full_pickler``.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from conveyor import _core
from conveyor.codec.header import Definition, Token
from conveyor.exceptions import SerializationError
from conveyor.weak import WeakSet, WeakValues


class Group:
    """Definitions that travel together. ``needs``: the groups that this one's bytes refer to."""

    __slots__ = ("__weakref__", "carried", "needs", "payload", "pins", "tokens")

    def __init__(self, tokens: tuple[Token, ...], payload: bytes, needs: tuple[Group, ...]) -> None:
        self.tokens = tokens
        self.payload = payload
        self.needs = needs
        #: Pins of the channels that have brought it here, and the channels that this process has sent it
        #: over.
        self.pins: WeakSet[Pin] = WeakSet()
        self.carried: WeakSet[_core.Untold] = WeakSet()

    @property
    def key(self) -> Token:
        return self.tokens[0]

    @property
    def definition(self) -> Definition:
        """Form in a frame of this process."""
        needs = tuple([needed.key for needed in self.needs])
        return self.tokens, self.payload, needs, _made_here(self.key)


class Entry:
    """Record of one live class or function in this process: its token and its group."""

    __slots__ = ("group", "ref", "token")

    def __init__(self, ref: weakref.ref[Any], token: Token, group: Group) -> None:
        self.ref = ref
        self.token = token
        self.group = group


# The registry. Everything in it is weak, so it ends nothing and keeps nothing:
# an object keeps its group (through its entry), a known channel keeps the group, and a pin the objects.

_entries: dict[int, Entry] = {}
_refs: dict[Token, weakref.ref[Any]] = {}
_groups: WeakValues[Token, Group] = WeakValues()
_lock = threading.RLock()  # a collection while it is held may run a finalizer that encodes
_prefix = os.urandom(8)
_counter = itertools.count(1)


class Pin:
    """Keeps a group that a channel has brought.

    Its objects are kept by the pins of channels from their maker. Where there are none, one other pin
    keeps them, which was there when they were loaded. More would keep them alive for each other where they
    go round in a circle of processes; so would one at their maker.
    """

    __slots__ = ("__weakref__", "from_maker", "group", "objects")

    def __init__(self, group: Group, from_maker: bool) -> None:
        self.group = group
        self.from_maker = from_maker
        self.objects: tuple[Any, ...] = ()


def received(definition: Definition) -> Group:
    """The group that a frame has brought."""
    tokens, payload, needs, _ = definition
    key = tokens[0]
    group = _groups.get(key)
    if group is not None:
        return group
    with _lock:
        group = _groups.get(key)
        if group is None:
            # Needed groups came before, on this channel, so it holds them.
            try:
                needed = tuple(_groups[key] for key in needs)
            except KeyError:
                raise _undefined(key) from None
            group = Group(tokens, payload, needed)
            for token in tokens:
                _groups[token] = group
        return group


def pin(definition: Definition) -> Pin:
    """Have the group that a channel has brought stay as long as this is held."""
    made = Pin(received(definition), from_maker=definition[3])
    with _lock:
        made.group.pins.add(made)
        if made.from_maker:
            objects = [live(token) for token in made.group.tokens]
            made.objects = tuple([obj for obj in objects if obj is not None])
    return made


def new_token() -> Token:
    return _prefix + next(_counter).to_bytes(6, "little")


def _made_here(token: Token) -> bool:
    return token.startswith(_prefix)


def entry_of(obj: Any) -> Entry | None:
    """The entry of a class or function that is defined by value already."""
    entry = _entries.get(id(obj))
    return entry if entry is not None and entry.ref() is obj else None


def live(token: Token) -> Any:
    """The object of ``token`` if this process has it, else ``None``."""
    ref = _refs.get(token)
    return None if ref is None else ref()


def resolve(token: Token) -> Any:
    """The object of ``token``; loads its group at the first need."""
    ref = _refs.get(token)
    if ref is not None:
        obj = ref()
        if obj is not None:
            return obj
    group = _groups.get(token)
    if group is None:
        raise _undefined(token)
    return _load(group)[token]


def _undefined(token: Token) -> SerializationError:
    return SerializationError(
        f"definition {token.hex()} did not reach this process: the frame that carried it was "
        "neither decoded nor announced"
    )


def register(group: Group, objects: dict[Token, Any]) -> bool:
    """Make a group made here known. ``False`` if another thread has defined a member meanwhile."""
    with _lock:
        if any(entry_of(obj) is not None for obj in objects.values()):
            return False
        for token in group.tokens:
            _groups[token] = group
        for token, obj in objects.items():
            _enter(group, token, obj)
        return True


def _enter(group: Group, token: Token, obj: Any) -> None:
    key = id(obj)

    def forget(ref: weakref.ref[Any]) -> None:
        entry = _entries.get(key)
        if entry is not None and entry.ref is ref:
            del _entries[key]
        if _refs.get(token) is ref:
            del _refs[token]
            if group.carried and not _is_alive(group):
                _let_go(group)

    ref = weakref.ref(obj, forget)
    _refs[token] = ref
    _entries[key] = Entry(ref, token, group)


def _is_alive(group: Group) -> bool:
    return any(token in _refs for token in group.tokens)


def _let_go(group: Group) -> None:
    """Tell the channels that have carried ``group``, and what it alone needed, that they are gone."""
    gone = [group.key]
    needs = list(group.needs)
    while needs:
        needed = needs.pop()
        if needed.key not in gone and not _is_alive(needed):
            gone.append(needed.key)
            needs.extend(needed.needs)
    while True:  # finalizers run in any thread: it is emptied step by step
        try:
            untold = group.carried.pop()
        except KeyError:
            return
        untold.add(gone)


# Loading. No lock is held while user code runs (class bodies' hooks, imports): two threads may load
# the same group at once, and the first to finish wins. A lock here could meet the import lock.


class _Load:
    __slots__ = ("kept", "made")

    def __init__(self) -> None:
        self.made: dict[Token, Any] = {}
        self.kept: set[int] = set()


class _Loads(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Load] = []


_loads = _Loads()


def _load(group: Group) -> dict[Token, Any]:
    load = _Load()
    _loads.stack.append(load)
    try:
        pickle.loads(group.payload)
    finally:
        _loads.stack.pop()
    with _lock:
        objects: dict[Token, Any] = {}
        for token in group.tokens:
            obj = live(token)
            if obj is None:
                obj = load.made[token]
                _enter(group, token, obj)
            objects[token] = obj
        if not _made_here(group.key):
            pins = list(group.pins)
            for pin in [pin for pin in pins if pin.from_maker] or pins[:1]:
                pin.objects = tuple(objects.values())
        if _home is not None:
            for obj in objects.values():
                if obj.__module__ == _home.__name__ and obj.__qualname__.isidentifier():
                    _named[obj.__qualname__] = obj
    return objects


# Where received definitions of ``__main__`` have their names too, the latest of each name.
_home: ModuleType | None = None
_named: WeakValues[str, Any] = WeakValues()


def name_in(module: ModuleType) -> None:
    """Give what is received of ``__main__`` its name in ``module`` too, as long as it is alive.

    The ``__main__`` of an actor is empty otherwise, and ``multiprocessing`` would not find there what it
    pickles by name.
    """
    global _home
    _home = module
    module.__getattr__ = _find_name  # type: ignore[method-assign]


def _find_name(name: str) -> Any:
    obj = _named.get(name)
    if obj is None:
        raise AttributeError(f"module '__main__' has no attribute {name!r}")
    return obj


def construct(token: Token, make: Callable[..., Any], args: Sequence[Any]) -> Any:
    """In a group's bytes: make the object of ``token``, still without its contents."""
    load = _loads.stack[-1]
    obj = live(token)
    if obj is None:
        obj = make(*args)
    else:
        load.kept.add(id(obj))
    load.made[token] = obj
    return obj


def fill(obj: Any, state: tuple[Callable[[Any, Any], Any], Any]) -> None:
    """In a group's bytes: give an object its contents, unless it was here before."""
    if id(obj) not in _loads.stack[-1].kept:
        set_state, contents = state
        set_state(obj, contents)


def modules_in_memory() -> list[str]:
    """Modules that another process cannot import, though pickle believes it can.

    ``__main__`` is not among them: it needs no search.
    """
    found = [
        name
        for name, module in list(sys.modules.items())
        if type(module) is ModuleType
        and "." not in name
        and getattr(module, "__spec__", None) is None
        and name != "__main__"
        and getattr(module, "__file__", None) is None
        and not name.startswith(("_cython", "cython_runtime"))
    ]
    if "__mp_main__" in sys.modules:  # the main module in a child of multiprocessing
        found.append("__mp_main__")
    return found


def _forget_in_child() -> None:
    # A child's new tokens must differ from its parent's and its siblings'.
    global _prefix, _counter, _lock
    _prefix = os.urandom(8)
    _counter = itertools.count(1)
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_in_child)
