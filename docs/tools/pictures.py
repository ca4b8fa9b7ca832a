"""Makes the documentation's pictures: `make pictures`.

Each is of the code on the page that shows it: the page's program is run, and what it has made is drawn.
The drawings and the chart are the same on every machine. The status and the trace show a run, and differ.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pages
from chart import draw_chart
from timeline import draw_trace

from conveyor.observe.drawing.picture import INK, MUTED, Picture, Text, text_width, write_svg

PICTURES = pages.ROOT / "docs" / "pictures"

#: Those that show a run.
OF_A_RUN = ("status.svg", "trace.svg")


def draw_all(folder: Path) -> None:
    """Write all pictures into ``folder``."""
    figures = (pages.ROOT / "docs" / "benchmarks.md").read_text()
    (folder / "measured.svg").write_text(write_svg(draw_chart(figures)))
    for page in ("docs/index.md", "docs/guide/observing.md", "docs/guide/simulate.md"):
        # A process for each: actors are numbered as in a program that has just begun.
        subprocess.run(
            [sys.executable, __file__, "--page", page, "--into", str(folder.resolve())],
            check=True,
            stdout=subprocess.DEVNULL,
        )


def draw_page(page: str, folder: Path) -> None:
    """Write the pictures of one page, whose program is run in a folder of its own."""
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        path = Path("page.py")
        path.write_text(pages.program(pages.ROOT / page))
        made = runpy.run_path(str(path), run_name="__main__")
        if page == "docs/index.md":
            made["graph"].visualize(folder / "graph", format="svg")
            return
        if page == "docs/guide/simulate.md":
            made["would"].draw(folder / "simulated.svg")
            return
        made["graph"].visualize(folder / "drawing", format="svg")
        (folder / "status.svg").write_text(write_svg(draw_text(made["status"], "graph.status()")))
        title = "three executions, one after the other"
        picture = draw_trace(Path("run.json"), made["traced"], title)
        (folder / "trace.svg").write_text(write_svg(picture))


def draw_text(text: str, title: str) -> Picture:
    """What a program prints, as a picture."""
    lines = text.splitlines()
    width = max(text_width(line, 13) for line in lines)
    shapes = [Text(20, 28, title, 13, MUTED)]
    shapes += [Text(20, 54 + 19 * row, line, 13, INK) for row, line in enumerate(lines)]
    return Picture(width + 40, 54 + 19 * len(lines), title, tuple(shapes))


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the documentation's pictures.")
    parser.add_argument("--into", type=Path, default=PICTURES, help="the folder to write to")
    parser.add_argument("--page", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.page:
        draw_page(options.page, options.into)
    else:
        draw_all(options.into)


if __name__ == "__main__":
    main()
