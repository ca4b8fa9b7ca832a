"""Engine whose actors are processes that Ray starts."""

from __future__ import annotations

import itertools
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from msgspec import field

from conveyor.cluster.addresses import Listening
from conveyor.cluster.tls import Credentials
from conveyor.codec import Reader
from conveyor.driver.process_engine import DriverCallbacks, PrepareRemote, Spawned, Spawning
from conveyor.engines.ray.agent import Arrived, Come, Ended, LostNode, News, ProcessRequest, Reached
from conveyor.engines.ray.agents import AgentNode, Agents
from conveyor.engines.ray.bootstrap import (
    Bootstrap,
    BootstrapFile,
    Locality,
    NodeOfProcess,
    made_for,
)
from conveyor.engines.ray.processes import Processes, Resident, tail
from conveyor.engines.ray.ray_actor import RayActor
from conveyor.engines.surroundings import surroundings
from conveyor.exceptions import ActorStartError, RuntimeStateError, SystemLimitError
from conveyor.flag import Flag
from conveyor.runtime import threads
from conveyor.runtime.context import Cluster
from conveyor.runtime.events import EventLoop, guarded
from conveyor.runtime.protocol import ProcessOptions
from conveyor.runtime.uninterrupted import uninterrupted

_log = logging.getLogger("conveyor")

#: Error text of a start that the session's end has ended.
ENDED = "the session has ended"
#: Timeout of a call to Ray that asks for a process, or ends one, in seconds.
_TIMEOUT = 10.0


class Starts:
    """The starts of one session's actors."""

    def __init__(self) -> None:
        # Entered as a lock: entering a condition runs Python code, so a signal handler that raises there may
        # leave the lock held. Then no thread could start an actor any more, nor end the session.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._under_way: dict[int, Callable[[], object]] = {}
        self._asking = 0
        self._closed = False

    def begin(self, number: int, end: Callable[[], object]) -> None:
        """Note that the start of that number waits for Ray. ``end()`` ends the wait."""
        with self._lock:
            self._under_way[number] = end

    def over(self, number: int) -> None:
        """Note that the start of that number does not wait any more."""
        with self._lock:
            self._under_way.pop(number, None)

    @contextmanager
    def waiting(self, number: int) -> Iterator[None]:
        """Context at whose end the wait of :meth:`begin` is over."""
        try:
            yield
        finally:
            self.over(number)

    @contextmanager
    def under_way(self, number: int, end: Callable[[], object]) -> Iterator[None]:
        """Context within which the start of that number waits for Ray. ``end()`` ends the wait."""
        self.begin(number, end)
        with self.waiting(number):
            yield

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Context within which Ray is asked for a process, or for what the process needs. ``ActorStartError``
        if the session has ended, so that it is too late to do ``what``."""
        with self._lock:
            if self._closed:
                raise ActorStartError(f"cannot {what}: {ENDED}")
            self._asking += 1
        try:
            yield
        finally:
            with self._lock:
                self._asking -= 1
                self._changed.notify_all()

    def close(self, events: EventLoop) -> None:
        """Let Ray be asked for nothing from now on, and end the starts that are under way, on the thread of
        ``events``. Wait for the calls that ask Ray now, since their processes have to be ended, too."""
        with self._lock:
            self._closed = True
            if not self._changed.wait_for(lambda: not self._asking, _TIMEOUT):
                _log.warning("Ray has not answered for %g s who asks it for a process", _TIMEOUT)
            ends = list(self._under_way.values())
        ended = Flag()
        for end in ends:
            events.call(end)
        events.call(ended.set)
        if not events.on_thread() and not events.closed and not ended.wait(_TIMEOUT):
            _log.warning("a call of Ray's has taken %g s, and holds up the session's end", _TIMEOUT)


class Started(Resident, eq=False, kw_only=True):
    """A process that Ray is asked for, from the request to its end.

    The thread that asks Ray sets ``fds``, ``handle``, ``ran``, ``node`` and ``identity``, and clears
    ``done``. The rest changes on the event loop's thread, apart from the fields that :class:`Resident`
    excepts.
    """

    number: int
    name: str
    requested: Mapping[str, Any]
    on_spawned: Callable[[int], object]
    error: str = ""
    abandoned: bool = False
    #: Set once there is a pid or an error, or the process is known to be on another node.
    done: Flag = field(default_factory=Flag)
    #: Ray's handle, and the ref of the call that lasts as long as the process.
    handle: Any = None
    ran: Any = None
    stderr: str = ""
    #: Whether Ray says that it has died before it came to the driver.
    died_early: bool = False
    #: Its node, if not the driver's; which process it is there, and how it has ended.
    is_remote: NodeOfProcess | None = None
    node: AgentNode | None = None
    identity: Reader = (0, 0)
    ended: Ended | None = None

    def refuse(self, why: str) -> None:
        """Give the process up: the start fails with ``why``, unless it is done already."""
        self.close_fds()
        if not self.done.is_set():
            self.error = why
            self.done.set()

    @property
    def key(self) -> int:
        """Number of the process in the session: its pid, with the node's number above it on another node."""
        return self.pid if self.node is None else self.node.number << 32 | self.pid

    def last_lines(self) -> str:
        """Return the last lines that the process has written to stderr."""
        if self.node is None:
            return tail(self.stderr)
        return "" if self.ended is None else self.ended.tail


