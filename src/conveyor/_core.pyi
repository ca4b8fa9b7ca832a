"""The native core: what must be fast or atomic, and nothing else.

Slots are board slots, bits are bell bits, offsets and sizes are bytes, timeouts are seconds
(``None``: none). A failed system call raises ``OSError``; an integer that does not fit its field
raises ``TypeError``.
"""

import builtins
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, overload

_Ref = TypeVar("_Ref", bound=RefCore)
_T = TypeVar("_T")

KIND_VALUE: int
KIND_CALL: int
KIND_CONTROL: int
BELL_BITS: int
"""How many bits a bell has: bits are 0 to ``BELL_BITS - 1``."""
ATTENTION_BIT: int
"""The bit that a death sets in every bell."""
WAIT_ROWS: int
"""How many waits of one process can be noted for one kind of work."""
RING_WRITER_MAY_WAIT: int
"""A ring's flag: its readers wake a writer that asked for it with ``wants_room``."""
MAX_READERS: int
"""How many readers a ring can have."""
DEBUG: bool
"""Whether the core was built to check its invariants."""

class Empty:
    """The type of ``EMPTY``; false."""

    def __bool__(self) -> bool: ...

EMPTY: Empty
"""What ``receive``, ``get`` and ``take`` return where there is nothing; compare with ``is``."""

Holding = tuple[str, int, int, str, int, list[int]]
"""Values that a process still holds, at an arena's cap: the process, the graph's number (0: of none),
the edge, what the channel carries in words, bytes, executions (or calls)."""

def show_decoding_on(board: Board | None, slot: int) -> None:
    """Have that slot's status say from now on when this process decodes values; ``None``: no slot's."""

def bytes_of(buffer: Any) -> bytes:
    """A copy of a contiguous buffer, in huge pages where the system has them."""

def text_of(buffer: Any) -> str:
    """The text in a contiguous buffer, in UTF-8 as pickles have it."""

def note_import(module: str) -> bool:
    """If this thread decodes a value: have the status say that ``module`` is imported for it, until
    :func:`end_import`. ``False``: it decodes none, or the status names another module."""

def end_import() -> None:
    """Have the status name no module."""

class Untold:
    """Definitions that are gone, of which a channel's next frames have to tell."""

    def __init__(self) -> None: ...
    def add(self, tokens: Sequence[bytes]) -> None:
        """Have them told."""

    def take(self, most: int) -> tuple[bytes, ...]:
        """Take out the first ``most`` of them."""

    def __len__(self) -> int: ...

def set_codec(
    encode: Callable[
        [Any, Any],
        tuple[int, int, bytes, Sequence[Any] | None]
        | tuple[int, int, bytes, Sequence[Any] | None, Any],
    ],
    decode: Callable[[int, bytes, list[Buffer] | None], Any],
    announce: Callable[[bytes, Any], None],
    discard: Callable[..., None],
    final_error: type[Exception],
    arena_full: Callable[[str, list[Holding], int], Exception],
    storage_held_alone: Callable[[Any], int],
    state_error: type[Exception],
    refused: Callable[[int, str], Exception],
    take: Callable[[bytes], Any] | None = None,
    known: Callable[[], Any] | None = None,
) -> None:
    """Set what serves values that are not encoded natively, for the whole process.

    ``encode(value, sent)`` gives ``(codec, flags, meta, buffers)``, the codec's number being 16 or
    more; ``decode(codec, meta, buffers)`` gives the value; ``announce(meta, known)`` learns a frame's
    definitions, ``known`` being what ``known()`` has made for its reader, ``discard(meta[, known])`` hears of one that nobody will decode. ``final_error`` is the class of errors that decoding again would not mend,
    ``arena_full(message, holdings, cap)`` makes what is raised at an arena's cap (``cap``: what has no room
    now; 1: the graph's, 2: the session's, 0: it is too large), ``state_error`` is raised
    in forked children; ``refused(errno, text)`` makes what is raised for what the system has refused;
    ``storage_held_alone(value)`` gives the address of a tensor's storage that nothing else refers to, or 0.
    ``take(meta)`` gives the
    refs that a frame which is decoded later has claims on, to be held until then.
    """

def refcount(value: Any) -> int:
    """The value's reference count, with none of this call's own."""

def live_leases() -> int:
    """How many leases this process holds that were not inherited over a fork."""

def begin_exit(patience: float) -> bool:
    """This thread ends the interpreter: no other gets out of this module into Python any more. Waits,
    at most ``patience`` seconds, for those that are between the two; false if one still is.
    """

def die_of_interrupt() -> None:
    """Have this process die of SIGINT instead of exiting, once everything in it has ended."""

def own_descriptor(fd: int) -> int:
    """Give ``fd`` a number of the library's own (:mod:`conveyor.descriptors`), and ``FD_CLOEXEC``. It stays as it
    is where the process's limit leaves no such number."""

def duplicate_descriptor(fd: int) -> int:
    """Duplicate ``fd``, under such a number; the caller closes it, as what those below return. ``OSError`` where
    there is none."""

def event_descriptor() -> int:
    """Make an eventfd, which does not block."""

def epoll_descriptor() -> int:
    """Make an epoll instance."""

def memory_file(name: str) -> int:
    """Make a file without a place in any directory."""

def skip_descriptors() -> None:
    """Give later descriptors higher numbers than all that there were: others have closed those, and what has had
    them may close them once more."""

def end_without_descriptors() -> None:
    """Have this process, an actor's, say so on stderr and end where its code has closed the library's
    descriptors: it could leave others asleep."""

def end_forked_child(where: str) -> NoReturn:
    """Say on stderr that this process, which was forked in ``where``, has come back from there, and end it with
    exit code 1: nothing of Python's is flushed.
    """

def sleep_for_ever() -> NoReturn:
    """Without the GIL."""

def monotonic_ns() -> int:
    """Return the clock of deadlines and status pages, in nanoseconds (``CLOCK_MONOTONIC``)."""

def monotonic() -> float:
    """Return the same in seconds. Tests that replace the functions of ``time`` do not stop this clock."""

