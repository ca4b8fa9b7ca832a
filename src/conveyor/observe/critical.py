"""The spans of a timeline are summed up: who was busy, and what all of it took so long for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conveyor.observe.dataflow import place_name
from conveyor.plan.model import Plan
from conveyor.plan.timeline import Span, Timeline, Why


@dataclass(frozen=True, slots=True)
class Share:
    """What one actor does with its time, from the first work of any actor to the last.

    actor: its name.
    computing, sending, waiting, idle: the shares of that time, which add up to 1. To wait is to stand still
        between two works, to be idle before the first and after the last.
    """

    actor: str
    computing: float
    sending: float
    waiting: float
    idle: float

    @property
    def busy(self) -> float:
        """The share in which it works."""
        return self.computing + self.sending


@dataclass(frozen=True, slots=True)
class Link:
    """One span of the critical path.

    span: the span, which lasts.
    why: what it had waited for last: see ``conveyor.plan.timeline.Why``.
    what: that in words.
    gap: the seconds between the span before it and this one: what travels, or a time that had not come.
    """

    span: Span
    why: Why
    what: str
    gap: float


def shares(plan: Plan, timeline: Timeline) -> tuple[Share, ...]:
    """Sum up the spans of each actor."""
    begin, end = window(timeline)
    length = end - begin
    made = []
    for info in plan.actors:
        spans = [span for span in timeline.spans if span.place == info.index]
        computing = sum(span.seconds for span in spans if span.kind == "compute")
        sending = sum(span.seconds for span in spans if span.kind == "send")
        waiting = sum(span.seconds for span in spans if span.kind == "wait")
        idle = max(length - computing - sending - waiting, 0.0)
        whole = length or 1.0
        made.append(
            Share(
                place_name(plan, info.index),
                computing / whole,
                sending / whole,
                waiting / whole,
                idle / whole,
            )
        )
    return tuple(made)


def window(timeline: Timeline) -> tuple[float, float]:
    """Return when the first actor begins to work, and when the last one ends."""
    work = [span for span in timeline.spans if span.kind in ("compute", "send") and span.place >= 0]
    return min(span.start for span in work), max(span.end for span in work)


def critical_path(timeline: Timeline) -> tuple[Link, ...]:
    """Follow the last result back to the first submission, each time to what was waited for last."""
    place = max(range(len(timeline.ends)), key=lambda n: timeline.completed[n])
    at = timeline.ends[place]
    links: list[Link] = []
    spans = timeline.spans
    while at >= 0:
        span = spans[at]
        before, why, what = span.after, span.why, _in_words(span)
        # What takes no time only hands on why the next one had to wait.
        while before >= 0 and not spans[before].seconds:
            handed = spans[before]
            # An input that comes when there is room waits for that, not for its frame.
            if why == "order" or (handed.kind == "submit" and handed.why in ("room", "pace")):
                why, what = handed.why, _in_words(handed)
            before = handed.after
        if span.seconds:
            end = spans[before].end if before >= 0 else 0.0
            links.append(Link(span, why, what, max(span.start - end, 0.0)))
        at = before
    return tuple(reversed(links))


def _in_words(span: Span) -> str:
    match span.why:
        case "start":
            return "the beginning"
        case "order":
            return "its actor's step before"
        case "data":
            return span.label if span.kind == "receive" else "a frame"
        case "tensors":
            return "tensors"
        case "room":
            return "room: an older execution's end"
        case "pace":
            return "its time"


def steady_rate(completed: Sequence[float], depth: int) -> float:
    """Return the executions that end in a second once the first ones are through.

    Executions may end in groups of up to ``depth``, so a multiple of that is counted where there are enough.
    """
    last = len(completed) - 1
    warm = min(max(depth, len(completed) // 4), len(completed) // 2)
    counted = last - warm
    if counted > depth:
        counted -= counted % depth
    if not counted or completed[last] == completed[last - counted]:
        return len(completed) / completed[last] if completed[last] else math.inf
    return counted / (completed[last] - completed[last - counted])
