"""How a session on Ray ends, and what is told of who does not."""

import os
import re
import signal
import sys
import time

import cloudpickle
import pytest

import conveyor

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT = 60
#: Connections are not to be lost because the machine has other work.
TIMEOUT = 30
THERE = {"resources": {"second": 0.01}}


@conveyor.remote
class Stage:
    def pid(self):
        return os.getpid()

    def hold(self, inside):
        open(inside, "w").close()
        while True:
            time.sleep(0.002)


def test_actors_have_the_grace_period_at_sigterm(scripts, two_nodes):
    """Ray's native handler of SIGTERM has a process aborted that is not gone three seconds later."""
    source = """
    import signal, sys, time
    import conveyor

    class A:
        def pid(self):
            return 1

        def __conveyor_exit__(self):
            time.sleep(4)
            open("whole", "w").close()

    conveyor.init(engine="ray", address=sys.argv[1], grace_seconds=60)
    actor = conveyor.remote(A).remote()
    print("said", conveyor.get(actor.pid.remote()), flush=True)
    signal.pause()
    """
    program = scripts.start(source, two_nodes.address, env={"RAY_ADDRESS": ""})
    next(line for line in program.stdout if line.startswith("said"))
    program.send_signal(signal.SIGTERM)
    out, err = program.communicate(timeout=100)
    assert program.returncode == signal.SIGTERM, (out, err)  # as Ray has a driver end
    assert os.path.exists(os.path.join(os.path.dirname(program.args[2]), "whole"))


def test_what_an_actor_of_another_node_does_that_does_not_end(
    two_nodes, leaves_nothing, tmp_path, wait_until, caplog, monkeypatch
):
    monkeypatch.setattr("conveyor.driver.remote_processes.BRIEF_TIME_LIMIT", WAIT)
    with leaves_nothing():
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT, grace_seconds=0.5)
        actor = Stage.options(**THERE, name="busy").remote()
        pid = conveyor.get(actor.pid.remote(), timeout=WAIT)
        call = actor.hold.remote(str(tmp_path / "inside"))
        wait_until(lambda: (tmp_path / "inside").exists(), WAIT)
        conveyor.shutdown()
        del call
    (told,) = (r.getMessage() for r in caplog.records if "not ended within" in r.message)
    assert re.search(rf"busy \(pid {pid} on \S+ \(\w+\)\): running hold \(call \d+\)", told)


def test_what_waits_for_a_restart_says_so(
    two_nodes, leaves_nothing, wait_until, caplog, monkeypatch
):
    monkeypatch.setattr("conveyor.runtime.waiting.LOG_AFTER", 0.01)
    with leaves_nothing():
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT)
        actor = Stage.options(**THERE, max_restarts=1, name="back").remote()
        pid = conveyor.get(actor.pid.remote(), timeout=WAIT)
        caplog.clear()
        os.kill(pid, signal.SIGKILL)

        def again():
            try:
                return conveyor.get(actor.pid.remote(), timeout=WAIT) != pid
            except conveyor.exceptions.ActorRestartedError:
                return False

        wait_until(again, WAIT)
        conveyor.shutdown()
    told = [r.getMessage() for r in caplog.records if r.message.startswith("waiting for back.pid")]
    assert any("back is starting" in each for each in told), told


def test_an_address_that_is_none():
    with pytest.raises(TypeError, match="address must be a str, not int"):
        conveyor.init(engine="ray", address=6379)
    assert not conveyor.is_initialized()
