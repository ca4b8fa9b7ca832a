"""Data-parallel training: two replicas, an allreduce in the graph, and the same weights as in one process.

The data set is made up: points on two spirals, which a small network learns to tell apart.
"""

import torch
from torch import nn

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.experimental import collective
from conveyor.experimental.collective import ReduceOp

STEPS = 200
BATCH = 128


def spirals(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(count) % 2
    turn = torch.rand(count, generator=generator).sqrt() * 7
    angle = turn + which * torch.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 7
    return points + 0.01 * torch.randn(count, 2, generator=generator), which


class Trainer:
    """A network with its optimizer; all begin with the same weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.net = nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)

    def gradients(self, batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        points, which = batch
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.net(points), which).backward()
        return [weight.grad for weight in self.net.parameters()]

    def step(self, *gradients: torch.Tensor) -> list[torch.Tensor]:
        for weight, gradient in zip(self.net.parameters(), gradients, strict=True):
            weight.grad = gradient
        self.optimizer.step()
        return [weight.detach() for weight in self.net.parameters()]

    def accuracy(self, points: torch.Tensor, which: torch.Tensor) -> float:
        with torch.no_grad():
            return float((self.net(points).argmax(1) == which).float().mean())


def main() -> None:
    points, which = spirals(2048)
    alone = Trainer()
    tensors = len(list(alone.net.parameters()))

    replicas = [conveyor.remote(Trainer).remote() for _ in range(2)]
    with InputNode() as batches:
        own = [
            replica.gradients.options(num_returns=tensors).bind(batches[i])
            for i, replica in enumerate(replicas)
        ]
        # One operation for all tensors: a list for each of them, with a node for each replica.
        averages = collective.allreduce.bind(
            [list(grads) for grads in zip(*own, strict=True)], op=ReduceOp.AVG
        )
        dag = MultiOutputNode(
            [r.step.bind(*grads) for r, grads in zip(replicas, averages, strict=True)]
        )

    furthest = 0.0
    generator = torch.Generator().manual_seed(1)
    with dag.compile(name="data parallel") as graph:
        for _ in range(STEPS):
            chosen = torch.randperm(len(points), generator=generator)[:BATCH]
            halves = [(points[half], which[half]) for half in chosen.chunk(2)]
            first, second = conveyor.get(graph.execute(*halves))
            expected = alone.step(*alone.gradients((points[chosen], which[chosen])))
            for one, other, wanted in zip(first, second, expected, strict=True):
                assert torch.equal(one, other), "the replicas have the same bits"
                furthest = max(furthest, float((one - wanted).abs().max()))
            assert furthest < 1e-3, "the weights are those of one process, but for rounding"

    accuracy = conveyor.get(replicas[0].accuracy.remote(points, which))
    print(f"{STEPS} steps on 2 replicas: {accuracy:.1%} are told apart")
    print(f"furthest from the weights of one process after any step: {furthest:.1e}")
    assert accuracy > 0.95


if __name__ == "__main__":
    main()
