"""Programs whose process is not as usual: a debugger's, with a second interpreter, or patched by gevent."""

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
