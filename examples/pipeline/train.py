"""Pipeline-parallel training: a step of a model in stages, each an actor, by each of three schedules.

    python examples/pipeline/train.py --schedule 1f1b --stages 4 --microbatches 8

It exits with 1 if gradients differ from those of the whole model in one process, or a stage has done its work
in another order than the schedule's.
"""

from __future__ import annotations

import argparse

import schedules
import torch
from stages import WIDTH, Stage, alone

import conveyor
from conveyor.dag import InputNode, MultiOutputNode

SCHEDULES = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "zero-bubble": schedules.zero_bubble,
}


def train(schedule, actors, batch):
    """Do one step, twice. Return what each stage has done when and its gradients, and a simulation."""
    orders = SCHEDULES[schedule](len(actors), len(batch))
    with InputNode() as inp:
        dag = MultiOutputNode(schedules.bind(actors, orders, len(batch), inp))
    with dag.compile(name=schedule) as graph:
        for _ in range(2):  # what is done for the first time is slow
            split = schedule == "zero-bubble"
            conveyor.get([actor.reset.remote(split) for actor in actors])
            conveyor.get(graph.execute(*batch))
        simulation = graph.simulate(executions=1)
    reports = conveyor.get([actor.report.remote() for actor in actors])
    return [done for done, _ in reports], [grads for _, grads in reports], simulation


def bubble_of(done):
    """The share of the stages' time, from the first work to the last, in which they do nothing."""
    spans = [(begin, end) for stage in done for _, begin, end in stage]
    window = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return 1 - sum(end - begin for begin, end in spans) / (window * len(done))


def formula(schedule, stages, count):
    """The bubble where a backward pass takes twice as long as a forward pass."""
    units = 3 * count if schedule == "zero-bubble" else count
    return (stages - 1) / (units + stages - 1)


def compare(schedule, done, grads, expected, count):
    """The largest difference of a gradient, and whether each stage's order is the schedule's."""
    differences = [
        float((ours - theirs).abs().max())
        for mine, reference in zip(grads, expected, strict=True)
        for ours, theirs in zip(mine, reference, strict=True)
    ]
    wanted = [[kind for kind, _ in order] for order in SCHEDULES[schedule](len(done), count)]
    return max(differences), [[kind for kind, _, _ in stage] for stage in done] == wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedule", choices=SCHEDULES, help="all of them, if left out")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.02, help="what a forward pass takes")
    given = parser.parse_args()
    stages, count, wrong = given.stages, given.microbatches, 0
    torch.manual_seed(0)
    batch, targets = torch.randn(2, count, 4, WIDTH)
    expected = alone(stages, batch, targets)
    last = stages - 1
    actors = [Stage.remote(i, targets if i == last else None, given.seconds) for i in range(stages)]
    print("schedule     bubble by formula  simulated  measured  order  gradients differ by")
    for schedule in [given.schedule] if given.schedule else SCHEDULES:
        done, grads, simulation = train(schedule, actors, batch)
        difference, in_order = compare(schedule, done, grads, expected, count)
        bubbles = (formula(schedule, stages, count), simulation.bubble, bubble_of(done))
        row = "{:17.1%}  {:9.1%}  {:8.1%}".format(*bubbles)
        print(f"{schedule:11}  {row}  {'good' if in_order else 'WRONG':5}  {difference:19.1e}")
        wrong += not in_order or difference > 1e-6
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
