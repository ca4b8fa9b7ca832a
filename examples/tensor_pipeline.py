"""Tensors through two actors at once: while one counts a batch, the other prepares the next."""

from time import perf_counter

import torch

import conveyor
from conveyor.dag import InputNode


@conveyor.remote
class Normalize:
    def run(self, batch: torch.Tensor) -> torch.Tensor:
        return (batch - batch.mean()) / batch.std()


@conveyor.remote
class CountOutliers:
    def run(self, batch: torch.Tensor) -> int:
        return int((batch.abs() > 3).sum())


def main() -> None:
    normalize, count = Normalize.remote(), CountOutliers.remote()
    with InputNode() as batch:
        dag = count.run.bind(normalize.run.bind(batch))

    batches = [torch.randn(1024, 1024) for _ in range(8)]  # 4 MiB each
    with dag.compile() as graph:
        conveyor.get(graph.execute(batches[0]))  # the first one warms the memory
        started = perf_counter()
        refs = [graph.execute(batch) for batch in batches]
        print("outliers:", conveyor.get(refs))
        print(f"{1e3 * (perf_counter() - started) / len(batches):.1f} ms per batch of 4 MiB")


if __name__ == "__main__":
    main()