def said(error: BaseException | None) -> str:
    """Return why a process has not come, by the outcome of the call that was to last as long as it."""
    if error is None:
        return "it has ended before it came to the driver"
    cause = getattr(error, "cause", None)
    return str(cause if isinstance(cause, ActorStartError) else error)


#: Seconds after which a warning says why an actor is not started yet.
_SAID_AFTER = 10.0
#: Limit of attempts to start an actor: Ray places actors on a dead node until it notices the death.
_MAX_TRIES = 3
#: Timeouts at the session's end, in seconds: for killed processes to end, and for agents to tell that.
_CLOSE_TIMEOUT, _REPORT_TIMEOUT = 10.0, 2.0


class RayProcessEngine:
    """The engine: starts and ends processes for the driver, by Ray."""

    places = True

    def __init__(
        self,
        ray: Any,
        environ: Mapping[str, str],
        disconnect: Callable[[], object],
        own_node: str,
        window: float,
        tls: Credentials | None,
        listening: Listening,
    ) -> None:
        """``ray``: the module, connected. ``environ``: variables of all actors. ``disconnect`` is called when
        all processes are gone. ``own_node``: the only node whose processes share memory with the driver; "":
        all processes of the driver's machine do. ``window``, ``tls``, ``listening``: see :class:`Agents`."""
        self._ray = ray
        self._environ = environ
        self._disconnect = disconnect
        self._own_node = own_node
        self._events = EventLoop()
        self._processes = Processes(self._events)
        self._process_listener = self._processes.process_listener
        self._connected = Cluster(ray)
        heard = self._on_news, self._on_loss
        self._agents = Agents(
            ray, self._events, window, *heard, tls, self._connected.check, listening
        )
        self._callbacks: DriverCallbacks | None = None
        self._starts = Starts()
        self._numbers = itertools.count(1)
        self._classes: dict[str, Any] = {}
        self._living: dict[int, Started] = {}
        #: Actors on other nodes, by the number under which they come there.
        self._remote_nodes: dict[int, Started] = {}
        self._ends = threading.RLock()
        self._all_gone = threading.Condition(self._ends)
        self._on_exit: Callable[[int, int], None] = lambda pid, status: None

    def start(self, on_exit: Callable[[int, int], None], callbacks: DriverCallbacks) -> None:
        self._on_exit, self._callbacks = on_exit, callbacks
        self._process_listener.start()
        self._agents.start(callbacks)

    def on_thread(self) -> bool:
        return self._events.on_thread()

    def spawn(
        self,
        name: str,
        payload: bytes,
        fds: Sequence[int],
        options: ProcessOptions,
        on_spawned: Callable[[int], object],
        prepare_remote: PrepareRemote,
    ) -> Spawned | Spawning:
        self._check_connected(name)
        requested = ray_options(options)
        environ = {k: v for k, v in self._environ.items() if k not in options.env_vars}
        boot_file = BootstrapFile(name, surroundings(), payload)
        return _Wish(
            self, name, requested, boot_file, tuple(fds), environ, on_spawned, prepare_remote
        )

    def _spawned(self, actor: Started) -> Spawned:
        node = actor.node
        return Spawned(
            actor.key,
            actor.last_lines,
            lambda: None,
            lambda: self.end_headless(actor.key),
            lambda: actor.went_on,
            "" if node is None else node.name,
            lambda: None if actor.ended is None else (actor.ended.snapshot, actor.ended.left),
            lambda: "" if node is None or actor.ended is not None else node.lost,
        )

    def _check_connected(self, name: str) -> None:
        try:
            self._connected.check()
        except RuntimeStateError as error:
            raise ActorStartError(f"cannot start actor {name!r}: {error}") from None

    def _ask(self, wish: _Wish, actor: Started) -> None:
        with self._starts.asking(f"start actor {actor.name!r}"):
            self._starts.begin(actor.number, partial(self._end_start, actor))
            actor.fds += made_for(wish.boot_file, wish.fds)
            key = self._process_listener.expect(
                actor.number, partial(self._arrived, actor), actor.refuse
            )
            waits = Locality.own()
            at = self._process_listener.address, actor.number, key, wish.environ, waits
            actor.handle = start_actor(self._class(actor.name), wish.requested, actor.name)
            self._run(actor, Bootstrap(*at, node=self._own_node))

    def _run(self, actor: Started, bootstrap: Bootstrap) -> None:
        actor.ran = actor.handle.run.remote(bootstrap)

        def tell(future: Any) -> None:
            error = None if future.cancelled() else future.exception()
            where = future.result() if error is None and not future.cancelled() else None
            self._events.call(partial(self._has_run, actor, error, where))

        actor.ran.future().add_done_callback(tell)

    def _ask_remote(self, wish: _Wish, actor: Started) -> None:
        """Have the agent of the actor's node wait for its process."""
        boot_file = wish.boot_file
        assert actor.is_remote is not None
        with self._starts.asking(f"start actor {actor.name!r}"):
            node = self._agents.at(actor.is_remote)
            identity, payload, segments = wish.prepare_remote(node)
            actor.node, actor.identity = node, identity
            self._remote_nodes[actor.number] = actor
            try:
                boot_file = BootstrapFile(boot_file.name, boot_file.around, payload)
                key = node.expect(actor.number, identity[0], boot_file, segments)
            except Exception as error:
                raise ActorStartError(f"cannot start actor {actor.name!r}: {error}") from error
            at = node.process_listener, actor.number, key, wish.environ, node.locality
            self._run(actor, Bootstrap(*at, stay=True))

    def _class(self, name: str) -> Any:
        """Return Ray's class for actors of that name, which Ray's tools and logs show."""
        name = re.sub(r"\W", "_", name.partition("#")[0]) or "Actor"
        made = self._classes.get(name)
        if made is None:
            cls = type(
                name, (RayActor,), {"__module__": RayActor.__module__, "__doc__": RayActor.__doc__}
            )
            made = self._classes[name] = self._ray.remote(num_cpus=0)(cls)
        return made

    def _wait_for(self, actor: Started) -> None:
        if not actor.done.wait(_SAID_AFTER):
            # On a thread: if Ray does not answer there, this wait still ends, and can be interrupted.
            with suppress(SystemLimitError):  # the log has a line less
                threads.start(self._say_what_it_wants, "what-it-wants", actor)
            actor.done.wait()

    def _say_what_it_wants(self, actor: Started) -> None:
        waits = still_waits(self._ray, actor.requested)
        if not actor.done.is_set():
            _log.warning("actor %s is not started yet: %s", actor.name, waits)

    # On the event loop's thread.

    def _arrived(self, actor: Started, pid: int, stderr: str) -> Sequence[int]:
        if actor.abandoned:
            raise OSError("nobody wants it any more")
        actor.on_end = partial(self._report, actor)
        self._processes.add(actor, pid)
        actor.stderr = stderr
        self._living[pid] = actor
        self._events.call(partial(self._sent, actor))
        return actor.fds

    def _sent(self, actor: Started) -> None:
        actor.close_fds()
        if actor.error:
            return
        guarded(partial(actor.on_spawned, actor.key))
        actor.done.set()

    def _give_up(self, actor: Started) -> None:
        """End an actor that its caller does not want any more, whether its process has come or not."""
        actor.abandoned = True
        self._process_listener.forget(actor.number)
        actor.close_fds()
        if actor.pid:
            self._kill(actor)
        elif actor.handle is not None:
            if actor.node is not None:
                self._remote_nodes.pop(actor.number, None)
                actor.node.disown(actor.number)
            self._kill_by_ray(actor)

    def _end_start(self, actor: Started, why: str = ENDED) -> None:
        actor.refuse(why)
        self._give_up(actor)

    def _kill_by_ray(self, actor: Started) -> None:
        with suppress(Exception):  # Ray may be disconnected by now, and its actors with it
            self._connected.check()
            self._ray.kill(actor.handle)

    def _has_run(
        self, actor: Started, error: BaseException | None, where: NodeOfProcess | None = None
    ) -> None:
        """Handle the end of the call that lasts as long as the actor. ``where``: the call has returned this
        at once, since the process is on another node."""
        actor.word = "" if error is None else str(error)
        if actor.pid or actor.error:
            return
        self._process_listener.forget(actor.number)
        actor.close_fds()
        if where is not None:
            actor.is_remote = where
            actor.done.set()
            return
        if actor.node is None:
            self._never_came(actor, error)
            return
        # News of its arrival may be on their way from the agent still.
        actor.node.disown(actor.number).add_done_callback(
            lambda requested: self._events.call(partial(self._disowned, actor, error, requested))
        )

    def _disowned(
        self, actor: Started, error: BaseException | None, requested: Future[bool]
    ) -> None:
        if requested.exception() is not None or requested.result():
            self._remote_nodes.pop(actor.number, None)
            self._never_came(actor, error)

    def _never_came(self, actor: Started, error: BaseException | None) -> None:
        actor.died_early = isinstance(error, self._ray.exceptions.ActorDiedError)
        actor.refuse(said(error))

    def _report(self, actor: Started) -> None:
        """Report the end of an actor's process to the driver. Nothing more about it will become known."""
        if self._living.pop(actor.key, None) is None:
            return
        actor.handle = actor.ran = None
        status = actor.wait_status() if actor.ended is None else actor.ended.status
        guarded(partial(self._on_exit, actor.key, status))
        with self._ends:
            self._all_gone.notify_all()

    def _on_news(self, node: AgentNode, news: News) -> None:
        """Handle a message of an agent."""
        assert self._callbacks is not None
        if isinstance(news, ProcessRequest):
            self._callbacks.heard(*news.process, news.data)
        elif isinstance(news, Come):
            self._callbacks.come(news.number)
        elif isinstance(news, Reached):
            self._callbacks.reached(node.number, news.number, news.error)
        elif isinstance(news, LostNode):
            self._agents.part(node, news.number, news.reason)
        elif isinstance(news, Arrived):
            self._come_from_remote(node, news)
        else:
            ended = partial(self._ended_remotely, news)
            self._callbacks.when_come(node.number, news.due, ended, ended)

    def _ended_remotely(self, news: Ended) -> None:
        actor = self._remote_nodes.pop(news.number, None)
        if actor is not None:  # otherwise it was lost with its node meanwhile
            actor.over, actor.ended, actor.went_on = True, news, news.went_on
            self._report(actor)

    def _come_from_remote(self, node: AgentNode, news: Arrived) -> None:
        actor = self._remote_nodes.get(news.number)
        if news.refused:
            self._remote_nodes.pop(news.number, None)
            if actor is not None:
                actor.refuse(news.refused)
        elif actor is None:  # nobody wants it any more
            return
        else:
            actor.pid = news.pid
            self._living[actor.key] = actor
            self._sent(actor)

    def _on_loss(self, node: AgentNode) -> None:
        """Report the ends of all actors of a lost node, and refuse those that had not come there yet."""
        for number, actor in list(self._remote_nodes.items()):
            if actor.node is node:
                del self._remote_nodes[number]
                actor.over = True
                if actor.pid:
                    self._report(actor)
                else:
                    actor.refuse(f"node {node.name} was lost: {node.lost}")

    # On any thread.

    def _kill(self, actor: Started) -> None:
        if actor.node is not None:
            actor.node.kill(*actor.identity)
        else:
            self._processes.signal(actor, signal.SIGKILL)

    def kill(self, pid: int) -> None:
        actor = self._living.get(pid)
        if actor is not None:
            self._kill(actor)

    def end_headless(self, pid: int) -> None:
        actor = self._living.get(pid)
        if actor is not None and actor.node is None:  # otherwise its own node does so
            self._processes.end_headless(actor)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        self._events.add(fd, callback)

    def unwatch(self, fd: int) -> None:
        self._events.remove(fd)

    def hurry(self) -> None:
        pass  # nothing waits here for a process that is still to come

    def close(self) -> None:
        self._agents.refuse()
        self._starts.close(self._events)
        for actor in list(self._living.values()):
            self._kill(actor)
        with self._ends:
            if not self._all_gone.wait_for(lambda: not self._hosts_in_use(), _REPORT_TIMEOUT):
                for node in self._hosts_in_use():
                    # Do not wait until the node is lost by its silence. It will find the driver's node lost.
                    self._agents.lose(node, "it does not end its actors, as the session does")
            if not self._all_gone.wait_for(lambda: not self._living, _CLOSE_TIMEOUT):
                left = ", ".join([actor.name for actor in self._living.values()])
                _log.warning("not ended %g s after they were killed: %s", _CLOSE_TIMEOUT, left)
        self._agents.close()
        self._events.call(self._process_listener.close)
        self._events.close()
        self._disconnect()

    def _hosts_in_use(self) -> set[AgentNode]:
        """Return the remote nodes that have processes of the session."""
        return {actor.node for actor in list(self._living.values()) if actor.node is not None}


