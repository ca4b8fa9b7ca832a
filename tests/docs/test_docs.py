"""The code of every page of the documentation runs, and its links and pictures are there."""

import ast
import dataclasses
import inspect
import os
import re
import sys
from pathlib import Path

import pytest

import conveyor
from conveyor.api import unused

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import pages  # noqa: E402

PAGES = pages.pages()
WITH_CODE = [page for page in PAGES if pages.program(page)]


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_the_code_of_a_page_runs(scripts, tmp_path, page):
    needed = re.findall(r"^(?:import|from) (numpy|torch|fastapi)", pages.program(page), re.M)
    for module in set(needed):
        pytest.importorskip(module)
    # On a busy machine actors end late, and what they do at their end is shown, too.
    env = {"PYTHONWARNINGS": "error::UserWarning", "CONVEYOR_GRACE_SECONDS": "20"}
    scripts.run(pages.runnable(page), env=env)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_python_and_is_run_or_says_why_not(page):
    found = list(pages.blocks(page))
    for block in found:
        ast.parse(block.source)
    assert sum(block.shown for block in found) == page.read_text().count("```python")


def test_pages_that_show_how_to_do_something_have_code_that_runs():
    without = {name(page) for page in PAGES if page not in WITH_CODE}
    assert without <= {
        "docs/api.md",
        "docs/architecture.md",
        *(name(page) for page in PAGES if page.parent.name == "architecture"),
        "docs/benchmarks.md",
        "docs/glossary.md",
        "docs/scaling.md",
        "docs/wires.md",
        "docs/gpu.md",
        "docs/guide/ray-engine.md",  # which tests/ray runs
        "docs/guide/security.md",
        "docs/limits.md",
    }


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def headings(page):
    """The anchors of a page's headings, as MkDocs makes them."""
    outside = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    for heading in re.findall(r"^#+ (.+)$", outside, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        yield re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_to_headings_find_them(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            there = page.parent / target if target else page
            assert anchor in set(headings(there)), f"{name(page)} links to {target}#{anchor}"


SOURCES = {
    path.relative_to(ROOT): path.read_text()
    for room in ("src", "native", "tests")
    for path in (ROOT / room).rglob("*")
    if path.suffix in {".py", ".h", ".cpp", ".inl"}
}


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("\nvalidation")[0]
    listed = set(re.findall(r"[\w/-]+\.md", nav))
    assert listed == {os.path.relpath(page, ROOT / "docs") for page in PAGES[1:]}


def words_of_rows(page, *starts):
    """What stands in backticks in the rows of tables that begin with one of ``starts``."""
    rows = [line for line in page.read_text().splitlines() if line.startswith(starts)]
    assert len(rows) == len(starts)
    return {word for row in rows for word in re.findall(r"`(\w+)`", row.split("|", 2)[2])}


def test_the_page_on_ray_names_every_option_that_is_ignored():
    page = ROOT / "docs" / "ray.md"
    actors = words_of_rows(page, "| actors and functions |")
    assert actors == {*unused.ACTOR_OPTIONS, *unused.PLACEMENT_OPTIONS}
    assert actors | words_of_rows(page, "| functions |") == set(unused.FUNCTION_OPTIONS)
    assert words_of_rows(page, "| `init` |") == set(unused.INIT_OPTIONS)


def test_the_page_on_settings_names_all_of_them():
    page = (ROOT / "docs/guide/settings.md").read_text()
    for field in dataclasses.fields(conveyor.Config):
        assert f"`{field.name}`" in page, field.name
    source = "".join(path.read_text() for path in (ROOT / "src/conveyor").rglob("*.py"))
    for variable in set(re.findall(r"\"(CONVEYOR_[A-Z_]+)\"", source)):
        assert f"`{variable}" in page, variable
    for name in list(inspect.signature(conveyor.init).parameters)[:-1]:
        assert f"`{name}=" in page, name


def test_the_glossary_has_few_words_and_all_are_in_use():
    glossary = ROOT / "docs" / "glossary.md"
    rows = re.findall(r"^\| (?!word |---)([^|]+) \|", glossary.read_text(), re.M)
    words = [word for row in rows for word in row.split(", ")]
    assert 20 < len(words) <= 70
    used = "\n".join([*SOURCES.values(), *(page.read_text() for page in PAGES if page != glossary)])
    assert [w for w in words if not re.search(rf"\b{w}s?\b", used, re.I)] == []


@pytest.mark.parametrize("page", ["limits.md", "ray.md"])
def test_tests_that_a_page_names_are_there(page):
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / page).read_text()))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^(?:async )?def (test_\w+)\(", tests, re.M))
    assert named
    assert named <= there, f"no such tests: {sorted(named - there)}"


def told_arguments(docstring):
    """The names that stand in the section ``Args:`` of a docstring, as the pages of the API show them."""
    section = re.search(r"^( *)Args:\n((?:\1 +.*\n|\n)+)", inspect.cleandoc(docstring) + "\n", re.M)
    if section is None:
        return []
    indent = re.match(r" +", section[2])[0]
    return re.findall(rf"^{indent}(\S.*?):(?: |$)", section[2], re.M)


def functions_with_arguments_told():
    for path, text in SOURCES.items():
        if path.suffix == ".py" and path.parts[0] == "src" and "Args:" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    told = told_arguments(ast.get_docstring(node) or "")
                    if told:
                        yield f"{path}:{node.lineno} {node.name}", node.args, told


def test_docstrings_tell_of_arguments_that_there_are():
    found = list(functions_with_arguments_told())
    assert len(found) > 20
    for where, args, told in found:
        each = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        names = {arg.arg for arg in each if arg is not None}
        assert {name.lstrip("*") for name in told} <= names, where
