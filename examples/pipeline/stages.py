"""A small model in stages, each of which can be an actor of a pipeline."""

from __future__ import annotations

import time
from collections import deque

import torch

import conveyor

WIDTH = 16


def module(stage: int) -> torch.nn.Module:
    torch.manual_seed(stage)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


@conveyor.remote
class Stage:
    """The layers of one stage.

    targets: those of the microbatches, at the last stage.
    seconds: a forward pass sleeps so long, as do both halves of a backward pass: a slow device.
    """

    def __init__(self, stage, targets, seconds):
        torch.set_num_threads(1)
        self.module, self.targets, self.seconds = module(stage), targets, seconds
        self.reset(False)

    def reset(self, split):
        """Begin anew. With ``split``, ``backward`` leaves the gradients of the weights to ``weights``."""
        self.module.zero_grad()
        self.split = split
        self.kept, self.waiting, self.done = deque(), deque(), []

    def forward(self, x):
        begin = time.monotonic()
        x = x.detach().requires_grad_()
        y = self.module(x)
        if self.targets is not None:
            at = sum(kind == "forward" for kind, _, _ in self.done)
            y = torch.nn.functional.mse_loss(y, self.targets[at]) / len(self.targets)
        self.kept.append((x, y))
        return self._ended("forward", begin, 1, y.detach())

    def backward(self, grad):
        begin = time.monotonic()
        x, y = self.kept.popleft()
        if self.targets is not None:
            grad = None  # the loss begins here: what has come is only the news of it
        if self.split:
            (into,) = torch.autograd.grad(y, x, grad, retain_graph=True)
            self.waiting.append((y, grad))
            return self._ended("backward", begin, 1, into)
        y.backward(grad)
        return self._ended("backward", begin, 2, x.grad)

    def weights(self, _):
        begin = time.monotonic()
        y, grad = self.waiting.popleft()
        torch.autograd.backward(y, grad, inputs=list(self.module.parameters()))
        return self._ended("weights", begin, 1, None)

    def _ended(self, kind, begin, halves, value):
        time.sleep(self.seconds * halves)
        self.done.append((kind, begin, time.monotonic()))
        return value

    def report(self):
        """What was done, from when to when; the gradients."""
        return self.done, [p.grad for p in self.module.parameters()]


def alone(stages, batch, targets):
    """One step of the whole model in this process. Return the gradients of each stage."""
    model = torch.nn.Sequential(*(module(i) for i in range(stages)))
    torch.nn.functional.mse_loss(model(batch), targets).backward()
    return [[p.grad for p in stage.parameters()] for stage in model]
