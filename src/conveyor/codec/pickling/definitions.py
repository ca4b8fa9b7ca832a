"""Classes and functions by value: those of this process, and those that a channel has carried.

A class of ``__main__`` pickles by name without an error, and the reader does not find it. So such
a class (or function) is *defined*: pickled by value once, together with everything of its kind
that it refers to, as one **group**. Each member of a group has a **token**, unique among all
processes. A channel carries a group once, inside the first frame that needs it, and tokens from
then on. A process that received a group may send it on: it keeps the bytes.

Here are the registry of one process, and what a channel has carried. How a group is
pickled, which needs cloudpickle, is in ``full_pickler``.

A group stays with a reader until its writer says that it is gone: nothing of it is alive there any more. What
the reader has made of it lives on as long as somebody there refers to it.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import itemgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.codec import borrows
from conveyor.codec.borrows import Reader
from conveyor.codec.encoded import Definition, Token, unpack
from conveyor.exceptions import SerializationError
from conveyor.weak import WeakSet, WeakValues

if TYPE_CHECKING:
    from conveyor.codec.promises import PromiseChecker
    from conveyor.codec.tensors.collected import Collected


class Group:
    """Definitions that travel together. ``needs``: the groups that this one's bytes refer to. ``refs``: the
    references that they refer to, which each new reader of the bytes loads."""

    __slots__ = ("__weakref__", "carried", "needs", "payload", "pins", "refs", "tokens")

    def __init__(
        self,
        tokens: tuple[Token, ...],
        payload: bytes,
        needs: tuple[Group, ...],
        refs: Sequence[object] = (),
    ) -> None:
        self.tokens = tokens
        self.payload = payload
        self.needs = needs
        self.refs = refs
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
#: Functions given to ``remote`` that have no closure: readers keep them, with the globals as they leave them.
remote_functions: WeakSet[Any] = WeakSet()
_lock = threading.RLock()  # a collection while it is held may run a finalizer that encodes
_prefix = os.urandom(8)
_counter = itertools.count(1)


class Pin:
    """Keeps a group that a channel has brought.

    Its objects are kept by the pins of channels from their owner. Where there are none, one other pin
    keeps them, which was there when they were loaded. More would keep them alive for each other where they
    go round in a circle of processes; so would one at their owner.
    """

    __slots__ = ("__weakref__", "from_owner", "group", "objects")

    def __init__(self, group: Group, from_owner: bool) -> None:
        self.group = group
        self.from_owner = from_owner
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
    made = Pin(received(definition), from_owner=definition[3])
    with _lock:
        made.group.pins.add(made)
        if made.from_owner and not _made_here(made.group.key):
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
    __slots__ = ("existing", "made")

    def __init__(self) -> None:
        self.made: dict[Token, Any] = {}
        self.existing: set[int] = set()


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
            for pin in [pin for pin in pins if pin.from_owner] or pins[:1]:
                pin.objects = tuple(objects.values())
        if _main_module is not None:
            for obj in objects.values():
                if obj.__module__ == _main_module.__name__ and obj.__qualname__.isidentifier():
                    _named[obj.__qualname__] = obj
    return objects


# Where received definitions of ``__main__`` have their names too, the latest of each name.
_main_module: ModuleType | None = None
_named: WeakValues[str, Any] = WeakValues()


def name_in(module: ModuleType) -> None:
    """Give what is received of ``__main__`` its name in ``module`` too, as long as it is alive.

    The ``__main__`` of an actor is empty otherwise, and ``multiprocessing`` would not find there what it
    pickles by name.
    """
    global _main_module
    _main_module = module
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
        load.existing.add(id(obj))
    load.made[token] = obj
    return obj


def fill(obj: Any, state: tuple[Callable[[Any, Any], Any], Any]) -> None:
    """In a group's bytes: give an object its contents, unless it was here before."""
    if id(obj) not in _loads.stack[-1].existing:
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


# Groups that are gone, in one frame: it should fit a slot.
MAX_GONE_PER_FRAME = 32

# Guards the knowledge of readers. Two threads may learn the definitions of a frame, before one of them takes
# it.
_known_lock = threading.RLock()


