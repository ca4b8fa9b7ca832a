"""Which files of tests/integration run on which engine, by a table of the documentation.

``python tests/suites.py ENGINE [SUITE]`` prints the paths of those that run on that engine (by that target of
make). It needs nothing but Python, since it is run before anything is installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture" / "proof.md"
ROOM = ROOT / "tests" / "integration"
#: The columns of engines, in the table's order.
ENGINES = ("local", "inline", "ray", "apart")


class Row(NamedTuple):
    """Where the tests of a file run: for each engine the target of make that does so, or nothing."""

    file: str
    local: str
    inline: str
    ray: str
    apart: str
    reason: str


def table() -> list[Row]:
    """Read the table. The row of a folder has its name, with a slash at the end."""
    found = []
    for line in PAGE.read_text().splitlines():
        if re.match(r"\| `(?:\w+/|[\w/]*test_\w+\.py)` \|.*\|.*\|.*\|.*\|", line):
            file, *others = [cell.strip() for cell in line.strip().strip("|").split("|")]
            found.append(Row(file.strip("`"), *others))
    return found


def rows() -> list[Row]:
    """Return a row for each file that the table has, also by the row of its folder."""
    told = {row.file: row for row in table()}
    found = []
    for path in sorted(ROOM.rglob("test_*.py")):
        file = str(path.relative_to(ROOM))
        row = told.get(file) or told.get(f"{file.rpartition('/')[0]}/")
        if row is not None:
            found.append(row._replace(file=file))
    return found


def paths(engine: str, suite: str = "") -> list[str]:
    """Find what runs on an engine; ``suite``: by that target of make."""
    at = 1 + ENGINES.index(engine)
    found = [row.file for row in rows() if row[at] and suite in ("", row[at])]
    return [str((ROOM / file).relative_to(ROOT)) for file in found]


if __name__ == "__main__":
    print(" ".join(paths(*sys.argv[1:])))
