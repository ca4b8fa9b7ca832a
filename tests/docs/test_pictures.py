"""The documentation's pictures are those of its code."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
OF_A_RUN = {"status.svg", "trace.svg"}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    made = subprocess.run(
        [sys.executable, ROOT / "docs/tools/pictures.py", "--into", folder],
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert made.returncode == 0, made.stderr
    return folder


def texts(path):
    return [node.text for node in ET.parse(path).iter() if node.tag.endswith("}text")]


def test_all_pictures_are_there(drawn):
    committed = {path.name for path in PICTURES.glob("*.svg")}
    assert {path.name for path in drawn.iterdir()} == committed
    shown = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert {name for name in committed if f"pictures/{name}" not in shown} == set()


@pytest.mark.parametrize("name", sorted({path.name for path in PICTURES.glob("*.svg")} - OF_A_RUN))
def test_drawings_are_current(drawn, name):
    assert (drawn / name).read_text() == (PICTURES / name).read_text(), "run `make pictures`"


def test_the_trace_shows_all_that_run(drawn):
    words = set(texts(drawn / "trace.svg"))
    assert {"driver", "prepare", "small", "large", "vote"} <= words
    tasks = [rect for rect in ET.parse(drawn / "trace.svg").iter() if rect.tag.endswith("}title")]
    titles = [rect.text for rect in tasks]
    assert sum(title.startswith("large.predict") for title in titles) == 3
    assert len(titles) > 30


def test_the_status_names_who_is_waited_for(drawn):
    assert any("running large.predict" in text for text in texts(drawn / "status.svg"))
