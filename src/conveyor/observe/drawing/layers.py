"""Layout of boxes in layers: every arrow points down, few cross, and lines are straight where possible."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 16


@dataclass(frozen=True, slots=True)
class Link:
    """An arrow between two boxes.

    source, target: the numbers of the boxes.
    width, height: the size of its label.
    """

    source: int
    target: int
    width: float = 0
    height: float = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """Position and size of a box.

    x, y: its left upper corner.
    width, height: its size.
    """

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Course:
    """Course of an arrow.

    ``stops`` are places ``(x, top, bottom)``, from the source's port (where top is bottom) to the
    target's. Within one the arrow runs straight down; nothing but the label, at the stop with the
    index ``label``, stands there. Between two stops is a gap without boxes.
    """

    stops: tuple[tuple[float, float, float], ...]
    label: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of all boxes, and courses of all arrows.

    boxes, courses: in the order of the boxes and links that were given.
    width, height: the size of the whole layout.
    """

    boxes: tuple[Placed, ...]
    courses: tuple[Course, ...]
    width: float
    height: float


#: Gives the height of a gap, by the ``x`` at which each arrow through the gap enters and leaves it.
Gap = Callable[[list[tuple[float, float]]], float]


@dataclass(slots=True)
class _Cell:
    """A box, or the position in a layer that an arrow runs through."""

    layer: int
    width: float
    height: float
    real: bool
    x: float = 0.0  # the left edge
    y: float = 0.0

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def lay_out(
    sizes: Sequence[tuple[float, float]],
    links: Sequence[Link],
    *,
    spacing: float,
    port: float,
    gap: Gap,
) -> Layout:
    """Place boxes of the given sizes (width, height) so that all ``links`` point down.

    Args:
        spacing: between two neighbours in a layer, at least.
        port: between two arrows at the same side of a box, at least; boxes are widened for it.
        gap: see ``Gap``.

    Raises:
        ValueError: the links go round in a circle.
    """
    width = _widths(sizes, links, port)
    deepest = depths(len(sizes), [(link.source, link.target) for link in links])
    # Boxes are in the even layers, the labels of the arrows in the odd ones.
    cells = [
        _Cell(2 * depth, w, height, real=True)
        for w, (_, height), depth in zip(width, sizes, deepest, strict=True)
    ]
    chains: list[list[int]] = []
    labels: list[int] = []
    for link in links:
        first, last = cells[link.source].layer + 1, cells[link.target].layer
        # The label is in the middle of the arrow, away from other labels of the same box.
        written = first + (last - first - 1) // 4 * 2
        chain = [link.source]
        for layer in range(first, last):
            here = layer == written
            chain.append(len(cells))
            cells.append(
                _Cell(layer, link.width if here else 0, link.height if here else 0, real=False)
            )
        chain.append(link.target)
        chains.append(chain)
        labels.append(written - first + 1)
    up: list[list[int]] = [[] for _ in cells]
    down: list[list[int]] = [[] for _ in cells]
    for chain in chains:
        for above, below in pairwise(chain):
            down[above].append(below)
            up[below].append(above)

    layers = _order(cells, up, down)
    _straighten(cells, layers, up, down, spacing)
    left = min((cell.x for cell in cells), default=0)
    for cell in cells:
        cell.x = math.floor(cell.x - left)
    _snap(cells, layers, up, spacing, 2 * port)

    ports = _ports(cells, chains, port)
    spans: list[list[tuple[float, float]]] = [[] for _ in layers]
    crossings: list[list[float]] = []
    for index, chain in enumerate(chains):
        xs = [cells[cell].middle for cell in chain]
        xs[0], xs[-1] = ports[index]
        crossings.append(xs)
        for number, (x0, x1) in zip(chain, pairwise(xs), strict=False):
            spans[cells[number].layer].append((x0, x1))
    y = 0.0
    bands: list[tuple[float, float]] = []
    for layer, members in enumerate(layers):
        height = max((cells[cell].height for cell in members), default=0)
        bands.append((y, y + height))
        for number in members:
            free = height - cells[number].height
            cells[number].y = y + (free // 2 if cells[number].real else 0)
        y += height
        if layer + 1 < len(layers):
            y += gap(spans[layer])
    courses = []
    for chain, xs, label in zip(chains, crossings, labels, strict=True):
        source, target = cells[chain[0]], cells[chain[-1]]
        # A box lower than its band: the arrow still starts where the band ends, by a stop.
        start, end = source.y + source.height, target.y
        stops = [(xs[0], start, bands[source.layer][1])]
        stops += [
            (x, *bands[cells[cell].layer]) for cell, x in zip(chain[1:-1], xs[1:-1], strict=True)
        ]
        stops.append((xs[-1], bands[target.layer][0], end))
        courses.append(Course(tuple(stops), label))
    return Layout(
        boxes=tuple(Placed(c.x, c.y, c.width, c.height) for c in cells if c.real),
        courses=tuple(courses),
        width=max((cell.x + cell.width for cell in cells), default=0),
        height=y,
    )


def _widths(
    sizes: Sequence[tuple[float, float]], links: Sequence[Link], port: float
) -> list[float]:
    """Make the boxes wide enough for the arrows at either side."""
    outgoing, coming = [0] * len(sizes), [0] * len(sizes)
    for link in links:
        outgoing[link.source] += 1
        coming[link.target] += 1
    return [
        max(width, (max(out, into) + 1) * port)
        for (width, _), out, into in zip(sizes, outgoing, coming, strict=True)
    ]


def depths(count: int, links: Sequence[tuple[int, int]]) -> list[int]:
    """Count for each box the links, from source to target, on the longest way to it.

    Raises:
        ValueError: the links go round in a circle.
    """
    below: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for source, target in links:
        below[source].append(target)
        missing[target] += 1
    found = [0] * count
    ready = [box for box in range(count) if not missing[box]]
    for box in ready:
        for target in below[box]:
            found[target] = max(found[target], found[box] + 1)
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    if len(ready) < count:
        raise ValueError("the links go round in a circle: nothing to lay out in layers")
    return found


def _order(cells: list[_Cell], up: list[list[int]], down: list[list[int]]) -> list[list[int]]:
    """Order the layers, each from left to right, with the fewest crossings that were found."""
    layers: list[list[int]] = [[] for _ in range(max((c.layer for c in cells), default=-1) + 1)]
    # Depth first from the top, so that what hangs together starts side by side.
    seen = [False] * len(cells)
    for top in sorted(range(len(cells)), key=lambda cell: cells[cell].layer):
        stack = [top]
        while stack:
            cell = stack.pop()
            if not seen[cell]:
                seen[cell] = True
                layers[cells[cell].layer].append(cell)
                stack += reversed(down[cell])
    best, fewest = [list(layer) for layer in layers], _crossings(layers, down)
    for sweep in range(_SWEEPS):
        if fewest == 0:
            break
        downward = sweep % 2 == 0
        adjacent = up if downward else down
        for layer in layers if downward else reversed(layers):
            _sort(layer, adjacent, _positions(layers))
        crossings = _crossings(layers, down)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return best


def _positions(layers: list[list[int]]) -> dict[int, int]:
    return {cell: position for layer in layers for position, cell in enumerate(layer)}


def _sort(layer: list[int], adjacent: list[list[int]], position: dict[int, int]) -> None:
    """Order a layer by the mean position of each cell's neighbours; a cell without any keeps its position."""

    def weight(cell: int) -> float:
        near = adjacent[cell]
        return sum(position[other] for other in near) / len(near) if near else position[cell]

    layer.sort(key=weight)


def _crossings(layers: list[list[int]], down: list[list[int]]) -> int:
    """Count the arrows that cross between neighbouring layers."""
    position = _positions(layers)
    total = 0
    for layer in layers:
        passed: list[int] = []
        for cell in layer:
            ends = sorted(position[other] for other in down[cell])
            total += sum(len(passed) - bisect_right(passed, end) for end in ends)
            for end in ends:
                insort(passed, end)
    return total


def _straighten(
    cells: list[_Cell],
    layers: list[list[int]],
    up: list[list[int]],
    down: list[list[int]],
    spacing: float,
) -> None:
    """Set every ``x``: in the layers' order, without overlap, near what a cell is linked to."""
    for layer in layers:
        x = 0.0
        for cell in layer:
            cells[cell].x = x
            x += cells[cell].width + spacing
    for sweep in range(_SWEEPS):
        downward = sweep % 2 == 0
        for layer in layers if downward else reversed(layers):
            wanted, weights = [], []
            for cell in layer:
                # The last sweeps look both ways, which settles what hangs between two layers.
                near = up[cell] if downward else down[cell]
                if sweep >= _SWEEPS // 2 or not near:
                    near = [*up[cell], *down[cell]]
                # A long arrow should run straight rather than a box stand in the middle.
                pulls = [1.0 if cells[other].real else 4.0 for other in near]
                sums = sum(p * cells[o].middle for p, o in zip(pulls, near, strict=True))
                mean = sums / sum(pulls) if near else cells[cell].middle
                wanted.append(mean - cells[cell].width / 2)
                weights.append(1.0 if cells[cell].real else 4.0)
            centres = _spread(wanted, weights, [cells[cell].width + spacing for cell in layer])
            for cell, x in zip(layer, centres, strict=True):
                cells[cell].x = x


def _snap(
    cells: list[_Cell],
    layers: list[list[int]],
    up: list[list[int]],
    spacing: float,
    reach: float,
) -> None:
    """Take small turns out of long arrows, if their neighbours leave room."""
    for layer in layers:
        for position, index in enumerate(layer):
            cell = cells[index]
            if cell.real or cells[up[index][0]].real:
                continue
            x = math.ceil(math.floor(cells[up[index][0]].middle) - cell.width / 2)
            low, high = -math.inf, math.inf
            if position:
                before = cells[layer[position - 1]]
                low = before.x + before.width + spacing
            if position + 1 < len(layer):
                high = cells[layer[position + 1]].x - spacing - cell.width
            if abs(x - cell.x) <= reach and max(low, 0) <= x <= high:
                cell.x = x


def _spread(wanted: list[float], weights: list[float], steps: list[float]) -> list[float]:
    """Find the positions nearest to ``wanted`` (least squares) that are at least ``steps`` apart.

    Less the steps before it, every position must be no lower than the one before: neighbours that
    violate that are pooled at their mean until none do.
    """
    offsets = [0.0]
    for step in steps[:-1]:
        offsets.append(offsets[-1] + step)
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for want, offset, weight in zip(wanted, offsets, weights, strict=False):
        mean, total, members = want - offset, weight, 1
        while pools and pools[-1][0] > mean:
            before, heavy, more = pools.pop()
            mean = (mean * total + before * heavy) / (total + heavy)
            total, members = total + heavy, members + more
        pools.append((mean, total, members))
    means = [mean for mean, _, members in pools for _ in range(members)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]


def _ports(cells: list[_Cell], chains: list[list[int]], port: float) -> list[tuple[float, float]]:
    """Find for each chain the points at which it leaves its source and comes to its target.

    The arrows at one side of a box stand in the order of where they lead.
    """
    ends: list[list[float]] = [[0.0, 0.0] for _ in chains]
    for side in (0, 1):
        at: dict[int, list[int]] = {}
        for index, chain in enumerate(chains):
            at.setdefault(chain[-side], []).append(index)
        near = 1 if side == 0 else -2
        for box, arrows in at.items():
            cell = cells[box]
            arrows.sort(key=lambda index: cells[chains[index][near]].middle)
            step = min(cell.width / (len(arrows) + 1), 3 * port)
            start = cell.middle - step * (len(arrows) - 1) / 2
            if len(arrows) == 1:
                # Alone, it may as well stand where it need not turn.
                there = cells[chains[arrows[0]][near]].middle
                start = there if abs(there - start) <= cell.width / 2 - port else start
            for number, index in enumerate(arrows):
                ends[index][side] = start + step * number
    return [(source, target) for source, target in ends]
