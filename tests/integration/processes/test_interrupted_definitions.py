"""A signal handler that raises while the first value of a class by value is encoded."""

import pytest

PROGRAM = """
    import gc, os, sys
    import conveyor
    from conveyor import codec
    from conveyor.dag import InputNode

    @conveyor.remote
    class Actor:
        def echo(self, x):
            return x

    actor = Actor.remote()
    with InputNode() as inp:
        graph = actor.echo.bind(inp).compile()
    send = {"execute": graph.execute, "call": actor.echo.remote}["WAY"]
    folder = os.path.dirname(codec.__file__) + os.sep

    class Raising:
        # Raises before the opcode with this number of those that the codec runs, as a handler may.
        def __init__(self, moment):
            self.left = moment
        def __call__(self, frame, event, argument):
            if not frame.f_code.co_filename.startswith(folder):
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                self.left -= 1
                if self.left < 0:
                    raise KeyboardInterrupt
            return self

    conveyor.get(send(type("First", (), {})()), timeout=60)  # cloudpickle is imported
    # Python 3.12 tells of opcodes only if some frame had requested for them before the tracing began.
    sys._getframe().f_trace_opcodes = True
    moment = 0
    gc.disable()  # what is raised while a class of before goes is lost
    while True:
        # A class that no channel has carried, at each moment.
        Local = type("Local", (), {"__module__": "__main__"})
        value = Local()
        sys.settrace(Raising(moment))
        try:
            ref = send(value)
        except KeyboardInterrupt:
            ref = None
        finally:
            sys.settrace(None)
        if ref is not None:
            assert type(ref.get(timeout=60)) is Local
        assert type(conveyor.get(send(value), timeout=60)) is Local, moment
        if ref is not None:
            break
        moment += 1
    assert moment > 100, moment
    print("all known")
"""


@pytest.mark.parametrize("way", ["execute", "call"])
def test_definitions_that_were_not_sent_are_sent_with_the_next_value(scripts, way):
    assert scripts.run(PROGRAM.replace("WAY", way)) == "all known\n"
