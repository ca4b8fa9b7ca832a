"""A session ends while processes are still being started: the end waits for none of them, and Ctrl-C ends it
at once."""

import re
import signal
import subprocess
import textwrap
import time
from contextlib import suppress

import psutil
import pytest

#: Whatever waits for the fork server in vain waits for longer than a test may take.
HEAD = """
    import atexit, os, pathlib, signal, sys, threading, time
    import conveyor
    from conveyor.dag import InputNode
    from conveyor.engines.local import launcher

    signal.signal(signal.SIGINT, signal.default_int_handler)
    launcher.SPAWN_TIMEOUT = launcher.CLOSE_TIMEOUT = 1000.0
    closes = launcher.Launcher.close

    def tells(self):
        pathlib.Path("closing").touch()
        closes(self)

    launcher.Launcher.close = tells

    def deafen():
        '''From now on the fork server hears nothing.'''
        launcher.Launcher._send = lambda *_, **__: None

    @conveyor.remote
    class Actor:
        def echo(self, x):
            return x
        def pid(self):
            return os.getpid()

    @conveyor.remote
    def double(x):
        return 2 * x

    def killed(actor):
        '''Have the actor restarted by a fork server that does not hear of it.'''
        pid = conveyor.get(actor.pid.remote())
        deafen()
        os.kill(pid, signal.SIGKILL)
        try:
            conveyor.get(actor.echo.remote(1), timeout=0.5)
        except conveyor.exceptions.ConveyorError:
            pass
"""
_STARTS = {
    "an actor": "deafen(); actor = Actor.remote()",
    "one that is called": "deafen(); ref = Actor.remote().echo.remote(1)",
    "one that has a name": "deafen(); Actor.options(name='it').remote()",
    "one that may be restarted": "deafen(); actor = Actor.options(max_restarts=-1).remote()",
    "several": "deafen(); actors = [Actor.remote() for _ in range(8)]",
    "the worker of a function": "deafen(); ref = double.remote(1)",
    "another one": """
        first = Actor.remote()
        assert conveyor.get(first.echo.remote(1)) == 1
        deafen()
        second = Actor.remote()
    """,
    "one that is restarted": """
        actor = Actor.options(max_restarts=1).remote()
        killed(actor)
    """,
    "the actor of a graph that is restarted": """
        actor = Actor.remote()
        with InputNode() as inp:
            graph = actor.echo.bind(inp).compile()
        assert conveyor.get(graph.execute(1)) == 1
        killed(actor)
        threading.Thread(target=graph.restart, daemon=True).start()
        while not conveyor.runtime.context.running().supervisor._awaited:
            time.sleep(0.01)
    """,
    "one whose fork server still imports": """
        pathlib.Path("endless.py").write_text("import time; time.sleep(10000)")
        sys.path.insert(0, os.getcwd())
        conveyor.init(preload=["endless"])
        actor = Actor.remote()
    """,
}
_ENDS = {
    "the last line": "",
    "sys.exit": "sys.exit(3)",
    "an exception": "raise KeyError",
    "shutdown": "conveyor.shutdown()",
    "shutdown in a thread": """
        thread = threading.Thread(target=conveyor.shutdown, daemon=True)
        thread.start()
        thread.join()
    """,
    "a with block": """
        with conveyor.init():
            deafen()
            actor = Actor.remote()
    """,
}


@pytest.fixture
def ending(scripts, tmp_path, wait_until):
    """Starts a program, and returns it once it waits for the fork server's end, and its processes."""

    def start(*parts):
        text = "\n".join(map(textwrap.dedent, (HEAD, *parts)))
        program = scripts.start(text, env={"CONVEYOR_GRACE_SECONDS": "100"})
        wait_until(lambda: (tmp_path / "closing").exists() or program.poll() is not None)
        assert program.poll() is None, program.stderr.read()
        children = psutil.Process(program.pid).children(recursive=True)
        time.sleep(0.1)  # into the wait for it; a signal that comes before ends it just as well
        return program, children

    return start


def _over(program, children, *codes):
    out, err = program.communicate(timeout=60)
    assert program.returncode in codes, (out, err)
    assert out == ""
    assert "has not answered" not in err, err
    psutil.wait_procs(children, timeout=60)
    assert not [child for child in children if child.is_running()]
    # Some of these programs kill an actor, to have it restarted.
    return re.sub("conveyor: actor .* died of signal 9 .*\n", "", err)