class Board:
    """The session's process slots: bell, life word and status page of each. Slots are not checked."""

    @staticmethod
    def create(slots: int) -> Board:
        """A new board with room for that many processes."""

    @staticmethod
    def attach(fd: int) -> Board:
        """The board behind a descriptor, which is duplicated; ``OSError`` if it is none of this
        version.
        """

    @staticmethod
    def look(fd: int) -> Board:
        """The same for who has no part in the session, and only reads: a call of what writes is a fault."""

    @property
    def fd(self) -> int:
        """The board's descriptor; stays the board's."""

    @property
    def slots(self) -> int:
        """How many slots there are."""

    @property
    def deaths(self) -> int:
        """How many deaths were announced, modulo 2**32."""

    @property
    def session(self) -> int:
        """A number that no other session has whose failures may be remembered. That of another host is set to
        the driver's before there is any process."""

    @session.setter
    def session(self, number: int) -> None: ...
    def is_rank(self, slot: int) -> bool:
        """Whether that process has joined a collective group, or is on another host, of which that is not
        known."""

    def set_eventfd(self, slot: int, fd: int, incarnation: int) -> None:
        """Let this process wake the ``incarnation``-th process of ``slot`` from a poll through a
        duplicate of ``fd``. Nothing if it has that of a later one. ``IndexError``, here and below,
        where the board has no such slot.
        """

    def close_fds(self) -> None:
        """At the end of a session: close every descriptor; the mapping stays."""

    def eventfd(self, slot: int) -> int:
        """The descriptor kept for that process, still the board's; -1 if there is none."""

    def forget_eventfd(self, slot: int) -> None:
        """Close the duplicate that ``set_eventfd`` made, if any."""

    def prepare(self, slot: int, name: str, incarnation: int = 0) -> None:
        """Make the slot ready for a new process: cleared, its incarnation counted up, "starting".
        ``incarnation``: the one it has where processes are counted, which is another host; 0: here."""

    def elsewhere(self, slot: int) -> bool:
        """Whether the process of this slot is on another host."""

    def name(self, slot: int) -> str:
        """The name given to ``prepare``, at most 63 bytes of it."""

    def live(self, slot: int) -> None:
        """Take the life word with the calling thread, the process's main thread: "alive" until it
        ends.
        """

    def alive_unwatched(self, slot: int) -> None:
        """Be "alive" without a life word (the driver: it watches, nobody watches it)."""

    def guard_signals(self, slot: int) -> None:
        """From now on announce a fatal signal of this process before a core is dumped."""

    def retire(self, slot: int) -> None:
        """Give back the life word, by the thread that has taken it with ``live``: the process leaves the
        session and goes on. For everybody it is dead.
        """

    def leave(self, slot: int) -> None:
        """Note that the process ends because user code wants it to (``SystemExit``)."""

    def leaving(self, slot: int) -> bool:
        """Whether the process has noted that."""

    def memory(self, slot: int) -> int:
        """Bytes with memory behind them in the arena of the process in ``slot``."""

    @property
    def session_memory(self) -> int:
        """The same of all processes together: what the session's cap bounds."""

    def starve(self, slot: int, what: int) -> None:
        """The process in ``slot`` waits for memory at a cap from now on, for ``what``, as the processes have
        agreed; 0: it does no longer. Meanwhile all processes give back at once what is free, and ring."""

    def starving(self, slot: int) -> int:
        """What the process in ``slot`` waits for memory for, at a cap."""

    def is_waiting(self, slot: int) -> bool:
        """Whether the main thread of the process in ``slot`` waits for something of this library, as far as it
        counts that."""

    def holders(self, slot: int) -> list[int]:
        """Processes, by slot, that hold values of the arena of the one in ``slot`` and run something: some,
        as of when that was last asked for memory, or somebody starves."""

    def is_idle(self, slot: int) -> bool:
        """Whether the process in ``slot`` runs nothing."""

    def forget_memory(self, slot: int) -> None:
        """The process in ``slot`` has ended: what it had counts no more."""

    def death_number(self, slot: int) -> int:
        """Which of the session's deaths the slot's was, from 1; 0 if none was announced."""

    def ring(self, slot: int, bit: int) -> None:
        """Set ``bit`` in the slot's bell and wake whoever sleeps on it."""

    def announce_death(self, slot: int) -> bool:
        """Mark the slot dead and ring every living process; false if it was marked already."""

    def free(self, slot: int) -> None:
        """Mark the slot as nobody's."""

    def condition(self, slot: int) -> int:
        """0 free, 1 starting, 2 alive, 3 dying, 4 dead."""

    def incarnation(self, slot: int) -> int:
        """How many processes have had the slot."""

    def gone(self, slot: int, incarnation: int) -> bool:
        """Whether the process that had the slot as its ``incarnation``-th is no more."""

    def pid(self, slot: int) -> int:
        """The process's id as it sees itself, 0 before it is alive."""

    def transfers(self, slot: int) -> int:
        """Whether what that process keeps is held back from who fetches it (1), or cannot be fetched (2), or both."""

    def change_transfers(self, slot: int, held: int, failing: int) -> None:
        """Add to how many want that, and have all processes look again."""

    def note_fetch(
        self,
        slot: int,
        source: int,
        number: int = 0,
        total: int = 0,
        others: int = 0,
        since_ns: int = 0,
    ) -> None:
        """That process waits for a value that the process in ``source`` keeps, of ``total`` bytes, or held
        back; and for so many others. -1: for none."""

    def note_fetched(self, slot: int, number: int, done: int) -> None:
        """So many bytes of that value are there, if that process waits for it."""

    def fetching(self, slot: int) -> tuple[int, int, int, int, int, int] | None:
        """The slot of who keeps what that process waits for, the value's number, its bytes that are there and
        all of them, how many others it waits for, and since when; ``None``: for none."""

    def publish_directory(self, slot: int) -> None:
        """This process has that slot: say where its directory is."""

    def directory(self, slot: int) -> int:
        """Where the process's directory is, in its memory; 0: nowhere."""

    def announced(self, slot: int) -> list[int]:
        """The numbers of the values that the process reads where they lie, as ``hazard`` has announced."""

    @property
    def used(self) -> int:
        """Slots from here on have never had a process."""

    def waits(
        self, slot: int, work: int
    ) -> tuple[int, int, int, list[tuple[int, int, str]]] | None:
        """What keeps that process from doing a work: (stamp, the question since which it has looked in
        vain, mode, any of whom it waits for as (slot, work, text)); an empty list: nothing does. ``None``
        while it is being noted."""

    def all_waits(self, slot: int) -> list[tuple[int, int, int, int, int, int, str]] | None:
        """All that the process has noted, as ``Inbox.note_waits`` takes it. ``None`` while it is being
        noted."""

    def ask(self, slot: int) -> int:
        """Have the waits of that process look once more; the number of the question."""

    def status(self, slot: int) -> tuple[int, int, int, int, int, int, str]:
        """(state, graph, node, execution, since in ns, fatal signal, method name); states are 0
        idle, 1 running, 2 waiting.
        """

    def decoding(self, slot: int) -> tuple[int, str] | None:
        """Since when (in ns) that process decodes values in Python, and the module that is imported for it, or ``""``;
        ``None``: it decodes none.
        """

class PumpWait:
    """How the thread that sends calls later waits: see ``native/pump_wait.h``."""

    def __init__(self, inbox: Inbox) -> None: ...
    def open(self) -> None: ...
    def release(self) -> None: ...
    def begin(self, sender: int) -> None: ...
    def end(self, sender: int) -> None: ...
    def close(self) -> None: ...
    def wait(self) -> bool:
        """Until there may be something to send; false: it is closed."""

class Attending:
    """A thread's wait for a result, as long as it sends what waits: see ``native/pump_wait.h``."""

    def __init__(self, wait: PumpWait, sender: int, does: bool) -> None: ...
    def __enter__(self) -> Attending: ...
    def __exit__(self, *error: Any) -> None: ...
    def end(self) -> None: ...

class Inbox:
    """This process's own side of its bell: what is ready, and waiting for it."""

    spin_ns: int
    """How long a wait spins at most before the thread sleeps; 0: not at all."""
    main_thread: int
    """The thread that sleeps in poll, for the sake of signal handlers; 0: none does."""
    @property
    def leftovers(self) -> Leftovers: ...
    def close_fds(self) -> None:
        """At the end of a session: close the descriptors, unless somebody sleeps on them."""

    def __init__(self, board: Board, slot: int, eventfd: int, main_thread: int) -> None:
        """``eventfd`` (duplicated, non-blocking) wakes the thread ``main_thread``
        (``threading.get_ident``).
        """

    @property
    def count(self) -> int:
        """The bell's event count, modulo 2**32: read it, look, then ``wait`` for it to move."""

    @property
    def eventfd(self) -> int:
        """The descriptor that becomes readable for a sleeper that armed; stays the inbox's."""

    @property
    def slot(self) -> int:
        """The process's slot."""

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child of the process whose bell it is."""

    def wait(self, seen: int, timeout: float | None = None) -> bool:
        """Wait until ``count`` differs from ``seen``; false at the timeout. Raises what a signal
        handler raises, and what another thread throws into this one.
        """

    def rest(self, seen: int) -> None:
        """Like :meth:`wait`, for a thread of the library's own, into which nobody throws."""

    def next(self, timeout: float | None = None) -> int:
        """Take the next ready bit, waiting if there is none; -1 at the timeout. Raises what a
        signal handler raises.
        """

    def poll(self) -> int:
        """Take the next ready bit, or -1, without waiting."""

    def arm(self, seen: int, own: int) -> bool:
        """Ask for the eventfd to be written at every ring from now on, for the sleeper whose relay is
        ``own``; true if ``count`` is still ``seen``: sleep only then.
        """

    def disarm(self, own: int) -> None:
        """This sleeper is awake, and needs no event."""

    def clear_event(self, own: int) -> None:
        """The same; also make the eventfd unreadable, and wake all others that sleep on it."""

    def add_relay(self, fd: int) -> None:
        """Be a sleeper that goes by this eventfd, which is written when another takes the event down
        that this one sleeps on. It stays the caller's.
        """

    def remove_relay(self, fd: int) -> None:
        """Undo ``add_relay``."""

    def idle(self) -> None:
        """Note on the status page: nothing to do, unless methods run beside the main thread."""

    def count_waiting(self, more: int) -> None:
        """Note that the main thread is in so many more waits."""

    def count_beside(self, more: int) -> None:
        """Note that so many more methods run beside the main thread, in other threads or as coroutines. Who ends
        the last one rings the bell."""

    def running(self, graph: int, node: int, execution: int) -> None:
        """Note on the status page: runs this task of a graph, since now."""

    def running_call(self, name: str, call: int) -> None:
        """Note on the status page: runs the method of this name (cut at 87 bytes) for a call, since
        now.
        """

    @property
    def asked(self) -> int:
        """How many questions others have had for this process's waits."""

    def note_waits(self, waits: list[tuple[int, int, int, int, int, int, str]]) -> None:
        """Note on the board what keeps this process from its work, at most ``WAIT_ROWS`` waits: the
        work, a stamp that tells its waits from earlier ones, the question since which they have looked
        in vain, how the work is run, and any of whom they wait for (slot, work there), in words."""

