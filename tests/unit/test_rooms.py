"""Imports between the product's files run in no circle but within one concept."""

import ast
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"

#: Files that import each other because they belong to one concept.
TOGETHER = [
    # Refs ask the process's runtime, which has a table of them. Its protocol knows all by their types.
    {
        "calls.retrying",
        "runtime.context",
        "runtime.broker",
        "runtime.protocol",
        "refs.imports",
        "refs.ref",
        "runtime.aio",
        "refs.watcher",
    },
]


def modules():
    found = {}
    for path in SOURCES.rglob("*.py"):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path, known):
    """The modules of ours that a file imports anywhere, also for checkers alone. The package itself is left
    out: it has the public names, which are imported when they are asked for."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in inner)


def reached(start, arrows):
    found, ahead = set(), [start]
    while ahead:
        new = arrows[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def test_no_circle_of_imports():
    known = modules()
    del known["conveyor"]
    arrows = {
        name: set(imports(path, known)) & known.keys() - {name} for name, path in known.items()
    }
    ways = {name: reached(name, arrows) for name in arrows}
    circles = {
        frozenset(other.removeprefix("conveyor.") for other in ways[name] if name in ways[other])
        for name in ways
        if name in ways[name]
    }
    assert [sorted(circle) for circle in circles if not any(circle <= t for t in TOGETHER)] == []


def test_the_arrows_are_seen():
    known = modules()
    assert "conveyor.runtime.context" in set(imports(known["conveyor.refs.ref"], known))
    assert "conveyor.dag.node" in set(imports(known["conveyor.dag.inputs"], known))
