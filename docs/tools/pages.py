"""The documentation's pages as programs.

The ``python`` blocks of a page, in order, are one program. Its lines keep their numbers, so a traceback says
where in the page something went wrong. Comments of HTML, which no reader sees, add to it:

``<!-- python`` ... ``-->``
    lines that run and are not shown: what a block takes for given, and checks of what it has made.
``<!-- not run: REASON -->``
    before a block: it is shown, and only its syntax is checked.

A line ``print(...)  # text`` must print that text (``...`` in it stands for anything).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

_BLOCK = re.compile(
    r"(?P<unrun><!-- not run: [^\n]+ -->\n)?^(?P<indent> *)```python\n(?P<shown>.*?)^ *```$"
    r"|^<!-- python\n(?P<hidden>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)

# Compares what is printed with the comment behind it. In front of the program, on its first line.
_PRELUDE = """\
def _print(*values, _print=print, _lines=open(__file__).read().splitlines(), **options):
    import io, re, sys
    written = io.StringIO()
    _print(*values, file=written)
    line = _lines[sys._getframe(1).f_lineno - 1]
    told = re.fullmatch(r" *print\\(.*\\)  # (.*)", line)
    if told:
        wanted = ".*".join(map(re.escape, told[1].split("...")))
        assert re.fullmatch(wanted, written.getvalue().rstrip("\\n"), re.DOTALL), (
            f"{line.strip()} prints {written.getvalue()!r}")
    _print(*values, **options)
import builtins; builtins.print = _print; del _print, builtins
"""


class Block(NamedTuple):
    """Some lines of a page's program. ``line``: the number of the first, from 1 on."""

    line: int
    source: str
    shown: bool
    runs: bool


def pages() -> list[Path]:
    """All pages that may hold programs, the README first."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """What the page holds of Python, in order."""
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        shown = match["shown"] is not None
        kind = "shown" if shown else "hidden"
        line = text.count("\n", 0, match.start(kind)) + 1
        yield Block(line, textwrap.dedent(match[kind]), shown, match["unrun"] is None)


def program(page: Path) -> str:
    """The program of the page: all blocks that run, on their lines; empty if there is none."""
    lines: list[str] = []
    for block in blocks(page):
        if block.runs:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.source.splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def runnable(page: Path) -> str:
    """``program``, which also checks what it prints."""
    source = program(page)
    if not source:
        return ""
    # One line: the page's numbers stay.
    return f"exec({_PRELUDE!r}){source}" if source.startswith("\n") else source