class Segment:
    """Shared memory that holds rings."""

    @staticmethod
    def create(size: int) -> Segment:
        """New memory of at least ``size`` bytes, all zero."""

    @staticmethod
    def attach(fd: int) -> Segment:
        """The segment behind a descriptor, which stays the caller's; none is kept."""

    @staticmethod
    def ring_bytes(slots: int, stride: int, readers: int) -> int:
        """What a ring takes, a multiple of 64."""

    def slots(self, offset: int) -> int:
        """How many slots the ring there has, a power of two. Raises ``OSError`` if there is none."""

    @property
    def fd(self) -> int:
        """The descriptor of a segment that was created here, -1 after ``close_fd``; stays the segment's."""

    def close_fd(self) -> None:
        """Close the descriptor; the memory stays."""

    @property
    def size(self) -> int:
        """In bytes, whole pages."""

    def make_ring(self, offset: int, slots: int, stride: int, readers: int, flags: int = 0) -> None:
        """Lay a ring there: ``slots`` a power of two, ``offset`` and ``stride`` multiples of 64;
        else ``OSError``.
        """

    def progress(self, offset: int) -> tuple[int, list[int]]:
        """Of the ring there: frames published, and frames taken by each reader; ``OSError`` where
        no ring is.
        """

class Limits:
    """Deadlines and cancellations of the executions (or calls) that are under way, in a segment."""

    def __init__(self, segment: Segment, offset: int, sets: int, tasks: int) -> None:
        """``sets``: a power of two, at least the depth; ``tasks``: of the graph. ``OSError`` where the
        segment has no room.
        """

    @staticmethod
    def bytes(sets: int, tasks: int) -> int:
        """What they take, a multiple of 64; all zero: no limits."""

    def cancel(self, number: int) -> None:
        """Mark an execution as cancelled; then ring those who should look."""

    def cancelled(self, number: int) -> bool:
        """Whether it is, as long as it is under way."""

    def count_failure(self) -> int:
        """Before the executor is told of a task that has failed: how many there were before."""

    def uncount_failure(self) -> None:
        """It could not be told."""

    def fail(self, number: int) -> None:
        """Mark an execution as failed, which counts as cancelled; after the executor has been told."""

    def failed(self, number: int) -> bool:
        """Whether it is so marked, as long as it is under way."""

    def drop_stream(self, number: int, task: int) -> None:
        """Nobody wants more items of a generator task of an execution; then ring its actor."""

    def stream_dropped(self, number: int, task: int) -> bool:
        """Whether that is so, of an execution that is under way."""

    @property
    def cancellations(self) -> int:
        """How often ``cancel`` was called."""

    def deadline(self, number: int) -> int:
        """In nanoseconds of the monotonic clock; 0: none."""

    def stopped(self, number: int) -> bool:
        """Whether it is cancelled or its deadline has passed."""

    def report(self, number: int) -> tuple[int, list[int]]:
        """Of an execution with a deadline: the task skipped first (-1: none), and those that ran."""

CANCELLED: bytes
"""``ErrorFrame.meta`` of what was not run because it had been cancelled."""
OVERDUE: bytes
"""``ErrorFrame.meta`` of what was not run, or came, after the deadline."""
LARGE: bytes
"""``ErrorFrame.meta`` in the place of an error that nobody gets, and that is too large to be kept for the log."""
MOST_LOGGED: int
"""Bytes of an error's ``ErrorFrame.meta`` that are kept for the log."""
UNSAID: bytes
"""``ErrorFrame.meta`` where no memory was left to say what had gone wrong."""
"""``ErrorFrame.meta`` of a result that this process had no memory left to look at."""
BROKEN: bytes
"""``ErrorFrame.meta`` of a result that is not valid."""

class Arena:
    """Where this process puts its large payloads. A thread of its own, which starts with the first of
    them and never takes the GIL, gives back what has been free for some seconds.
    """

    def close(self) -> None:
        """At the end of a session: nothing more can be allocated, and what is free is given back."""

    def leave_slot(self) -> None:
        """Count what is left of it for the session alone: its slot is about to be another process's."""

    def __init__(
        self, fd: int, size: int, cap: int, board: Board, slot: int, idle: float = 3.0
    ) -> None:
        """The file behind ``fd`` (duplicated), ``size`` bytes of addresses, of the process in ``slot``;
        at most ``cap`` bytes of memory behind all arenas that are counted on ``board``. What has been
        free for ``idle`` seconds is given back.
        """

    @property
    def file(self) -> tuple[int, int]:
        """The number of its descriptor in this process, and its file's, which no other arena has. -1: it is
        closed."""

    @staticmethod
    def create_fd(size: int) -> int:
        """A new sealed, sparse file, rounded down to 64 MiB; the caller closes it."""

    def allocate(self, size: int, may_wait: bool = True) -> Buffer:
        """Memory to make a value in; given back when garbage, unless the value was sent. Raises the
        ``arena_full`` of ``set_codec`` if there is none. ``may_wait``: for other processes, at the cap.
        """

    AS_MUCH: int
    """For ``note_given``: a result is passed on, which takes its own place."""

    @staticmethod
    def note_given(bytes: int) -> int:
        """Return what was noted last, and note that the method which this thread runs was given so many bytes of
        other processes' arenas: what it sends crosses a memory cap if the rest is not above it. A reader with
        ``brings_work``, and a program, note that by themselves."""

    def give_back(self) -> None:
        """Take back every block whose readers are done, and free the memory of all that are free."""

    def give_back_soon(self) -> None:
        """Have the arena's thread do so."""

    def holders(self, of: MemoryBudget | None = None) -> list[int]:
        """The processes, by slot, that still hold values of this arena. ``of``: only those of this budget."""

    @property
    def news(self) -> int:
        """Changes when memory has been given back: of any arena, or this one's part of a graph's."""

    @property
    def returned(self) -> int:
        """Count of values that were let go of while somebody starved, in any arena."""

    @property
    def bytes_touched(self) -> int:
        """Bytes that may have memory behind them."""

    @property
    def bytes_out(self) -> int:
        """Bytes of published blocks that were not seen free yet."""

    @property
    def blocks_out(self) -> int:
        """Published blocks that were not seen free yet."""

    @property
    def cap(self) -> int:
        """Of all arenas of the session."""

class MemoryBudget:
    """What some channels' values may take of an arena, all together."""

    def __init__(self, cap: int) -> None: ...
    @property
    def cap(self) -> int:
        """In bytes."""

    @property
    def out(self) -> int:
        """Bytes of values that were sent and were not seen to be let go of yet."""

class Duplicates:
    """Duplicates of descriptors. They are closed when nobody has this object any more, whatever a signal
    handler has broken off."""

    def __init__(self, fds: Sequence[int]) -> None:
        """Duplicate all of ``fds``, or none. Raises OSError."""

    def numbers(self) -> list[int]:
        """Their numbers, which they have as long as this object."""

    def taken(self) -> list[int]:
        """Give them to the caller, who closes them."""

    def close(self) -> None:
        """Close those that are left."""

class ArenaView:
    """Another process's arena as this one reads it, mapped where it is used."""

    def __init__(self, fd: int, size: int, board: Board, slot: int) -> None:
        """The file behind ``fd`` (duplicated), ``size`` bytes of addresses, of the process in ``slot``,
        which is told of leases that have ended. Where this process has a view of that file it is this one.
        """

    @property
    def fd(self) -> int:
        """The duplicate, which stays the view's."""