class SentDefinitions:
    """Groups that a channel has carried. Belongs to the channel's writer."""

    __slots__ = (
        "__weakref__",
        "by_reference",
        "by_value",
        "checker",
        "collected",
        "gone",
        "groups",
        "in_band",
        "is_remote",
        "of_exceptions",
        "readers",
    )

    def __init__(
        self, readers: tuple[Reader, ...] = (), is_remote: Callable[[], str] = lambda: ""
    ) -> None:
        # Names the readers that are on other nodes, where nothing that refers to this process can be
        # followed.
        self.is_remote = is_remote
        # Readers that decode each frame, in the order of the ring: each of them makes a borrow in it good
        # once. Empty: one unknown reader.
        self.readers = readers
        self.groups: set[Token] = set()
        # Groups that are gone; the next frames tell. Finalizers add to it, in any thread; the rest is the
        # encoder's. It is an object of the core, which looks here, so that its end runs no bytecode: an
        # exception that a signal handler raised there would be lost.
        self.gone = _core.Untold()
        # Whether the last value needed the full pickler: a guess for the next one, nothing more.
        self.by_value = False
        # Tensors that travel beside the frame of the value that is being pickled.
        self.collected: Collected | None = None
        # Keeper of the promises about the value that is being pickled.
        self.checker: PromiseChecker | None = None
        # Whether the value is pickled into one string: memory that it refers to is read at once.
        self.in_band = False
        # Reducer of the exceptions in a value that is pickled into one string; ``None``: each has its own.
        self.of_exceptions: Callable[[BaseException], Any] | None = None
        # Whether the memory of arrays and tensors of the value stays here, and that of nothing else.
        self.by_reference = False

    def note(self, groups: Iterable[Group]) -> None:
        """Note that a frame carries ``groups``."""
        for group in groups:
            self.groups.add(group.key)
            group.carried.add(self.gone)

    def take_gone(self) -> Sequence[Token]:
        """Return the groups that the frame which is being made tells to be gone.

        The frame, and those behind it, have to define them again if they refer to them.
        """
        gone = self.gone.take(MAX_GONE_PER_FRAME)
        self.groups.difference_update(gone)
        return gone

    def forget(self) -> None:
        """Send all definitions again: a reader has lost a frame with some."""
        self.groups.clear()

    def undo(self, meta: bytes) -> None:
        """Take back a frame with a header that was encoded and will not be published. Its definitions are
        not sent, and nobody comes for its borrows."""
        definitions, _, gone, _ = unpack(meta)
        self.groups.difference_update([tokens[0] for tokens, *_ in definitions])
        self.gone.add(gone)
        self._withdraw(meta, self.readers)

    def withdraw_borrows(self, meta: bytes, left: Iterable[int]) -> None:
        """Withdraw the borrows of a frame with a header for the readers with these numbers, which never come
        for them."""
        self._withdraw(meta, [self.readers[i] for i in left] if self.readers else ())

    def _withdraw(self, meta: bytes, readers: Sequence[Reader]) -> None:
        _, made, _, _ = unpack(meta)
        borrows.withdraw(made, readers)


class Generation:
    """The groups that frames of a channel may refer to, between two changes of what its reader knows.

    Who keeps such a frame, to decode it later, holds this.
    """

    __slots__ = ("__weakref__", "dropped", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        # Groups of this generation that the writer has let go of since.
        self.dropped: list[Sequence[tuple[int, Pin]]] = []


class KnownDefinitions:
    """Groups that a channel has brought. Belongs to the channel's reader.

    Holds what the writer believes to be known; the definitions can be forgotten when the last
    channel that brought them is gone, or has let go of them, and nothing is made of them any more.
    """

    __slots__ = ("generation", "living", "most", "pins")

    def __init__(self) -> None:
        self.generation = Generation(0)
        # Generations in their order, and among them some that nobody holds any more.
        self.living: list[weakref.ref[Generation]] = []
        self.most = 64  # of them, before those are taken out
        # Each with the number of the first generation that knows it.
        self.pins: dict[Token, tuple[int, Pin]] = {}

    def learn(self, definitions: Iterable[Definition], gone: Iterable[Token] = ()) -> None:
        """Take note of the groups in a frame, and of those that are gone. Loads nothing."""
        with _known_lock:
            pins = self.pins
            left = [key for key in gone if key in pins]
            new = [one for one in definitions if one[0][0] not in pins or one[0][0] in left]
            if not left and not new:
                return
            number = self._begin_generation()
            self._drop(sorted([pins[key] for key in left], key=itemgetter(0)))
            for key in left:
                del pins[key]
            for definition in new:
                pins[definition[0][0]] = number, pin(definition)

    def _begin_generation(self) -> int:
        living = self.living
        generation = Generation(self.generation.number + 1)
        living.append(weakref.ref(generation))
        self.generation = generation
        while len(living) > 1 and living[-2]() is None:
            del living[-2]
        if len(living) > self.most:
            living[:] = [ref for ref in living if ref() is not None]
            self.most = 2 * len(living) + 64
        return generation.number

    def _drop(self, pins: Sequence[tuple[int, Pin]]) -> None:
        """Have each generation before this one keep those of ``pins`` that it knows; older pins are first."""
        for ref in islice(reversed(self.living), 1, None):
            generation = ref()
            if generation is None:
                continue
            while pins and pins[-1][0] > generation.number:
                pins = pins[:-1]
            if not pins:
                break
            generation.dropped.append(pins)


def definitions_of(groups: Iterable[Group], sent: SentDefinitions) -> list[Group]:
    """The groups that a frame which refers to ``groups`` must carry, in the order to learn them in.

    Leaves ``sent`` alone: it is to take ``note`` of them once nothing can fail any more.
    """
    missing: dict[Token, Group] = {}
    for group in groups:
        _add_missing(group, sent, missing)
    return list(missing.values())


def _add_missing(group: Group, sent: SentDefinitions, missing: dict[Token, Group]) -> None:
    if group.key not in sent.groups and group.key not in missing:
        for needed in group.needs:
            _add_missing(needed, sent, missing)
        missing[group.key] = group
