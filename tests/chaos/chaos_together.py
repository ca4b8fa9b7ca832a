"""Executions that fail as one: each result that is still to come raises the first error at once, and the
errors of others are told with it."""

from __future__ import annotations

import re
from typing import Any

from chaos_around import Failure, Running, Wrong
from chaos_faults import Fault
from chaos_streams import Streams

from conveyor import StreamRef
from conveyor.exceptions import TaskError


class Together(Streams):
    def _check(
        self, running: Running, number: int, place: int, ref: Any, timeout: float | None = None
    ) -> bool | None:
        raise NotImplementedError

    def _check_the_rest(self, running: Running, number: int, refs: list[Any]) -> None:
        """Once an execution is known to have failed, nobody has to wait for any of its ``refs``."""
        failure = running.failures.get(number)
        if failure is None or failure.refs is not None:
            return
        failure.refs = refs
        if number in running.cancelled | running.limited or running.torn or running.died:
            return
        for place, ref in enumerate(refs):
            if ref is None:
                continue
            done = ref.done()
            if not done or self._check(running, number, place, ref, 0) is None:
                if running.torn:
                    return  # by another thread
                raise Wrong(
                    f"{running.spec.name}, execution {number} has failed with {failure.first}, and "
                    f"result {place} is still waited for"
                )
        self.tally.failed_as_one += 1

    def _check_siblings(self) -> None:
        """All executions are over: what was raised in one that has failed is told with its error."""
        for running in self.running:
            if not running.fail_fast or running.torn or running.died:
                continue
            told = []
            for number, failure in running.failures.items():
                told.append(failure.first)
                told += self._siblings(running, number, failure)
            # Of what nobody holds a ref nobody can be told, nor of what has ended before it could tell.
            clock, actors = self.around.clock, running.spec.actors
            ended = any(f.victim in actors and clock.read(f.slot) for f in self.faults.deadly)
            unknown = any(failure.refs is None for failure in running.failures.values())
            unsure = running.dropped or running.cancelled or running.limited or running.interrupted
            if unsure or ended or unknown:
                continue
            for fault in self.faults.planned:
                here = fault.raises and fault.graph == running.index and clock.read(fault.slot)
                if here and fault not in told:
                    raise Wrong(f"nobody was told of {fault}")

    def _siblings(self, running: Running, number: int, failure: Failure) -> list[Fault]:
        """What is told beside the first error, by each result that has failed in the same way."""
        found: list[Fault] = []
        for ref in failure.refs or ():
            error = None if ref is None else _error_of(ref)
            if error is None:
                continue
            where = f"{running.spec.name}, execution {number}"
            said = re.findall("also failed in this execution: (.*)", str(error))
            notes = getattr(error, "__notes__", [])
            found = [self._sibling(running, number, failure, line) for line in said]
            good = all(
                line in note and "Traceback" in note
                for line, note in zip(said, notes, strict=False)
            )
            if len(said) != len(notes) or not good:
                raise Wrong(f"{where}: the text says {said}, the notes {notes}")
        self.tally.siblings += len(found)
        return found

    def _sibling(self, running: Running, number: int, failure: Failure, said: str) -> Fault:
        for fault in self.faults.planned:
            here = fault.raises and fault.graph == running.index and fault is not failure.first
            told = here and re.search(
                rf"\('{running.spec.name}', {fault.task}\) run {fault.run}\b", said
            )
            if told and self.around.clock.read(fault.slot):
                self._failed_with(fault, running, number, said, first=False)
                return fault
        raise Wrong(f"{running.spec.name}, execution {number}: {said!r} has not happened")


def _error_of(ref: Any) -> TaskError | None:
    try:
        if isinstance(ref, StreamRef):
            ref.next(0)
        else:
            ref.get(0)
    except TaskError as error:
        return error
    except StopIteration:
        return None
    return None