class Buffer:
    """A window of received (leased) or own memory; exports the buffer protocol.

    What is exported may be written to, and nobody else sees it: memory that others read as well is exported as
    private pages over it, or as a copy.

    Holds the lease of the block it lies in until it is garbage. In a forked child it is inert.
    """

    @staticmethod
    def own(size: int) -> Buffer:
        """New memory of this process alone."""

    @staticmethod
    def copy_of(fd: int, size: int) -> Buffer:
        """What is at the beginning of a file. Its pages are shared until this process writes to them, which
        nobody else sees; the descriptor is not needed any more. ``ValueError``: the file is shorter."""

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""

    @property
    def address(self) -> int:
        """Where it lies in this process."""

    def made_for(self, storage: int) -> None:
        """Note the one storage of torch's, by its address, that memory made in place is for."""

    def part(self, offset: int, length: int) -> Buffer:
        """A part of it, which holds the same."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class BlockPin:
    """A mark of this process on a block of an arena: none of the block's memory is given back as long as it
    is there.
    """

    @property
    def address(self) -> int:
        """Where the block lies in this process."""

    @property
    def nbytes(self) -> int:
        """How much of it has memory: whole pages."""

    @property
    def inherited(self) -> bool:
        """Whether this process was forked since."""

    def release(self) -> None:
        """Take the mark away: no device has the memory any more."""

class PinWords:
    """How a process marks blocks that it pins for a device, and how it hears that memory is short."""

    def __init__(self, board: Board, slot: int) -> None: ...
    def hold(self, some: bool) -> None:
        """Whether there is anything to ask this process for."""

    def wait(self, seconds: float) -> bool:
        """Sleep until woken, or for that long (0: no limit). True: somebody waits for :meth:`answer`."""

    def answer(self) -> None:
        """What could be let go of has been."""

    def wake(self) -> None:
        """Have the thread in :meth:`wait` look."""

    def block(self, buffer: Buffer) -> tuple[int, int, int] | None:
        """Of the block that a buffer lies in: its address, how many bytes of it have memory, and which of the
        block's values it has now. ``None``: it lies in none, or the block has been sent.
        """

    def mark(self, buffer: Buffer) -> BlockPin | None:
        """Mark the block that a buffer lies in. ``None``: there is none, or as many processes have marked it as
        can.
        """

class Snapshot:
    """An encoded value, to be decoded any number of times; also what a ref keeps of a result that has
    come. To send it is to send the value."""

    def __init__(self, value: Any, sent: Any, share_from: int = 0) -> None:
        """``sent`` has carried nothing. From ``share_from`` bytes on (0: never) it lies in a file that others can be given. Raises
        what the codec raises for ``value``.
        """

    @staticmethod
    def received(codec: int, flags: int, size: int, data: bytes | None, fd: int) -> Snapshot:
        """Another process's: its ``parts`` and ``fd`` (-1: none), which is duplicated. ``OSError`` if
        they do not fit.
        """

    @property
    def parts(self) -> tuple[int, int, int, bytes | None]:
        """What ``received`` takes, but for the descriptor."""

    @property
    def size(self) -> int:
        """How many bytes its body has, of what is not kept elsewhere."""

    @property
    def goes_as_it_is(self) -> bool:
        """Whether it is sent on as it has come: nothing is decoded or kept for that."""

    @property
    def fd(self) -> int:
        """The file that it lies in, or -1; stays the snapshot's."""

    @property
    def has_refs(self) -> bool:
        """Whether its value refers to refs, which its meta bytes name."""

    @property
    def codec(self) -> int:
        """What it is encoded by."""

    @property
    def keeps(self) -> bool:
        """Whether something is kept for it where it was made: as long as this is, or whatever stands for it."""

    @property
    def meta(self) -> bytes:
        """Of a value that the codec has encoded."""

    @property
    def shared_at(self) -> tuple[int, int] | None:
        """Of a value that has stayed with its maker, and of which its later writes are seen: that process's slot
        and incarnation."""

    def note_kept(self, number: int) -> None:
        """It has come from another process, and refers to the value of that number: have the directory say that
        this process holds a reference."""

    def loose(self) -> tuple[int, bytes, list[Buffer] | None] | None:
        """What the codec's ``decode`` takes, to be sent inside of another value. ``None`` if it was
        encoded natively, or could not be decoded elsewhere."""

    def decode(self, fetches: bool = True) -> Any:
        """A value equal to the one at the time of the snapshot; they share the snapshot's memory. Not
        ``fetches``: what has stayed in another process is not fetched."""

def fetches() -> bool:
    """Whether what has stayed elsewhere is fetched in the frame that this thread is decoding."""

class ErrorFrame:
    """What an error frame is received as."""

    def __init__(self, meta: bytes) -> None:
        """``meta``: what ``send_error`` was given."""

    @property
    def meta(self) -> bytes:
        """The encoded exception."""

    @property
    def others(self) -> list[bytes] | None:
        """Of an execution that fails as one: what else is known to have failed in it, encoded."""

EVENT_BYTES: int
"""What one event of a trace takes."""
RECORDING_CONTROL_BYTES: int
"""What a segment has once for all recorders in it."""

_Histogram = tuple[int, int, list[tuple[int, int, int]]]
"""Total, largest, and (least value, first value beyond, count) of each bucket that is not empty."""

class Recorder:
    """What one process of a graph notes: counters, and events while the graph is traced. Made by that
    process to write and by the driver to read; times are nanoseconds. Not thread-safe: keep the GIL.
    """

    def __init__(
        self,
        segment: Segment,
        control: int,
        offset: int,
        events: int,
        capacity: int,
        tasks: int,
        receives: int,
        sends: int,
        outputs: int,
        slots: int,
        threads: bool,
        whose: str = "",
    ) -> None:
        """At ``offset``, with a ring of ``capacity`` events (a power of two) at ``events``; ``control``
        is shared by all recorders of a graph. ``outputs`` of the sends go to the driver, and the time
        of each of their last ``slots`` (a power of two) is kept. ``threads``: events name theirs.
        ``whose`` it is, for errors. ``OSError`` where the segment has no such place.
        """

    @staticmethod
    def bytes(tasks: int, receives: int, sends: int, outputs: int, slots: int) -> int:
        """What the counters take at ``offset``, a multiple of 64."""

    def task(self, index: int) -> tuple[int, int, _Histogram]:
        """(runs that raised, times it was skipped, running times)."""

    def receive(self, index: int) -> _Histogram:
        """Waiting times."""

    def send(self, index: int) -> tuple[int, int, int]:
        """(frames, frames that carry an error, bytes)."""

    @property
    def running(self) -> tuple[int, int, int] | None:
        """(task, execution, since) while a task runs, or if the process has ended in it."""

    tracing: bool
    """Whether events are noted: of all recorders with the same ``control``. Set by the driver."""

    def collect(self, limit: int) -> None:
        """Forget the events that are there; keep at most ``limit`` from now on."""

    def drain(self) -> None:
        """Take the events out of the ring. ``OSError``, once, where a process has written over its
        head.
        """

    def take_events(self) -> builtins.bytes:
        """The events taken out of the ring, once: ``EVENT_BYTES`` each."""

    @property
    def dropped(self) -> int:
        """Events since ``collect`` that found no room, in the ring or within the limit."""

    def free_events(self) -> None:
        """Give back the memory of the ring."""

    def note_task(self, index: int, execution: int, begin: int, end: int, failed: bool) -> None:
        """A task has run."""

    def count_waiting(self, more: int) -> None:
        """Note that the main thread is in so many more waits."""

    def count_beside(self, index: int, bytes: int) -> None:
        """Count what goes beside the frames of a send."""

    def note_send(
        self, index: int, execution: int, begin: int, end: int, bytes: int, failed: bool
    ) -> None:
        """A frame was sent."""

    def note_room(self, execution: int, begin: int, traced: bool) -> None:
        """An execution has waited for room until now: task 1 of the driver. ``traced``: on a thread
        that did nothing else meanwhile.
        """

class Writer:
    """The writing end of a ring."""

    deserted: bool
    """Whether the process of a reader is gone."""

    def __init__(
        self,
        segment: Segment,
        offset: int,
        board: Board,
        targets: Sequence[tuple[int, int]],
        arena: Arena,
        sent: Any,
        graph: int = 0,
        edge: int = 0,
        carries: str = "",
        budget: MemoryBudget | None = None,
    ) -> None:
        """``targets``: (slot, bit) of each reader in turn; ``sent`` is handed to the codec.
        ``graph``, ``edge`` and ``carries`` name the channel where its values fill the arena.
        ``budget``: what its values may take of it, together with those of others who have the same.
        ``OSError`` where no such ring is.
        """

    moved_refs: int
    """A value with at most so many references was let go by its maker: its block may travel
    uncopied.
    """
    sent: Any
    """What the codec is handed to know which definitions the readers have."""

    @property
    def bytes(self) -> int:
        """Bytes of all bodies sent by this end."""

    @property
    def count(self) -> int:
        """Frames published in this ring."""

    @property
    def has_room(self) -> bool:
        """Whether ``send`` would find a free slot; readers that closed or died do not count."""

    @property
    def wanted(self) -> int:
        """Frames with lower tags are wanted by no reader any more."""

    def wants_room(self) -> None:
        """Be rung when a reader takes a frame (``RING_WRITER_MAY_WAIT``); look at ``has_room``
        again after this.
        """

    def send(self, value: Any, tag: int, kind: int = ...) -> bool:
        """Publish ``value``; false, with nothing done, if the ring is full. Raises what the codec
        raises, or its ``arena_full``, with nothing sent.
        """

    def send_error(self, meta: builtins.bytes, tag: int) -> bool:
        """Publish an encoded exception; false, with nothing done, if the ring is full."""

