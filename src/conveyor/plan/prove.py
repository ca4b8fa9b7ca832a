"""Programs are proved to fit together; their steps say what they wait for, and may be of any kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

from conveyor.exceptions import GraphError

Event = TypeVar("Event", bound=Hashable)
_Event_co = TypeVar("_Event_co", bound=Hashable, covariant=True)


class Blocking(Protocol[_Event_co]):
    """Step, as far as other programs depend on it. A step that meets others enables its own event and waits
    for those of the others."""

    def waits_for(self) -> Iterable[_Event_co]:
        """Return the events that the step waits for: it ends once all of them have happened."""
        ...

    def enables(self) -> Iterable[_Event_co]:
        """Return the events that happen when a program comes to the step, before it waits."""
        ...


def prove(
    programs: Sequence[Sequence[Blocking[Event]]],
    given: Iterable[Event],
    name_step: Callable[[int, int], str],
    name_event: Callable[[Event], str],
) -> None:
    """Prove that all programs come to their end, however fast each of them is.

    What has happened stays so, and no step is the less able to go on for it. So it does not matter who
    is followed first: the programs fit together exactly if following them all, each as far as it comes,
    ends with all of them done.

    Args:
        given: the events that happen whatever the programs do.
        name_step: says what a program, by its number, does with its step at a place.
        name_event: says what a step waits for.

    Raises:
        GraphError: some wait for each other, or for what never happens; the message says who.
    """
    places = [0] * len(programs)
    happened = set(given)
    waiting: dict[Event, list[int]] = {}
    ready = list(range(len(programs)))
    while ready:
        program = ready.pop()
        steps = programs[program]
        while places[program] < len(steps):
            step = steps[places[program]]
            for event in step.enables():
                happened.add(event)
                if event in waiting:
                    ready += waiting.pop(event)
            missing = _missing(step.waits_for(), happened)
            if missing is not None:
                waiting.setdefault(missing, []).append(program)
                break
            places[program] += 1
    if waiting:
        raise GraphError(_why(programs, places, happened, name_step, name_event))


def _missing(events: Iterable[Event], happened: set[Event]) -> Event | None:
    """Find the first of ``events`` that has not happened."""
    for event in events:
        if event not in happened:
            return event
    return None


def _why(
    programs: Sequence[Sequence[Blocking[Event]]],
    places: Sequence[int],
    happened: set[Event],
    name_step: Callable[[int, int], str],
    name_event: Callable[[Event], str],
) -> str:
    """Say why the programs are stuck at ``places``."""
    # A stuck program waits for another stuck one, so following them must come around.
    program = next(i for i, steps in enumerate(programs) if places[i] < len(steps))
    trail: dict[
        int, tuple[Event, int]
    ] = {}  # what each waits for, and where the next one enables it
    while program not in trail:
        missing = _missing(programs[program][places[program]].waits_for(), happened)
        assert missing is not None
        enabler = _enabler(programs, places, missing)
        if enabler is None:
            doing = name_step(program, places[program])
            return f"{doing} waits for {name_event(missing)}, which nothing makes"
        trail[program] = missing, enabler[1]
        program = enabler[0]
    cycle = list(trail)[list(trail).index(program) :]
    clauses = []
    for member, maker in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        missing, place = trail[member]
        clause = f"{name_step(member, places[member])} waits for {name_event(missing)}"
        first = name_step(maker, places[maker])
        if name_step(maker, place) != first:
            clause += f", which its actor makes after {first}"
        clauses.append(clause)
    return f"no order of the graph's tasks is possible: {'; '.join(clauses)}"


def _enabler(
    programs: Sequence[Sequence[Blocking[Event]]], places: Sequence[int], event: Event
) -> tuple[int, int] | None:
    """Find the program that would still enable ``event``, and at which place."""
    for program, steps in enumerate(programs):
        for place in range(places[program], len(steps)):
            if event in steps[place].enables():
                return program, place
    return None
