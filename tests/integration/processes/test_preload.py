"""Modules that are imported once, for all actors."""

import os
import sys

import pytest

import conveyor


class Place:
    def has(self, *modules):
        return [module in sys.modules for module in modules]

    def loaded_by(self, module):
        """The process that has imported it, and this one."""
        return sys.modules[module].PID, os.getpid()

    def imports(self, module):
        __import__(module)
        return self.has(module)

    def torch_threads(self):
        import torch

        return torch.get_num_threads(), (torch.ones(64, 64) @ torch.ones(64, 64)).sum().item()


Remote = conveyor.remote(Place)


@pytest.fixture
def begin(leaves_nothing):
    """Begins a session that leaves nothing."""
    with leaves_nothing():
        yield conveyor.init
        conveyor.shutdown()


def ask(actor, method, *args):
    return conveyor.get(getattr(actor, method).remote(*args), timeout=120)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder on the path for modules."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_it_is_imported_once(begin, modules):
    (modules / "heavy_one.py").write_text("import os\nPID = os.getpid()\n")
    begin(preload=["heavy_one", "colorsys"])
    found = [ask(Remote.remote(), "loaded_by", "heavy_one") for _ in range(2)]
    assert len({loader for loader, _ in found}) == 1
    assert not {loader for loader, _ in found} & {me for _, me in found}
    assert "heavy_one" not in sys.modules
    assert ask(Remote.remote(), "has", "colorsys", "imaplib") == [True, False]


def test_what_cannot_be_imported_is_told_and_left_to_the_actors(begin, modules, capsys, wait_until):
    (modules / "heavy_two.py").write_text("raise RuntimeError('no driver here')\n")
    begin(preload=["heavy_two", "there_is_none.of_it", "colorsys"])
    actor = Remote.remote()
    assert ask(actor, "has", "heavy_two", "colorsys") == [False, True]
    said = ""

    def told():
        nonlocal said
        said += capsys.readouterr().err
        return "'heavy_two'" in said and "'there_is_none.of_it'" in said

    wait_until(told, what="both warnings")
    assert "(RuntimeError: no driver here): each actor that needs it will try for itself" in said
    with pytest.raises(RuntimeError, match="no driver here"):
        ask(actor, "imports", "heavy_two")


@pytest.mark.parametrize("cpus", [None, 1, 2])
def test_torch_has_the_threads_of_its_actor(begin, cpus):
    pytest.importorskip("torch")
    begin(preload=["torch"])
    actor = Remote.options(num_cpus=cpus).remote() if cpus else Remote.remote()
    assert ask(actor, "has", "torch") == [True]
    assert ask(actor, "torch_threads") == (cpus or 1, 64.0**3)


class Draw:
    """Draws from the states that libraries keep for the whole process, first in its constructor."""

    def __init__(self):
        self.first = self.draw()

    def draw(self):
        import random

        drawn = [random.getrandbits(64)]
        numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
        if numpy is not None:
            drawn += [numpy.uniform(), numpy.normal()]
        if torch is not None:
            drawn.append(torch.randint(1 << 60, ()).item())
        return drawn

    def drawn(self):
        return self.first, self.draw()

    def end(self):
        os._exit(3)


@pytest.mark.parametrize("others", [False, True], ids=["as it is", "another bit generator"])
def test_random_states_are_an_actors_own(begin, modules, others):
    pytest.importorskip("torch")
    text = "import random, torch, numpy.random\nrandom.random(), numpy.random.normal(), torch.rand(1)\n"
    if others:
        text += "if hasattr(numpy.random, 'set_bit_generator'):\n"
        text += "    numpy.random.set_bit_generator(numpy.random.PCG64(1))\n"
    (modules / "seeded.py").write_text(text)
    begin(preload=["seeded"])
    Remote = conveyor.remote(Draw)
    actors = [Remote.options(max_restarts=1, max_task_retries=1).remote() for _ in range(3)]
    drawn = conveyor.get([actor.drawn.remote() for actor in actors], timeout=120)
    with pytest.raises(conveyor.exceptions.ActorDiedError):
        conveyor.get(actors[0].end.options(max_task_retries=0).remote(), timeout=120)
    drawn.append(conveyor.get(actors[0].drawn.remote(), timeout=120))
    rows = [row for pair in drawn for row in pair]
    assert {len(row) for row in rows} == {4}
    for column in zip(*rows, strict=True):
        assert len(set(column)) == len(column)


def test_the_inline_engine_has_the_modules_of_its_process(begin):
    begin(engine="inline", preload=["there_is_none"])
    assert ask(Remote.remote(), "has", "there_is_none", "sys") == [False, True]


@pytest.mark.parametrize("engine", ["local", "inline"])
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("torch", TypeError, "preload must be a list of names of modules, not 'torch'"),
        ([1], TypeError, r"preload must be a list of names of modules, not \[1\]"),
        ([""], ValueError, "preload has '', which is no name that a module can have"),
        (["a b"], ValueError, "preload has 'a b', which is no name"),
        (["a..b"], ValueError, r"preload has 'a\.\.b', which is no name"),
    ],
)
def test_what_is_no_list_of_modules(given, error, words, engine):
    with pytest.raises(error, match=words):
        conveyor.init(engine=engine, preload=given)
    assert not conveyor.is_initialized()
