"""A constructor's call that can be made again: its arguments as they were sent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from conveyor import _core
from conveyor.calls.call import Call, start
from conveyor.calls.unsendable import blame_constructor
from conveyor.codec import SentDefinitions, borrows, decode_error, encode_error
from conveyor.codec.encoded import DEFINING
from conveyor.codec.frames import decode, encode
from conveyor.exceptions import SerializationError
from conveyor.refs.ref import Ref
from conveyor.runtime.uninterrupted import try_each

if TYPE_CHECKING:
    from conveyor.calls.streams import CurrentLink


#: The method that is called when the actor ends in good order. It may be a coroutine function.
EXIT_HOOK = "__conveyor_exit__"


def call_exit_hook(
    instance: Any, actor: str, run: Callable[[Coroutine[Any, Any, Any]], object]
) -> KeyboardInterrupt | None:
    """Call the exit hook of ``instance``, if it has one. An error that it raises is printed, and ends
    nothing else."""

    def call() -> None:
        hook = _of_the_class(instance, EXIT_HOOK)
        if hook is not None:
            outcome = hook()
            if inspect.iscoroutine(outcome):
                run(outcome)

    return try_each(call, name=f"{actor}.{EXIT_HOOK}")


def _of_the_class(instance: Any, name: str) -> Any:
    """The special method ``name`` of ``instance``, or ``None``. Found as Python finds its own: what the
    instance makes up for unknown names (``__getattr__``) is none."""
    for cls in type(instance).__mro__:
        if name in vars(cls):
            found = vars(cls)[name]
            bind = getattr(type(found), "__get__", None)
            return found if bind is None else bind(found, instance, type(instance))
    return None


#: Arguments up to this size (bytes) are kept for every actor, so that graphs of it can be restarted;
#: larger ones only for an actor with ``max_restarts``.
MAX_STORED_BYTES = 1 << 20


class Unmade:
    """Stand-in for an actor's class whose arguments could not be had: making an instance raises why."""

    __slots__ = ("_meta",)

    def __init__(self, meta: bytes) -> None:
        self._meta = meta

    @classmethod
    def why(cls, error: BaseException, actor: str) -> Unmade:
        return cls(encode_error(error, actor, f"{actor}.__init__"))

    def __reduce__(self) -> Any:
        return Unmade, (self._meta,)

    def __call__(self) -> Any:
        raise decode_error(self._meta)


def unmade(error: BaseException, actor: str) -> Call:
    """Make the constructor's call for an actor whose arguments cannot be had. Without one, whoever calls the
    actor would wait for it for ever."""
    return start((Unmade.why(error, actor),))


#: The same where there is no memory for the reason: it fits into a slot.
UNSAID = start((Unmade(_core.UNSAID),))


class Constructor(Struct, frozen=True):
    """The class and the arguments, encoded; picklable.

    ``refs``: the places (position or name) of arguments that are refs. Their values travel beside it; or, of
    refs that only their maker can wait for, the refs inside it (``inside``), and the new actor gets them.
    """

    codec: int
    meta: bytes
    buffers: tuple[bytearray, ...]
    refs: tuple[int | str, ...]
    inside: bool

    def start(self, link: CurrentLink) -> Any:
        """Send it to an actor that has no instance yet; the call's ref."""
        return link.call(start((self,)))

    def take(self) -> Sequence[Ref]:
        """The refs inside of arguments, to be held as long as this may be sent."""
        return borrows.take(self.meta) if self.codec == DEFINING else ()

    def call(self, values: tuple[Any, ...]) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
        """The class and its arguments; ``values``: those of ``refs``, in order."""
        cls, args, kwargs = decode(self.codec, self.meta, list(self.buffers))
        args = list(args)
        given: Any
        for place, value in zip(self.refs, self.refs if self.inside else values, strict=True):
            given = args if isinstance(place, int) else kwargs
            given[place] = given[place].get() if self.inside else value
        return cls, tuple(args), kwargs


class StoredConstructor(Struct, frozen=True):
    """Constructor as kept by a process that may have to send it again: with the refs among its arguments,
    and those inside of them (``inner``)."""

    constructor: Constructor
    refs: tuple[Ref, ...]
    inner: Sequence[Ref] = ()

    @classmethod
    def received(cls, constructor: Constructor) -> StoredConstructor:
        """Make one of a constructor that another process has made. That process holds the refs inside until
        this returns."""
        return cls(constructor, (), constructor.take())

    def start(self, link: CurrentLink) -> Any:
        """Send it to an actor that has no instance yet; the call's ref."""
        return link.call(start((self.constructor, *self.refs)))

    def make(self) -> Any:
        """The instance, made here; gets refs among the arguments."""
        cls, args, kwargs = self.constructor.call(tuple(ref.get() for ref in self.refs))
        return cls(*args, **kwargs)


def keep(
    cls: type,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    always: bool,
    inside: bool = False,
) -> StoredConstructor | None:
    """A snapshot of the call ``cls(*args, **kwargs)``; ``None`` if it is large and not ``always``
    wanted. ``SerializationError`` if it cannot be sent. ``inside``: see :class:`Constructor`."""
    try:
        return _keep(cls, args, kwargs, always, inside)
    except SerializationError as error:
        raise blame_constructor(error, cls, args, kwargs) from error.__cause__


def _keep(
    cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any], always: bool, inside: bool
) -> StoredConstructor | None:
    found: dict[int | str, Ref] = {i: a for i, a in enumerate(args) if isinstance(a, Ref)}
    found.update((k, v) for k, v in kwargs.items() if isinstance(v, Ref))
    if not inside:
        args = tuple(None if i in found else a for i, a in enumerate(args))
        kwargs = {k: None if k in found else v for k, v in kwargs.items()}
    codec, _flags, meta, buffers, *_ = encode((cls, args, dict(kwargs)), SentDefinitions())
    views = [memoryview(b).cast("B") for b in buffers or ()]
    if not always and len(meta) + sum(view.nbytes for view in views) > MAX_STORED_BYTES:
        if codec == DEFINING:
            borrows.give_up(meta)
        return None
    constructor = Constructor(codec, meta, tuple(map(bytearray, views)), tuple(found), inside)
    return StoredConstructor(
        constructor, () if inside else tuple(found.values()), constructor.take()
    )
