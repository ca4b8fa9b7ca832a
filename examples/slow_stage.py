"""One stage is slow: what `graph.stats()` says of it, what `graph.simulate()` says would help, and what does.

Photos are fetched, described by a model, and stored. The model takes most of the time, and gets its photos
over a slow link. What four changes bring is predicted with the times of the unchanged graph, then each is
made and measured. It exits with 1 if a prediction is off by more than 10 %.

    python examples/slow_stage.py
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

import conveyor
from conveyor import testing, transport
from conveyor.dag import InputNode

#: Seconds that the methods take, on devices that others do not use: they sleep.
SECONDS = {"fetch": 0.015, "prepare": 0.03, "describe": 0.03, "store": 0.025}
#: Seconds that a photo takes from its source to a model, once that asks for it.
LINK = 0.03
PHOTO = 1 << 18  # bytes


@conveyor.remote
class Source:
    def fetch(self, number):
        time.sleep(SECONDS["fetch"])
        return torch.full((PHOTO,), number, dtype=torch.uint8)


@conveyor.remote
class Model:
    def prepare(self, number):
        """Do what can be done before the photo is there."""
        time.sleep(SECONDS["prepare"])
        return f"photo {number}"

    def describe(self, name, photo):
        time.sleep(SECONDS["describe"])
        return f"{name}: {int(photo[-1])}"


@conveyor.remote
class Store:
    def store(self, *described):
        time.sleep(SECONDS["store"])
        return described


def bind(source, models, store):
    """Take as many photos at a time as there are models."""
    with InputNode() as numbers:
        described = []
        for i, model in enumerate(models):
            photo = source.fetch.bind(numbers[i]).with_tensor_transport("link")
            # Bound after the photo's maker, so with `overlap` the photo travels meanwhile.
            name = model.prepare.bind(numbers[i])
            described.append(model.describe.bind(name, photo))
        return store.store.bind(*described)


@dataclass(frozen=True)
class Change:
    """What is done to the graph: ``models`` describe photos, and ``depth`` executions are on their way."""

    title: str
    models: int
    depth: int
    overlap: bool


BEFORE = Change("as it is", 1, 1, False)
CHANGES = [
    Change("depth 4", 1, 4, False),
    Change("depth 8", 1, 8, False),
    Change("depth 4, overlap", 1, 4, True),
    Change("depth 4, overlap, two models", 2, 4, True),
]


def predict(graph, change, durations):
    """Photos in a second, by the graph's Plan and what the methods take."""
    sizes = {edge.source: PHOTO for edge in graph.plan.edges if edge.out_of_band}
    would = graph.simulate(durations, sizes=sizes, bandwidth=PHOTO / LINK)
    return would, would.throughput * change.models


def measure(graph, change, count):
    """Execute ``count`` times. Return photos in a second, once the first ones are through."""
    pending, ended = deque(), []
    for n in range(count):
        numbers = [(n * change.models + i) % 256 for i in range(change.models)]
        pending.append((numbers, graph.execute(*numbers)))
        if len(pending) == change.depth or n == count - 1:
            for _ in range(1 if n < count - 1 else len(pending)):
                numbers, ref = pending.popleft()
                assert conveyor.get(ref) == tuple(f"photo {i}: {i}" for i in numbers)
                ended.append(time.monotonic())
    warm = change.depth
    return (count - 1 - warm) * change.models / (ended[-1] - ended[warm])


def fastest(graph, change, wanted):
    """Measure up to three times, until it is as fast as ``wanted``: others may use the machine, too."""
    best = 0.0
    for _ in range(3):
        best = max(best, measure(graph, change, change.depth + 10))
        if best > wanted:
            break
    return best


def show(stats):
    """Print what the counters say. Return what each method takes, by its name."""
    print("the counters: what takes long, and what is waited for")
    for one in stats.tasks:
        print(f"  {one.task:15} takes {one.running.p50_s * 1e3:3.0f} ms")
    for edge in stats.edges:
        for one in edge.waits:
            print(f"  {one.reader:15} waits {one.waiting.p50_s * 1e3:3.0f} ms for {edge.source}")
    return {one.task.split(".")[1]: one.running.p50_s for one in stats.tasks}


def main() -> int:
    conveyor.init(preload=["torch"])  # it is slow to import: once, and not in each actor
    transport.register(testing.FaultyTransport("link", delay=(LINK, LINK)))
    source, store, models = Source.remote(), Store.remote(), [Model.remote(), Model.remote()]
    rows, durations = [], None
    for change in [BEFORE, *CHANGES]:
        dag = bind(source, models[: change.models], store)
        with dag.compile(depth=change.depth, overlap=change.overlap) as graph:
            if durations is None:
                measure(graph, change, 8)
                durations = show(graph.stats())
            would, predicted = predict(graph, change, durations)
            measured = fastest(graph, change, 0.9 * predicted)
            busiest = max(would.actors, key=lambda actor: actor.computing)
        rows.append((change.title, predicted, measured, busiest))
    print("\nchange                        predicted  measured  busiest")
    for title, predicted, measured, busiest in rows:
        print(
            f"{title:28}  {predicted:7.1f}/s {measured:7.1f}/s  {busiest.actor} {busiest.computing:.0%}"
        )
    return int(any(abs(measured / predicted - 1) > 0.1 for _, predicted, measured, _ in rows))


if __name__ == "__main__":
    raise SystemExit(main())