class _Wish:
    """Request for a process, made with one Ray actor after the other until one comes. See
    :class:`conveyor.driver.process_engine.Spawning`."""

    def __init__(
        self,
        engine: RayProcessEngine,
        name: str,
        requested: Mapping[str, Any],
        boot_file: BootstrapFile,
        fds: tuple[int, ...],
        environ: dict[str, str],
        on_spawned: Callable[[int], object],
        prepare_remote: PrepareRemote,
    ) -> None:
        self._engine, self._name, self._on_spawned = engine, name, on_spawned
        self.requested, self.boot_file, self.fds, self.environ = requested, boot_file, fds, environ
        self.prepare_remote = prepare_remote
        self.actor: Started | None = None
        #: Why nobody wants the process any more, or an empty string.
        self._abandoned = ""

    def ask(self) -> bool:
        """Ask Ray for an actor, which replaces the last one if that has not come."""
        engine = self._engine
        number = next(engine._numbers)
        self.actor = Started(
            number=number, name=self._name, requested=self.requested, on_spawned=self._on_spawned
        )
        uninterrupted(partial(engine._ask, self, self.actor))
        return False

    def wait(self) -> Spawned:
        """Return the process when it is there, as for ``Spawning``. If the Ray actor died before it came, try
        again: its node may have died, and nothing of the user's has run in the actor."""
        left = _MAX_TRIES
        while True:
            actor, left = self.actor, left - 1
            assert actor is not None
            with self._engine._starts.waiting(actor.number):
                if self._comes(actor, last=not left):
                    return self._engine._spawned(actor)
            self.ask()

    def _comes(self, actor: Started, last: bool) -> bool:
        engine = self._engine
        engine._wait_for(actor)
        if actor.is_remote is not None and not actor.error:
            actor.done.clear()
            uninterrupted(partial(engine._ask_remote, self, actor))
            engine._wait_for(actor)
            last = True  # its slot is in the process table of that node
        if actor.error and (last or self._abandoned or not actor.died_early):
            raise ActorStartError(f"cannot start actor {self._name!r}: {actor.error}")
        return not actor.error

    def give_up(self, why: str) -> None:
        """Stop asking for the process, as for ``Spawning``."""
        self._abandoned = f"it {why}"
        if self.actor is not None:
            engine = self._engine
            engine._starts.over(self.actor.number)
            engine._events.call(partial(engine._end_start, self.actor, self._abandoned))


