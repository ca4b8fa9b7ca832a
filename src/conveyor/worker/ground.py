"""State that every part of an actor's process shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from conveyor.runtime.process import Process
from conveyor.worker.calls.instance import Instance
from conveyor.worker.orders import Hello

if TYPE_CHECKING:
    from conveyor.worker.calls.coroutines import Coroutines


class Ground:
    """The shared state of an actor's process. It knows none of the process's parts."""

    def __init__(self, hello: Hello, process: Process, instance: Instance | None = None) -> None:
        """``instance``: of an attached actor, whose object exists already."""
        self.hello = hello
        self.process = process
        #: The function to call for each bit of the doorbell.
        self.handlers: dict[int, Callable[[], None]] = {}
        self.instance = instance or Instance(hello.name)
        #: Where coroutines run, if the actor has async methods.
        self.coroutines: Coroutines | None = None
