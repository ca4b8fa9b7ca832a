"""The code of every page of the documentation runs, and its links and pictures are there."""

import ast
import dataclasses
import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import conveyor
import conveyor.compat.ray
from conveyor.api import options

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import pages  # noqa: E402

PAGES = pages.pages()
WITH_CODE = [page for page in PAGES if pages.program(page)]
API = [page for page in PAGES if page.parent.name == "api"]


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
        *(name(page) for page in API),
        "docs/architecture.md",
        *(name(page) for page in PAGES if page.parent.name == "architecture"),
        "docs/benchmarks.md",
        "docs/glossary.md",
        "docs/scaling.md",
        "docs/changelog.md",  # docs/tools/hooks.py has its text
        "docs/gpu.md",
        "docs/tutorials/multi-node.md",
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


#: Names that the pages of the architecture cite and that are not ours, or stand for any.
NOT_OURS = {"NAME", "PAGEMAP_SCAN", "ProcessGroupNCCL"}


@pytest.fixture(scope="module")
def known():
    """Every word of the sources, of their paths, and of the names of the repository's own files."""
    texts = [*SOURCES.values(), *map(str, SOURCES), *(path.name for path in ROOT.iterdir())]
    return {word for text in texts for word in re.findall(r"\w+", text)} | NOT_OURS


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "architecture" in (page.stem, page.parent.name)], ids=name
)
def test_names_that_a_page_of_the_architecture_cites_are_there(page, known):
    outside = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    cited = set(re.findall(r"`([\w.:/()=@]+)`", outside))
    names = {word for text in cited for word in re.findall(r"[A-Za-z_]\w+", text)}
    assert sorted(names - known) == []
    files = [f"/{path}" for path in SOURCES]
    paths = [text for text in sorted(cited) if re.fullmatch(r"[\w/]+\.(?:py|h|cpp)", text)]
    assert [path for path in paths if not any(file.endswith(f"/{path}") for file in files)] == []


def test_members_of_native_classes_that_a_page_cites_are_theirs():
    native = [
        t
        for path, t in SOURCES.items()
        if path.is_relative_to("native") and "tests" not in path.parts
    ]
    cited = {
        member
        for page in PAGES
        for member in re.findall(r"\b([A-Z][A-Za-z]+)::([a-z]\w*)", page.read_text())
    }
    assert len(cited) > 30

    def is_there(owner, member):
        declared = rf"\b{member}(\(|;|,|{{| =)"
        return any(
            re.search(rf"\b{owner}::{member}\(", text)
            or (
                re.search(rf"\b(class|struct)( alignas\(\w+\))? {owner}\b", text)
                and re.search(declared, text)
            )
            for text in native
        )

    assert [f"{o}::{m}" for o, m in sorted(cited) if not is_there(o, m)] == []


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("\nvalidation")[0]
    listed = set(re.findall(r"[\w/.-]+\.md", nav))
    assert listed == {os.path.relpath(page, ROOT / "docs") for page in PAGES[1:]}


def words_of_rows(page, *starts):
    """What stands in backticks in the rows of tables that begin with one of ``starts``."""
    rows = [line for line in page.read_text().splitlines() if line.startswith(starts)]
    assert len(rows) == len(starts)
    return {word for row in rows for word in re.findall(r"`(\w+)`", row.split("|", 2)[2])}


def test_the_page_on_ray_names_every_option_that_is_ignored():
    page = ROOT / "docs" / "ray.md"
    actors = words_of_rows(page, "| actors and functions |")
    assert actors == {*options.ACTOR_OPTIONS_WITHOUT_EFFECT, *options.PLACEMENT_OPTIONS}
    assert actors | words_of_rows(page, "| functions |") == set(
        options.FUNCTION_OPTIONS_WITHOUT_EFFECT
    )
    assert words_of_rows(page, "| `init` |") == set(options.INIT_OPTIONS)


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


class Documented(NamedTuple):
    """A directive of mkdocstrings. ``name``: its heading."""

    section: str
    path: str
    name: str
    members: list[str] | None


def documented(page):
    section = ""
    for match in re.finditer(r"^## (.+)$|^::: (\S+)\n((?:    .*\n)*)", page.read_text(), re.M):
        if match[1]:
            section = match[1]
            continue
        heading = re.search(r"heading: (\S+)", match[3])
        listed = re.search(r"members: (?:\[(.*)\]|false)", match[3])
        members = None if listed is None else (listed[1] or "").split(", ") if listed[1] else []
        yield Documented(
            section, match[2], heading[1] if heading else match[2].split(".")[-1], members
        )


def module_of(page):
    return importlib.import_module(re.match(r"# (\S+)\n", page.read_text())[1])


