"""Tests of what lies in shared memory, on a C library that refuses what pages of 64 KiB refuse."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc")

SELECTED = (
    "tests/integration/memory/test_leases.py::test_a_graph_has_a_cap_of_its_own",
    "tests/integration/memory/test_leases.py::test_a_sole_consumer_writes_a_tensor_where_it_lies",
    "tests/integration/memory/test_leases.py::test_shared_consumers_of_a_tensor_write_on_private_pages",
    "tests/integration/memory/test_leases.py::test_a_forked_child_that_drops_values_ends_no_lease",
    "tests/integration/processes/test_fork.py::test_a_child_that_writes_changes_nothing_of_the_parents",
    "tests/integration/processes/test_fork.py::test_arrays_made_in_place_are_a_childs_own",
    "tests/integration/processes/test_fork.py::test_a_child_keeps_its_values_when_the_parent_drops_its_own",
)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C compiler is installed")
    library = tmp_path_factory.mktemp("pages") / "refusing.so"
    source = Path(__file__).with_name("refusing.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


def run(command, library, page):
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "CONVEYOR_TEST_PAGE_SIZE": str(page),
        "PYTHONPATH": str(ROOT / "src"),
    }
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_values_leases_and_forks(refusing):
    done = run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SELECTED], refusing, 65536)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "refused" not in done.stdout + done.stderr


def test_the_library_refuses(refusing):
    program = """
import mmap, os
fd = os.memfd_create("conveyor-test")
os.ftruncate(fd, 1 << 20)
mmap.mmap(fd, 65536, offset=65536)
try:
    mmap.mmap(fd, 4096, offset=4096)
except OSError:
    print("refused as it should be")
"""
    done = run(["-c", program], refusing, 65536)
    assert done.stdout == "refused as it should be\n", done.stdout + done.stderr


def test_a_page_size_that_cannot_be_is_named():
    done = run(["-c", "import conveyor"], "", 5000)
    assert done.returncode != 0
    assert "CONVEYOR_TEST_PAGE_SIZE=5000 is no power of two" in done.stderr
