"""The tests that are skipped between hosts are those that there are."""

from pathlib import Path

import nodes_apart
import pytest

ROOM = Path(__file__).parents[1] / "integration"


@pytest.mark.parametrize(
    ("file", "name"),
    [(file, name) for file in nodes_apart.LIMITS for name in nodes_apart.LIMITS[file]],
)
def test_what_is_skipped_is_there(file, name):
    [path] = ROOM.rglob(f"{file}.py")
    assert f"def {name}(" in path.read_text()
