"""Attached actors: actors of the user's own Ray program that take part in a session.

In the actor's process, which runs methods for Ray, a thread becomes the loop of an actor of the session.
Ray's own calls go on beside it. On the driver's side the process is one of the session like any other, except
that the session never ends it. When the session ends, or lets go of the actor, the thread takes out of the
process what the session has brought, and Ray's actor is as it was. An attached actor on another node is let
in by the agent of that node, as other actors there are.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from conveyor import descriptors
from conveyor.driver.process_engine import DriverCallbacks, PrepareRemote, Spawned, Spawning
from conveyor.engines.ray import ray_actor
from conveyor.engines.ray.bootstrap import (
    MESSAGE_BYTES,
    Bootstrap,
    BootstrapFile,
    Farewell,
    Locality,
    NodeOfProcess,
    made_for,
    read_file,
    write,
)
from conveyor.engines.ray.process_engine import ENDED, RayProcessEngine, Started
from conveyor.engines.ray.processes import AttachedProcesses
from conveyor.engines.surroundings import surroundings
from conveyor.exceptions import ActorStartError
from conveyor.local_sockets import owner
from conveyor.runtime import context, ending, threads
from conveyor.runtime.context import Cluster
from conveyor.runtime.messages import after_version
from conveyor.runtime.process import close_all
from conveyor.runtime.protocol import Attached, ProcessOptions
from conveyor.runtime.uninterrupted import try_each, uninterrupted
from conveyor.worker import forked
from conveyor.worker.actor_runtime import ActorRuntime
from conveyor.worker.control import Control
from conveyor.worker.instance import Instance
from conveyor.worker.messages import WorkerBootstrap
from conveyor.worker.worker import Worker


def end_waits(runtime: ActorRuntime) -> None:
    """End all waits for things of the session here with the error that the session is over."""
    process = runtime.process
    process.ended = True  # before anybody looks again
    error = ending.error()
    for graph_info in list(runtime.graphs):
        graph_info.lifecycle.close(error)
    runtime.end_links()


def leave(runtime: ActorRuntime, control: Control) -> None:
    """Take all steps out of the session. Called by the thread that has taken the liveness futex, whose loop
    is over.

    References and values that are held stay; nothing new can come or go.
    """
    process = runtime.process
    process.loop_over = True  # who waits for a call of the actor itself looks again
    end_waits(runtime)
    try_each(
        control.close,
        control.hang_up,
        runtime.pump.close,
        process.sweeper.close,
        process.releasing.close,
        runtime.exports.close,
        lambda: process.remote_memory.close() if process.remote_memory is not None else None,
        runtime.watcher.close,
        runtime.requests.close,
    )
    if context.running() is runtime:
        context.install(None)
    try_each(lambda: process.process_table.retire(process.slot), process.close)


def everybody_is_gone(runtime: ActorRuntime) -> None:
    """Announce the death of all other processes: the driver has died, and its actors die with it."""
    process_table, own = runtime.process.process_table, runtime.process.slot
    for slot in range(process_table.used):
        if slot != own and process_table.condition(slot) in (1, 2, 3):
            process_table.announce_death(slot)
    end_waits(runtime)


_log = logging.getLogger("conveyor")

#: Concurrency group of Ray's own calls, which wait for no call of the program's.
SYSTEM_CALLS = "_ray_system"


# The driver's side.


class _AttachedActor(Started, eq=False, kw_only=True):
    """Attached actor, from the request until it has left."""

    attached: Attached


class RayProcessEngineWithAttached(RayProcessEngine):
    """Engine on Ray that also lets attached actors in."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._attached_processes = AttachedProcesses(self._events)

    def start(self, on_exit: Callable[[int, int], None], callbacks: DriverCallbacks) -> None:
        super().start(on_exit, callbacks)
        self._attached_processes.process_listener.start()

    def spawn(
        self,
        name: str,
        payload: bytes,
        fds: Sequence[int],
        options: ProcessOptions,
        on_spawned: Callable[[int], object],
        prepare_remote: PrepareRemote,
    ) -> Spawned | Spawning:
        if options.attached is None:
            return super().spawn(name, payload, fds, options, on_spawned, prepare_remote)
        self._check_connected(name)
        attached_actor = _AttachedActor(
            number=next(self._numbers),
            name=name,
            requested={},
            on_spawned=on_spawned,
            attached=options.attached,
        )
        boot_file = BootstrapFile(name, surroundings(), payload)
        try:
            # Ray may not have placed the actor, or its process may be busy. The session's end ends the wait.
            with self._starts.under_way(
                attached_actor.number, partial(self._end_attaching, attached_actor)
            ):
                uninterrupted(partial(self._invite, attached_actor, boot_file, fds))
                attached_actor.done.wait()
                if attached_actor.is_remote is not None and not attached_actor.error:
                    attached_actor.done.clear()
                    uninterrupted(
                        partial(self._invite_remote, attached_actor, boot_file, prepare_remote)
                    )
                    attached_actor.done.wait()
            if attached_actor.error:
                raise ActorStartError(f"cannot attach Ray's actor {name!r}: {attached_actor.error}")
        except BaseException:
            self._events.call(partial(self._abandon, attached_actor))
            raise
        node = attached_actor.node
        return Spawned(
            attached_actor.key,
            str,
            lambda: None,
            lambda: None,
            lambda: False,
            "" if node is None else node.name,
            lambda: (
                None
                if attached_actor.ended is None
                else (attached_actor.ended.snapshot, attached_actor.ended.left)
            ),
            lambda: "" if node is None or attached_actor.ended is not None else node.lost,
            attached=True,
        )

    def _invite(
        self, attached_actor: _AttachedActor, boot_file: BootstrapFile, fds: Sequence[int]
    ) -> None:
        with self._starts.asking(f"attach Ray's actor {attached_actor.name!r}"):
            attached_actor.fds += made_for(boot_file, fds)
            listener = self._attached_processes.process_listener
            key = listener.expect(
                attached_actor.number,
                partial(self._comes, attached_actor),
                partial(self._refused, attached_actor),
            )
            waits = Locality.own()
            self._call_in(
                attached_actor,
                Bootstrap(
                    listener.address, attached_actor.number, key, {}, waits, node=self._own_node
                ),
            )

    def _invite_remote(
        self,
        attached_actor: _AttachedActor,
        boot_file: BootstrapFile,
        prepare_remote: PrepareRemote,
    ) -> None:
        """Have the agent of the actor's node let it in."""
        assert attached_actor.is_remote is not None
        with self._starts.asking(f"attach Ray's actor {attached_actor.name!r}"):
            node = self._agents.at(attached_actor.is_remote)
            identity, payload, segments = prepare_remote(node)
            attached_actor.node, attached_actor.identity = node, identity
            self._remote_nodes[attached_actor.number] = attached_actor
            boot_file = BootstrapFile(boot_file.name, boot_file.around, payload)
            key = node.expect(attached_actor.number, identity[0], boot_file, segments, visits=True)
            self._call_in(
                attached_actor,
                Bootstrap(
                    node.attached_listener, attached_actor.number, key, {}, node.locality, stay=True
                ),
            )

    def _call_in(self, attached_actor: _AttachedActor, bootstrap: Bootstrap) -> None:
        """Have Ray call :func:`join` in the actor's process, with the bootstrap."""
        call = attached_actor.attached.handle.__ray_call__.options(concurrency_group=SYSTEM_CALLS)
        joined = call.remote(join, bootstrap)

        def tell(future: Any) -> None:
            error = None if future.cancelled() else future.exception()
            said = future.result() if error is None and not future.cancelled() else None
            self._events.call(partial(self._has_joined, attached_actor, error, said))

        joined.future().add_done_callback(tell)

    # On the event loop's thread.

    def _comes(self, attached_actor: _AttachedActor, pid: int, _stderr: str) -> Sequence[int]:
        if attached_actor.abandoned:
            raise OSError("nobody wants it any more")
        self._attached_processes.add(attached_actor, pid)
        attached_actor.on_end = partial(self._report, attached_actor)
        self._living[pid] = attached_actor
        self._events.call(partial(self._sent, attached_actor))
        return attached_actor.fds

    def _refused(self, attached_actor: _AttachedActor, why: str) -> None:
        """Undo what :meth:`_comes` has done, where what the actor needs could not be sent, and refuse it."""
        if attached_actor.pid:
            self._living.pop(attached_actor.pid, None)
            self._attached_processes.forget(attached_actor)
            attached_actor.pid = 0
        attached_actor.refuse(why)

    def _has_joined(
        self,
        attached_actor: _AttachedActor,
        error: BaseException | None,
        said: NodeOfProcess | None,
    ) -> None:
        """Act on the end of the call that was to bring the actor here: its error, or where the actor is."""
        if attached_actor.pid and isinstance(error, self._ray.exceptions.RayTaskError):
            # It came, and failed to start afterwards. Its farewell does not say why, but Ray's error does.
            _log.warning("actor %s of Ray cannot take part: %s", attached_actor.name, _why(error))
        if (
            attached_actor.pid
            or attached_actor.error
            or (error is None and attached_actor.node is not None)
        ):
            return  # on another node: its agent tells the rest
        self._attached_processes.process_listener.forget(attached_actor.number)
        attached_actor.close_fds()
        if isinstance(said, NodeOfProcess):
            attached_actor.is_remote = said
            attached_actor.done.set()
        elif attached_actor.node is None:
            attached_actor.refuse(_why(error))
        else:  # news of its arrival may be on their way from the agent still
            attached_actor.node.disown(attached_actor.number).add_done_callback(
                lambda requested: self._events.call(
                    partial(self._not_come, attached_actor, error, requested)
                )
            )

    def _not_come(
        self, attached_actor: _AttachedActor, error: BaseException | None, requested: Future[bool]
    ) -> None:
        if requested.exception() is not None or requested.result():
            self._remote_nodes.pop(attached_actor.number, None)
            attached_actor.refuse(_why(error))

    def _end_attaching(self, attached_actor: _AttachedActor) -> None:
        """End the start, because the session is over."""
        attached_actor.refuse(ENDED)
        self._abandon(attached_actor)

    def _abandon(self, attached_actor: _AttachedActor) -> None:
        """Give the actor up, since its start was broken off."""
        attached_actor.abandoned = True
        self._attached_processes.process_listener.forget(attached_actor.number)
        attached_actor.close_fds()
        if attached_actor.node is not None and not attached_actor.pid:
            self._remote_nodes.pop(attached_actor.number, None)
            attached_actor.node.disown(attached_actor.number)
            attached_actor.node.kill(
                *attached_actor.identity
            )  # for the case that it had come already
        elif attached_actor.pid:
            self._kill(attached_actor)

    # On any thread.

    def _kill(self, actor: Started) -> None:
        if isinstance(actor, _AttachedActor) and actor.node is None:
            self._attached_processes.tell_to_leave(actor.pid)
        else:
            super()._kill(actor)  # an agent knows which processes are attached actors

    def end_headless(self, pid: int) -> None:
        if not isinstance(self._living.get(pid), _AttachedActor):
            super().end_headless(pid)

    def close(self) -> None:
        self._events.call(self._see_off)
        super().close()

    def _see_off(self) -> None:
        """Let all attached actors leave by themselves: the session is over, and nobody waits for them."""
        self._attached_processes.see_off()
        for key, actor in list(self._living.items()):
            if isinstance(actor, _AttachedActor):
                del self._living[key]


