"""The driver has other hosts look at a graph's actors, for who executes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conveyor import _core
from conveyor.futures import Future, wait
from conveyor.runtime.driver.hosts.looks import HERE
from conveyor.runtime.driver.processes.far_hosts import FarHosts
from conveyor.runtime.driver.processes.record import ActorRecord
from conveyor.runtime.graph.edges.layout import Layout
from conveyor.runtime.graph.telemetry.afar import Afar, Look, LookedAt, Question, Rings, Seen, Sight
from conveyor.runtime.graph.telemetry.clocks import NONE, Offset, estimate

#: How often another host's clock is asked: a few of the answers come without delay.
_CLOCK_TIMES = 16


def look_afar(
    abroad: FarHosts,
    question: Question,
    patience: float,
    number: int,
    layout: Layout,
    records: Sequence[ActorRecord],
    executor: int,
) -> Afar:
    """What the hosts of these actors say, but for that of the executor, which has that slot. The graph's
    segment has that number, and is laid out like this. ``patience``: seconds that they have, all together."""
    own = abroad.host_of(executor)
    asked: dict[int, list[LookedAt]] = {}
    for actor, record in enumerate(records):
        host = HERE if record.host is None else record.host.number
        if host != own:
            looked_at = LookedAt(actor, record.reader, layout.recorders[actor])
            asked.setdefault(host, []).append(looked_at)
    names = {host: abroad.name_of(host) for host in asked}
    if patience <= 0:
        why = "it was not asked, by the thread that would hear its answer"
        return Afar(unknown=dict.fromkeys(names.values(), why))
    end = _core.monotonic() + patience
    looks = {
        host: Look(question, number, layout.offsets, tuple(actors))
        for host, actors in asked.items()
    }
    answers = {host: abroad.looks.look(host, look, layout.segment) for host, look in looks.items()}
    clocks = _clocks(abroad, own, answers, end) if question.trace else {}
    wait(answers.values(), max(end - _core.monotonic(), 0.0))
    seen: dict[int, Sight] = {}
    rings: dict[int, Rings] = {}
    by_actor: dict[int, Offset] = {}
    unknown: dict[str, str] = {}
    for host, answer in answers.items():
        why = _why_not(answer, patience)
        if why:
            unknown[names[host]] = why
            continue
        said = answer.result()
        seen.update(said.actors)
        rings.update(dict.fromkeys(said.actors, said.rings))
        if host in clocks:
            by_actor.update(dict.fromkeys(said.actors, clocks[host]))
    return Afar(seen, rings, by_actor, unknown)


def _why_not(answer: Future[Seen], patience: float) -> str:
    if not answer.done():
        return f"its host has not answered for {patience:g} s"
    error = answer.exception()
    return "" if error is None else str(error) or type(error).__name__


def _clocks(
    abroad: FarHosts, own: int, hosts: Mapping[int, object], end: float
) -> dict[int, Offset]:
    """How far the clocks of these hosts are ahead of the executor's, as far as they answer."""
    found = {host: _clock(abroad, host, end) for host in {own, *hosts}}
    base = found[own]
    if base is None:
        return {}
    return {host: clock.seen_from(base) for host in hosts if (clock := found[host]) is not None}


def _clock(abroad: FarHosts, host: int, end: float) -> Offset | None:
    if host == HERE:
        return Offset(_core.monotonic_ns(), NONE.ahead, NONE.error)
    try:
        left = max(end - _core.monotonic(), 0.001)
        samples = abroad.pump.ask_clock(host, _CLOCK_TIMES, left)
    except OSError:  # the session ends
        return None
    return estimate(samples) if samples else None
