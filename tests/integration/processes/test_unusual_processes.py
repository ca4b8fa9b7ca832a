"""Programs whose process is not as usual: a debugger's, with a second interpreter, patched by gevent, or
without the descriptors that it had."""

import sys
import textwrap
import types

import pytest

import conveyor

PROGRAM = """
    import sys, types
    {before}
    import conveyor

    class Box:
        def __init__(self, x):
            self.x = x

    @conveyor.remote
    class Actor:
        def f(self, box):
            return Box(box.x + 1)

    @conveyor.remote
    def g(box):
        return Box(box.x + 2)

    if __name__ == "__main__":
        {after}
        assert conveyor.get(Actor.remote().f.remote(Box(1)), timeout=60).x == 2
        assert conveyor.get(g.remote(Box(1)), timeout=60).x == 3
        print("DONE")
"""
NO_SPEC = "m = types.ModuleType('plugin'); del m.__spec__; sys.modules['plugin'] = m"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (NO_SPEC, ""),
        ("", NO_SPEC),
        ("", "del sys.modules['__main__'].__spec__"),
        ("sys.modules.update(none=None, number=5, odd=type('O', (), {})())", ""),
    ],
    ids=["before the import", "later", "the main module", "what is no module"],
)
def test_modules_without_a_spec(scripts, before, after):
    assert "DONE" in scripts.run(PROGRAM.format(before=before, after=after))


@pytest.mark.parametrize(
    "start",
    [
        "sys.argv[:] = ['pdb', '-c', 'c', '-c', 'q', PATH]; import pdb; pdb.main()",
        "import runpy; runpy.run_path(PATH, run_name='__main__')",
        "exec(compile(open(PATH).read(), PATH, 'exec'), {'__name__': '__main__'})",
    ],
    ids=["pdb", "run_path", "exec"],
)
def test_a_program_that_another_one_runs(scripts, start):
    path = scripts.path(PROGRAM.format(before="", after=""), "inner.py")
    assert "DONE" in scripts.run(f"import sys\nPATH = {str(path)!r}\n{start}\n")


def test_an_import_in_a_second_interpreter_is_refused_and_harms_nothing(scripts):
    module = "_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters"
    out = scripts.run(
        f"""
        import sys
        import {module} as interpreters
        import conveyor

        SCRIPT = '''
        import sys
        sys.path[:] = PATH
        try:
            import conveyor._core
        except ImportError as error:
            print("REFUSED", error, flush=True)
        '''

        @conveyor.remote
        class Actor:
            def f(self, x):
                return x + 1

        def try_it():
            new = interpreters.create()
            source = "PATH = %r\\n" % (sys.path,) + SCRIPT.replace("        ", "").replace("    ", " ")
            interpreters.run_string(new, source)
            interpreters.destroy(new)

        if __name__ == "__main__":
            try_it()
            actor = Actor.remote()
            assert conveyor.get(actor.f.remote(1)) == 2
            try_it()
            assert conveyor.get(actor.f.remote(2)) == 3
            conveyor.shutdown()
        """
    )
    refused = [line for line in out.splitlines() if line.startswith("REFUSED")]
    assert len(refused) == 2
    if sys.version_info < (3, 12):
        assert all("cannot be imported in a subinterpreter" in line for line in refused)


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
@pytest.mark.parametrize(
    "name", ["_thread.start_new_thread", "select.select", "socket.socket", "subprocess.Popen"]
)
def test_what_gevent_has_patched_is_refused_by_name(monkeypatch, library, name):
    module, _, attribute = name.partition(".")
    if attribute[0].isupper() or attribute == "socket":
        replacement = types.new_class(attribute, (getattr(__import__(module), attribute),))
    else:
        replacement = types.FunctionType((lambda *args: None).__code__, {})
    replacement.__module__ = f"{library}.{module}"
    monkeypatch.setattr(f"{module}.{attribute}", replacement)
    with pytest.raises(
        conveyor.exceptions.RuntimeStateError, match=f"^{library} has replaced {name} "
    ):
        conveyor.init()
    assert not conveyor.is_initialized()


