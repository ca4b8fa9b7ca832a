"""While the fork server is stopped: whoever starts actors goes on, and calls wait no longer than they may."""

import pytest

COMMON = """
    import os, signal, threading, time
    from contextlib import contextmanager, suppress
    import conveyor
    import conveyor.dag
    from conveyor.exceptions import ActorDiedError, ActorStartError, WaitTimeoutError

    @conveyor.remote
    class Actor:
        def __init__(self, value=0):
            self.value = value

        def get(self):
            return self.value

        def add(self, x):
            return self.value + x

        def leave(self):
            self.leaves = True

        def __conveyor_exit__(self):
            if getattr(self, "leaves", False):
                open(self.value + "/left", "w").close()

        def touch(self):
            open(self.value, "w").close()

        def parent(self):
            return os.getppid()

        def make(self, value):
            self.made = Actor.remote(value)
            return self.made

    @conveyor.remote
    def double(x):
        return 2 * x

    @contextmanager
    def stopped():
        os.kill(server, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):  # it has ended with its session
                os.kill(server, signal.SIGCONT)

    def late(ref):
        begin = time.monotonic()
        try:
            conveyor.get(ref, timeout=0.2)
        except WaitTimeoutError as error:
            assert f"the fork server (pid {server}), which is stopped" in str(error), error
            assert time.monotonic() - begin < 5
        else:
            raise AssertionError("it cannot have started")

    if __name__ == "__main__":
        first = Actor.remote(7)
        server = conveyor.get(first.parent.remote())
"""

PROGRAMS = {
    "calls of a new actor wait as long as they may, and come": """
        with stopped():
            calls = [Actor.remote(number).get.remote() for number in range(3)]
            for call in calls:
                late(call)
            assert conveyor.get(first.get.remote(), timeout=10) == 7
        assert conveyor.get(calls) == [0, 1, 2]
""",
    "so do functions": """
        with stopped():
            call = double.remote(21)
            late(call)
        assert conveyor.get(call) == 42
""",
    "an actor starts one": """
        with stopped():
            made = conveyor.get(first.make.remote(5), timeout=10)
            call = made.get.remote()
            late(call)
        assert conveyor.get(call) == 5
""",
    "a graph is compiled once its actor is there": """
        made = []

        def compile():
            with conveyor.dag.InputNode() as inp:
                dag = new.add.bind(inp)
            made.append(dag.experimental_compile())

        with stopped():
            new = Actor.remote(3)
            compiling = threading.Thread(target=compile)
            compiling.start()
            compiling.join(0.5)
            assert compiling.is_alive()
        compiling.join()
        assert conveyor.get(made[0].execute(1)) == 4
""",
    "what is not wanted any more does not come": """
        with stopped():
            killed, dropped = Actor.remote(1), Actor.remote(2)
            call = killed.get.remote()
            conveyor.kill(killed)
            try:
                conveyor.get(call, timeout=10)
            except ActorDiedError as error:
                assert "conveyor.kill()" in str(error), error
            else:
                raise AssertionError("it was killed")
            del dropped
        assert conveyor.get(Actor.remote(4).get.remote()) == 4
""",
    "who is killed is buried, and the session ends": """
        with stopped():
            new = Actor.remote(1)
            conveyor.kill(first)
            assert conveyor.get(new.get.remote(), timeout=10) == 1  # the server goes on
        with stopped():
            pending = Actor.remote(2).get.remote()
            begin = time.monotonic()
            conveyor.shutdown()
            assert time.monotonic() - begin < 8
        try:
            conveyor.get(pending, timeout=10)
        except conveyor.exceptions.ConveyorError:
            pass
        else:
            raise AssertionError("its session is over")
        assert conveyor.get(Actor.remote(5).get.remote()) == 5
""",
    "one that was killed before it was there runs nothing": """
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            with stopped():
                begin = time.monotonic()
                killed = Actor.remote(folder + "/made")
                call = killed.touch.remote()
                others = [Actor.remote(number) for number in range(12)]
                assert time.monotonic() - begin < 4  # who has waited in vain is enough
                threading.Thread(target=conveyor.kill, args=(killed,)).start()
                try:
                    conveyor.get(call, timeout=10)
                except ActorDiedError:
                    pass
                else:
                    raise AssertionError("it was killed")
            assert conveyor.get([other.get.remote() for other in others]) == list(range(12))
            assert os.listdir(folder) == []
""",
    "Ctrl-C while a thread begins to wait for it": """
        from conveyor.driver.supervisor import Restarts
        follow = Restarts.follow

        def interrupted(self, work):
            follow(self, work)
            os.kill(os.getpid(), signal.SIGINT)

        Restarts.follow = interrupted
        with stopped():
            for _ in range(2):
                try:
                    Actor.options(name="late").remote(1)
                except KeyboardInterrupt:
                    pass
                else:
                    raise AssertionError("it was interrupted")
            Restarts.follow = follow
        limit = time.monotonic() + 60
        while True:
            try:
                late = Actor.options(name="late").remote(2)
                break
            except ValueError:  # until the thread has noted that the first is not wanted
                assert time.monotonic() < limit
        assert conveyor.get(late.get.remote()) == 2
""",
    "one that is there before who waits for it has heard of that ends in good order": """
        from conveyor.engines.local.engine import LocalSpawning
        import tempfile
        wait = LocalSpawning.wait

        def late(self):
            spawned = wait(self)
            time.sleep(0.3)
            return spawned

        LocalSpawning.wait = late
        with tempfile.TemporaryDirectory() as folder:
            for end in (lambda actor: conveyor.kill(actor, graceful=True), lambda actor: conveyor.shutdown()):
                with stopped():
                    actor = Actor.remote(folder)
                    call = actor.leave.remote()
                assert conveyor.get(call) is None
                end(actor)
                assert os.listdir(folder) == ["left"]
                os.unlink(folder + "/left")
""",
    "its death is the death of what is asked for": """
        os.kill(server, signal.SIGSTOP)
        call = Actor.remote(1).get.remote()
        late(call)
        os.kill(server, signal.SIGKILL)
        try:
            conveyor.get(call, timeout=10)
        except ActorStartError as error:
            assert f"the fork server (pid {server}) was killed by signal 9" in str(error), error
        else:
            raise AssertionError("nobody could start it")
""",
    "Ctrl-C ends the wait for its answer, and nothing is left": """
        with stopped():
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                Actor.options(name="late").remote(1)
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("it was interrupted")
        assert conveyor.get(Actor.options(name="late").remote(2).get.remote()) == 2
""",
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_while_the_fork_server_is_stopped(scripts, what):
    scripts.run(COMMON + PROGRAMS[what])
