"""The full pickler: cloudpickle, with definitions by value once for each channel.

Imported at the first value that the fast pickler cannot do, because cloudpickle takes a while.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
import typing
import warnings
from typing import Any

import cloudpickle

from conveyor.codec.encoded import REFS, InBandReducers, Pieces, ReducerFactory
from conveyor.codec.pickling import definitions
from conveyor.codec.pickling.definitions import Entry, Group
from conveyor.exceptions import ConveyorWarning
from conveyor.weak import WeakSet

_LARGE_DEFINITION = 16 << 20

_make_skeleton_class = cloudpickle.cloudpickle._make_skeleton_class
_lookup = cloudpickle.cloudpickle._lookup_module_and_qualname


class FullPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles what has no importable name. ``pieces`` are the bytes, ``groups`` what they refer to.

    Can be used again after ``reset``.
    """

    def __init__(self, make_reducers: ReducerFactory, out_of_band: bool) -> None:
        self.pieces = Pieces()
        #: Output: the pickle, and the memory that is out of it.
        self.parts: tuple[bytes, list[Any] | None] = b"", None
        self.notes: dict[Any, Any] = {}
        self.groups: dict[bytes, Group] = {}
        # Whether anything was found here that the fast pickler cannot do.
        self.by_value = False
        # A plain dict: cloudpickle's ChainMap costs a microsecond for each object. Before the base's
        # __init__, which takes it over; later it would be hidden by the base's attribute.
        table = {
            **cloudpickle.CloudPickler.dispatch_table,
            types.CodeType: _reduce_code,
            typing.NewType: _reduce_new_type,
            _Cached: _reduce_cached,
            functools.cached_property: _reduce_cached_property,
            **make_reducers(self.notes),
        }
        self.dispatch_table = table if out_of_band else InBandReducers(table, self.notes)
        self.make_reducers = make_reducers
        self.out_of_band = out_of_band
        super().__init__(
            self.pieces,
            protocol=5,
            buffer_callback=self.pieces.append if out_of_band else None,
        )

    def reset(self) -> None:
        self.pieces.clear()
        self.parts = b"", None
        self.notes.clear()
        self.groups.clear()
        self.by_value = False
        self.globals_ref.clear()
        self.clear_memo()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is not types.FunctionType and not issubclass(kind, type):
            return NotImplemented
        entry = definitions.entry_of(obj)
        if entry is not None:
            return self.refer(entry)
        if obj in _named:
            return NotImplemented
        reduction = super().reducer_override(obj)
        if reduction is NotImplemented:
            _named.add(obj)
            return NotImplemented
        if len(reduction) != 6:  # NoneType and its like
            return reduction
        if reduction[0] is _make_skeleton_class and "__slots__" in obj.__dict__:
            reduction = _with_slots(obj, reduction)
        self.by_value = True
        location = _wrapped_at(obj)
        if location is not None:
            return _unwrap, location
        if _has_identity(obj):
            return self.define(obj, reduction)
        return reduction

    def refer(self, entry: Entry) -> Any:
        self.by_value = True
        self.groups[entry.group.key] = entry.group
        return definitions.resolve, (entry.token,)

    def define(self, obj: Any, reduction: Any) -> Any:
        """Define ``obj``, which is met for the first time in this process."""
        while True:
            _define(obj, self.make_reducers)
            entry = definitions.entry_of(obj)
            if entry is not None:
                return self.refer(entry)


class _GroupPickler(FullPickler):
    """Pickles a group: ``define`` makes members, instead of groups of their own."""

    def __init__(self, make_reducers: ReducerFactory) -> None:
        super().__init__(make_reducers, out_of_band=False)
        self.members: dict[bytes, Any] = {}

    def define(self, obj: Any, reduction: Any) -> Any:
        make, args, state, _, _, set_state = reduction
        token = definitions.new_token()
        self.members[token] = obj
        return (
            definitions.construct,
            (token, make, args),
            (set_state, state),
            None,
            None,
            definitions.fill,
        )


def _define(obj: Any, make_reducers: ReducerFactory) -> None:
    pickler = _GroupPickler(make_reducers)
    pickler.dump(obj)
    payload = pickler.pieces.whole()
    if len(payload) > _LARGE_DEFINITION:
        warnings.warn(
            f"{obj.__qualname__} is sent by value with {len(payload) >> 20} MiB of data that it "
            "refers to through globals or closures; pass large data as arguments instead",
            ConveyorWarning,
            stacklevel=2,
        )
    refs = pickler.notes.get(REFS, ())
    group = Group(tuple(pickler.members), payload, tuple(pickler.groups.values()), refs)
    definitions.register(group, pickler.members)


