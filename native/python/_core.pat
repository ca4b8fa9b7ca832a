# The parts of _core.pyi that no binding can say: imports, aliases, constants with docstrings, types made in C.
# Syntax: nanobind, "Pattern files". Each entry is a regular expression of a name, and what stands in its place.

^_core\.__prefix__$:
    \from collections import deque
    \from collections.abc import Callable, Sequence
    \from typing import Any, NoReturn, TypeVar
    _Ref = TypeVar("_Ref", bound=RefCore)
    _T = TypeVar("_T")

    _Histogram = tuple[int, int, list[tuple[int, int, int]]]
    """Total, largest, and (least value, first value beyond, count) of each bucket that is not empty."""

    Holding = tuple[str, int, int, str, int, list[int]]
    """Values that a process still holds, at an arena's cap: the process, the graph's number (0: of none),
    the edge, what the channel carries in words, bytes, executions (or calls)."""

    KeptValue = tuple[int, int, int, bytes]
    """Its number, its bytes, since when it is kept (``monotonic_ns``), and its names."""

    Directory = tuple[list[KeptValue], list[int], list[tuple[int, int, int]]]
    """State of a process: its stored values; the numbers of values that it holds references of its own making to; and to whom it has sent
    references that are held: (number, slot, incarnation)."""

^_core\.EMPTY$:
    EMPTY: Empty
    """Result of ``receive``, ``get`` and ``take`` where there is nothing; compare with ``is``."""

^_core\.BELL_BITS$:
    BELL_BITS: int
    """How many bits a bell has: bits are 0 to ``BELL_BITS - 1``."""

^_core\.ATTENTION_BIT$:
    ATTENTION_BIT: int
    """The bit that a death sets in every bell."""

^_core\.WAIT_ROWS$:
    WAIT_ROWS: int
    """How many waits of one process can be noted for one kind of work."""

^_core\.RING_WRITER_MAY_WAIT$:
    RING_WRITER_MAY_WAIT: int
    """A ring's flag: its readers wake a writer that asked for it with ``wants_room``."""

^_core\.MAX_READERS$:
    MAX_READERS: int
    """How many readers a ring can have."""

^_core\.DEBUG$:
    DEBUG: bool
    """Whether the core was built to check its invariants."""

^_core\.CANCELLED$:
    CANCELLED: bytes
    """``ErrorFrame.meta`` of what was not run because it had been cancelled."""

^_core\.OVERDUE$:
    OVERDUE: bytes
    """``ErrorFrame.meta`` of what was not run, or came, after the deadline."""

^_core\.LARGE$:
    LARGE: bytes
    """``ErrorFrame.meta`` in the place of an error that nobody gets, and that is too large to be kept for the log."""

^_core\.MOST_LOGGED$:
    MOST_LOGGED: int
    """Bytes of an error's ``ErrorFrame.meta`` that are kept for the log."""

^_core\.UNSAID$:
    UNSAID: bytes
    """``ErrorFrame.meta`` where no memory was left to say what had gone wrong."""

^_core\.BROKEN$:
    BROKEN: bytes
    """``ErrorFrame.meta`` of a result that is not valid."""

^_core\.EVENT_BYTES$:
    EVENT_BYTES: int
    """Bytes of one event of a trace."""

^_core\.RECORDING_CONTROL_BYTES$:
    RECORDING_CONTROL_BYTES: int
    """Bytes that a segment has once for all recorders in it."""

^_core\.MOST_RANKS$:
    MOST_RANKS: int
    """How many ranks a ``CollectiveGroup`` can have."""

^_core\.NOT_BETWEEN_HOSTS$:
    NOT_BETWEEN_HOSTS: bytes
    """The body of the error that stands for a frame that cannot go to another host."""

^_core\.HOST_IS_FULL$:
    HOST_IS_FULL: bytes
    """The same for a frame for which its readers' host had no memory."""

^_core\.WIRE_VERSION$:
    WIRE_VERSION: int
    """Version of the messages between pumps."""

# `bytes` is another member of these classes.
^_core\.Recorder\.take_events$:
    \import builtins
    def take_events(self) -> builtins.bytes:
        \doc

^_core\.Writer\.send_error$:
    \import builtins
    def send_error(self, meta: builtins.bytes, tag: int) -> bool:
        \doc

# Slots of a type are methods from some version of Python on.
^_core\.Buffer\.__(buffer|release_buffer)__$:

^_core\.Buffer\.__suffix__$:
    def __buffer__(self, flags: int, /) -> memoryview: ...

^_core\.Finalizer\.__del__$:

^_core\.Holder$:
    class Holder:
        """Which thread has ``lock``; the lock is taken for the body of a ``with``, or by a ``TimedLock``."""

        def __init__(self, lock: Any, /) -> None: ...
        def __enter__(self) -> bool: ...
        def __exit__(self, *raised: object) -> None: ...
        def mine(self) -> bool:
            """Whether it is this one."""

^_core\.TimedLock$:
    class TimedLock:
        """A lock that is taken for the body of a ``with``, if it can be within ``timeout`` seconds (-1: any), and
        given back whatever a signal's handler raises meanwhile.
        """

        def __init__(self, lock: Any, timeout: float = 0.0, holder: Holder = ..., /) -> None:
            """``holder`` is told which thread has the lock."""

        def __enter__(self) -> bool:
            """Whether it has been taken."""

        def __exit__(self, *raised: object) -> None: ...