# Requirements of an actor of ours on Ray: resources, a place, an environment.


def ray_options(options: ProcessOptions) -> dict[str, Any]:
    """Return the options of the Ray actor for one of ours.

    The Ray actor has no name, as ours are found by ``conveyor.get_actor``. Ray does not restart it, since a
    process that Ray starts again would know no other one. Each restart of ours takes a new Ray actor.
    """
    requested = dict(options.placement)
    if options.num_cpus is not None:
        requested["num_cpus"] = options.num_cpus
    if options.num_gpus:
        requested["num_gpus"] = options.num_gpus
    if options.env_vars:
        # Given to Ray, since the linker and the interpreter read some variables before anything of ours runs.
        requested["runtime_env"] = {
            **requested.get("runtime_env", {}),
            "env_vars": options.env_vars,
        }
    return requested


def start_actor(made: Any, requested: Mapping[str, Any], name: str) -> Any:
    """Start an actor of Ray's class ``made`` and return its handle. Some of what Ray does not take it finds
    by an assertion without a word.

    Raises:
        TypeError, ValueError: Ray does not take what is ``requested`` for it.
    """
    try:
        return made.options(**requested).remote()
    except (TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        kind = TypeError if isinstance(error, (TypeError, AttributeError)) else ValueError
        given = ", ".join(f"{key}={value!r}" for key, value in requested.items())
        why = str(error) or f"{type(error).__name__} in Ray"
        raise kind(f"Ray takes no actor {name!r} with {given}: {why}") from error


def wanted(requested: Mapping[str, Any]) -> str:
    """Write the resources that are asked for, and where."""
    parts = {
        key: requested[key]
        for key in (
            "num_cpus",
            "num_gpus",
            "memory",
            "resources",
            "accelerator_type",
            "label_selector",
        )
        if requested.get(key)
    }
    text = ", ".join(f"{key}={value!r}" for key, value in parts.items()) or "a process"
    strategy = requested.get("scheduling_strategy") or requested.get("placement_group")
    return text if strategy is None else f"{text}, where {strategy!r} says"


def still_waits(ray: Any, requested: Mapping[str, Any]) -> str:
    """Say what an actor waits for that has been asked for some time ago."""
    return (
        f"it wants {wanted(requested)}, and available are {ray.available_resources()}. If one node has it "
        "all, Ray makes its environment there, or starts its process. Where that fails Ray tries again, and "
        "says why in its logs on that node only: raylet.out, worker-*.err and runtime_env_setup-*.log"
    )
