"""What the driver knows of each actor's process, and what it says when one has died."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.exceptions import ActorDiedError
from conveyor.runtime.layout import RESULT_BIT
from conveyor.runtime.process import BellBits
from conveyor.runtime.protocol import MAX_FDS, ActorId, MethodInfo

if TYPE_CHECKING:
    from conveyor.runtime.links import Link

#: How long an error waits for the exit code that the fork server is about to report.
_EXIT_CODE_WAIT = 0.05
#: Life words for one service thread: what futex_waitv takes, less its own alarm.
MAX_WATCHED = 120


class ActorRecord:
    """One actor, from the driver's side. Lives as long as anything asks about the actor."""

    def __init__(
        self,
        board: _core.Board,
        identity: ActorId,
        slot: int,
        class_name: str,
        methods: Mapping[str, MethodInfo],
        named: bool,
    ) -> None:
        self._board = board
        self.id = identity
        self.slot = slot
        self.incarnation = board.incarnation(slot)
        self.class_name = class_name
        self.methods = methods
        self.named = named
        self.pid = 0
        self.bits = BellBits(reserved=RESULT_BIT)
        self.handles = 0
        self.shared = False  # a handle has left this process: it is not known when the last is gone
        self.killed = False
        self.stopping = False
        self.arena_fd = -1
        self.eventfd = -1
        self.control_socket: socket.socket | None = None
        # Descriptors and the frame that announces them go in step.
        self.control_lock = threading.Lock()
        self.known_peers: set[int] = set()
        self.calls: Link | None = None
        self.control_link: Link | None = None
        self.gpu_ids: tuple[str, ...] = ()
        self.num_gpus = 0.0
        self.exit_status: int | None = None
        self.exited = threading.Event()
        self.stderr_tail: Callable[[], str] = str

    @property
    def alive(self) -> bool:
        return not self._board.gone(self.slot, self.incarnation)

    def check_alive(self) -> None:
        if not self.alive:
            raise self.death()

    def control(self, operation: str, *args: Any) -> Any:
        """Ask the actor's main loop for something that is not a call of the user's."""
        link = self.control_link
        if link is None:
            raise self.death()
        return link.call(operation, args, {})

    def send_fds(self, fds: list[int]) -> None:
        assert self.control_socket is not None
        try:
            for start in range(0, len(fds), MAX_FDS):
                socket.send_fds(self.control_socket, [b"+"], fds[start : start + MAX_FDS])
        except OSError:
            # The actor must not wait for descriptors that never come.
            self.control_socket.close()
            self.check_alive()
            raise

    def death(self, label: Callable[[int, int], str | None] | None = None) -> ActorDiedError:
        """The error for whoever needed this actor. ``label`` names a (graph, node)."""
        state, graph, node, execution, _since, number, what = self._board.status(self.slot)
        if not number:
            self.exited.wait(_EXIT_CODE_WAIT)
        doing: str | None = None
        if state != 0:
            doing = (label(graph, node) if label is not None else None) if graph else what
            doing = doing or (f"node {node} of graph {graph}" if graph else what)
        code: int | None = None
        if self.exit_status is not None:
            ended = _exit_code(self.exit_status)
            number = number or (-ended if ended < 0 else 0)
            code = ended if ended >= 0 else None
        if self.killed:
            how = "was killed by conveyor.kill()"
        elif number:
            how = f"died of signal {number} ({_signal_name(number)})"
        elif code is not None:
            how = f"exited with code {code}"
        else:
            how = "died (its exit code is not known yet)"
        message = f"actor {self.id.name} (pid {self.pid}) {how}"
        if doing is not None:
            where = f"execution {execution}" if graph else f"call {execution}"
            message += f" while running {doing} ({where})"
        if number == signal.SIGKILL and not self.killed:
            message += "; SIGKILL is also what the kernel's out-of-memory killer sends"
        tail = self.stderr_tail()
        if tail and not self.killed:
            message += f"\nthe last lines of its stderr:\n{tail}"
        return ActorDiedError(message, self.id.name, doing, code, number or None)


def _exit_code(status: int) -> int:
    return os.waitstatus_to_exitcode(status)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


class DeathWatches:
    """The native service threads: each can watch so many life words."""

    def __init__(self, board: _core.Board) -> None:
        self._board = board
        self._lock = threading.Lock()
        self._watches: list[tuple[_core.DeathWatch, set[int]]] = []

    def add(self, slot: int) -> None:
        with self._lock:
            found = next((w for w in self._watches if len(w[1]) < MAX_WATCHED), None)
            if found is None:
                found = (_core.DeathWatch(self._board), set())
                self._watches.append(found)
            found[1].add(slot)
            found[0].add(slot)

    def remove(self, slot: int) -> None:
        with self._lock:
            for watch, slots in self._watches:
                if slot in slots:
                    slots.discard(slot)
                    watch.remove(slot)

    def stop(self) -> None:
        for watch, _ in self._watches:
            watch.stop()