class Reader:
    """A reading end of a ring."""

    brings_work: bool
    """This process's loop takes its work from here alone: it runs nothing while ``receive`` decodes."""

    given: int
    """Bytes of the writer's arena that the frame received last lies in."""

    def __init__(
        self,
        segment: Segment,
        offset: int,
        reader: int,
        board: Board,
        writer: tuple[int, int],
        view: ArenaView,
        readonly: bool,
        carries: str = "",
    ) -> None:
        """End number ``reader``; ``writer``: the (slot, bit) to ring for room, ``view``: of its
        arena, ``carries``: what goes over it, for errors. ``OSError`` where no such ring is; from
        everything that looks at the ring, where a process has written over its head.
        """

    @property
    def empty(self) -> bool:
        """Whether ``receive`` would find nothing."""

    @property
    def dry(self) -> bool:
        """The same, and nothing is being decoded that was received."""

    @property
    def count(self) -> int:
        """Frames taken from this ring by this reader."""

    @property
    def available(self) -> int:
        """Frames that can be received now."""

    @property
    def tag(self) -> int:
        """Of the frame received last."""

    @property
    def kind(self) -> int:
        """Of the frame received last: one of the ``KIND_`` numbers."""

    @property
    def bytes(self) -> int:
        """Bytes of all bodies taken by this end."""

    @property
    def front(self) -> int:
        """The tag of the next frame, -1 if there is none."""

    def want(self, tag: int) -> None:
        """Tell the writer that frames with lower tags are not wanted any more."""

    def receive(self) -> Any:
        """The next frame's value, an ``ErrorFrame`` if it is one, ``EMPTY`` if there is no frame;
        raises what decoding raises.
        """

    def receive_undecoded(self, make: Callable[[Snapshot], Any]) -> Any:
        """As ``receive``, but for what something of may have stayed in another process comes what ``make``
        makes of a ``Snapshot``, which is to be decoded once; that may be tried again if it raises.
        """

    def receive_or_leave(self) -> Any:
        """The next frame's value, or ``EMPTY``. If this raises the frame is still there."""

    def receive_kept(self) -> Any:
        """The next frame as a ref keeps it: its value if that is immutable, an ``ErrorFrame``, else a
        ``Snapshot``; ``EMPTY`` if there is no frame.
        """

    def skip(self) -> bool:
        """Drop the next frame, but for the definitions in it; false if there is none."""

    def close(self) -> None:
        """Take no more: the writer does not wait for this reader, and large values that it has not
        taken, or that still come, are free again. The end of the object does the same.
        """

class Leftovers:
    """The gates of one process that have dropped results which may still come."""

    def wait(self, quiet: float) -> bool:
        """Sleep until they should look, ``quiet`` seconds after there was a reason, or at once where
        memory is short; False: until ``stop``."""

    def sweep(self) -> None:
        """Have each of them let go of what was dropped and has come."""

    def note_more(self) -> None:
        """Make a sweep due: there is more to be said than this knows. Finalizers may call it."""

    def take_unseen(self) -> list[tuple[bytes, bool]]:
        """The errors that have been let go of and that nobody has got, since this was last asked; and of each
        whether more was sent to where it came from, after what it is the result of."""

    def stop(self) -> None: ...

class Gate:
    """Submits under consecutive numbers, and finds each number's result on each reader."""

    def __init__(
        self,
        writers: list[Writer],
        readers: list[Reader],
        depth: int,
        kind: int,
        inbox: Inbox,
        first: int = 0,
    ) -> None:
        """At most ``depth`` submissions are under way; frames go out as ``kind``; ``get`` waits on
        ``inbox``; numbers begin with ``first``.
        """

    closed: bool
    """Whether ``get`` no longer waits; set it, then ring this process's bell."""

    def start(self, value: Any, source: Any, type: type[_Ref]) -> _Ref | None:
        """Like ``submit``, and make the ref of the first reader's result: an instance of ``type``,
        with ``source``. ``None`` if there is no room, if ``value`` is a ref, and if somebody has died.
        """

    #: ``Board.deaths`` when all who take part were known to live; -1: ``start`` does not look.
    deaths: int

    def submit(self, value: Any) -> int:
        """Send ``value`` on the first writer: its number, -1 if there is no room. Raises as
        ``Writer.send`` does.
        """

    def set_limits(self, limits: Limits) -> None:
        """Where deadlines are written."""

    def set_failures(self, readers: list[Reader], together: bool, siblings: Sequence[int]) -> None:
        """Hear of tasks that have failed, on these readers: frames as ``FailureTeller`` sends them. With
        ``together`` each execution fails as one, and the results that are ``siblings`` (by their readers) come
        when it is known of all of them whether they have failed. After ``set_limits``.
        """

    def failed(self, number: int, reader: int) -> bool:
        """Of a result that is here: whether it is an error."""

    def hear(self) -> bool:
        """Hear of what has failed since: whether there was anything."""

    def failures(self) -> list[tuple[int, list[bytes]]]:
        """Executions under way in which tasks have failed, with the errors in the order of coming."""

    def interrupt(self) -> None:
        """Whoever waits in ``get`` returns ``EMPTY`` and looks again. Rings this process's bell."""

    def get(self, number: int, reader: int, timeout: float | None = None, deaths: int = -1) -> Any:
        """Wait for a result and take it, as ``Reader.receive_kept`` gives it; ``EMPTY`` at the timeout,
        when closed, or when ``Board.deaths`` is not ``deaths`` (-1: any).
        """

    def await_ready(self, number: int, reader: int, seconds: float) -> None:
        """Wait until a result is here, for so long. It is not taken; what ends ``get`` ends this."""

    def take(self, number: int, reader: int) -> Any:
        """Take a result that is here, as ``Reader.receive_kept`` gives it, else ``EMPTY``."""

    def ready(self, number: int, reader: int) -> bool:
        """Whether the result is here."""

    def drop(self, number: int, reader: int) -> None:
        """The result is not wanted, now or when it comes; it can be taken no more."""

    def drop_cancelled(self, number: int, reader: int) -> None:
        """The same, by who has cancelled the submission: an error that comes of it is not logged."""

    def drain(self) -> None:
        """Move what has come out of the rings, so that their slots are free."""

    def leave(self) -> None:
        """``drain``, and take nothing that comes later: the readers are closed."""

    @property
    def has_room(self) -> bool:
        """Whether a submission would be accepted now."""

    @property
    def submitted(self) -> int:
        """How many submissions there were; the next one's number."""

    @property
    def completed(self) -> int:
        """How many submissions have all their results."""

    @property
    def asked(self) -> int:
        """Results that were asked for in vain, and may still be got."""

    @property
    def stashed(self) -> int:
        """Results out of the rings that nobody has taken yet."""

    @property
    def stashed_bytes(self) -> int:
        """The size of their bodies."""

    def record(
        self,
        own: Recorder,
        outputs: Sequence[tuple[Recorder, int]],
        all: Sequence[Recorder],
    ) -> None:
        """Note in ``own`` what goes through: receives and sends in the order of the readers and
        writers, whole executions as task 0 (see ``Recorder.note_execution``). ``outputs``: the recorder of each reader's writer, and
        which of its outputs it is. While the graph is traced, take the events of ``all`` in time.
        """

    def count_completed(self) -> None:
        """Note the time of the executions that have been completed since."""

class RefCore:
    """The native part of ``refs.ref.Ref``: ``get`` returns from here what comes soon."""

    def __init__(self, source: Any, gate: Gate | None, number: int, reader: int) -> None:
        """``number`` -1: not submitted yet."""

    _number: int
    """Of the submission; -1: there was none yet."""
    _outcome: Any
    """``EMPTY`` until the ref is settled; a ``Snapshot`` of what has come, or its value if that is
    immutable."""

    _inner: Any
    """The refs that the value refers to, once they are held; else ``None``."""

    _targets: Any
    """What the value is received into by ``get``, which asks the subclass then; else ``None``."""

    _passed: int
    """To whom it was passed (``calls.pending``)."""

    def _move(self, source: Any, gate: Gate, waiting: dict[Any, Any], pending: deque[Any]) -> None:
        """Move what ``waiting`` has for this to the end of ``pending``, and have the result come from there, in
        one step; nothing happens if ``waiting`` has nothing. It has not been submitted yet."""

    def _settled_now(self) -> Any:
        """``_outcome``, which is what has come if anything has."""

    @property
    def _source(self) -> Any:
        """What the subclass asks to wait."""

    @property
    def _gate(self) -> Gate:
        """Where the result comes from; none where there is nothing to come."""

    @property
    def _reader(self) -> int:
        """Which of the gate's readers the result comes from."""

    def get(self, timeout: float | None = None) -> Any:
        """The result; asks the subclass (``_get``) where it does not come soon."""

    def _with_siblings(self, count: int) -> list[Any]:
        """The refs of all ``count`` results of the execution, this one, of reader 0, among them."""

    def _siblings(self) -> list[Any]:
        """Those of them that are still there."""

    def _claim(self, by: object) -> bool:
        """Take the right to settle the ref; false if somebody has it."""

    def _unclaim(self, by: object) -> None:
        """Give it back, if it was taken by this, and wake those who were refused."""

def refs_get_soon(refs: list[Any]) -> list[Any] | None:
    """The values of the first of ``refs``: of those before one that is not soon there, or has failed.
    ``None`` if there is anything else than refs.
    """

