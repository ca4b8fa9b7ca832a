"""What is imported when it is first asked for: under threads, forks, and at the program's end."""

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


def test_a_module_that_is_asked_for_when_the_interpreter_has_ended_says_so(scripts):
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