def _with_slots(cls: type, reduction: Any) -> Any:
    """The reduction of a class that has ``__slots__``.

    cloudpickle sets them once the reader's class is there, which is too late: its instances would
    have a ``__dict__``, and their state would not fit the sender's class when they come back.
    """
    make, (kind, name, bases, namespace, *rest), (contents, more), *others = reduction
    if typing.NamedTuple in bases:
        return reduction  # it makes its own, and takes none
    slots = cls.__dict__["__slots__"]
    if not isinstance(slots, (str, dict)):
        slots = tuple(slots)
    # Descriptors of the slots; private ones have other names than in `__slots__`.
    made = {key for key, value in cls.__dict__.items() if type(value) is types.MemberDescriptorType}
    contents = {k: v for k, v in contents.items() if k not in made and k != "__slots__"}
    namespace = {**namespace, "__slots__": slots}
    return (make, (kind, name, bases, namespace, *rest), (contents, more), *others)


def _has_identity(obj: Any) -> bool:
    """Whether a reader may ask if two of these are the same.

    Classes are compared (``isinstance``); functions hardly ever. So only a function that its module
    knows by name gets a token, also under a decorator such as ``remote``, and one without a closure that
    was made a remote function: its globals stay as it leaves them. Any other, such as a lambda, is made anew
    for every message, with what it refers to as it is then.
    """
    if type(obj) is not types.FunctionType or obj in definitions.remote_functions:
        return True
    name = obj.__qualname__
    module = sys.modules.get(obj.__module__ or "")
    found = None if module is None else module.__dict__.get(name)
    if found is obj:
        return True
    # Looked up on the object alone, never through a ``__getattr__`` of the user's.
    return found is not None and getattr(found, "__dict__", {}).get("__wrapped__") is obj


# Objects that have been found importable by name. A wrong answer is loud, since the pickler looks
# the name up itself; only an object of a module that is by value by now would slip through.
_named: WeakSet[Any] = WeakSet()


def forget_names() -> None:
    """Look all names up again: a module was reloaded, or is by value from now on."""
    _named.clear()


def _wrapped_at(obj: Any) -> tuple[str, str] | None:
    """Find the location where an importable module keeps a wrapper of ``obj``, such as the result of
    ``remote``.

    Sending the location keeps the reader's class that of its own module, with that module's globals.
    """
    module: str | None = getattr(obj, "__module__", None)
    if module not in sys.modules or module in by_value_modules():
        return None
    found: Any = sys.modules[module]
    try:
        for name in obj.__qualname__.split("."):
            found = getattr(found, name)
        wrapped = found.__wrapped__
    except Exception:
        return None
    return (module, obj.__qualname__) if wrapped is obj else None


def _unwrap(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found.__wrapped__


_Cached = type(functools.lru_cache(len))


def _reduce_cached(function: Any) -> Any:
    """Reduce a function of ``functools.lru_cache``, with an empty cache. By itself it pickles by its name
    wherever it is."""
    if function.__module__ not in by_value_modules() and _lookup(function) is not None:
        return function.__reduce__()
    return _make_cached, (function.__wrapped__, function.cache_parameters())


def _make_cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(obj: functools.cached_property[Any]) -> Any:
    """Reduce a ``cached_property``, which has a lock before Python 3.12."""
    return _make_cached_property, (obj.func, obj.attrname)


def _make_cached_property(function: Any, name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


_reduce_code_of_any_file = cloudpickle.CloudPickler.dispatch_table[types.CodeType]
#: Where ``CodeType`` takes the file's name, in all of its versions from Python 3.10 on.
_FILE_ARGUMENT = 10


def _reduce_code(code: types.CodeType) -> Any:
    """Reduce a code object with the name of its file, which cloudpickle leaves out from 3.1.3 on. So a
    traceback at the reader shows the lines of a file that it can read, and names the file to a debugger."""
    make, args = _reduce_code_of_any_file(code)
    # A string of its own, as cloudpickle makes of each: how pickles refer to shared ones would vary.
    file = "".join(code.co_filename)
    return make, (*args[:_FILE_ARGUMENT], file, *args[_FILE_ARGUMENT + 1 :])


def _reduce_new_type(obj: Any) -> Any:
    if obj.__module__ in by_value_modules():
        return _make_new_type, (obj.__name__, obj.__supertype__, obj.__module__)
    return obj.__reduce__()


def _make_new_type(name: str, supertype: Any, module: str) -> Any:
    made = typing.NewType(name, supertype)  # type: ignore[misc]
    made.__module__ = module
    return made


def registered_modules() -> set[str]:
    """cloudpickle's modules by value: the live set, so that its length can be watched."""
    live = getattr(cloudpickle.cloudpickle, "_PICKLE_BY_VALUE_MODULES", None)
    return live if isinstance(live, set) else cloudpickle.list_registry_pickle_by_value()


def register_modules_in_memory() -> None:
    """Register the modules that exist only in memory with cloudpickle, which goes by ``sys.modules`` alone,
    and would name what these hold."""
    for name in definitions.modules_in_memory():
        module = sys.modules.get(name)
        if module is not None and module.__name__ == name:
            cloudpickle.register_pickle_by_value(module)


def by_value_modules() -> set[str]:
    return {"__main__", *cloudpickle.list_registry_pickle_by_value()}


# For the value that had this module imported; later ones find them registered.
register_modules_in_memory()
