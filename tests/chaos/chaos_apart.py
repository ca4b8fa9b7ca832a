"""Rounds in which a process is stopped, and whoever does not need it goes on meanwhile."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from random import Random

import psutil
from chaos_around import SOON, Around, Running, Wrong
from chaos_course import Course
from chaos_faults import NOBODY, Fault
from chaos_graphs import Graph, evaluate, plain_objects, random_graph
from chaos_pool import Member

import conveyor
from conveyor.exceptions import ActorDiedError


class Apart(Course):
    """Two graphs: all members are in *theirs*, all but the one that is stopped in *ours*. Instead of an
    actor the fork server may be stopped, which no graph needs."""

    title = "stopped"

    def __init__(self, seed: int, around: Around, rng: Random) -> None:
        super().__init__(seed, around, rng)
        self._choose_members(least=2)
        asynchronous = [member.asynchronous for member in self.members]
        theirs = self._routed(random_graph(rng, "theirs", asynchronous, False, 40))
        self._victim = NOBODY if rng.random() < 0.2 else rng.choice(sorted(theirs.actors))
        if self._victim != NOBODY:
            theirs = self._stoppable(theirs)
        self._others = [i for i in range(len(self.members)) if i != self._victim]
        self._times = rng.randint(1, 4)
        self._kills = rng.random() < 0.3
        others = [asynchronous[i] for i in self._others]
        ours = self._routed(random_graph(rng, "ours", others, False, 10))
        self.specs = [theirs, ours]

    def _stoppable(self, theirs: Graph) -> Graph:
        """The same without what holds up those who share a graph with a process that is stopped."""
        return theirs

    def describe(self) -> str:
        return f"stopped is {self._victim}, killed {self._kills}, {super().describe()}"

    def run(self) -> None:
        self.around.clock.clear()
        self.around.hiccups.forget()
        self._doing("begin")
        conveyor.get([member.handle.begin.remote({}) for member in self.members])
        for spec, members in zip(
            self.specs, (self.members, [self.members[i] for i in self._others]), strict=True
        ):
            self._compile(spec, members)
        theirs, ours = self.running
        for i in range(self._times):
            for _ in range(theirs.spec.executions):
                self._submit(theirs)
            time.sleep(self.rng.choice([0, 0, self.rng.uniform(0, 0.003)]))
            self._stop()
            try:
                self._go_on(ours)
                self._look_at(theirs)
                if self._kills and i == self._times - 1:
                    self._kill(theirs)
            finally:
                self._signal(signal.SIGCONT)
            self._collect(theirs)
        for running in self.running:
            self._doing(f"teardown of {running.spec.name}")
            running.graph.teardown()
        self.running.clear()
        self._check_closed()
        self.tally.faults["stopped"] += self._times
        self._count()

    def _compile(self, spec: Graph, members: list[Member]) -> None:
        self._doing(f"compile {spec.name}")
        objects = plain_objects({}, set(range(len(members))))
        expected = evaluate(spec, objects, spec.executions * self._times)
        graph = self._dag(spec, members).compile(**self._options(spec))
        self.running.append(Running(len(self.running), spec, graph, expected, exact=False))
        self.tally.graphs += 1

    # While one is stopped

    def _stop(self) -> None:
        self._signal(signal.SIGSTOP)
        pid = self._pid()
        self._doing(f"SIGSTOP of {pid}")
        end = time.monotonic() + SOON
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            if time.monotonic() > end:
                raise Wrong(f"{pid} does not stop")
            time.sleep(0.0002)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it was killed
            os.kill(self._pid(), number)

    def _pid(self) -> int:
        if self._victim == NOBODY:
            return self.around.elsewhere.server
        return self.members[self._victim].pid

    def _go_on(self, ours: Running) -> None:
        """All of it ends while the other does not run: whoever would wait for that one hangs."""
        for _ in range(ours.spec.executions):
            self._submit(ours)
            if self.rng.random() < 0.5:
                self._collect(ours)
        self._collect(ours)
        for place in self._others:
            self._eager(place)
            self._begin_call(place)
        self._finish_calls()
        if ours.died:
            raise Wrong(f"{ours.spec.name} has failed")

    def _look_at(self, theirs: Running) -> None:
        """What is there of the others' can be got, and what is not is said to wait for who is stopped."""
        for number in list(theirs.pending):
            self._get(theirs, number, self.rng.choice([0, 0.001]))
        if self._victim != NOBODY:
            self._doing("status of a graph of which an actor is stopped")
            if "stopped" not in str(theirs.graph.status()):
                raise Wrong(f"nobody is said to be stopped:\n{theirs.graph.status()}")

    def _kill(self, theirs: Running) -> None:
        """Who is stopped, or, if that is the fork server, an actor: that is known before it goes on."""
        place = self._others[0] if self._victim == NOBODY else self._victim
        member = self.members[place]
        fault = Fault("signal", place, 1, signal.SIGKILL, pid=member.pid)
        self.faults.planned.append(fault)
        self.around.clock.stamp(fault.slot)
        signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
        member.dead = True
        since = self._doing(f"a call of {member.name}, which was killed")
        try:
            member.handle.ping.remote(1).get()
        except ActorDiedError as error:
            self._died(error, None, since, place)
        else:
            raise Wrong(f"{member.name} answers, which was killed")
        self._collect(theirs)