@pytest.mark.parametrize("first", [True, False])
def test_a_program_that_gevent_has_patched_is_refused(scripts, first):
    pytest.importorskip("gevent")
    patch = "from gevent import monkey; monkey.patch_all()"
    scripts.run(
        textwrap.dedent(
            f"""
            {patch if first else ""}
            import conveyor
            {patch}
            try:
                conveyor.remote(type("A", (), {{}})).remote()
            except conveyor.exceptions.RuntimeStateError as error:
                assert "gevent has replaced" in str(error)
            else:
                raise AssertionError
            """
        )
    )


CLOSES_ALL = textwrap.dedent("""
    import os, sys, time
    import conveyor

    def close_all(where):
        os.closerange(3, 70_000)
        files = [open(f"{where}-{i}", "w+b", buffering=0) for i in range(100)]
        for file in files:
            file.write(b"mine")
        return files

    def unharmed(files):
        for file in files:
            file.write(b"!")
            assert file.seek(0) == 0 and file.read() == b"mine!", file.name

    class Base:
        def add(self, x):
            return x + 1
        def close_all(self, where):
            self.files = close_all(where)
        def look_late(self):
            time.sleep(0.3)  # whoever waits for this sleeps, and has to be woken
            unharmed(self.files)

    @conveyor.remote
    class Plain(Base):
        pass

    @conveyor.remote(max_concurrency=2)
    class Threads(Base):
        pass

    @conveyor.remote
    class Loop(Base):
        async def more(self):
            pass
""")


HAS_LOW = textwrap.dedent("""
    import asyncio, os
    import numpy
    import conveyor
    from conveyor import collective
    from conveyor.dag import InputNode

    def low():
        found = {}
        for name in os.listdir("/proc/self/fd"):
            if 2 < int(name) < 512 and os.path.exists(f"/proc/self/fd/{name}"):
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        return found

    class Base:
        def low(self, *args):
            return low()
        def items(self):
            yield low()
        def receive(self, receiver):
            return receiver.receive(), low()
        def sum(self):
            collective.allreduce(numpy.ones(2))
            return low()

    @conveyor.remote
    class Plain(Base):
        pass

    @conveyor.remote(max_concurrency=2)
    class Threads(Base):
        pass

    @conveyor.remote
    class Loop(Base):
        async def later(self):
            await asyncio.sleep(0)
            return low()
""")


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_no_descriptor_of_the_librarys_has_a_low_number(scripts, engine):
    program = f"""
    before = low()
    conveyor.init(engine={engine!r})
    inherited = before if {engine == "inline"} else {{}}
    actors = plain, threads, loop = [kind.remote() for kind in (Plain, Threads, Loop)]
    found = conveyor.get([actor.low.remote(numpy.ones(1 << 18)) for actor in actors])
    found.append(conveyor.get(loop.later.remote()))
    found += list(plain.items.remote())
    with InputNode() as inp:
        graph = threads.low.bind(plain.low.bind(inp)).compile()
    found.append(conveyor.get(graph.execute(numpy.ones(1 << 18))))
    if {engine == "local"}:
        sender, receiver = conveyor.channel.open()
        received = plain.receive.remote(receiver)
        sender.send(1)
        found.append(conveyor.get(received)[1])
        collective.create_collective_group([plain, threads])
        found += conveyor.get([plain.sum.remote(), threads.sum.remote()])
    assert found == [inherited] * len(found), found
    assert low() == before, (before, low())
    print("DONE")
    """
    assert "DONE" in scripts.run(HAS_LOW + textwrap.dedent(program))


def test_a_program_that_closes_low_descriptors_goes_on_with_whole_files(scripts, tmp_path):
    program = f"""
    import numpy
    actors = [Plain.remote()]
    assert conveyor.get(actors[0].add.remote(1)) == 2
    os.closerange(3, 256)
    files = [open(f"{{{str(tmp_path)!r}}}/{{i}}", "w+b", buffering=0) for i in range(100)]
    for file in files:
        file.write(b"mine")
    actors += [Plain.remote(), Loop.remote()]  # these get the driver's memory, and write to its log
    for actor in actors:
        assert conveyor.get(actor.add.remote(numpy.ones(1 << 18)))[0] == 2
    conveyor.shutdown()
    unharmed(files)
    print("DONE")
    """
    assert "DONE" in scripts.run(CLOSES_ALL + textwrap.dedent(program))


