"""Writing any value: a pickle, with its large memory out of band.

The fast pickler is C with a table of reducers. It names classes and functions; where it named
something of ``__main__``, or could not name something at all, the full pickler does it again.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from conveyor.codec import borrows
from conveyor.codec.encoded import (
    DEFINING,
    FINAL,
    FLAG_BOUND,
    FLAG_DEFINITIONS,
    FLAG_REFS,
    HELD,
    PICKLE,
    SENT,
    Encoded,
    InBandReducers,
    Pieces,
    Reducer,
    ReducerFactory,
    Token,
    pack,
)
from conveyor.codec.faults import is_fault
from conveyor.codec.pickling import definitions as byvalue
from conveyor.codec.pickling.definitions import Group, SentDefinitions, definitions_of
from conveyor.codec.tensors.staging import STAGED
from conveyor.exceptions import SerializationError
from conveyor.later import LaterModule

if TYPE_CHECKING:
    from conveyor.codec.pickling.blame import Given
    from conveyor.codec.pickling.full_pickler import FullPickler

# Slow to import, and not needed for most values.
blame: Any = LaterModule("conveyor.codec.pickling.blame")
full_pickler: Any = LaterModule("conveyor.codec.pickling.full_pickler")

# A pickler is kept for the next value, since making one costs more than pickling a small dict;
# not one that has pickled a large value, since clearing its memo costs by the memo's size.
_KEEP_BELOW = 1 << 16

_factories: list[ReducerFactory] = []
_over: list[Callable[[dict[type, Reducer], dict[Any, Any]], dict[type, Reducer]]] = []
_waiting: dict[str, Callable[[], None]] = {}
_fast_pool: list[_FastPickler] = []
_full_pool: list[FullPickler] = []
_in_band_pool: list[_FastPickler] = []
_by_value_patterns: tuple[bytes, ...] = ()

# State of the process for which the pools above were made. A new module may be numpy, or one made in memory.
_seen_modules = -1
_seen_reducers = -1
_seen_registered = 0
_registered: Any = ()


class _FastPickler(pickle.Pickler):
    def __init__(self, out_of_band: bool = True) -> None:
        self.pieces = Pieces()
        self.notes: dict[Any, Any] = {}
        super().__init__(
            self.pieces,
            5,
            buffer_callback=self.pieces.append if out_of_band else None,
        )
        table = {**copyreg.dispatch_table, **_reducers(self.notes)}
        self.dispatch_table = table if out_of_band else InBandReducers(table, self.notes)


def _reducers(notes: dict[Any, Any]) -> dict[type, Reducer]:
    made: dict[type, Reducer] = {}
    for factory in _factories:
        made.update(factory(notes))
    for over in _over:
        made.update(over(made, notes))
    return made


def add_reducers(factory: ReducerFactory) -> None:
    """Have both picklers use these reducers, for values to come."""
    _factories.append(factory)
    drop_picklers()


def add_reducers_over(
    over: Callable[[dict[type, Reducer], dict[Any, Any]], dict[type, Reducer]],
) -> None:
    """Have both picklers use these reducers, which are made of those that there are, and of the notes."""
    _over.append(over)
    drop_picklers()


def when_imported(module: str, install: Callable[[], None]) -> None:
    """Call ``install`` once ``module`` has been imported by whomever."""
    global _seen_modules
    _waiting[module] = install
    _seen_modules = -1


def drop_picklers() -> None:
    """Make new picklers for values to come: types have come that have a reducer."""
    # New lists: a pickler in use goes back to the list that it came from.
    global _fast_pool, _full_pool, _in_band_pool
    _fast_pool = []
    _full_pool = []
    _in_band_pool = []


def _catch_up() -> None:
    """Look at what has changed in the process: modules, reducers, modules by value."""
    global _seen_modules, _seen_reducers, _seen_registered, _registered, _by_value_patterns
    if (
        len(sys.modules) == _seen_modules
        and len(copyreg.dispatch_table) == _seen_reducers
        and len(_registered) == _seen_registered
    ):
        return
    modules = len(sys.modules)
    for name in list(_waiting):
        module = sys.modules.get(name)
        if module is None:
            continue
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            modules = -1
        else:
            _waiting.pop(name, _nothing)()
    if "cloudpickle" in sys.modules:
        full_pickler.register_modules_in_memory()
        _registered = full_pickler.registered_modules()
        if len(_registered) != _seen_registered:
            full_pickler.forget_names()
    # As protocol 5 writes the name; a text that mentions __main__ is no match.
    _by_value_patterns = (
        b"\x8c\x08__main__",
        *(name.encode() for name in (*_registered, *byvalue.modules_in_memory())),
    )
    if len(copyreg.dispatch_table) != _seen_reducers:
        drop_picklers()
    _seen_modules = modules
    _seen_reducers = len(copyreg.dispatch_table)
    _seen_registered = len(_registered)


def _nothing() -> None:
    pass


def dump(value: Any, sent: SentDefinitions | None) -> Encoded:
    """Pickle ``value`` for a channel that has carried ``sent`` (``None``: nothing yet)."""
    _catch_up()
    if sent is None:
        sent = SentDefinitions()
    if not sent.by_value:
        pool = _fast_pool
        pickler: _FastPickler | None
        try:
            pickler = pool.pop()
        except IndexError:
            pickler = None
        if pickler is None:  # not in the handler, of which a Ctrl-C would tell
            pickler = _FastPickler()
        pickler.notes[SENT] = sent
        if sent.checker is not None:
            sent.checker.begin()
        failed = False
        pieces = pickler.pieces
        try:
            pickler.dump(value)
            if len(pieces) == 1:
                meta, buffers = pieces[0], None
            else:
                meta, buffers = _parts(pickler)
        except BaseException as error:
            if not _may_be_tried_again(error, pickler.notes):
                borrows.drop_noted(pickler.notes, sent.readers)
                raise
            failed = True
        if failed:  # not in the handler: what it raises is the same again, and is told once
            return _dump_fully(value, sent, pickler.notes.get(borrows.BORROWS))
        made = held = None
        if len(pickler.notes) > 1:
            borrows.confirm_noted(pickler.notes, sent.readers)
            made = pickler.notes.pop(borrows.BORROWS, None)
            held = pickler.notes.pop(HELD, None)
        if buffers is not None:
            pickler.notes.clear()  # only what has a buffer makes notes
        if len(meta) < _KEEP_BELOW:
            pieces.clear()
            pickler.clear_memo()
            pool.append(pickler)
        for pattern in _by_value_patterns:
            if meta.find(pattern) >= 0:  # three times as fast as `in`
                break
        else:
            if not made and not sent.gone:
                return (PICKLE, 0, meta, buffers, held) if held else (PICKLE, 0, meta, buffers)
            return _with_header(meta, (), made, sent.take_gone(), sent, 0, buffers, held)
        return _dump_fully(value, sent, made)
    return _dump_fully(value, sent)


def _parts(pickler: _FastPickler | FullPickler) -> tuple[bytes, list[Any] | None]:
    """The pickle that has been written, and the memory that is out of it."""
    sent: SentDefinitions = pickler.notes[SENT]
    meta, buffers = pickler.pieces.parts(with_texts=not sent.by_reference)
    if buffers is not None and STAGED in pickler.notes:
        pickler.notes.pop(STAGED).finish(buffers)
    return meta, buffers


def _encoded(codec: int, flags: int, meta: bytes, buffers: list[Any] | None, held: Any) -> Encoded:
    return (codec, flags, meta, buffers, held) if held else (codec, flags, meta, buffers)


def _may_be_tried_again(error: BaseException, notes: dict[Any, Any]) -> bool:
    """Whether another pickler may do what has failed with ``error``."""
    if isinstance(error, SerializationError) or notes.pop(FINAL, None) is error:
        return False
    return is_fault(error)


def _dump_fully(
    value: Any, sent: SentDefinitions, made: dict[int, tuple[Any, Any]] | None = None
) -> Encoded:
    """Pickle a value with the full pickler. ``made``: the borrows of an earlier attempt to pickle it."""
    pool = _full_pool
    pickler: FullPickler | None = None
    with suppress(IndexError):
        pickler = pool.pop()
    if pickler is None:  # not in the handler, of which a Ctrl-C would tell
        pickler = _full_pickler()
    pickler = _pickled(pickler, value, sent, made)
    borrows.confirm_noted(pickler.notes, sent.readers)
    made = pickler.notes.pop(borrows.BORROWS, None)
    held = pickler.notes.pop(HELD, None)
    meta, buffers = pickler.parts
    gone = sent.take_gone()
    missing: Sequence[Group] = ()
    for key in pickler.groups:
        if key not in sent.groups:
            missing = definitions_of(pickler.groups.values(), sent)
            break
    by_value = pickler.by_value
    flags = FLAG_BOUND if pickler.groups else 0
    if len(meta) < _KEEP_BELOW:
        pickler.reset()
        pool.append(pickler)
    sent.by_value = by_value
    if not missing and not made and not gone:
        return _encoded(PICKLE, flags, meta, buffers, held)
    return _with_header(meta, missing, made, gone, sent, flags, buffers, held)


def _with_header(
    meta: bytes,
    missing: Sequence[Group],
    made: dict[int, tuple[Any, Any]] | None,
    gone: Sequence[Token],
    sent: SentDefinitions,
    flags: int,
    buffers: list[Any] | None,
    held: Any,
) -> Encoded:
    definitions = [group.definition for group in missing]
    meta = pack(definitions, meta, [borrow for _, borrow in (made or {}).values()], gone)
    if made:
        flags |= FLAG_REFS
    if gone:
        flags |= FLAG_BOUND  # to this channel
    if missing:
        sent.note(missing)
    return _encoded(DEFINING, flags | FLAG_DEFINITIONS, meta, buffers, held)


def _full_pickler(out_of_band: bool = True) -> FullPickler:
    pickler: FullPickler = full_pickler.FullPickler(_reducers, out_of_band)
    return pickler


def _pickled(
    pickler: FullPickler,
    value: Any,
    sent: SentDefinitions,
    made: dict[int, tuple[Any, Any]] | None,
) -> FullPickler:
    """Pickle ``value``: the pickler that has done it, or an error that names the part that cannot be done."""
    if _try_to_pickle(pickler, value, sent, made) is None:
        return pickler
    # Perhaps it remembered a name that is not good any more.
    full_pickler.forget_names()
    pickler = _full_pickler(pickler.out_of_band)
    error = _try_to_pickle(pickler, value, sent, None)
    if error is None:
        return pickler
    try:
        raise SerializationError(blame.cannot_send(value, error, _why_not)) from error
    finally:
        del error  # it refers to this frame


def _try_to_pickle(
    pickler: FullPickler,
    value: Any,
    sent: SentDefinitions,
    made: dict[int, tuple[Any, Any]] | None,
) -> BaseException | None:
    """Try to pickle ``value``. Returns the error if another pickler may do it, else raises it. After a
    failure borrows are given back."""
    pickler.notes[SENT] = sent
    if sent.checker is not None:
        sent.checker.begin()
    if made:
        pickler.notes[borrows.BORROWS] = made
    try:
        pickler.dump(value)
        pickler.parts = _parts(pickler) if pickler.out_of_band else (pickler.pieces.whole(), None)
    except BaseException as error:
        borrows.drop_noted(pickler.notes, sent.readers)
        if not _may_be_tried_again(error, pickler.notes):
            raise
        return error
    return None


def blamed(error: SerializationError, given: Iterable[Given]) -> SerializationError:
    """``error`` in the user's terms: of the first of ``given`` that cannot be sent. ``error`` itself if
    all of them can, or if it says what it is about."""
    if type(error) is not SerializationError:
        return error
    text = blame.cannot_send_given(given, _why_not)
    if text is None:
        return error
    wrapped = SerializationError(text)
    wrapped.__cause__ = error.__cause__
    return wrapped


def _why_not(value: Any) -> BaseException | None:
    pickler = _full_pickler()
    pickler.notes[SENT] = SentDefinitions()
    try:
        pickler.dump(value)
    except BaseException as error:
        if not is_fault(error):
            raise
        return error.with_traceback(None)  # its frames refer to those that keep it
    finally:
        borrows.drop_noted(pickler.notes, ())
    return None


def dumps_by_value(value: Any, sent: SentDefinitions | None = None) -> bytes:
    """Pickle ``value`` with all that it needs into one string: buffers in band, definitions too.

    For what travels beside a channel, such as an error. Whoever does not want it loads it: no header names
    the refs inside.
    """
    if sent is None:
        sent = SentDefinitions()
    sent.in_band = True
    try:
        return _dump_in_band(value, sent)
    finally:
        sent.in_band = False


def _dump_in_band(value: Any, sent: SentDefinitions) -> bytes:
    _catch_up()
    pool = _in_band_pool
    fast: _FastPickler | None = None
    with suppress(IndexError):
        fast = pool.pop()
    if fast is None:
        fast = _FastPickler(out_of_band=False)
    fast.notes[SENT] = sent
    try:
        fast.dump(value)
    except BaseException as error:
        if not _may_be_tried_again(error, fast.notes):
            borrows.drop_noted(fast.notes, sent.readers)
            raise
    else:
        pickled = b"".join(fast.pieces)
        if not any(pattern in pickled for pattern in _by_value_patterns):
            borrows.confirm_noted(fast.notes, sent.readers)
            if len(pickled) < _KEEP_BELOW:
                fast.notes.clear()
                fast.pieces.clear()
                fast.clear_memo()
                pool.append(fast)
            return pack((), pickled)
    full = _full_pickler(out_of_band=False)
    full = _pickled(full, value, sent, fast.notes.get(borrows.BORROWS))
    borrows.confirm_noted(full.notes, sent.readers)
    missing = definitions_of(full.groups.values(), sent)
    data = pack([group.definition for group in missing], full.parts[0])
    sent.note(missing)
    return data