@pytest.mark.parametrize("what", _STARTS)
def test_ctrl_c_at_the_end_of_the_program(ending, what):
    program, children = ending(_STARTS[what])
    program.send_signal(signal.SIGINT)
    assert _over(program, children, -signal.SIGINT) == ""


@pytest.mark.parametrize("how", _ENDS)
def test_ctrl_c_however_it_ends(ending, how):
    begin = "" if "with" in how else _STARTS["an actor"]
    program, children = ending(begin, _ENDS[how])
    # One may be meant for what Python does between the end of the main thread and the session's.
    end = time.monotonic() + 60
    while program.poll() is None and time.monotonic() < end:
        program.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            program.wait(1)
    _over(program, children, -signal.SIGINT)


@pytest.mark.parametrize("what", ["an actor", "one that is restarted", "the worker of a function"])
def test_ctrl_c_after_sigterm(ending, what):
    program, children = ending(_STARTS[what], "os.kill(os.getpid(), signal.SIGTERM)")
    program.send_signal(signal.SIGINT)
    assert _over(program, children, -signal.SIGTERM) == ""


@pytest.mark.parametrize("handler", ["SystemExit", "KeyError", "nothing"])
def test_a_handler_of_the_users_at_the_end(ending, handler):
    """Whatever it raises, the end waits for no process that does not come."""
    does = "pass" if handler == "nothing" else f"raise {handler}"
    program, children = ending(
        _STARTS["an actor"],
        f"""
        launcher.CLOSE_TIMEOUT = 1.0
        def handle(*_):
            {does}
        signal.signal(signal.SIGUSR1, handle)
        """,
    )
    program.send_signal(signal.SIGUSR1)
    program.communicate(timeout=60)
    psutil.wait_procs(children, timeout=60)
    assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize("what", ["an actor", "one that is restarted", "the worker of a function"])
@pytest.mark.parametrize("how", ["", "conveyor.shutdown()"])
def test_without_ctrl_c_it_waits_for_the_fork_server_alone(ending, what, how):
    program, children = ending("launcher.CLOSE_TIMEOUT = 1.0", _STARTS[what], how)
    assert _over(program, children, 0) == ""


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.02, 0.04, 0.08])
def test_ctrl_c_at_any_moment(scripts, delay):
    """With a fork server that answers: it may have ended when the wait for its answer begins."""
    program = scripts.start(
        """
        import conveyor
        @conveyor.remote
        class Actor:
            pass
        actor = Actor.remote()
        print("ends", flush=True)
        """
    )
    assert program.stdout.readline() == "ends\n"
    children = psutil.Process(program.pid).children(recursive=True)
    time.sleep(delay)
    program.send_signal(signal.SIGINT)
    assert program.wait(30) in (-signal.SIGINT, 0)  # it may have ended before
    psutil.wait_procs(children, timeout=60)
    assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize("how", ["", "conveyor.shutdown()"])
def test_who_starts_an_actor_in_a_thread_is_told_that_the_session_has_ended(ending, how):
    program, children = ending(
        """
        launcher.CLOSE_TIMEOUT = 1.0
        launcher.Launcher.is_silent = property(lambda self: False, lambda self, value: None)
        from conveyor.engines.local import engine
        engine._ANSWER_TIMEOUT = 1000.0
        Actor.remote()
        deafen()
        told = []

        def start():
            try:
                Actor.remote()
            except conveyor.exceptions.SessionEndedError:
                told.append(1)
                raise

        threads = [threading.Thread(target=start, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(conveyor.runtime.context.running().supervisor._awaited) < 3:
            time.sleep(0.01)
        """,
        how,
        "" if not how else "for thread in threads: thread.join()\nassert told == [1, 1, 1], told",
    )
    err = _over(program, children, 0)
    if not how:  # at the end of the program nothing is printed of it
        assert err == ""


def test_who_waits_in_a_thread_is_told_that_the_session_has_ended(scripts):
    scripts.run(
        """
        import threading, time
        import conveyor
        from conveyor.engines.local import launcher

        @conveyor.remote
        class Actor:
            def echo(self, x):
                return x

        launcher.SPAWN_TIMEOUT, launcher.CLOSE_TIMEOUT = 1000.0, 1.0
        conveyor.init()
        launcher.Launcher._send = lambda *_, **__: None
        call = Actor.remote().echo.remote(1)
        told = []

        def get():
            try:
                conveyor.get(call)
            except conveyor.exceptions.SessionEndedError as error:
                told.append(str(error))

        thread = threading.Thread(target=get)
        thread.start()
        conveyor.shutdown()
        thread.join(60)
        assert told == ["the session has ended: it has been shut down"], told
        """
    )