def found(path):
    """What a directive names, by importing as much of the path as is modules."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(path)


def public(module):
    """Names of a module that are documented on its page."""
    names = {name: getattr(module, name) for name in module.__all__}
    ours = conveyor.compat.ray.__name__
    return {
        name: thing
        for name, thing in names.items()
        if not isinstance(thing, ModuleType)
        and not (module.__name__ == ours and thing is getattr(conveyor, name, None))
    }


#: Sections of what is documented beside the names of a module: what these return, by which name it may be.
OUT_OF_BAND = ("What these return", "For devices of your own")
#: Methods that have no underscore since other parts of the library call them.
INTERNAL = {
    "ActorClass": set(),
    "ActorHandle": set(),
    "CollectiveGroupHandle": set(),
    "CollectiveOutputNode": {"kernel", "operation", "ranks"},
    "DAGContext": {"options"},
    "DAGNode": set(),
    "DeviceIpcTransport": {"accepts", "open", "viable"},
    "GraphRef": {"new_borrow", "parts", "to_send"},
    "ObjectRef": {"new_borrow", "parts", "to_send"},
    "Session": set(),
    "StreamRef": {"await_whole", "new_borrow", "gather", "is_whole", "parts", "to_send"},
}


def test_each_public_module_has_a_page():
    modules = {conveyor}
    for module in (conveyor, conveyor.experimental):
        modules |= {
            one for name in module.__all__ if isinstance(one := getattr(module, name), ModuleType)
        }
    modules.add(conveyor.compat.ray)
    assert {module_of(page) for page in API} == modules
    assert len(API) == len(modules)


@pytest.mark.parametrize("page", API, ids=name)
def test_the_page_of_a_module_has_its_public_names_and_no_others(page):
    module = module_of(page)
    own = [
        one.name
        for one in documented(page)
        if one.section not in OUT_OF_BAND and "." not in one.name
    ]
    own += re.findall(r"^\| `(\w+)` \|", page.read_text(), re.M)
    assert sorted(own) == sorted(public(module))
    for one in documented(page):
        assert inspect.getdoc(found(one.path)) or one.name == "CONTENT_TYPE", one.path
        assert not one.name.startswith("_")


def test_a_name_is_documented_once():
    # At run time an ActorProxy is an ActorHandle.
    each = [found(one.path) for page in API for one in documented(page) if one.name != "ActorProxy"]
    assert len({id(thing) for thing in each}) == len(each)


def test_every_form_of_a_collective_is_documented():
    from conveyor.experimental import collective

    page = ROOT / "docs/api/experimental.collective.md"
    forms = {one.name for one in documented(page) if "." in one.name}
    operations = {key: thing for key, thing in public(collective).items() if hasattr(thing, "bind")}
    operations.pop("CollectiveOutputNode", None)
    assert forms == {
        f"{key}.{form}"
        for key, thing in operations.items()
        for form in ("bind", "shared")
        if hasattr(thing, form)
    }


@pytest.mark.parametrize("page", API, ids=name)
def test_what_a_class_shows_is_there_and_what_it_hides_is_known(page):
    for one in documented(page):
        if one.members is None:
            continue
        cls = found(one.path)
        hints = {key for base in cls.__mro__ for key in inspect.get_annotations(base)}
        assert {member for member in one.members if not hasattr(cls, member)} <= hints, one.path
        assert not [member for member in one.members if member.startswith("_")]
        if one.name in INTERNAL:
            bases = [base for base in cls.__mro__ if base.__module__.startswith("conveyor")]
            there = {key for base in bases for key, thing in vars(base).items() if callable(thing)}
            hidden = {key for key in there if not key.startswith("_")} - {*one.members}
            assert hidden <= INTERNAL[one.name] | inherited(cls), one.name


def inherited(cls):
    """Methods that a class has of one that is documented itself."""
    from conveyor.dag import DAGNode, MethodNode
    from conveyor.refs.ref import Ref

    return {
        key
        for base in (Ref, DAGNode, MethodNode)
        if issubclass(cls, base) and cls is not base
        for key in dir(base)
    }


#: Words that users search for, and the page that answers.
SEARCHES = {
    "weight sync": "docs/tutorials/weight-sync.md",
    "kv cache": "docs/tutorials/kv-cache.md",
    "tensor parallel": "docs/tutorials/tensor-parallel.md",
    "pipeline parallel": "docs/tutorials/pipeline-training.md",
    "hang": "docs/tutorials/hang.md",
    "multi-node": "docs/tutorials/multi-node.md",
    "GPU": "docs/tutorials/gpu.md",
    "FastAPI": "docs/tutorials/fastapi.md",
    "timeout": "docs/guide/failures.md",
    "trace": "docs/guide/observing.md",
    "allreduce": "docs/guide/collectives.md",
    "NCCL": "docs/guide/transports.md",
    "out of memory": "docs/guide/memory.md",
    "Kubernetes": "docs/guide/deployment.md",
    "pytest": "docs/guide/testing.md",
}


@pytest.mark.parametrize(("words", "page"), SEARCHES.items())
def test_a_search_in_users_words_finds_the_page(words, page):
    beginning = " ".join((ROOT / page).read_text().split("\n\n")[:2]).lower()
    assert all(
        re.search(rf"\b{word}", beginning) for word in words.lower().replace("-", ".").split()
    )
