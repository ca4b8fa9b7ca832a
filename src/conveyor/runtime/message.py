"""Messages between the processes of a session: values whose class says what they mean.

Each connection has one family of messages for each direction, which is a class with a subclass for each
message. Whoever receives them has one table from these subclasses to what is to be done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from conveyor.exceptions import RuntimeStateError

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_options: Any) -> Callable[[Any], Any]:
        return lambda marked: marked


#: What processes of this version say to each other. It changes with every message that changes its meaning
#: or its fields.
PROTOCOL = 4
#: Descriptors that one message on a socket may carry.
MAX_FDS = 250
#: The size of the number that comes with descriptors and tells which frame they belong to.
TICKET_BYTES = 8

M = TypeVar("M", bound="Message")


@dataclass_transform(frozen_default=True)
class _Kind(type):
    """Makes slots of a message's annotations.

    A dataclass takes sixty times as long to be made, and the time to import this package is the time to
    start an actor's program.
    """

    __match_args__: tuple[str, ...]

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> _Kind:
        fields = tuple(namespace.get("__annotations__", ()))
        namespace["__slots__"] = namespace["__match_args__"] = fields
        return super().__new__(mcs, name, bases, namespace, **options)


class Message(metaclass=_Kind):
    """A frozen value with the fields that its class is annotated with; picklable."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = type(self).__match_args__
        values = dict(zip(fields, args, strict=False), **kwargs)
        if len(args) + len(kwargs) != len(fields) or values.keys() != set(fields):
            raise TypeError(f"{type(self).__name__} takes {', '.join(fields) or 'nothing'}")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a {type(self).__name__} cannot be changed")

    def _values(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in type(self).__match_args__])

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), self._values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._values()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in type(self).__match_args__)
        return f"{type(self).__name__}({fields})"


def members(family: type[M]) -> frozenset[type[M]]:
    """The messages of a family: all that a receiver has to know."""
    return frozenset(family.__subclasses__())


def greeting() -> bytes:
    """What this process says first to another one."""
    from conveyor import __version__  # the package is whole by now

    return f"conveyor {__version__} protocol {PROTOCOL}\n".encode()


def check_greeting(said: bytes) -> bytes:
    """What comes after the greeting that ``said`` begins with. ``RuntimeStateError`` if it is another one
    than this process's own."""
    own = greeting()
    if said.startswith(own):
        return said[len(own) :]
    first = said.partition(b"\n")[0][:100].decode(errors="replace")
    raise RuntimeStateError(
        f"this process is of {own.decode().strip()!r}, and the one that has started it of {first!r}: they "
        "do not understand each other. Most likely the package was changed while the program ran: start "
        "the program again"
    )