def refs_done(
    refs: list[Any], most: int, link: type, own: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
    """The first ``most`` of ``refs`` that are done, and the others, in their order. Nobody else has the list.
    ``link``: the type of the sources of calls' refs. ``own``: the ``done`` of refs that do not override it.

    ``TypeError``: one is no ref. ``ValueError``: one is there twice.
    """

def refs_among(args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether one of the arguments is itself a ref; ``kwargs``: a dict, or ``None``."""

class Program:
    """The steps of one actor's part of a graph."""

    def __init__(
        self,
        inbox: Inbox,
        graph: int,
        bit: int,
        registers: int,
        encode_error: Callable[[BaseException, str, int], bytes],
        check_elements: Callable[[Any, int, str], tuple[Any, ...]],
        recorder: Recorder,
    ) -> None:
        """``bit`` is rung when the program wants another turn. What it does is noted in ``recorder``:
        its tasks, receives and sends in the order in which they are added.
        """

    def add_receive(
        self,
        reader: Reader,
        reg: int,
        spread: Sequence[int],
        label: str,
        arrived: Callable[[Any, int], Any] | None = None,
    ) -> None:
        """One frame to ``reg``, or its elements to the registers in ``spread`` (-1: not used). With
        ``arrived``, the frame is only the head of a value whose tensors come by another way: what
        ``arrived(head, execution)`` returns is in the register until ``add_await`` has the value."""

    def add_try(
        self, receive: int, patience: float, most: float, vain: int, most_left_out: int
    ) -> None:
        """From here on, take the frame of the ``receive``-th receive, which is added later, as soon as it
        is there; ``conveyor.plan.model.Try`` says for how long it is waited for."""

    def add_await(self, receive: int, take: Callable[[Any], Any]) -> None:
        """Wait for the tensors of the ``receive``-th receive that was added: ``take(register)`` gives
        the value, or ``NotImplemented``, and is called again when the program is rung. ``ValueError`` where
        there is no such receive with ``arrived``."""

    def add_call(
        self,
        method: Callable[..., Any],
        node: int,
        label: str,
        args: Sequence[int],
        constants: list[Any],
        uses: Sequence[int],
        invoke: Callable[[list[Any]], Any] | None,
        start: Callable[[list[Any]], None] | None,
        out: int,
        outs: Sequence[int],
        num_returns: int,
    ) -> None:
        """A call; an argument is a register, or -1 - the index of a constant. ``invoke`` and
        ``start`` are called with all registers in its place; ``start`` suspends the program.
        """

    def add_send(
        self,
        writer: Writer,
        reg: int,
        last: bool,
        only_done: bool,
        label: str,
        output: bool,
        pack: Callable[[Any], Any] | None = None,
        posted: Callable[[], None] | None = None,
    ) -> None:
        """Publish a register; ``last``: nothing later in the execution needs it; ``only_done``:
        ``None`` in its place, unless it is an error; ``output``: the driver reads it. With ``pack`` and
        ``posted``, ``pack(value)`` is sent, and ``posted()`` called when it has been."""

    given: int
    """Bytes of the blocks that this execution's inputs lie in."""

    def set_shortage(self, wait: Callable[[BaseException, Any], Any]) -> None:
        """Have ``wait(error, before)`` called where what is sent has no memory: it returns what is passed as
        ``before`` next time, when it is to be tried again; or ``None``, and then the program goes on when it
        is rung and ``before.ready()``, calls ``before.tries()`` first, and sends what ``before.take(value)``
        returns. It raises if it is not to be tried
        again. ``before.end()`` is called in the end."""

    def set_progress(self, progress: Callable[[], None]) -> None:
        """Have this called whenever the program is rung; it goes on with what is beside the frames."""

    def set_fetching(self, begin: Callable[[Snapshot], object], take: Callable[[], Any]) -> None:
        """Have ``begin(snapshot)`` called for an input of which something may have stayed elsewhere, then
        ``take()`` for its value: it may give ``NotImplemented``, and is asked again when the bit is rung.
        """

    def set_limits(self, limits: Limits, cancel: Callable[[], None]) -> None:
        """Look at these before every call; ``cancel`` ends the coroutine that runs."""

    def start_at(self, execution: int) -> None:
        """Set the number of the first execution; before the first ``advance``."""

    def pause_after_tasks(self) -> None:
        """From now on ``resume`` only sends what the task has made: the next one waits for ``advance``."""

    def advance(self) -> None:
        """Run as far as input is there, for a turn at most."""

    def resume(self, value: Any, error: BaseException | None) -> None:
        """The coroutine of the suspended call has ended."""

    def close(self) -> None:
        """The graph is taken down."""

    @property
    def execution(self) -> int:
        """The number of the execution that it is in."""

    @property
    def bit(self) -> int:
        """The bit that was given."""

class DeathWatch:
    """A native thread that sees processes die by their life words and announces it. Never takes the
    GIL.
    """

    def __init__(self, board: Board, told: int = -1) -> None:
        """Starts the thread. ``told``: an eventfd that it writes to whenever a life word has fired; it must
        outlive the thread.
        """

    @staticmethod
    def supported() -> bool:
        """Whether this kernel can wait for many life words (Linux 5.16), and lets us; else only fatal
        signals are seen.
        """

    def add(self, slot: int) -> None:
        """Watch this process; at most 127 are watched by one thread."""

    def remove(self, slot: int) -> None:
        """Watch it no more."""

    def stop(self) -> None:
        """End the thread and wait for it; safe to call again."""

class Waker:
    """Wakes whoever carries wills out, until it is closed; in a forked child it is."""

    @overload
    def __init__(self) -> None:
        """Wakes nobody: they are carried out at some other occasion."""

    @overload
    def __init__(self, eventfd: int) -> None:
        """By a duplicate of it."""

    @overload
    def __init__(self, inbox: Inbox) -> None:
        """By the bell of that process."""

    def close(self) -> None:
        """Wills that end from now on are without effect."""

class Door:
    """Where the executions of a graph begin: at the gate of its epoch, or, while it is shut, at what says why
    there is none.
    """

    def open(self, gate: Gate) -> None:
        """``gate`` takes what comes from now on."""

    def shut(self, instead: Callable[..., Any]) -> None:
        """``instead`` is called in place of a gate's ``start``."""

    def start(self, value: Any, source: Any, type: type[_Ref], deadline: int = 0) -> _Ref | None:
        """See ``Gate.start``. ``deadline`` (monotonic nanoseconds, 0: none) goes to the limits; then ``source`` is
        of this execution alone, and its ``keep_report`` is called with the execution's number before what the
        limits note of it is overwritten.
        """

    def start_many(
        self, values: tuple[Any, ...], source: Any, type: type[_Ref], deadline: int = 0
    ) -> _Ref | None:
        """Send one value on each writer, all or none; otherwise like ``start``."""

class ShortWay:
    """Executions of a graph whose arguments are sent as they are, while nobody else submits."""

    def __init__(
        self,
        door: Door,
        lock: Any,
        holder: Holder,
        source: Any,
        type: type[Any],
        serialization_error: type[Exception],
        blame: Callable[[Any, tuple[Any, ...]], Any],
        results: int,
        timed: Callable[[Any, int, float], Any],
        seconds: float | None,
        inputs: tuple[tuple[int | str, ...], ...] | None = None,
        positional: int = 1,
        named: int = 0,
    ) -> None:
        """``lock``: held meanwhile, as ``holder`` is told. ``source`` and ``type``: of the refs. ``blame(error, args)`` raises what a
        ``serialization_error`` becomes. ``results``: how many refs are made, as a list; 0: that of the first, alone.
        ``timed(source, deadline, seconds)`` makes the source of an execution that has a deadline (monotonic
        nanoseconds), after these ``seconds`` where it is given none.
        ``inputs``: for each input edge the arguments that its frames have, by place or by name, of so many
        ``positional`` and ``named`` ones; ``None``: the one argument is the one frame.
        """

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float | None = None
    ) -> Any:
        """What ``execute`` returns; ``None``: it has not begun."""

class Holder:
    """Which thread has ``lock``; the lock is taken for the body of a ``with``, or by a ``Turn``."""

    def __init__(self, lock: Any, /) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *raised: object) -> None: ...
    def mine(self) -> bool:
        """Whether it is this one."""

class Turn:
    """A lock that is taken for the body of a ``with``, if it can be within ``timeout`` seconds (-1: any), and
    given back whatever a signal's handler raises meanwhile.
    """

    def __init__(self, lock: Any, timeout: float = 0.0, holder: Holder = ..., /) -> None:
        """``holder`` is told whose turn it is."""
    def __enter__(self) -> bool:
        """Whether it has been taken."""

    def __exit__(self, *raised: object) -> None: ...

