"""Where things are placed."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.observe.drawing.layers import Link, lay_out


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 14))
    sizes = draw(
        st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=count, max_size=count)
    )
    pairs = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))))
    links = [
        Link(min(p), max(p), draw(st.integers(0, 60)), draw(st.integers(0, 20)))
        for p in pairs
        if p[0] != p[1]
    ]
    return sizes, links


@given(graph=graphs())
@settings(max_examples=150, deadline=None)
def test_nothing_overlaps_and_every_arrow_points_down(graph):
    sizes, links = graph
    layout = lay_out(sizes, links, spacing=7, port=3, gap=lambda spans: 5)
    assert len(layout.boxes) == len(sizes)
    assert len(layout.courses) == len(links)
    things = [(box.x, box.y, box.width, box.height) for box in layout.boxes]
    for link, course in zip(links, layout.courses, strict=True):
        x, top, _ = course.stops[course.label]
        if link.width and link.height:
            things.append((x - link.width / 2, top, link.width, link.height))
    for (ax, ay, aw, ah), (bx, by, bw, bh) in combinations(things, 2):
        apart = ax + aw <= bx or bx + bw <= ax or ay + ah <= by or by + bh <= ay
        assert apart, ((ax, ay, aw, ah), (bx, by, bw, bh))
    for x, y, width, height in things:
        assert x >= 0
        assert y >= 0
        assert x + width <= layout.width
        assert y + height <= layout.height
    for link, course in zip(links, layout.courses, strict=True):
        source, target = layout.boxes[link.source], layout.boxes[link.target]
        heights = [y for _, top, bottom in course.stops for y in (top, bottom)]
        assert heights == sorted(heights)
        assert heights[0] == source.y + source.height
        assert heights[-1] == target.y
        assert source.x < course.stops[0][0] < source.x + source.width
        assert target.x < course.stops[-1][0] < target.x + target.width
        # Between its ends an arrow runs through no box.
        for x, top, bottom in course.stops[1:-1]:
            for box in layout.boxes:
                out_of_band = not box.x < x < box.x + box.width
                assert out_of_band or bottom <= box.y or top >= box.y + box.height
    assert lay_out(sizes, links, spacing=7, port=3, gap=lambda spans: 5) == layout


def test_a_tree_has_no_loopback():
    links = [Link(0, 2), Link(0, 1), Link(1, 5), Link(2, 3), Link(1, 4), Link(2, 6)]
    boxes = lay_out([(10, 10)] * 7, links, spacing=5, port=2, gap=lambda spans: 5).boxes
    assert (boxes[1].x < boxes[2].x) == (max(boxes[4].x, boxes[5].x) < boxes[3].x)


def test_a_circle_is_refused():
    with pytest.raises(ValueError, match="circle"):
        lay_out([(1, 1)] * 2, [Link(0, 1), Link(1, 0)], spacing=1, port=1, gap=lambda s: 1)


def test_no_box_at_all():
    assert lay_out([], [], spacing=1, port=1, gap=lambda s: 1).boxes == ()
