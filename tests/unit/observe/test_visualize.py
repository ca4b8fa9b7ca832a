"""A drawing in every format."""

from __future__ import annotations

import logging
import re
import webbrowser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from observed_plans import diamond, layered, pipeline, plans

from conveyor.observe.drawing.formats import visualize
from conveyor.observe.drawing.picture import Rect, actor_colour, compose, rgb

NASTY = 'q"uo\\te\nline <b>&amp; #1; | `x` ]] --> \0'


def svg_texts(text: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(text).iter()]


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("schedule", [False, True])
def test_svg_tells_all(details, schedule):
    plan = diamond()
    texts = svg_texts(visualize(plan, None, "svg", False, details, schedule))
    for name in (*(t.label for t in plan.tasks), *(a.name for a in plan.actors), "input[0]"):
        assert name in texts
    assert ("same host" in texts) == details
    assert ("recv" in " ".join(texts)) == schedule


def test_long_and_nasty_names():
    plan = pipeline("n" * 300, NASTY, "数据")
    text = visualize(plan, None, "svg")
    assert any("n" * 300 in found for found in svg_texts(text))
    assert "数据.run" in svg_texts(text)


def test_a_large_graph_is_drawn_soon():
    """300 tasks, each of which uses two of the layer before."""
    assert visualize(layered(12, 25), None, "svg").count("<rect") > 300