class WeakTable:
    """The dictionary of a collection that keeps nothing alive. No code in Python hears of an object's end."""

    known: dict[Any, Any]

    def __init__(self) -> None: ...
    def ref(self, object: object, key: object) -> weakref.ref[Any]:
        """A weak reference, with whose end ``key`` is taken out of ``known`` if it, or a tuple that begins with
        it, is the value there."""

class Will:
    """What is to be done when the object that holds this is garbage, noted where no bytecode runs."""

    def __init__(self, note: Callable[[Any], object], work: Any, waker: Waker) -> None:
        """At its end it calls ``note(work)``, which is to be a function in C (the ``append`` of a deque), and
        wakes.
        """

    def revoke(self) -> None:
        """Nothing is to be done any more."""

MOST_RANKS: int
"""How many ranks a ``CollectiveGroup`` can have."""

def reduce(to: tuple[Any, ...], sources: tuple[Any, ...], type: int, op: int) -> None:
    """Reduce ``sources`` into each of ``to``, without the GIL: buffers of one size whose elements are of a
    type of ``conveyor.dag.collective.kernels.ELEMENT_TYPES``, by number. ``op`` is a ``ReduceOp``'s value. What is
    written to may be one of the sources. ``ValueError`` for what does not fit, and for the average of integers."""

class CollectiveGroup:
    """One rank of a group of processes that do collective operations over one segment."""

    @staticmethod
    def bytes(hosts: Sequence[int]) -> int:
        """Of the segment of a group whose ranks are on these hosts, which are counted from 0 on."""
    @staticmethod
    def rings(hosts: Sequence[int]) -> list[tuple[int, int, int, int, tuple[int, ...]]]:
        """The rings of such a group: the rank that writes, where it lies, its slots and the size of one, and the
        ranks that read."""
    @staticmethod
    def ring_at(ranks: int, rank: int) -> int:
        """Where the ring lies in it that ``rank`` writes, and all ranks read."""
    @staticmethod
    def prepare(segment: Segment, hosts: Sequence[int]) -> None:
        """Lay out a fresh segment, and give it its memory; ``OSError`` if there is none."""
    @staticmethod
    def destroy(
        segment: Segment,
        board: Board,
        members: Sequence[tuple[int, int]],
        session: bool = False,
    ) -> None:
        """Break the group, for its end. ``session``: that of the session."""
    @staticmethod
    def waits(segment: Segment) -> list[tuple[int, list[int]]]:
        """Of each rank the last barrier that it has come to, and if it sleeps there, for which ranks."""
    @staticmethod
    def tell_of_waits(segment: Segment, slot: int) -> None:
        """Have ranks ring the process in ``slot`` from now on when they go to sleep in an operation."""
    def __init__(
        self,
        segment: Segment,
        inbox: Inbox,
        rank: int,
        members: Sequence[tuple[int, int]],
        hosts: Sequence[int],
        arena: Arena,
        views: Sequence[ArenaView],
        bit: int,
    ) -> None:
        """``members`` are slot and incarnation of each rank's process; ``inbox`` and ``arena`` are this one's.
        ``views``: of each rank's arena. ``bit`` is rung where a rank of another host has come."""
    def close(self) -> None:
        """Take nothing more from ranks of other hosts."""
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def run(
        self,
        inbox: Inbox,
        operation: int,
        op: int,
        type: int,
        count: int,
        shape: tuple[int, ...],
        tensors: int,
        shapes: int,
        root: int,
        sources: tuple[Any, ...],
        to: tuple[Any, ...],
        timeout: float | None,
        until: Callable[[], int] | None,
    ) -> int:
        """One operation: 0 done, 1 the ranks have not called the same (see ``called``), 2 the group is broken
        (see ``broken``), 3 timed out, 4 another thread is in one, 5 this is a forked child, 6 nobody waits
        for it. Tensors are addresses or buffers, each of ``count`` elements. ``until``, asked before each
        sleep, says when what runs here is over at the latest, in ns; 0: at no time; below: it is. ``None``:
        this process runs several things side by side, and none of them is known to call."""
    def exchange(
        self,
        inbox: Inbox,
        form: int,
        root: int,
        gives: bool,
        given: list[Any],
        takes: Sequence[int],
        writer: Writer,
        readers: tuple[Reader, ...],
        timeout: float | None,
        until: Callable[[], int] | None,
    ) -> int | list[Any]:
        """The values of the ranks ``takes``, in that order of ranks; or what it has come to, as ``run`` says it.
        The value in the list ``given`` is sent if this rank ``gives`` one. All ranks name the same ``form`` and ``root``. ``writer``
        and ``readers`` are this rank's ends of the rings of all ranks."""
    @property
    def absent(self) -> list[int]:
        """The ranks that have not come to the last barrier that this one has come to."""
    def forget(self, readers: tuple[Reader, ...]) -> None:
        """After a mismatch: let go of what the others have given."""
    def called(self, rank: int) -> tuple[int, int, int, int, tuple[int, ...], int, int]:
        """What a rank has called that has come to the last barrier that this one has come to: operation, op,
        type, count, shape, tensors, root."""
    def raised(self, why: str, running: bool) -> None:
        """What may have come to an operation here, or an operation, has raised: that breaks the group, unless it
        is broken already. ``running``: what this process runs has; else something that has not begun."""
    @property
    def broken(self) -> tuple[int, int, str] | None:
        """Why nothing can be done any more: the cause, the rank, and more in words."""
    @property
    def failed_in_execution(self) -> tuple[int, int] | None:
        """The graph and the execution that this rank runs a step of, if the group was broken by what another
        one has raised in that."""

def let_go_of_kept() -> None:
    """Drop what was kept as long as somebody had a frame, and is no longer. Needs no memory."""

class KeptWait:
    """Waits for something to drop."""

    def __init__(self) -> None: ...
    def wait(self) -> bool:
        """Wait until there is something. False: ``stop`` was called, now or before, and nothing is kept."""

    def stop(self) -> bool:
        """Have it end. True: it goes on until nothing is kept any more."""

def seconds_to_fetch() -> float | None:
    """What the ``get`` that this thread is in has left; ``None``: as long as it takes."""

def with_fetch_limit(timeout: float | None, function: Callable[..., _T], *args: Any) -> _T:
    """``function(*args)``, in which a fetch has no longer than that."""

def let_read(pid: int) -> None:
    """Let that process, and what descends from it, read this one's memory, where the system limits who may."""

def may_read(pid: int) -> bool:
    """Whether the system lets this process read the memory of that one."""

def readable(ranges: bytes) -> bool:
    """Whether other processes of this user may read these ranges of this process's memory."""

class LastingText:
    """Text that is there as long as this process, once for all that is alike."""

    def __init__(self, text: bytes) -> None: ...

class Anchor:
    """A word of this process that holds ``number`` as long as this is: whoever reads memory of ours reads it behind
    that, to see whether the memory was still what it took it for. It is an entry of the directory, which says when it
    was made, how much the ranges of ``table`` are, and ``names``."""

    def __init__(
        self,
        number: int,
        table: bytes = b"",
        names: LastingText | None = None,
        checksum: int = 0,
    ) -> None: ...
    @property
    def address(self) -> int:
        """Where it lies."""

def check_writes(on: bool) -> None:
    """Whether this process looks for writes to what is kept, here and elsewhere. Where it does, what reads all of
    a value that has a checksum raises ``OSError`` with ``EBADMSG`` if that is another one's."""

def checks_writes() -> bool:
    """What ``check_writes`` was told last."""

def checksum_of(table: bytes) -> int:
    """That of what lies in the ranges of the table, which must be there."""

KeptValue = tuple[int, int, int, bytes]
"""Its number, its bytes, since when it is kept (``monotonic_ns``), and its names."""

Directory = tuple[list[KeptValue], list[int], list[tuple[int, int, int]]]
"""What a process keeps; the numbers of values that it holds references of its own making to; and to whom it has sent
references that are held: (number, slot, incarnation)."""

def read_directory(pid: int, address: int) -> Directory:
    """That of the process ``pid``, which lies there (``Board.directory``). Raises ``OSError``: as ``read_peer``, and
    ``EPROTO`` if there is none."""

def ranges_of(buffers: Sequence[Any]) -> bytes:
    """Where contiguous buffers lie: a table of addresses and lengths, as 64-bit numbers."""

def lying_in(table: bytes, arena: Arena) -> bytes:
    """Where each of such ranges lies in the process's own arena: its block's offset and size, and its own place in
    the block, as 64-bit numbers; the last is 0 for one that lies elsewhere. Nothing if all do."""

def outlive_all() -> None:
    """This process is the driver's: a session ends with it, so what it holds is let go of by itself alone."""

def sure_lease(number: int) -> InPlace | None:
    """What keeps the value of that number where it lies in the arena of who has made it: the lease on the frame which
    this thread is decoding, if nobody's death but that of who has made the value can let go of it. ``None``: there is
    no such lease, and the value may go at any time."""

