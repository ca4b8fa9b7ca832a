"""The table that says which tests run on which engine has all files, and only what is so."""

import os
import re
import subprocess
from pathlib import Path

import nodes_apart
import pytest
import suites

ROWS = suites.rows()
#: Targets of make by which a file can run on an engine.
TARGETS = {
    "local": {"test"},
    "inline": {"test", "test-inline"},
    "ray": {"test", "test-ray"},
    "apart": {"test", "test-nodes"},
}

#: What has a suite's tests run on an engine.
SETTINGS = {
    "ray": "CONVEYOR_ENGINE=ray",
    "inline": "CONVEYOR_ENGINE=inline",
    "apart": "CONVEYOR_TEST_NODES=apart",
}


def test_every_file_has_its_row_or_that_of_its_folder():
    files = {str(path.relative_to(suites.ROOM)) for path in suites.ROOM.rglob("test_*.py")}
    assert {row.file for row in ROWS} == files
    table = suites.table()
    told = {row.file: row for row in table}
    assert len(told) == len(table)
    folders = {f"{file.rpartition('/')[0]}/" for file in files if "/" in file}
    assert set(told) <= files | folders
    for file in told.keys() & files:
        folder = told.get(f"{file.rpartition('/')[0]}/")
        assert folder is None or folder[1:] != told[file][1:], f"{file} has the row of its folder"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.file)
def test_a_file_runs_somewhere_by_targets_that_there_are(row):
    runs = {engine: getattr(row, engine) for engine in suites.ENGINES}
    for engine, target in runs.items():
        assert target in {"", *TARGETS[engine]}
    assert row.local or row.inline
    # Where it does not run between hosts the table says why, and nowhere else.
    assert bool(row.reason) is not bool(row.apart)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.file)
def test_a_file_that_runs_inline_by_make_test_asks_for_that_itself(row):
    source = (suites.ROOM / row.file).read_text()
    asks = re.search(r'"inline"|def \w+\(.*\bengine\b.*\):$|usefixtures\("engine"\)', source, re.M)
    if row.inline != "test-inline":
        assert bool(asks) is (row.inline == "test")


def test_what_is_skipped_between_hosts_is_of_files_that_run_there():
    apart = {Path(row.file).stem for row in ROWS if row.apart}
    assert set(nodes_apart.LIMITS) <= apart


@pytest.mark.parametrize(
    ("target", "engine", "suite"),
    [
        ("test", "ray", "test"),
        ("test", "apart", "test"),
        ("test-ray", "ray", ""),
        ("test-nodes", "apart", ""),
        ("test-inline", "inline", "test-inline"),
    ],
)
def test_make_runs_what_the_table_says(target, engine, suite):
    if not (suites.ROOT / "Makefile").exists():
        pytest.skip("there is no Makefile beside these tests")
    environ = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    said = subprocess.run(
        ["make", "--dry-run", "--always-make", target],
        cwd=suites.ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = suites.paths(engine, suite)
    assert paths
    lines = [line for line in said.splitlines() if all(path in line.split() for path in paths)]
    assert any(SETTINGS[engine] in line for line in lines), said