def test_colours_are_readable_and_differ():
    assert len({actor_colour(i) for i in range(24)}) == 24
    assert actor_colour(24) == actor_colour(0)

    def luminance(colour):
        parts = [part / 255 for part in rgb(colour)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for i in range(-1, 24):
        contrast = (luminance(actor_colour(i).fill) + 0.05) / (luminance("#1b1f24") + 0.05)
        assert contrast > 7, "WCAG AAA"


@given(plan=plans())
@settings(max_examples=40, deadline=None)
def test_boxes_and_texts_of_a_picture_stay_within_it(plan):
    picture = compose(plan, "", True, True)
    for shape in picture.shapes:
        if isinstance(shape, Rect):
            assert shape.x >= 0
            assert shape.y >= 0
            assert shape.x + shape.width <= picture.width
            assert shape.y + shape.height <= picture.height
    ElementTree.fromstring(visualize(plan, None, "svg", channel_details=True))
    assert picture == compose(plan, "", True, True)


@given(plan=plans())
@settings(max_examples=60, deadline=None)
def test_ascii_draws_every_node(plan):
    text = visualize(plan, format="ascii")
    drawing = text.split("Graph:\n")[1].split("Schedule:")[0]
    for place, task in enumerate(plan.tasks, len(plan.inputs)):
        assert f"[{place}: {task.label}]" in drawing
    assert drawing.isascii()


def test_ascii_draws_layers():
    drawing = visualize(diamond(), format="ascii", schedule=False).split("Graph:\n")[1]
    assert (
        drawing
        == """\
  (0: input[0])  (1: input['weight'])

  0
  | #0
  v
  [2: split.prepare]

  2
  :
  v
  [3: split.halve]

  1     3         1     3
  | #1  | #3 [0]  | #1  | #4 [1]
  v     v         v     v
  [4: left.work]  [5: right.work]

  4     5
  | #5  :
  v     v
  [6: right.join]

  2            4            6
  | #2 to [1]  | #5 to [2]  | #6 to [0]
  v            v            v
  (7: output)
"""
    )


def test_ascii_drawing():
    drawing = visualize(pipeline("a", "b"), format="ascii", schedule=False).split("Graph:\n")[1]
    assert (
        drawing
        == """\
  (0: input)

  0
  | #0
  v
  [1: a.run]

  1
  | #1
  v
  [2: b.run]

  2
  | #2
  v
  (3: output)
"""
    )


def test_ascii_sections_and_schedule():
    text = visualize(diamond(), format="ascii", channel_details=True)
    titles = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert titles == ["Nodes", "Edges", "Legend", "Graph", "Schedule"]
    assert "shm, depth 16: same host" in text
    assert re.search(r"2 \.\.\.> 3 +no channel", text)
    assert re.search(r"call +split\.halve", text)
    bare = visualize(diamond(), format="ascii", schedule=False)
    assert "Schedule" not in bare
    assert "shm" not in bare


def test_ascii_is_printed_if_viewed_and_goes_into_no_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = visualize(diamond(), format="ascii")
    assert capsys.readouterr().out == ""
    assert visualize(diamond(), format="ascii", view=True) == text
    assert capsys.readouterr().out == text + "\n"
    assert list(tmp_path.iterdir()) == []


def test_dot_escapes_names():
    text = visualize(pipeline(NASTY), None, "dot", channel_details=True)
    string = r'"(?:[^"\\\n]|\\.)*"'
    bare = re.sub(string, "S", text)
    assert '"' not in bare
    assert "<b>" not in bare
    assert r'label="q\"uo\\te\\nline <b>&amp; #1; | `x` ]] --> \\x00.run"' in text
    assert bare.count("{") == bare.count("}") == 2
    assert "cluster_schedule" not in visualize(pipeline("a"), None, "dot", schedule=False)
    for line in bare.splitlines()[1:]:
        assert re.fullmatch(r"\s*(}|subgraph \w+ {|label=S;|\w+( -> \w+)? \[.*\];)", line), line


def test_mermaid_escapes_names():
    text = visualize(pipeline(NASTY, "b"), None, "mermaid", channel_details=True)
    assert text.startswith("flowchart TD\n")
    quoted = re.findall(r'"([^"]*)"', text)
    assert text.count('"') == 2 * len(quoted)
    assert "<b>" not in text
    assert any("q#34;uo#92;te#92;nline #60;b#62;#38;amp; #35;1;" in label for label in quoted)
    label, kind = r'"[^"]*"', r":::\w+"
    forms = (
        rf"n\d+(\[{label}\]|\(\[{label}\]\)){kind}",
        rf"n\d+ (-->|-\.->)(\|{label}\|)? n\d+",
        rf"s\d+\[{label}\]{kind}",
        rf"subgraph schedule\[{label}\]",
        r"classDef \w+ fill:#\w{6},stroke:#\w{6},color:#\w{6}",
        "end",
    )
    for line in text.splitlines()[1:]:
        assert any(re.fullmatch(form, line.strip()) for form in forms), line


@pytest.mark.parametrize("format", ["dot", "mermaid"])
def test_registers_are_dashed(format):
    text = visualize(diamond(), None, format)
    assert ("-.->" if format == "mermaid" else "style=dashed") in text


@pytest.mark.parametrize(
    ("format", "ending"),
    [("svg", "svg"), ("dot", "dot"), ("mermaid", "mmd")],
)
def test_files(format, ending, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = visualize(diamond(), format=format)
    assert [path.name for path in tmp_path.iterdir()] == [f"compiled_graph.{ending}"]
    made = Path(f"compiled_graph.{ending}").read_bytes()
    assert made.decode() == text if format in ("dot", "mermaid") else text[:7] == "digraph"
    if format == "svg":
        assert made.decode() == visualize(diamond(), None, format)
    else:
        assert visualize(diamond(), None, format) == text
    # A name with dots keeps all of them.
    visualize(diamond(), str(tmp_path / "v1.2"), format)
    assert (tmp_path / f"v1.2.{ending}").read_bytes() == made


def test_view_opens_the_file(tmp_path, monkeypatch, caplog):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda uri: opened.append(uri) or len(opened) == 1)
    monkeypatch.chdir(tmp_path)
    visualize(diamond(), "a b", "svg", view=True)
    assert opened == [(tmp_path / "a b.svg").as_uri()]
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "conveyor"):
        visualize(diamond(), "c", "svg", view=True)
    assert "no browser was found to view c.svg" in caplog.text


@pytest.mark.parametrize("format", ["png", "", "SVG", "../x"])
def test_unknown_formats(format, tmp_path):
    with pytest.raises(ValueError, match="'svg', 'dot', 'mermaid', 'ascii'"):
        visualize(diamond(), tmp_path / "x", format)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_view():
    with pytest.raises(ValueError, match="filename"):
        visualize(diamond(), None, "svg", view=True)


@pytest.mark.parametrize("format", ["svg", "dot"])
def test_no_such_directory(format, tmp_path):
    with pytest.raises(FileNotFoundError):
        visualize(diamond(), tmp_path / "none" / "x", format)
    assert list(tmp_path.iterdir()) == []
