"""The actor's side: a thread of a process that is Ray's becomes the loop of an actor of the session.

Ray's own calls go on beside it. When the session ends, or lets go of the actor, the thread takes out of the
process what the session has brought, and Ray's actor is as it was.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from conveyor import descriptors
from conveyor.engine.ray import shell
from conveyor.engine.ray.connected import Connected
from conveyor.engine.ray.greeting import (
    MESSAGE_BYTES,
    Birth,
    Elsewhere,
    Farewell,
    read_file,
    write,
)
from conveyor.engine.ray.guests.turns import Turn
from conveyor.exceptions import ActorStartError
from conveyor.local_sockets import owner
from conveyor.runtime import context, threads
from conveyor.runtime.actor import forked
from conveyor.runtime.actor.calls.instance import Instance
from conveyor.runtime.actor.leaving import end_waits, everybody_is_gone, leave
from conveyor.runtime.actor.orders import Hello
from conveyor.runtime.actor.worker import Worker
from conveyor.runtime.calls.call import Call
from conveyor.runtime.messages.message import check_greeting
from conveyor.runtime.process import close_all

_lock = threading.Lock()
#: This process takes part in a session, of the driver with that pid.
_host: int | None = None


class _Instance(Instance):
    """Of an actor that Ray has made."""

    def __init__(self, name: str, made: Any, turn: Turn | None) -> None:
        super().__init__(name)
        self._made = made
        self._turn = turn
        self._worker: GuestWorker | None = None

    def belongs_to(self, worker: GuestWorker) -> None:
        self._worker = worker

    def start(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.started = True
        self._object = self._made

    def end(self, run: Callable[[Coroutine[Any, Any, Any]], object]) -> None:
        self._generators.close_all()
        self._object = self._made = None  # it goes on, and has no end of ours

    def find(self, call: Call) -> tuple[Callable[..., Any], bool]:
        function, is_async = super().find(call)
        return self._in_turn(function), is_async

    def method(self, name: str) -> tuple[Callable[..., Any], bool]:
        function, is_async = super().method(name)
        return self._in_turn(function), is_async

    def _in_turn(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._turn is None or self._worker is None:
            return function
        process = self._worker.process
        return self._turn.taking(function, process.board, process.inbox)


class GuestWorker(Worker):
    """What one of them does in the session. It ends without its process."""

    def serve(self) -> tuple[int, bool]:
        """Until it is to leave; with which exit code, and whether a method has left by ``sys.exit``."""
        board, slot = self.process.board, self.process.slot
        board.guard_signals(slot)
        board.live(slot)
        code, left = 0, False
        try:
            self._serve()
        except SystemExit as error:
            code = forked.exit_code(error)
            if self.process.inbox.inherited:
                forked.leave(error)
            board.leave(slot)
            left = True
        except BaseException:
            code = 1
            sys.excepthook(*sys.exc_info())
        finally:
            self._leave()
        return code, left

    def withdraw(self) -> None:
        """Leave the session, of which it has not done anything yet. By the thread that would have served."""
        self.process.board.live(self.process.slot)
        self._leave()

    def _leave(self) -> None:
        self.handlers.clear()
        self.instance.end(lambda _: None)
        leave(self.runtime, self.control)

    def depart(self) -> None:
        """Leave the session when what runs is done. On any thread."""
        self.end()
        self.process.ring()


def join(made: Any, birth: Birth, in_turn: bool) -> bool | Elsewhere:
    """Take part in the session of that birth; ``made`` is the actor's instance. Whether Ray's own calls take
    turns with its methods, as far as there is need. If it is on another host, say so instead. Ray runs this
    beside the actor's calls.

    Raises:
        ActorStartError: it cannot take part.
    """
    global _host
    with _lock:
        if _host is not None:
            raise ActorStartError(
                f"its process (pid {os.getpid()}) takes part in a session of process {_host}, which it has "
                "not left: it can be in one at a time, and leaves one when the method that it runs for it "
                "has returned"
            )
        if context.running() is not None:
            raise ActorStartError(
                f"its process (pid {os.getpid()}) has started a session of its own (conveyor.init())"
            )
        _host = 0
    connection: socket.socket | None = None
    fds: list[int] = []
    turn: Turn | None = None
    try:
        turn = Turn() if in_turn and _runs_one_at_a_time() else None
        connection = shell.meet_at(birth)
        if connection is None:
            _host = None
            return shell.where()
        _host, _ = owner(connection)
        fds = shell.welcomed(connection)
        takes_turns = turn is None or turn.begin()
        threads.start(_take_part, "guest", made, turn, connection, fds)
    except BaseException:
        if turn is not None:
            turn.end()
        if connection is not None:
            if fds:  # it has come, and goes
                _say_farewell(connection, 1)
            connection.close()
        close_all(fds)
        _host = None
        raise
    return takes_turns


def _take_part(made: Any, turn: Turn | None, connection: socket.socket, fds: list[int]) -> None:
    global _host
    told, driver, *handed = fds
    code, left = 1, False
    try:
        code, left = _be_guest(made, turn, connection, driver, told, handed)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        del made
        if turn is not None:
            turn.end()
        gc.collect()  # what of the session refers to itself has memory, and descriptors
        os.close(told)
        os.close(driver)
        with connection:  # another driver, or this one, is let in only behind it
            _say_farewell(connection, code)
        _host = None
        if left:
            _end_as_on_ray()


def _say_farewell(connection: socket.socket, code: int) -> None:
    with suppress(OSError):  # a driver that is gone needs none
        connection.sendmsg([write(Farewell(code))], [], socket.MSG_NOSIGNAL)


def _be_guest(
    made: Any,
    turn: Turn | None,
    connection: socket.socket,
    driver: int,
    told: int,
    handed: list[int],
) -> tuple[int, bool]:
    try:
        import ray

        cluster = Connected(ray)
        hello: Hello = pickle.loads(check_greeting(read_file(told).payload))
        instance = _Instance(hello.name, made, turn)
    except BaseException:
        close_all(handed)  # else the worker does
        raise
    worker = GuestWorker(hello, handed, instance)
    instance.belongs_to(worker)
    worker.runtime.end_at_once = worker.depart
    over = -1
    try:
        try:
            over = descriptors.own(os.eventfd(0, os.EFD_CLOEXEC))
            watch = threads.start(_watch, "with-driver", worker, connection, driver, over)
        except BaseException:
            worker.withdraw()
            raise
        try:
            context.install(worker.runtime)
            context.place_on(cluster)
            return worker.serve()
        finally:
            os.eventfd_write(over, 1)
            watch.join()
    finally:
        if over >= 0:
            os.close(over)


def _watch(worker: GuestWorker, connection: socket.socket, driver: int, over: int) -> None:
    """Have it leave when the driver says so, when the session has ended, and when the driver is gone. Each of
    them may come behind another, while it runs a method still."""
    poll = select.poll()
    for fd in (connection.fileno(), driver, over):
        poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if over in ready:
            return
        worker.depart()
        if driver in ready:
            everybody_is_gone(worker.runtime)
            return
        said = b""
        with suppress(OSError):
            said = connection.recv(MESSAGE_BYTES)
        if not said:  # the session is over, and nobody comes to whoever waits for something of it
            poll.unregister(connection.fileno())
            end_waits(worker.runtime)


def _runs_one_at_a_time() -> bool:
    """Whether Ray runs the calls of this process's actor one after the other."""
    import ray

    core = ray._private.worker.global_worker.core_worker
    return not core.current_actor_is_asyncio() and core.current_actor_max_concurrency() == 1


def _end_as_on_ray() -> None:
    """A method has left by ``sys.exit``, which ends an actor of Ray's as well, in good order."""
    import ray

    ray.get_runtime_context().current_actor.__ray_terminate__.remote()
