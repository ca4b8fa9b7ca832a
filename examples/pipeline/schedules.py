"""Schedules of pipeline-parallel training: what each stage does, in which order.

A schedule is a list for each stage, of steps ``(kind, microbatch)``. ``bind`` writes it as a graph: the order
in which an actor's methods are bound is the order in which it runs them.
"""

from __future__ import annotations

from typing import Any

Step = tuple[str, int]


def gpipe(stages: int, count: int) -> list[list[Step]]:
    """All microbatches forward, then all of them backward."""
    steps = [("forward", m) for m in range(count)] + [("backward", m) for m in range(count)]
    return [list(steps) for _ in range(stages)]


def one_f_one_b(stages: int, count: int) -> list[list[Step]]:
    """Backward as soon as can be: a stage keeps the activations of few microbatches."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, count)
        order = [("forward", m) for m in range(ahead)]
        for m in range(ahead, count):
            order += [("forward", m), ("backward", m - ahead)]
        order += [("backward", m) for m in range(count - ahead, count)]
        orders.append(order)
    return orders


def zero_bubble(stages: int, count: int) -> list[list[Step]]:
    """1F1B in which ``backward`` makes only what the stage before needs: the gradients of the weights wait
    for a time in which there is nothing else to do (ZB-H1 of arXiv:2401.10241)."""
    orders = []
    for stage, order in enumerate(one_f_one_b(stages, count)):
        waiting: list[int] = []
        made: list[Step] = []
        backward = 0
        for kind, m in order:
            made.append((kind, m))
            if kind == "backward":
                backward += 1
                waiting.append(m)
                # So many are kept in hand, to fill the stage's end.
                if backward > stage:
                    made.append(("weights", waiting.pop(0)))
        orders.append(made + [("weights", m) for m in waiting])
    return orders


def bind(actors: list[Any], orders: list[list[Step]], count: int, inputs: Any) -> list[Any]:
    """Bind the steps of all stages. ``inputs``: a value for each microbatch. Return the last step of each."""
    last = len(actors) - 1
    done: dict[tuple[str, int, int], Any] = {}
    ahead = [list(order) for order in orders]
    while any(ahead):
        before = len(done)
        for stage, order in enumerate(ahead):
            while order:
                kind, m = order[0]
                if kind == "forward":
                    needed = inputs[m] if stage == 0 else done.get(("forward", stage - 1, m))
                elif kind == "backward" and stage < last:
                    needed = done.get(("backward", stage + 1, m))
                else:
                    needed = done.get(("forward" if kind == "backward" else "backward", stage, m))
                if needed is None:
                    break  # another stage's turn
                done[kind, stage, m] = getattr(actors[stage], kind).bind(needed)
                order.pop(0)
        if len(done) == before:
            raise ValueError(f"no stage can go on: {[order[0] for order in ahead if order]}")
    # What nobody else reads: each stage's last gradients.
    ends = [steps for steps in done if steps[0] == "weights"] or [
        steps for steps in done if steps[0] == "backward" and steps[1] == 0
    ]
    return [done[step] for step in ends]
