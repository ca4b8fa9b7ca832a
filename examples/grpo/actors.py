"""The actors: generators make rollouts, a scorer verifies them, the trainer learns from them."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch
from policy import Policy, advantages, clipped_loss, fingerprint, make_prompts, pretrain, reward

import conveyor
from conveyor.experimental import wait_tensor_freed

GROUP = 8  # answers to each prompt


class Weights(NamedTuple):
    version: int
    state: dict[str, torch.Tensor]


class Rollout(NamedTuple):
    version: int  # of the weights
    fingerprint: str  # of the generator's weights
    tokens: torch.Tensor
    logprobs: torch.Tensor
    route: str  # how the weights came
    update: float  # seconds that they took
    span: tuple[float, float]  # when sampling began and was done


class Step(NamedTuple):
    version: int  # of the weights that it began with
    stalest: int  # of the rollouts: how many versions older they were
    reward: float
    waited: float  # seconds until no generator needed the weights
    span: tuple[float, float]  # when it began and was done


@conveyor.remote
class Generator:
    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self.policy = Policy()
        self.targets = list(self.policy.state_dict().values())
        self.random = torch.Generator().manual_seed(seed)

    @conveyor.method(tensor_transport="auto")
    def rollout(self, published: list[conveyor.ObjectRef[Weights]], prompts: int) -> Rollout:
        # The call keeps the list until it returns. What is taken out of it the trainer may write to as soon
        # as it is here.
        ref = published.pop()
        route, began = ref.route(), perf_counter()
        version = conveyor.get(ref, into=self.targets).version
        update = perf_counter() - began
        del ref
        requested = make_prompts(prompts, self.random).repeat_interleave(GROUP, 0)
        tokens, logprobs = self.policy.sample(requested, self.random)
        self.last, span = tokens, (began + update, perf_counter())
        return Rollout(version, fingerprint(self.policy), tokens, logprobs, route, update, span)

    def wait_until_freed(self) -> None:
        """Until nobody can read the last rollout."""
        wait_tensor_freed(self.last, timeout=60)


@conveyor.remote
class Scorer:
    def score(self, *rollouts: Rollout) -> torch.Tensor:
        """Rewards: a row for each prompt."""
        return torch.cat([reward(rollout.tokens) for rollout in rollouts]).view(-1, GROUP)


@conveyor.remote
class Trainer:
    def __init__(self, seed: int, pretraining: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.policy = Policy()
        pretrain(self.policy, pretraining, torch.Generator().manual_seed(seed))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-3)
        self.version = 0
        self.fingerprints = {0: fingerprint(self.policy)}

    @conveyor.method(tensor_transport="auto")
    def publish(self) -> Weights:
        """The weights themselves: nothing is copied until a generator reads them here."""
        return Weights(self.version, self.policy.state_dict())

    def update(self, rewards: torch.Tensor, *rollouts: Rollout) -> Step:
        start = perf_counter()
        for rollout in rollouts:
            if rollout.fingerprint != self.fingerprints[rollout.version]:
                raise ValueError(
                    f"a rollout was not made with the weights of version {rollout.version}"
                )
            if self.version - rollout.version > 1:
                raise ValueError(f"a rollout is {self.version - rollout.version} versions old")
        tokens = torch.cat([rollout.tokens for rollout in rollouts])
        old = torch.cat([rollout.logprobs for rollout in rollouts])
        self.optimizer.zero_grad()
        advantage = advantages(rewards).view(-1, 1)
        clipped_loss(self.policy.logprobs(tokens), old, advantage, clip=0.2).backward()
        began = perf_counter()
        self.wait_until_freed()
        waited = perf_counter() - began
        self.optimizer.step()
        stalest = self.version - min(rollout.version for rollout in rollouts)
        span = (start, perf_counter())
        step = Step(self.version, stalest, float(rewards.mean()), waited, span)
        self.version += 1
        self.fingerprints[self.version] = fingerprint(self.policy)
        return step

    def wait_until_freed(self) -> None:
        """Until nobody can read the weights. They are published as one value: one tensor speaks for all."""
        wait_tensor_freed(self.policy.head.weight, timeout=60)