def hazard(
    board: Board, slot: int, view: ArenaView, pid: int, anchor: int, number: int
) -> InPlace | None:
    """The same without a lease: this process, in ``slot``, announces that it reads the value, and the process ``pid``,
    which keeps it with that anchor in the arena that ``view`` shows, lets it be until it does so no more. ``None``: no
    more values can be announced. Raises ``OSError``: as ``read_peer``."""

class InPlace:
    """What keeps a value where it lies."""

    def buffers(self, view: ArenaView, ranges: bytes, lying: bytes) -> list[Buffer | None] | None:
        """The ranges of a value, which lie as ``lying_in`` has said in the arena that ``view`` shows, as read-only
        memory; ``None`` for each that lies elsewhere. ``None`` instead of all: they cannot be mapped."""

class Lingers:
    """What is left of a value in the process's own arena when its keeper lets go of it: ``rest``, which keeps its
    memory. ``table`` are its ranges; ``names`` says the directory of it."""

    def __init__(
        self, arena: Arena, number: int, table: bytes, names: LastingText, rest: object
    ) -> None: ...
    def end(self) -> None:
        """The value's anchor is down. The rest goes, now or when no process has announced any more that it reads the
        value."""

def lengths_of(table: bytes) -> list[int]:
    """The length of each of them."""

def packed_size(table: bytes) -> int:
    """The bytes that ``read_peer`` needs for such a table's memory."""

def read_peer(pid: int, table: bytes, anchor: int, number: int, into: Buffer) -> list[Buffer]:
    """Copy memory of the process ``pid``, all ranges of the table, to ``into``; a buffer for each.

    Raises ``OSError``: ``ESTALE`` if the word at ``anchor`` does not hold ``number`` afterwards, ``ESRCH`` if there
    is no such process, ``EPERM`` if this one may not read it, ``EFAULT`` if nothing is mapped there.
    """

def fetch_peer(pid: int, table: bytes, anchor: int, number: int, arena: Arena) -> list[Buffer]:
    """``read_peer`` into new memory of ``arena``. Raises what its ``allocate`` does, too."""

def fetch_small(meta: bytes, board: Board, own_slot: int) -> tuple[int, bytes, list[Buffer]] | None:
    """What the codec's ``decode`` takes, of a value that another process than that of ``own_slot`` keeps, as
    ``Located.pack`` has written it. ``None``: it is not small, or more is to be done for it than to read, or it
    cannot be read."""

def read_peer_joined(pid: int, table: bytes, anchor: int, number: int, into: Any) -> None:
    """The same, to the beginning of ``into``, a buffer, one range behind the other."""

def untouched(memory: Any) -> bool:
    """Whether nobody has read or written any page of ``memory``, a private anonymous mapping, since it was
    made."""

def read_peer_into(pid: int, table: bytes, anchor: int, number: int, into: bytes) -> None:
    """The same, to the ranges of this process that ``into`` has, each as long as the other. ``ValueError`` if one
    is not."""

def copy_into(buffers: list[Buffer], into: bytes) -> None:
    """Copy ``buffers`` to such ranges."""

NOT_BETWEEN_HOSTS: bytes
"""The body of the error that stands for a frame that cannot go to another host."""
HOST_IS_FULL: bytes
"""The same for a frame for which its readers' host had no memory."""
HOST_CONNECTED: int
HOST_DISCONNECTED: int
HOST_LOST: int
WIRE_VERSION: int
"""Of what pumps say to each other."""

class MirroredRing:
    """A ring of a segment that several hosts have."""

    def __init__(
        self,
        offset: int,
        writer: tuple[int, int],
        readers: Sequence[tuple[int, int]],
        view: ArenaView | None = None,
        times: int = 0,
        kept: int = 0,
    ) -> None:
        """``writer`` and ``readers``: slots and bits. ``view``: of the arena of a writer that is on this host.
        ``times``: the offset of ``kept`` numbers of 64 bits, a power of two, in which it is noted when frames have
        come from another host, that of each at its tag modulo ``kept``."""

class MirroredLimits:
    """Limits of a segment that several hosts have; ``home``: the host that submits."""

    def __init__(self, offset: int, sets: int, tasks: int, home: int) -> None: ...

class Acceptor:
    """Native thread that accepts connections of other nodes and reads their first message. It never takes
    the GIL. Whoever does not know the token gets no further."""

    def __init__(self, listener: int, token: bytes, patience: float) -> None:
        """``listener``: a listening socket, of which it has a duplicate. ``patience``: seconds for the
        message."""

    @property
    def ready_fd(self) -> int:
        """Becomes readable when there are connections to take, and when it is stopped."""

    def take(self) -> list[int]:
        """Return the descriptors of admitted connections; they are the caller's."""

    def counts(self) -> tuple[int, int]:
        """Return how many have not proved themselves, and how many were dropped for lack of room."""

    def reasons(self) -> list[str]:
        """Return what was wrong with the latest strangers, since the last call."""

    def stop(self) -> None:
        """Accept nobody any more, and drop whoever is not taken."""

class HostPump:
    """The native thread that joins this host's rings to those of others. It never takes the GIL. All but
    ``events`` and ``stop`` return when it has done what was asked; ``OSError`` says what kept it from that:
    ``ESHUTDOWN`` after ``stop``, ``EPERM`` in a forked child.
    """

    def __init__(
        self, board: Board, host: int, window: float = 1.0, spin_us: float = 100.0
    ) -> None:
        """``host``: this one's number. ``window``: seconds without a connection after which a host's
        processes are dead."""

    @property
    def eventfd(self) -> int:
        """Of the bells of all proxies: every process of this host that writes to one has to have it."""

    @property
    def notice_fd(self) -> int:
        """Becomes readable when there are ``events``; stays the pump's."""

    def add_proxy(self, slot: int, incarnation: int, host: int, name: str, arena: Arena) -> None:
        """Have a slot of the board stand for a process of ``host``, which has the same there. What it sends
        comes to lie in ``arena``, which is made for that slot."""

    def remove_proxy(self, slot: int) -> None:
        """Its process is no more."""

    def mirror(
        self,
        number: int,
        segment: Segment,
        rings: Sequence[MirroredRing],
        limits: Sequence[MirroredLimits] = (),
    ) -> None:
        """Join a segment to those of this number on the other hosts, which have the same rings and limits
        in the same order. A number is used once."""

    def unmirror(self, number: int) -> None:
        """This host has it no more."""

    def connect(self, fd: int, host: int) -> None:
        """A stream socket to ``host``, duplicated, which has been let in (``cluster.handshake``). It takes
        the place of the former one, and nothing is lost or comes twice."""

    def disconnect(self, host: int, reason: str) -> None:
        """End the connection, as if it had broken."""

    def give_up(self, host: int, reason: str) -> None:
        """Its processes are dead."""

    def connected(self, host: int) -> bool:
        """Whether its pump has greeted this one over the present connection."""

    def overslept(self, within: float) -> float:
        """Seconds for which this process has not run, though its pump was to look: now, or the last time within
        so many seconds."""

    def left(self) -> list[tuple[bytes, int, int]]:
        """What frames have claimed for processes that had left before they came: their headers, slots and
        incarnations. To be asked behind ``events``: what comes later makes ``notice_fd`` readable again."""

    def events(self) -> list[tuple[int, int, str]]:
        """What has happened since: ``HOST_CONNECTED``, ``HOST_DISCONNECTED`` (connect again) or
        ``HOST_LOST``, to which host, and why."""

    def counts(self, host: int) -> tuple[int, int, int, int, int]:
        """Frames sent and received, bytes sent and received, connections."""

    def due(self) -> list[tuple[int, int, int, int]]:
        """Which frames other hosts are to have of all that was published here until now, sent or not: (host,
        number of the segment, ring, frames)."""

    def has(self, host: int, frames: tuple[tuple[int, int, int], ...]) -> bool:
        """Whether all of these frames of ``host`` are in their rings here: (number of the segment, ring,
        frames). Of a ring that is not here, or no more, none is waited for."""

    def tell_when_come(
        self, host: int, frames: tuple[tuple[int, int, int], ...], number: int
    ) -> None:
        """Have ``number`` be among ``come``, once, when ``has`` is true of these, or nothing of that host
        comes here any more."""

    def come(self) -> list[int]:
        """Numbers of ``tell_when_come``. To be asked behind ``events``, as ``left`` is."""

    def ask_clock(self, host: int, times: int, timeout: float) -> list[tuple[int, int, int]]:
        """Ask that host's clock so often, one question after the other, over the connection: when each was
        asked and answered, by this host's ``CLOCK_MONOTONIC``, and, in the middle, what the other one said.
        They are fewer if ``timeout`` seconds have passed before."""

    def stop(self) -> None:
        """Say goodbye to the other hosts, and end. Proxies are dead then."""
