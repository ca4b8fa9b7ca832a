"""A Plan in virtual time: the laws that no timeline breaks, and figures that can be worked out by hand."""

from __future__ import annotations

import itertools
import json
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_graphs import OUT_OF_BAND, Actor, call, chain, random_plan, transport_beside

from conveyor.config import Config
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.observe import simulate
from conveyor.plan import EXECUTOR, lower

LATENCY = 0.001
NEAR = 1e-9


@pytest.fixture(scope="module", autouse=True)
def out_of_band():
    with transport_beside():
        yield


def simulated(seed, *, depth=3, executions=12, spread=True, **options):
    plan = random_plan(seed, out_of_band=True)
    rng = random.Random(seed + 1)
    seconds = {
        task.label: rng.choice([0.0, 0.01, 0.02, 0.05]) if spread else 0.01 for task in plan.tasks
    }
    return simulate(
        plan,
        seconds,
        depth=depth,
        executions=executions,
        latency=LATENCY,
        sizes=rng.choice([0, 1000]),
        bandwidth=1e5,
        **options,
    )


def work_of(made, place):
    spans = [s for s in made.timeline.spans if s.participant == place and s.kind != "transfer"]
    return [s for s in spans if s.kind not in ("wait", "idle", "receive")], spans


seeds = st.integers(0, 1 << 32)


