"""What is imported when it is first asked for: under threads, forks, and at the program's end. And what is
imported at the start."""

import pytest


@pytest.mark.parametrize("attempt", range(5))
def test_a_child_that_is_forked_during_an_import_can_import(scripts, attempt):
    # Several times, since the fork must come while the other thread imports.
    scripts.run(
        """
        import os, signal, threading
        import conveyor
        begun = threading.Event()
        def look():
            begun.set()
            conveyor.observe
        thread = threading.Thread(target=look)
        thread.start()
        begun.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            conveyor.observe.GraphStatus
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        thread.join()
        """
    )


def test_a_module_that_is_requested_for_when_the_interpreter_has_ended_says_so(scripts):
    out = scripts.run(
        """
        import os
        import conveyor
        class Late:
            def __del__(self, write=os.write, package=conveyor, wanted=conveyor.exceptions.RuntimeStateError):
                for name in ("observe", "GraphRef"):
                    try:
                        getattr(package, name)
                    except wanted as error:
                        write(1, str(error).encode())
        late = Late()
        late.itself = late  # found by the last collection
        """
    )
    assert out.count("the program is ending") == 2


def test_importing_the_package_leaves_out_what_a_session_needs(scripts):
    out = scripts.run(
        """
        import sys
        import conveyor
        print(*sys.modules)
        """
    )
    imported = set(out.split())
    assert "conveyor.dag" in imported
    ours = {
        "channel",
        "collective",
        "dag.collective",
        "engines",
        "experimental",
        "metrics",
        "observe",
        "plan",
        "worker",
        "driver",
        "graph",
        "testing",
        "transport",
    }
    others = {
        "asyncio",
        "cloudpickle",
        "concurrent.futures",
        "ctypes",
        "json",
        "logging",
        "numpy",
        "selectors",
        "socket",
        "subprocess",
        "tempfile",
        "torch",
    }
    assert not imported & others
    assert not imported & {f"conveyor.{name}" for name in ours}


def test_actors_find_everything_imported(scripts):
    # One that is short of descriptors can import nothing, and each would pay for it by itself.
    scripts.path("import sys\nTHERE = set(sys.modules)", "preloaded.py")
    scripts.run(
        """
        import sys
        import conveyor
        from conveyor.dag import InputNode

        @conveyor.remote
        class Actor:
            def add(self, x):
                return x + 1

            def execute(self, other):
                with InputNode() as inp:
                    graph = other.add.bind(inp).experimental_compile()
                assert conveyor.get(graph.execute(1)) == 2
                graph.teardown()

            def imported(self):
                import preloaded
                return set(sys.modules) - preloaded.THERE - {"preloaded"}

        conveyor.init(preload=["preloaded"])
        actor, other = Actor.remote(), Actor.remote()
        with InputNode() as inp:
            graph = actor.add.bind(inp).compile()
        assert conveyor.get(graph.execute(1)) == 2
        conveyor.get(actor.execute.remote(other))
        imported = conveyor.get([actor.imported.remote(), other.imported.remote()])
        assert imported == [set(), set()], imported
        """
    )


def test_what_a_session_begins_with_is_quickly_made(scripts):
    # A dataclass is compiled at each import, which takes about a millisecond. Those that are left are public.
    out = scripts.run(
        """
        import sys
        import conveyor

        @conveyor.remote
        class Actor:
            def dataclasses(self):
                return {
                    value.__qualname__
                    for name, module in list(sys.modules.items())
                    if name.startswith("conveyor")
                    for value in vars(module).values()
                    if isinstance(value, type) and "__dataclass_fields__" in vars(value)
                }

        conveyor.init()
        there = conveyor.get(Actor.remote().dataclasses.remote())
        print(*there | Actor.__wrapped__().dataclasses())
        """
    )
    status = {"ActorStatus", "EdgeWait", "ExecutionStatus", "GraphStatus"}
    assert set(out.split()) == {"Capabilities", "Config", "DAGContext", *status}
