"""Settings of a graph, as one frozen object."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from conveyor.checks import MOST_BYTES, MOST_SECONDS, check_name
from conveyor.exceptions import GraphError
from conveyor.later import import_later
from conveyor.typevars import Unpack


class ConfigOptions(TypedDict, total=False):
    """Settings of :class:`Config` by name, as ``compile`` takes them."""

    depth: int
    stream_items: int
    function_workers: int | None
    slot_bytes: int
    memory_bytes: int | None
    spin_us: float | None
    name: str
    deadline: float | None
    submit_timeout: float | None
    get_timeout: float | None
    fail_fast: bool
    cancel_with_await: bool
    default_communicator: Any
    ignore_unused: bool
    overlap: bool
    debug: bool


@dataclass(frozen=True, slots=True)
class Config:
    """How a graph is compiled.

    depth: executions that may be on their way at once, at least 1. ``execute`` waits for room
        beyond that.
    stream_items: items of a generator method that may be on their way to the driver; the method waits
        for more to be taken.
    function_workers: processes that the graph may start for functions that were bound to no actor;
        ``None``: as many as there are cores.
    slot_bytes: what one slot of a ring holds in place; larger payloads go to the arena.
    memory_bytes: what values of this graph may take of each process's arena at the same time, those on
        their way and those that somebody still holds; ``None``: only the session's cap holds. Beyond
        it sending raises ``ArenaFullError``, in this graph only.
    spin_us: microseconds that the graph's processes spin at most before a wait sleeps, as long as it
        is there; 0 uses no core while waiting and costs the time that a wake-up takes. Where a process
        has several limits (of other graphs, ``CONVEYOR_SPIN_US``) the least holds. ``None``: no limit
        of its own.
    name: the graph's name in messages.
    deadline: seconds within which every execution must have run that is not given a deadline of its
        own; ``None``: no limit.
    submit_timeout, get_timeout: seconds that ``execute`` and ``get`` wait where they are given no
        ``timeout``; ``None``: no limit. ``timeout=-1`` is no limit in any case.
    fail_fast: an execution fails as one: as soon as one of its tasks raises, all of its results that
        were not got yet come to that error, and tasks that have not begun are skipped; a result is there
        when the others are. ``False``: each result comes to what it depends on, and every task runs whose
        inputs are there.
    cancel_with_await: an execution is cancelled when the last task that awaits one of its results is
        (``asyncio.wait_for``, a client that disconnects). ``False``: it goes on.
    overlap: tensors that travel beside the frames (``docs/guide/transports.md``) are received as early as the
        order in which tasks were bound allows, and waited for as late as they are needed, so that they come
        while their actor computes. It changes nothing for values that travel in the frames, which are read in
        place. ``explain()`` says what it has done.
    debug: note where the driver gets results, so that ``ArenaFullError`` can say where those were got
        that fill an arena. Costs a microsecond for each ``get``. ``CONVEYOR_DEBUG=1`` in the environment
        turns it on for all graphs.
    default_communicator: what ``with_tensor_transport("accelerator")`` (also ``"nccl"``) means where it
        names no communicator: ``"create"`` is the transport ``"nccl"``, ``None`` refuses such a node,
        and a ``conveyor.experimental.channel.Communicator`` is used.
    ignore_unused: compile also where tasks are bound to the graph's nodes that it does not run,
        because they belong to another graph.
    """

    depth: int = 16
    stream_items: int = 64
    function_workers: int | None = None
    slot_bytes: int = 2048
    memory_bytes: int | None = None
    spin_us: float | None = None
    name: str = ""
    deadline: float | None = None
    submit_timeout: float | None = None
    get_timeout: float | None = None
    fail_fast: bool = True
    cancel_with_await: bool = True
    default_communicator: Any = "create"
    ignore_unused: bool = False
    overlap: bool = False
    debug: bool = field(default_factory=lambda: os.environ.get("CONVEYOR_DEBUG") == "1")

    def __post_init__(self) -> None:
        if type(self.depth) is not int or not 1 <= self.depth <= 4096:
            raise GraphError(f"depth must be an integer from 1 to 4096, not {self.depth!r}")
        if type(self.stream_items) is not int or not 1 <= self.stream_items <= 4096:
            raise GraphError(
                f"stream_items must be an integer from 1 to 4096, not {self.stream_items!r}"
            )
        workers = self.function_workers
        if workers is not None and (type(workers) is not int or workers < 1):
            raise GraphError(f"function_workers must be a positive integer, not {workers!r}")
        if type(self.slot_bytes) is not int or not 256 <= self.slot_bytes <= 1 << 20:
            raise GraphError(
                f"slot_bytes must be an integer from 256 to 1048576, not {self.slot_bytes!r}"
            )
        memory = self.memory_bytes
        if memory is not None and (type(memory) is not int or not 1 <= memory <= MOST_BYTES):
            raise GraphError(
                f"memory_bytes must be an integer from 1 to 2**50 or None, not {memory!r}"
            )
        spin = self.spin_us
        if spin is not None and (type(spin) not in (int, float) or not 0 <= spin < 1e6):
            raise GraphError(f"spin_us must be a number from 0 to a million or None, not {spin!r}")
        communicator = self.default_communicator
        named = communicator is None or communicator == "create"
        # The module is of a higher layer, and is imported when it is needed.
        if not named and not import_later("conveyor.transport.communicator").is_one(communicator):
            raise GraphError(
                f"default_communicator must be 'create', None or a "
                f"conveyor.experimental.channel.Communicator, not {communicator!r}"
            )
        for name in ("fail_fast", "cancel_with_await", "ignore_unused", "overlap", "debug"):
            if type(getattr(self, name)) is not bool:
                raise GraphError(f"{name} must be True or False, not {getattr(self, name)!r}")
        try:
            check_name(self.name, "name")
        except (TypeError, ValueError) as error:
            raise GraphError(str(error)) from None
        for name in ("deadline", "submit_timeout", "get_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and (
                type(seconds) not in (int, float) or not 0 < seconds <= MOST_SECONDS
            ):
                raise GraphError(
                    f"{name} must be a number above 0 (at most {MOST_SECONDS:g}) or None, not {seconds!r}"
                )

    def with_options(self, **options: Unpack[ConfigOptions]) -> Config:
        """A copy with ``options`` changed; ``TypeError`` for a name that is no setting."""
        known = {f.name for f in fields(self)}
        for name in options:
            if name not in known:
                raise TypeError(f"unknown setting {name!r}; known are {', '.join(sorted(known))}")
        return replace(self, **options)
