"""The tables of docs/architecture/locks-and-threads.md name what the sources have."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "conveyor"
PAGE = (ROOT / "docs" / "architecture" / "locks-and-threads.md").read_text()


def _files():
    # What users put into their tests is no part of a session.
    return [path for path in SOURCES.rglob("*.py") if SOURCES / "testing" not in path.parents]


def _makes_lock(value):
    made = [node.func for node in ast.walk(value) if isinstance(node, ast.Call)]
    return any(
        isinstance(f, ast.Attribute) and f.attr in {"Lock", "RLock", "Condition"} for f in made
    )


def _locks_of(node, owner):
    """The names of all attributes and globals that are made as locks, as the table writes them."""
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.ClassDef) else owner
        if (
            isinstance(child, ast.Assign | ast.AnnAssign)
            and child.value
            and _makes_lock(child.value)
        ):
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            yield f"{inner}.{target.attr if isinstance(target, ast.Attribute) else target.id}"
        yield from _locks_of(child, inner)


def _locks():
    return sorted(
        {lock for path in _files() for lock in _locks_of(ast.parse(path.read_text()), path.stem)}
    )


def _threads():
    """The constant names of all threads that are started, and of event loops, which have one each."""
    found = set()
    for path in _files():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if called in {"start", "start_or_run", "start_thread"} and len(node.args) > 1:
                found |= {node.args[1].value} if isinstance(node.args[1], ast.Constant) else set()
            if getattr(node.func, "id", "") in {"EventLoop", "Connection"}:
                for argument in node.args:
                    if isinstance(argument, ast.Constant):
                        name = argument.value
                        two = node.func.id == "Connection"
                        found |= {f"{name}-in", f"{name}-out"} if two else {name}
    return sorted(found)


def _in_backticks():
    return {text.removeprefix("graph.") for text in re.findall(r"`([^`]+)`", PAGE)}


@pytest.mark.parametrize("lock", _locks())
def test_every_lock_stands_in_the_table(lock):
    assert lock in _in_backticks()


@pytest.mark.parametrize("thread", _threads())
def test_every_thread_stands_in_the_table(thread):
    assert {f"conveyor-{thread}", f"-{thread}"} & _in_backticks()


def test_the_table_names_no_lock_that_is_gone():
    rows = [row.split("|")[1] for row in PAGE.splitlines() if row.startswith("| `")]
    named = {
        text.removeprefix("graph.")
        for row in rows
        for text in re.findall(r"`(?:graph\.)?(\w+\.\w+)`", row)
    }
    assert named == set(_locks())


def test_there_are_locks_and_threads_to_be_found():
    assert "Supervision.lock" in _locks()
    assert {"pump", "output", "refs-in"} <= set(_threads())


def _conditions(tree):
    """The names of all attributes that are made as conditions, and of the locks that each is given."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if getattr(node.value.func, "attr", "") == "Condition":
                yield target.attr, [getattr(of, "attr", "") for of in node.value.args]


CONDITIONS = [
    (path, name, of) for path in _files() for name, of in _conditions(ast.parse(path.read_text()))
]


@pytest.mark.parametrize(
    ("path", "name", "of"), CONDITIONS, ids=[f"{path.stem}.{name}" for path, name, _ in CONDITIONS]
)
def test_the_lock_of_a_condition_has_a_name_and_is_taken_by_that(path, name, of):
    """The entering of a condition is Python's: a signal handler that raises in it leaves the lock held."""
    assert of, f"{path}: {name} is made of no lock that has a name"
    entered = [
        f"{other}:{item.context_expr.lineno}"
        for other in path.parent.rglob("*.py")
        for node in ast.walk(ast.parse(other.read_text()))
        if isinstance(node, ast.With)
        for item in node.items
        if getattr(item.context_expr, "attr", "") == name
    ]
    assert entered == []


def test_nobody_waits_for_an_event_of_threading():
    """It has a condition of its own in it, which Python enters; see ``conveyor.flag``."""
    named = {path.name for path in SOURCES.rglob("*.py") if "threading.Event" in path.read_text()}
    assert named == {"flag.py"}


def test_no_future_has_a_condition_of_threading():
    """See ``conveyor.futures``."""
    made = {path: path.read_text() for path in _files() if "= Future()" in path.read_text()}
    assert len(made) > 5
    assert [
        path.name
        for path, text in made.items()
        if "from conveyor.futures import Future" not in text
    ] == []
