"""The programs of the documents in ``seeds``, verbatim but for ``import conveyor as ray``.

``compiled_graphs_*`` are the cells of "Quickstart with Ray Compiled Graphs" that need no GPU, each
file one part of it; ``overview_*`` is the first listing of "Ray Compiled Graph (beta)", which the
page sets beside its compiled form. ``overlap_cpu`` is the program of "Overlapping communication and
computation" in its form for CPUs: there is another device, transport and size in it. ``direct_*`` are
those of "Ray Direct Transport (RDT)"; ``direct_nixl_cpu`` is made of several listings, in their form for
CPUs, and ``direct_nccl_cpu`` asks for no GPU.
"""

import importlib.util
import os
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
NOTEBOOK = HERE / "notebook.py"

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


def check_hello_world(lines):
    assert lines[:3] == ["hello", "hello", "world"]
    took = [line for line in lines if re.fullmatch(r"took \d.*", line)]
    assert len(took) == 20
    assert "Graph" in lines[13]
    assert lines[-1] == "done"
    assert len(lines) == 25


def check_multiple_actors(lines):
    assert lines == [
        "['hello', 'hello', 'hello']",
        "['hello0', 'hello1', 'hello2']",
    ]


def check_asyncio(lines):
    assert lines == ["hello"]


def check_tensors(lines):
    assert lines == ["cpu"]


def check_overlap(lines):
    said = [re.sub(r"\d+\.\d+(e-\d+)?", "N", line) for line in lines]
    assert said == [f"overlap_gpu_communication={on}, duration=N" for on in (False, True)]


def check_overview(lines):
    assert [re.sub(r"pid=\d+", "pid=N", line) for line in lines] == [
        "(Receiver pid=N) received some data"
    ] * 2


def check_a_number(lines):
    assert len(lines) == 1
    # One that is near to a whole number is shown as "12.", and one near to zero with an exponent.
    assert re.fullmatch(r"tensor\(-?\d+\.\d*(e[+-]\d+)?\)", lines[0])


def check_nothing(lines):
    assert lines == []


def check_a_tensor(lines):
    assert lines[0].startswith("tensor([[")


def check_different_sums(lines):
    assert lines == ["AssertionError: sender and receiver returned different sums."]


def check_nixl(lines):
    check_a_tensor(lines)
    assert re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?", lines[-1])


DIRECT = [
    ("tensor", check_a_number),
    ("nested", check_a_number),
    ("same_actor", check_nothing),
    ("get", check_a_tensor),
    ("mutable", check_different_sums),
    ("freed", check_nothing),
    ("nccl_cpu", check_a_number),
    ("nixl_cpu", check_nixl),
]


@needs_torch
@pytest.mark.parametrize(("program", "check"), DIRECT)
def test_direct_program(scripts, program, check):
    """Those of "Ray Direct Transport", whose defaults ``conveyor.compat.ray`` has where they are errors."""
    check(lines_of(scripts.run(PROGRAMS / f"direct_{program}.py", timeout=220)))
    assert "Traceback" not in scripts.stderr


@needs_torch
def test_direct_program_that_is_warned(scripts):
    out = scripts.run(PROGRAMS / "direct_warning.py", timeout=220)
    assert lines_of(out) in ([], ["AssertionError: sender and receiver returned different sums."])
    assert re.search(
        r"ConveyorWarning: .* is being passed back to the actor that created it", scripts.stderr
    )


def lines_of(output):
    return output.splitlines()


@pytest.mark.parametrize(
    ("program", "check"),
    [
        ("compiled_graphs_hello_world.py", check_hello_world),
        ("compiled_graphs_multiple_actors.py", check_multiple_actors),
        pytest.param("compiled_graphs_tensors.py", check_tensors, marks=needs_torch),
        pytest.param("overlap_cpu.py", check_overlap, marks=needs_torch),
        ("overview_core_and_compiled.py", check_overview),
    ],
)
def test_program_as_a_script(scripts, program, check):
    check(lines_of(scripts.run(PROGRAMS / program, timeout=220)))
    assert "Traceback" not in scripts.stderr


def test_asyncio_program_in_a_notebook(scripts):
    # It awaits at the top level, as notebooks allow.
    check_asyncio(lines_of(scripts.run(NOTEBOOK, PROGRAMS / "compiled_graphs_asyncio.py")))


def test_asyncio_program_as_a_script(scripts):
    text = (PROGRAMS / "compiled_graphs_asyncio.py").read_text()
    head, tail = text.split("\nref = await")
    tail = "ref = await" + tail
    body = "".join(f"  {line}\n" for line in tail.splitlines())
    script = f"{head}\nimport asyncio\nasync def main():\n{body}\nasyncio.run(main())\n"
    check_asyncio(lines_of(scripts.run(script)))


def test_quickstart_as_one_notebook(scripts):
    # One process, one __main__, EchoActor defined again and again, the event loop running.
    parts = ["hello_world", "multiple_actors", "asyncio"]
    if importlib.util.find_spec("torch") is not None:
        parts.append("tensors")
    paths = [PROGRAMS / f"compiled_graphs_{part}.py" for part in parts]
    lines = lines_of(scripts.run(NOTEBOOK, *paths))
    check_hello_world(lines[:25])
    check_multiple_actors(lines[25:27])
    check_asyncio(lines[27:28])
    check_tensors(lines[28:] or ["cpu"])


def test_programs_leave_no_process(scripts, wait_until):
    mark = {"CONVEYOR_TEST_MARK": str(os.getpid())}
    scripts.run(PROGRAMS / "compiled_graphs_multiple_actors.py", env=mark)
    wait_until(lambda: not _marked(*mark.items()), 20, "the end of all its processes")


def _marked(item):
    found = []
    needle = "=".join(item).encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if needle in environ.split(b"\0"):
            found.append(int(pid))
    return found
