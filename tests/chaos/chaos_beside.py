"""Rounds of all kinds whose tensors go beside their frames, by transports that may fail."""

from __future__ import annotations

import gc
import re
import time
from dataclasses import replace
from random import Random
from typing import Any

import chaos_transports
import psutil
from chaos_apart import Apart
from chaos_around import SOON, Around, Running, Wrong
from chaos_course import Course
from chaos_faults import Fault
from chaos_graphs import STREAMING, Expected, Graph, build
from chaos_pool import Member
from chaos_restarts import Restarts
from chaos_round import Round
from chaos_transports import COMMUNICATOR, DEVICE, Sockets, broken, routed

from conveyor import transport
from conveyor.exceptions import TaskError, TransportError


class OutOfBand(Course):
    """What these rounds have in common."""

    #: Whether a communicator takes part, for which handles are pickled: their actors live on.
    communicates = True

    def __init__(self, seed: int, around: Around, rng: Random) -> None:
        self._registered: list[str] = []
        self._overlap = rng.random() < 0.5
        # After so many calls in one process it fails.
        self._fails = rng.choice([None, None, 0, 1, 5])
        super().__init__(seed, around, rng)

    def describe(self) -> str:
        routes = "".join(
            f"\n  {spec.name}: {dict(spec.routes)}, broken {dict(spec.broken)}, stuck {spec.stuck}"
            for spec in self.specs
        )
        return (
            f"overlap {self._overlap}, communicator fails {self._fails}, "
            f"{super().describe()}{routes}"
        )

    def run(self) -> None:
        try:
            super().run()
            self._check_nothing_beside()
        finally:
            for name in self._registered:
                transport.unregister(name)

    def _routed(self, spec: Graph) -> Graph:
        names = [*self.around.transports, *chaos_transports.ROUGH]
        if self.communicates and not self._exact():
            names.append(COMMUNICATOR)
        return routed(self.rng, spec, names)

    def _exact(self) -> bool:
        return False

    def _dag(self, spec: Graph, members: list[Member]) -> Any:
        self.tally.routes.update({route.partition(" ")[0] for route in spec.routes.values()})
        handles = [member.handle for member in members]
        if COMMUNICATOR not in spec.routes.values():
            return build(spec, handles)
        # In some order of their own.
        actors = self.rng.sample(handles, len(handles))
        return build(spec, handles, Sockets(actors, self._fails))

    def _options(self, spec: Graph) -> dict[str, Any]:
        return {**super()._options(spec), "overlap": self._overlap}

    def _transfers_may_fail(self, spec: Graph) -> bool:
        return COMMUNICATOR in spec.routes.values() or bool(spec.broken or spec.stuck)

    def _check_error(
        self,
        error: BaseException,
        running: Running,
        number: int,
        expected: Expected,
        since: int,
        where: str,
    ) -> None:
        if isinstance(error, (TransportError, TaskError)) and self._of_transport(
            str(error), running, number
        ):
            self.tally.transports += 1
            return
        super()._check_error(error, running, number, expected, since, where)

    def _of_transport(self, said: str, running: Running, number: int) -> bool:
        """Whether what is ``said`` of a transfer had to be, or may be."""
        # It is told to whoever next waits for that stream, which may be a task of a later round.
        if lost := re.search(
            r"process (\d+), which was to record an event of its device, has", said
        ):
            return not psutil.pid_exists(int(lost[1]))
        for name, fails in running.spec.broken.items():
            if told := re.search(rf"transport '{name}': InjectedFault: transfer (\d+)", said):
                return int(told[1]) == number and number in fails
        if "by the transport 'communicator chaos'" not in said:
            return False
        # All of its transfers that are under way fail with one that is given up.
        given_up = running.cancelled or running.limited or self.faults.deadly or running.torn
        return self._fails is not None or bool(given_up)

    def _check_nothing_beside(self) -> None:
        """Of transports nothing is left where no graph uses any."""
        gc.collect()  # graphs that were dropped
        for member in self.members:
            if member.dead or member.handle is None:
                continue
            self._doing(f"the end of what transports have in {member.name}")
            end = time.monotonic() + SOON
            while left := member.handle.out_of_band.remote().get():
                if time.monotonic() > end:
                    raise Wrong(f"{member.name} still has {left}")
                time.sleep(0.005)
        self.around.watchdog.idle()


class BesideRound(OutOfBand, Round):
    title = "transports"

    def __init__(self, seed: int, around: Around, rng: Random) -> None:
        super().__init__(seed, around, rng)
        planned = self.faults.planned
        # An execution fails with one of both, and the other is told or not.
        if any(map(self._transfers_may_fail, self.specs)):
            planned[:] = [fault for fault in planned if not fault.raises]
        # Which run of a generator it is, is not known: see `routed`.
        if self.exact:
            planned[:] = [fault for fault in planned if not self._in_a_generator(fault)]

    def _in_a_generator(self, fault: Fault) -> bool:
        return fault.inside and self.specs[fault.graph].tasks[fault.task].method in STREAMING

    def _exact(self) -> bool:
        return self.exact

    def _routed(self, spec: Graph) -> Graph:
        spec = super()._routed(spec)
        # Which transfer fails is known by its number, which threads do not know of what they execute.
        on_device = set(spec.routes.values()) & set(DEVICE)
        if self.exact or self.style != "one thread" or on_device or self.rng.random() < 0.5:
            return spec
        over = [n for n in self.around.transports if n != "shm" and n not in DEVICE] + ["shm"] * 2
        name = f"broken {self.seed} {spec.name}"
        spec, registered = broken(self.rng, spec, over, name)
        self._registered += registered
        return spec


class BesideRestarts(OutOfBand, Restarts):
    title = "transports, restarts"
    communicates = False


class BesideApart(OutOfBand, Apart):
    title = "transports, stopped"

    def _stoppable(self, theirs: Graph) -> Graph:
        # A simulated device stands still with its process, as no GPU does: what others have enqueued behind
        # its events waits, and so does a task that looks at the result.
        routes = {task: name for task, name in theirs.routes.items() if name not in DEVICE}
        return replace(theirs, routes=routes)
