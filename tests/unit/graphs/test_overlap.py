"""Where receives stand for overlap, and what is said of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_graphs import OUT_OF_BAND, Actor, call, chain, random_plan, transport_beside

from conveyor.config import Config
from conveyor.dag import DAGContext, InputNode
from conveyor.exceptions import GraphError
from conveyor.observe import simulate
from conveyor.plan import Call, Recv, Send, explain, lower
from conveyor.plan.model import TIME_LIMIT, Await, Try
from conveyor.plan.reading import Values, in_order
from conveyor.plan.schedule import early_receives, overlapped, prove_programs

A, B = Actor(0, "a"), Actor(1, "b")
SENDS = (
    "\n\noverlap\n"
    "  every send stands right behind the task that makes its value: it waits for nothing\n"
)


@pytest.fixture(scope="module", autouse=True)
def out_of_band():
    with transport_beside():
        yield


def two_inputs(**options):
    """b.g needs what a.f has made; b.f and b.h, bound before and after a.f, do not."""
    inp = InputNode()
    first = call(B, "f", inp)
    tensor = call(A, "f", inp).with_tensor_transport(OUT_OF_BAND)
    between = call(B, "h", first)
    return lower(call(B, "g", between, tensor), Config(**options))


def steps_of(plan, actor):
    found = []
    for step in plan.programs[actor].steps:
        match step:
            case Call():
                found.append(plan.tasks[step.task].label)
            case Recv():
                found.append(f"recv {plan.edges[step.edge].source}")
            case Try():
                found.append(f"try {plan.edges[step.edge].source}")
            case Await():
                found.append(f"wait {plan.edges[step.edge].source}")
    return found


def number_of(plan, name):
    return next(info.index for info in plan.actors if info.name == name)


def test_a_receive_is_tried_ahead_of_what_was_bound_after_its_maker():
    plan = two_inputs()
    b = number_of(plan, "b")
    late = ["recv input", "b.f", "b.h", "recv a.f", "wait a.f", "b.g"]
    assert steps_of(plan, b) == late
    early = two_inputs(overlap=True)
    assert steps_of(early, b) == [*late[:2], "try a.f", *late[2:]]
    assert overlapped(plan, True) == early
    assert overlapped(early, False) == plan
    assert [
        [early.tasks[task].label for task in (*one.ahead, one.user)]
        for one in early_receives(early)
    ] == [["b.h", "b.g"]]
    assert list(early_receives(plan)) == []


def test_explain_says_why():
    assert "overlap" not in explain(two_inputs())
    text = explain(two_inputs(overlap=True))
    assert text.endswith(
        f"{SENDS}  #1 a.f at b: tried ahead of b.h, bound after its maker and before b.g, which needs it; "
        "taken from there on as soon as it has come"
    )
    shown = [" ".join(line.split()) for line in text.splitlines()]
    at = shown.index("3 try a.f ← a")
    assert shown[at + 2 : at + 4] == ["5 recv a.f ← a", "6 wait tensors of a.f ← a"]
    inp = InputNode()
    tensor = call(A, "f", inp).with_tensor_transport(OUT_OF_BAND)
    text = explain(lower(call(B, "g", call(B, "f", tensor), tensor), Config(overlap=True)))
    assert "#1 a.f at b: not early; no other task there is bound between its maker" in text


def test_values_in_frames_stay_where_they_are():
    plan = chain(3)
    assert chain(3, overlap=True).programs == plan.programs
    assert explain(chain(3, overlap=True)).startswith(explain(plan))
    assert explain(chain(3, overlap=True)).endswith(
        f"{SENDS}  nothing is received early: all values travel in their frames, "
        "which their writers copy and their readers read in place"
    )


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=150, deadline=None)
def test_it_is_proved_reversible_and_keeps_the_order(seed):
    late = random_plan(seed, out_of_band=True)
    early = random_plan(seed, out_of_band=True, overlap=True)
    prove_programs(early.programs, early.tasks, early.edges)
    assert overlapped(late, True) == early
    assert overlapped(early, False) == late
    # All bound tasks in bind order, one after the other, find their values: as the inline engine runs them.
    Values(early)
    made = {bundle.edge for bundle in early.inputs}
    for stage in in_order(early):
        assert {step.edge for step in stage.receives} <= made
        made |= {send.edge for send in stage.sends}
    for program in early.programs:
        made = set()
        for step in program.steps:
            if isinstance(step, Call):
                made = {step.out, *step.outs}
            elif isinstance(step, Send):
                assert step.reg in made  # of the task right before it
            else:
                made = set()
    # Whoever waits does so where it would without overlap, and each receive is tried once at most.
    for program, before in zip(early.programs, late.programs, strict=True):
        assert tuple(s for s in program.steps if not isinstance(s, Try)) == before.steps
        for place, step in enumerate(program.steps):
            if isinstance(step, Try):
                assert early.edges[step.edge].out_of_band
                rest = program.steps[place + 1 :]
                later = [s.edge for s in rest if isinstance(s, (Try, Recv))]
                assert later.count(step.edge) == 1
                kinds = [type(s) for s in rest]
                receive = [isinstance(s, Recv) and s.edge == step.edge for s in rest].index(True)
                assert kinds.index(Call) < receive


def makespans(times):
    """Without overlap and with it, where a transfer takes a second."""
    given = {"executions": 1, "sizes": 1000, "bandwidth": 1e3, "latency": 0}
    return [
        simulate(two_inputs(), lambda label, _: times.get(label, 0), overlap=on, **given).makespan
        for on in (False, True)
    ]


def test_a_transfer_hides_behind_the_tasks_that_its_receive_goes_ahead_of():
    late, early = makespans({"b.h": 2})
    assert late - early == pytest.approx(1)


def test_a_frame_that_comes_late_costs_nothing():
    for times in ({"a.f": 2, "b.h": 2}, {"a.f": 1, "b.h": 2}, {"a.f": 3, "b.h": 1}):
        late, early = makespans(times)
        assert late == early


def test_a_frame_that_comes_while_its_reader_waits_is_taken():
    """Here b waits for the tensors of c.f, those of a.f come meanwhile."""
    inp = InputNode()
    tensor = call(A, "f", inp).with_tensor_transport(OUT_OF_BAND)
    other = call(Actor(2, "c"), "f", inp).with_tensor_transport(OUT_OF_BAND)
    plan = lower(call(B, "g", call(B, "h", other), tensor), Config(overlap=True))
    assert steps_of(plan, number_of(plan, "b"))[:4] == [
        "recv c.f", "try a.f", "wait c.f", "b.h",
    ]  # fmt: skip
    sizes = {"a.f": 1, "c.f": 1}
    given = {"executions": 1, "sizes": sizes, "bandwidth": 1, "latency": 0}
    times = {"a.f": 0.5, "b.h": 1}
    made = simulate(plan, lambda label, _: times.get(label, 0), **given)
    transfers = {s.label: (s.start, s.end) for s in made.timeline.spans if s.kind == "transfer"}
    assert transfers == {"c.f": (0, 1), "a.f": (0.5, 1.5)}
    assert made.makespan == 2


def waits(makes, busy=1.0, executions=40):
    """How long b waits ahead of b.h in each execution, for a frame that comes after ``makes`` seconds."""
    given = {"executions": executions, "depth": 1, "latency": 0}
    made = simulate(
        two_inputs(overlap=True),
        lambda label, _: {"a.f": makes, "b.h": busy}.get(label, 0),
        **given,
    )
    found = [0.0] * executions
    for span in made.timeline.spans:
        if span.kind in ("wait", "idle") and span.participant >= 0 and span.label == "a.f":
            found[span.execution] += span.seconds
    return [round(seconds, 9) for seconds in found], made


def test_a_little_time_limit():
    # What b.h takes is not known in the first execution.
    found, made = waits(0.004)
    assert found == [0.0] + [0.004] * 39
    assert len([s for s in made.timeline.spans if s.kind == "transfer"]) == 40
    # A twentieth of it is all that is spent, and less and less of that where it is in vain.
    found, _ = waits(0.004, busy=0.04)
    vain = [n for n, seconds in enumerate(found) if seconds == 0.002]
    assert vain == [1, 2, 3, 5, 8, 13, 22, 39]


@given(seed=st.integers(0, 1 << 32), depth=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_nobody_is_much_slower_for_it(seed, depth):
    rng = random.Random(seed)
    late = random_plan(seed, out_of_band=True)
    seconds = {task.label: rng.choice([0.0, 0.01, 0.02, 0.05]) for task in late.tasks}
    given = {"executions": 12, "depth": depth, "sizes": 1000, "bandwidth": 1e5, "latency": 0.001}
    slow, quick = (simulate(late, seconds, overlap=on, **given).makespan for on in (False, True))
    assert quick <= slow * (1 + 2 * TIME_LIMIT)


def test_the_settings():
    with pytest.raises(GraphError, match="overlap must be True or False, not 1"):
        Config(overlap=1)
    context = DAGContext(overlap_gpu_communication=True)
    assert context.options() == {"overlap": True}