def _why(error: BaseException | None) -> str:
    """Return the reason why the actor does not take part, from the error of its call."""
    cause = getattr(error, "cause", None)
    return str(cause if isinstance(cause, ActorStartError) else error)


# The actor's side.

_lock = threading.Lock()
#: Pid of the driver in whose session this process takes part; 0 while it joins one.
_driver_pid: int | None = None


class _Instance(Instance):
    """Instance of an actor that Ray has made."""

    def __init__(self, name: str, made: Any) -> None:
        super().__init__(name)
        self._made = made

    def start(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.started = True
        self._object = self._made

    def end(self, run: Callable[[Coroutine[Any, Any, Any]], object]) -> None:
        self._generators.close_all()
        self._object = self._made = None  # the object lives on, so no end method runs


class AttachedWorker(Worker):
    """Loop of an attached actor. It ends without its process."""

    def serve(self) -> tuple[int, bool]:
        """Serve until told to leave. Return the exit code, and whether a method has left by ``sys.exit``."""
        process_table, slot = self.process.process_table, self.process.slot
        process_table.guard_signals(slot)
        process_table.live(slot)
        code, left = 0, False
        try:
            self._serve()
        except SystemExit as error:
            code = forked.exit_code(error)
            if self.process.inbox.inherited:
                forked.leave(error)
            process_table.mark_exiting(slot)
            left = True
        except BaseException:
            code = 1
            sys.excepthook(*sys.exc_info())
        finally:
            self._leave()
        return code, left

    def withdraw(self) -> None:
        """Leave the session before anything was done in it. Called on the thread that would have served."""
        self.process.process_table.live(self.process.slot)
        self._leave()

    def _leave(self) -> None:
        self.handlers.clear()
        self.instance.end(lambda _: None)
        leave(self.runtime, self.control)

    def depart(self) -> None:
        """Leave the session when the method that runs has returned. On any thread."""
        self.end()
        self.process.notify()


def join(made: Any, bootstrap: Bootstrap) -> NodeOfProcess | None:
    """Take part in the session of that bootstrap. Ray runs this beside the actor's calls. ``made``: the
    actor's object. Return where the process is, if that is another node than the one where it is expected.

    Raises:
        ActorStartError: the actor cannot take part.
    """
    global _driver_pid
    with _lock:
        if _driver_pid is not None:
            raise ActorStartError(
                f"its process (pid {os.getpid()}) takes part in a session of process {_driver_pid}, which it "
                "has not left: it can be in one at a time, and leaves one when the method that it runs for "
                "it has returned"
            )
        if context.running() is not None:
            raise ActorStartError(
                f"its process (pid {os.getpid()}) has started a session of its own (conveyor.init())"
            )
        _driver_pid = 0
    connection: socket.socket | None = None
    fds: list[int] = []
    try:
        connection = ray_actor.meet_at(bootstrap)
        if connection is None:
            _driver_pid = None
            return ray_actor.where()
        _driver_pid, _ = owner(connection)
        fds = ray_actor.welcomed(connection)
        threads.start(_take_part, "attached-actor", made, connection, fds)
    except BaseException:
        if connection is not None:
            if fds:  # it was let in, so its leaving has to be told
                _say_farewell(connection, 1)
            connection.close()
        close_all(fds)
        _driver_pid = None
        raise
    return None


def _take_part(made: Any, connection: socket.socket, fds: list[int]) -> None:
    global _driver_pid
    boot_fd, driver, *handed = fds
    code, left = 1, False
    try:
        code, left = _be_attached(made, connection, driver, boot_fd, handed)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        del made
        gc.collect()  # cycles of the session's objects hold memory and descriptors
        os.close(boot_fd)
        os.close(driver)
        with connection:  # closed before this process may join another session
            _say_farewell(connection, code)
        _driver_pid = None
        if left:
            _end_as_on_ray()


def _say_farewell(connection: socket.socket, code: int) -> None:
    with suppress(OSError):  # the driver may be gone
        connection.sendmsg([write(Farewell(code))], [], socket.MSG_NOSIGNAL)


def _be_attached(
    made: Any,
    connection: socket.socket,
    driver: int,
    boot_fd: int,
    handed: list[int],
) -> tuple[int, bool]:
    try:
        import ray

        cluster = Cluster(ray)
        bootstrap: WorkerBootstrap = pickle.loads(after_version(read_file(boot_fd).payload))
        instance = _Instance(bootstrap.name, made)
    except BaseException:
        close_all(handed)  # later the worker closes them
        raise
    worker = AttachedWorker(bootstrap, handed, instance)
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


def _watch(worker: AttachedWorker, connection: socket.socket, driver: int, over: int) -> None:
    """Have the worker leave if the driver says so, the session has ended, or the driver is gone. Several of
    these may come, one after the other, while a method still runs."""
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
        if not said:  # the session is over: nothing comes for waits in it
            poll.unregister(connection.fileno())
            end_waits(worker.runtime)


def _end_as_on_ray() -> None:
    """Have Ray end the actor in good order: a method has left by ``sys.exit``, which does so on Ray, too."""
    import ray

    ray.get_runtime_context().current_actor.__ray_terminate__.remote()