@given(seed=seeds, depth=st.integers(1, 5), overlap=st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_laws(seed, depth, overlap):
    made = simulated(seed, depth=depth, overlap=overlap)
    plan, timeline = made.plan, made.timeline
    for place in (EXECUTOR, *range(len(plan.actors))):
        work, all_of_it = work_of(made, place)
        # One thing at a time, without a hole, and one execution after the other.
        for before, after in itertools.pairwise(all_of_it):
            assert after.start == pytest.approx(before.end, abs=NEAR)
        assert [s.execution for s in work] == sorted(s.execution for s in work)
        if place >= 0:
            order = [s.number for s in work if s.kind == "compute" and s.execution == 0]
            assert order == [t for t in plan.order if plan.tasks[t].actor == place]
        assert sum(s.seconds for s in work) <= made.makespan + NEAR
    # Nothing is read before it was sent.
    sent = {(s.number, s.execution): s.end for s in timeline.spans if s.kind == "send"}
    for bundle in plan.inputs:
        for s in timeline.spans:
            if s.kind == "submit":
                sent[bundle.edge, s.execution] = s.end
    reads = [s for s in timeline.spans if s.kind == "receive"]
    assert reads
    for s in reads:
        assert s.start >= sent[s.number, s.execution] + LATENCY - NEAR
    # A task that needs tensors begins when they have come.
    arrived = {
        (s.participant, s.number, s.execution): s.end
        for s in timeline.spans
        if s.kind == "transfer"
    }
    for program in plan.programs:
        for i, step in enumerate(program.steps):
            if type(step).__name__ != "Await":
                continue
            user = next(s.task for s in program.steps[i:] if type(s).__name__ == "Call")
            for s in timeline.spans:
                if s.kind == "compute" and s.number == user:
                    came = arrived[program.actor, step.edge, s.execution]
                    assert s.start >= came - NEAR
    # Depth.
    assert len(timeline.completed) == made.executions
    for n in range(depth, made.executions):
        assert timeline.submitted[n] >= timeline.completed[n - depth] - NEAR
    assert all(
        end >= begin for begin, end in zip(timeline.submitted, timeline.completed, strict=True)
    )


@given(seed=seeds, depth=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_the_critical_path_is_all_of_the_time(seed, depth):
    made = simulated(seed, depth=depth)
    at = 0.0
    for link in made.critical_path:
        assert link.gap >= 0
        assert link.span.start == pytest.approx(at + link.gap, abs=NEAR)
        # Between two spans there is only what is on its way: a latency for each hop that costs nothing else.
        assert link.gap % LATENCY == pytest.approx(0, abs=NEAR) or link.gap % LATENCY == (
            pytest.approx(LATENCY, abs=NEAR)
        )
        at = link.span.end
    hops = (made.makespan - at) / LATENCY
    assert hops == pytest.approx(round(hops), abs=1e-5)
    assert made.makespan >= sum(link.span.seconds for link in made.critical_path) - NEAR


@given(seed=seeds, depth=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_more_depth_delays_nothing_and_it_is_deterministic(seed, depth):
    shallow, deep = simulated(seed, depth=depth), simulated(seed, depth=depth + 1)
    for early, late in zip(deep.timeline.completed, shallow.timeline.completed, strict=True):
        assert early <= late + NEAR
    assert simulated(seed, depth=depth).timeline == shallow.timeline


@given(seed=seeds)
@settings(max_examples=60, deadline=None)
def test_shares_add_up_and_the_busiest_actor_limits_the_rate(seed):
    made = simulated(seed, depth=8, executions=96, spread=False)
    for one in made.actors:
        assert one.computing + one.sending + one.waiting + one.idle == pytest.approx(1)
    longest = max(
        sum(s.seconds for s in work_of(made, place)[0]) for place in range(len(made.plan.actors))
    )
    assert made.throughput <= made.executions / longest * 1.001
    assert 0 <= made.bubble < 1


@pytest.mark.parametrize(
    ("depth", "rate"), [(1, 1 / 0.07), (2, 1 / 0.04), (3, 1 / 0.04), (8, 1 / 0.04)]
)
def test_a_chain_of_unequal_stages(depth, rate):
    made = simulate(chain(3), {"s0.f": 0.01, "s1.f": 0.04, "s2.f": 0.02}, depth=depth, latency=0)
    assert made.throughput == pytest.approx(rate)
    if depth == 1:
        assert made.latency_p50 == made.latency_max == pytest.approx(0.07)
        path = made.critical_path[:4]
        assert [link.span.label for link in path] == ["s0.f", "s1.f", "s2.f", "s0.f"]
        assert [link.what for link in path[:3]] == ["the beginning", "s0.f", "s1.f"]
        assert [link.why for link in path] == ["start", "data", "data", "room"]


def test_copies_and_latencies_are_part_of_a_hop():
    made = simulate(
        chain(2), 0.01, depth=1, executions=3, latency=0.002, sizes={"s0.f": 500}, bandwidth=1e5
    )
    # Two tasks, three hops, one copy.
    assert made.latency_p50 == pytest.approx(0.02 + 3 * 0.002 + 0.005)
    assert made.makespan == pytest.approx(3 * made.latency_p50)
    assert made.actors[0].sending == pytest.approx(0.005 / 0.015, abs=0.2)


def test_a_pace_below_the_rate_is_kept():
    made = simulate(chain(2), 0.01, pace=0.05, executions=10, latency=0)
    assert list(made.timeline.submitted) == pytest.approx([n * 0.05 for n in range(10)])
    assert made.latency_max == pytest.approx(0.02)
    assert made.throughput == pytest.approx(20)
    hurried = simulate(chain(2), 0.01, pace=0.001, executions=40, latency=0, depth=4)
    assert hurried.throughput == pytest.approx(100)


def test_durations_by_execution():
    slow = 7
    made = simulate(
        chain(2), lambda label, n: 0.1 if (label, n) == ("s1.f", slow) else 0.01, executions=12
    )
    took = {
        s.execution: s.seconds
        for s in made.timeline.spans
        if s.kind == "compute" and s.label == "s1.f"
    }
    assert took[slow] == pytest.approx(0.1)
    assert took[slow + 1] == pytest.approx(0.01)


def test_the_most_exact_name_counts():
    a, b = Actor(0, "a"), Actor(1, "b")
    x = call(a, "f", InputNode())
    plan = lower(call(b, "f", call(a, "f", x), call(a, "g", x)), Config())
    made = simulate(plan, {"f": 1, "a.f": 2, "a.f#2": 3, "g": 4}, executions=1)
    took = {s.label: s.seconds for s in made.timeline.spans if s.kind == "compute"}
    assert took == pytest.approx({"a.f": 2, "a.f#2": 3, "a.g": 4, "b.f": 1})


def test_a_graph_whose_results_are_all_inputs_parts_or_effects():
    a = Actor(0, "a")
    inp = InputNode()
    done = call(a, "save", inp[0])
    plan = lower(MultiOutputNode([inp[1]], effects=[done]), Config())
    made = simulate(plan, 0.01, executions=4, depth=1, latency=0)
    assert made.makespan == pytest.approx(0.04)


def test_tensors_beside_the_frames_come_while_their_actor_computes():
    # b.g needs what a.f has made, and b.f does not.
    a, b = Actor(0, "a"), Actor(1, "b")
    inp = InputNode()
    tensor = call(a, "f", inp).with_tensor_transport(OUT_OF_BAND)
    plan = lower(call(b, "g", call(b, "f", inp), tensor), Config())
    # A transfer takes 0.03, b.f 0.04, b.g 0.02, and a.f nothing.
    given = {
        "durations": {"a.f": 0.0, "b.f": 0.04, "b.g": 0.02},
        "sizes": {"a.f": 3000},
        "bandwidth": 1e5,
        "latency": 0.0,
        "executions": 1,
    }
    late, early = (simulate(plan, overlap=on, **given) for on in (False, True))
    assert late.makespan == pytest.approx(0.04 + 0.03 + 0.02)
    assert early.makespan == pytest.approx(0.04 + 0.02)
    assert not [s for s in early.timeline.spans if s.kind == "wait"]


def test_what_is_shown(tmp_path):
    made = simulate(chain(2), {"s0.f": 0.01, "s1.f": 0.03}, depth=2, executions=20, name="two")
    assert str(made).splitlines()[:2] == [
        "two: 20 executions, up to 2 on the way, take 610 ms",
        "33.33 executions/s; latency p50 60.0 ms, max 70.0 ms; bubble 34.4%",
    ]
    assert "   98.4%  s1.f" in str(made).splitlines()
    text = made.draw(tmp_path / "two.svg")
    assert (tmp_path / "two.svg").read_text() == text == made._repr_svg_()
    assert "compute s1.f, execution 3: 30.0 ms" in text

    for name in ("two.png", "two"):
        with pytest.raises(ValueError, match=r"must end in '\.svg', and is"):
            made.draw(tmp_path / name)
        assert not (tmp_path / name).exists()

    made.trace(tmp_path / "two.json")
    document = json.loads((tmp_path / "two.json").read_text())
    events = document["traceEvents"]
    tasks = [e for e in events if e["ph"] == "X" and e["cat"] == "task"]
    assert len(tasks) == 40
    assert tasks[0]["name"] == "s0.f"
    assert tasks[0]["dur"] == pytest.approx(10_000)
    arrows = [e["ph"] for e in events if e.get("cat") == "edge"]
    # The input and the value between the two; results end at the executor, which has no span for it.
    assert arrows.count("s") == arrows.count("f") == 40
    made.trace(tmp_path / "two.json.gz")
    assert (tmp_path / "two.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    with pytest.raises(OSError, match="nowhere"):
        made.trace(tmp_path / "nowhere" / "two.json")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"durations": {"s0.f": 1}}, ValueError, "durations has none for s1.f"),
        ({"durations": {"f": 1, "s7.f": 1}}, ValueError, "durations has 's7.f', but the graph has"),
        ({"durations": {"f": -1}}, ValueError, "the duration of f must be at least 0 .*, not -1"),
        ({"durations": math.nan}, ValueError, "the duration of all tasks must be at least 0"),
        ({"durations": math.inf}, ValueError, r"at least 0 and at most 1e\+09, not inf"),
        ({"durations": 1e308}, ValueError, r"at least 0 and at most 1e\+09, not 1e\+308"),
        ({"durations": {"f": 10**400}}, ValueError, "the duration of f must be at least 0 and at"),
        ({"durations": lambda label, n: 1e10}, ValueError, "of s0.f in execution 0 must be at le"),
        ({"pace": 1e308}, ValueError, "pace must be at least 0 and at most"),
        ({"latency": math.inf}, ValueError, "latency must be at least 0 and at most"),
        ({"sizes": 1e308}, ValueError, "the size of all values must be at least 0 and at most"),
        ({"sizes": 1, "bandwidth": 5e-324}, ValueError, "the time that copying .* takes must be"),
        ({"durations": "slow"}, TypeError, "the duration of all tasks must be a number"),
        ({"durations": lambda label, n: None}, TypeError, "the duration of s0.f in execution 0"),
        ({"durations": None}, TypeError, "a Plan has no counters"),
        ({"executions": 0}, ValueError, "executions must be at least 1, not 0"),
        ({"executions": 1.5}, TypeError, "executions must be an integer"),
        ({"depth": 0}, ValueError, "depth must be from 1 to 4096, not 0"),
        ({"depth": True}, TypeError, "depth must be an integer, not True"),
        ({"overlap": 1}, TypeError, "overlap must be True, False or None, not 1"),
        ({"bandwidth": 0}, ValueError, "bandwidth must be above 0, not 0"),
        ({"latency": -1}, ValueError, "latency must be at least 0"),
        ({"latency": "1"}, TypeError, "latency must be a number"),
        ({"pace": math.inf}, ValueError, "pace must be at least 0"),
        ({"sizes": {"s3.f": 1}}, ValueError, "sizes has 's3.f', but the graph has"),
        ({"sizes": {"s0.f": "big"}}, TypeError, "the size of s0.f must be a number"),
    ],
)
def test_what_makes_no_sense_is_refused(options, kind, message):
    options.setdefault("durations", 0.01)
    with pytest.raises(kind, match=message):
        simulate(chain(2), **options)


def test_durations_may_be_any_real_numbers():
    np = pytest.importorskip("numpy")
    wanted = simulate(chain(2), 0.25)
    for number in (np.float32(0.25), np.float16(0.25), Fraction(1, 4)):
        for durations in (number, {"f": number}, lambda label, n, number=number: number):
            assert simulate(chain(2), durations).makespan == wanted.makespan
    assert simulate(chain(2), np.int64(1)).makespan == simulate(chain(2), 1).makespan
    for number in (np.bool_(True), np.complex64(1), "1"):
        with pytest.raises(TypeError, match="the duration of all tasks must be a number"):
            simulate(chain(2), number)


def test_without_any_time_there_is_no_limit():
    made = simulate(chain(2), 0, latency=0, executions=5)
    assert made.throughput == math.inf
    assert (made.makespan, made.bubble, made.critical_path) == (0, 0, ())
    assert "0 ns" in str(made)
    made.draw()