def test_a_driver_that_closes_all_descriptors_has_errors_and_whole_files(scripts, tmp_path):
    program = f"""
    actors = [kind.remote() for kind in (Plain, Threads, Loop)]
    assert conveyor.get([actor.add.remote(1) for actor in actors]) == [2, 2, 2]
    files = close_all({str(tmp_path / "driver")!r})
    begun = time.monotonic()
    for attempt in (
        lambda: conveyor.get(actors[0].look_late.remote()),
        lambda: conveyor.get([actor.add.remote(1) for actor in actors]),
        lambda: conveyor.get(Plain.remote().add.remote(1)),
    ):
        try:
            attempt()
        except conveyor.exceptions.ConveyorError as error:
            assert "has closed descriptors of conveyor's" in str(error), error
        else:
            raise AssertionError("no error")
    conveyor.shutdown()
    assert time.monotonic() - begun < 5
    unharmed(files)
    conveyor.init()
    assert conveyor.get(Plain.remote().add.remote(1)) == 2
    print("DONE")
    """
    assert "DONE" in scripts.run(CLOSES_ALL + textwrap.dedent(program))


@pytest.mark.parametrize("last", [256, 70_000])
def test_an_inline_session_ends_quietly_after_descriptors_were_closed(scripts, tmp_path, last):
    program = f"""
    import numpy
    actor = Plain.remote()
    assert conveyor.get(actor.add.remote(1)) == 2
    os.closerange(3, {last})
    files = [open(f"{{{str(tmp_path)!r}}}/{{i}}", "w+b", buffering=0) for i in range(100)]
    for file in files:
        file.write(b"mine")
    assert conveyor.get(actor.add.remote(numpy.ones(1 << 18)))[0] == 2
    conveyor.shutdown()
    conveyor.init(engine="inline")
    assert conveyor.get(Plain.remote().add.remote(1)) == 2
    conveyor.shutdown()
    unharmed(files)
    print("DONE")
    """
    inline = 'import conveyor; conveyor.init(engine="inline")\n'
    assert "DONE" in scripts.run(inline + CLOSES_ALL + textwrap.dedent(program))


@pytest.mark.parametrize("kind", ["Plain", "Threads", "Loop"])
def test_an_actor_that_closes_all_descriptors_ends_by_name_and_has_whole_files(
    scripts, tmp_path, kind
):
    program = f"""
    actor, other = {kind}.remote(), Plain.remote()
    assert conveyor.get([actor.add.remote(1), other.add.remote(1)]) == [2, 2]
    try:
        conveyor.get(actor.close_all.remote({str(tmp_path / kind)!r}))
        conveyor.get(actor.look_late.remote())  # a result that was there before its end has come
        conveyor.get(actor.add.remote(1))
    except conveyor.exceptions.ActorDiedError as error:
        assert "has closed descriptors of conveyor's" in str(error) or "OSError" in str(error), error
    else:
        raise AssertionError("it goes on")
    assert conveyor.get(other.add.remote(1)) == 2
    print("DONE")
    """
    assert "DONE" in scripts.run(CLOSES_ALL + textwrap.dedent(program))
    files = list(tmp_path.glob(f"{kind}-*"))
    assert len(files) == 100
    assert {file.read_bytes() for file in files} <= {b"mine", b"mine!"}


MODULE = """
import conveyor

@conveyor.remote
class Model:
    def f(self, x):
        return x + 1

@conveyor.remote
def square(x):
    return x * x

{top}
"""


@pytest.mark.parametrize(
    "top", ["model = Model.remote()", "table = conveyor.get([square.remote(x) for x in range(3)])"]
)
def test_a_module_that_makes_actors_where_actors_import_it_is_refused(scripts, top):
    scripts.path(MODULE.format(top=top), "served.py")
    out = scripts.run(
        """
        import conveyor
        try:
            import served
            conveyor.get(served.model.f.remote(1))
        except conveyor.exceptions.ConveyorError as error:
            assert "at the top of the module 'served'" in str(error), error
            print("DONE")
        """
    )
    assert "DONE" in out


def test_a_module_that_finds_its_actor_by_name_may_be_imported_by_it(scripts):
    top = "model = Model.options(name='model', get_if_exists=True).remote()"
    scripts.path(MODULE.format(top=top), "served.py")
    assert "2\n" in scripts.run(
        "import conveyor, served; print(conveyor.get(served.model.f.remote(1)))"
    )
