"""GRPO (group-relative policy optimisation) with weights and rollouts as direct objects.

    trainer ==weights==> generators ==rollouts==> scorer, trainer

A small policy learns to sort digits; an answer that is sorted is rewarded with 1. While the trainer updates
the weights, the generators make the next rollouts with those from before the update: they are one step off
policy, for which the ratio is clipped. Tensors go from actor to actor; only references come by here.

python examples/grpo/train.py
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from importlib.util import find_spec
from statistics import mean, median
from time import perf_counter

if not find_spec("torch"):
    sys.exit("This example also needs: torch. In a clone, `make demo` installs it.")

from actors import GROUP, Generator, Rollout, Scorer, Step, Trainer, Weights

import conveyor

GENERATORS = 2
PRETRAINING = 80  # supervised steps, after which few answers are right


def nbytes(value: Weights | Rollout) -> int:
    tensors = value.state.values() if isinstance(value, Weights) else value[2:4]
    return sum(tensor.nbytes for tensor in tensors)


def overlapped(steps: list[Step], made: list[Rollout]) -> int:
    """The steps during which a generator was sampling."""
    spans = [rollout.span for rollout in made]
    return sum(any(a < step.span[1] and step.span[0] < b for a, b in spans) for step in steps)


def show(rewards: list[float], made: list[Rollout], steps: list[Step], seconds: float) -> None:
    updates = sorted(1e3 * rollout.update for rollout in made)
    waits = sorted(1e3 * step.waited for step in steps)
    print(f"  reward {rewards[0]:.2f} -> {rewards[1]:.2f}, {len(steps)} steps in {seconds:.1f} s")
    print(
        f"  weight update  {median(updates):7.2f} ms, the longest {updates[-1]:7.2f} ms"
        f" ({len(updates)} updates, by {', '.join(sorted({one.route for one in made}))})"
    )
    print(
        f"  wait for them  {median(waits):7.2f} ms, the longest {waits[-1]:7.2f} ms, in the trainer"
    )
    print(f"  oldest rollout {max(step.stalest for step in steps)} version behind")
    print(f"  steps of the trainer while a generator samples: {overlapped(steps, made)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rise", type=float, default=0.15, help="of the reward, to be reached")
    parser.add_argument("--prompts", type=int, default=16, help="for each generator and step")
    options = parser.parse_args()
    conveyor.init(preload=["torch"])
    trainer, scorer = Trainer.remote(0, PRETRAINING), Scorer.remote()
    generators = [Generator.remote(1 + rank) for rank in range(GENERATORS)]

    def generate() -> list[conveyor.ObjectRef[Rollout]]:
        published = trainer.publish.remote()  # nothing has moved; each generator reads it there
        return [one.rollout.remote([published], options.prompts) for one in generators]

    published = trainer.publish.remote()
    weights = conveyor.get(published)
    print(f"  weights {nbytes(weights) / 1e6:.2f} MB, by {published.route()}")
    del published
    rollouts = generate()
    conveyor.wait(rollouts, num_returns=len(rollouts))
    size = nbytes(conveyor.get(rollouts[0]))
    answers = GROUP * options.prompts
    print(f"  rollout {size / 1e6:.2f} MB, {answers} answers, by {rollouts[0].route()}")

    began, steps, made = perf_counter(), [], []
    # The calls of two steps are on their way: no actor waits for this process.
    under_way: deque[tuple[conveyor.ObjectRef[Step], list[conveyor.ObjectRef[Rollout]]]] = deque()
    for number in range(options.steps):
        ready, rollouts = rollouts, generate()  # by the weights before the update
        rewards = scorer.score.remote(*ready)
        under_way.append((trainer.update.remote(rewards, *ready), ready))
        del ready
        while under_way and (len(under_way) > 1 or number + 1 == options.steps):
            step, used = under_way.popleft()
            steps.append(conveyor.get(step))
            made += [rollout._replace(tokens=None, logprobs=None) for rollout in conveyor.get(used)]
            del used
            if len(steps) % 10 == 0:
                print(f"  step {len(steps):3}: reward {mean(s.reward for s in steps[-10:]):.2f}")
    seconds = perf_counter() - began
    conveyor.wait(rollouts, num_returns=len(rollouts))
    del rollouts
    conveyor.get([actor.wait_until_freed.remote() for actor in (trainer, *generators)])
    conveyor.shutdown()

    part = max(1, options.steps // 8)
    first, last = mean(s.reward for s in steps[:part]), mean(s.reward for s in steps[-part:])
    show([first, last], made, steps, seconds)
    checks = {
        f"the reward rises by {options.rise}": last >= first + options.rise,
        "weights are read in the trainer's memory": {one.route for one in made} == {"read"},
        "no rollout is older than 1 version": max(step.stalest for step in steps) <= 1,
        "generators and trainer work at the same time": overlapped(steps, made) >= len(steps) / 2,
    }
    print("  generators' weights are the trainer's, bit by bit: yes")  # or its update has raised
    print("  nothing can be read any more at the end: yes")  # or the waits have raised
    for name, holds in checks.items():
        print(f"  {name}: {'yes' if holds else 'NO'}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
