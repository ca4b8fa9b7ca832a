"""Exceptions of signal handlers (Ctrl-C) at every moment of a session's start and end, of an actor's start,
and of a graph's: in the end nothing is left."""

import pytest

PROGRAM = """
    import linecache, os, signal, subprocess, sys, threading, time
    import psutil
    import conveyor

    # Every line takes a while: each run takes its own third of them.
    STEP = 3
    FIRST = os.getpid() % STEP - STEP + 1
    SOURCES = (os.path.dirname(conveyor.__file__), subprocess.__file__)

    @conveyor.remote
    class Actor:
        def pid(self):
            return os.getpid()
        def echo(self, x):
            return x

    def state():
        return (
            sorted(os.listdir("/proc/self/fd")),
            sorted(t.name for t in threading.enumerate()),
            [f"{p.pid} {p.status()}" for p in psutil.Process().children()],
        )

    def settled(condition):
        '''Whether it comes true: a thread that has done its work, and said so, may still be about to end.'''
        end = time.monotonic() + 60
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def in_finalizer(frame):
        # What it raises is printed, and not raised.
        while frame is not None:
            if frame.f_code.co_name in ("__del__", "_release", "_remove"):
                return True
            frame = frame.f_back
        return False

    class Injector:
        '''Raises at the k-th line of the library's that the main thread is about to execute.'''
        def __init__(self, k):
            self.left = k
        def trace(self, frame, event, arg):
            code = frame.f_code
            if not code.co_filename.startswith(SOURCES) or in_finalizer(frame):
                return None
            # Not where no handler runs: at `with`, which is told again before the lock is given back, and at
            # `try:`, which does nothing and is guarded by none of what stands around it.
            line = linecache.getline(code.co_filename, frame.f_lineno).lstrip()
            if event == "line" and not line.startswith(("with ", "try:")):
                self.left -= 1
                if self.left == 0:
                    self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    raise KeyboardInterrupt
            return self.trace

    def inject(k, work):
        '''Whether there was a k-th line. Whoever has swallowed the interrupt is a fault.'''
        injector = Injector(k)
        try:
            sys.settrace(injector.trace)
            work()
        except KeyboardInterrupt:
            pass
        else:
            sys.settrace(None)
            assert injector.left > 0, "swallowed at " + injector.where
            return ""
        finally:
            sys.settrace(None)
        return injector.where

    conveyor.init()
    conveyor.get(Actor.remote().pid.remote())
    conveyor.shutdown()
    BODY
"""


def program(body):
    lines = body.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    body = "\n".join("    " + line[indent:] for line in lines).lstrip()
    return PROGRAM.replace("BODY", body)


def test_a_shutdown_that_is_interrupted_at_any_line(scripts):
    body = """
        before = state()
        k, where = FIRST, "none"
        while where:
            k += STEP
            conveyor.init()
            actor = Actor.remote()
            pid = conveyor.get(actor.pid.remote())
            where = inject(k, conveyor.shutdown)
            conveyor.shutdown()
            assert settled(lambda: state() == before), (k, where, state(), before)
            assert not psutil.pid_exists(pid), (k, where)
            assert not conveyor.is_initialized()
        print("interrupted" if k > 20 else k)
    """
    assert scripts.run(program(body), timeout=220) == "interrupted\n"
    assert scripts.stderr == ""


def test_a_session_after_a_shutdown_that_was_interrupted_at_any_line(scripts):
    body = """
        before = state()
        k, where = FIRST, "none"
        while where:
            k += STEP
            conveyor.init(ignore_reinit_error=True)
            where = inject(k, conveyor.shutdown)
            conveyor.init(ignore_reinit_error=True)
            assert conveyor.get(Actor.remote().pid.remote()) != os.getpid(), (k, where)
        conveyor.shutdown()
        assert settled(lambda: state() == before), (state(), before)
        print("went on" if k > 20 else k)
    """
    assert scripts.run(program(body), timeout=220) == "went on\n"


def test_a_start_that_is_interrupted_at_any_line(scripts):
    body = """
        before = state()
        k, where = FIRST, "none"
        while where:
            k += STEP
            where = inject(k, conveyor.init)
            conveyor.shutdown()
            assert settled(lambda: state() == before), (k, where, state(), before)
        print("interrupted" if k > 20 else k)
    """
    assert scripts.run(program(body), timeout=220) == "interrupted\n"


def test_an_actor_whose_start_is_interrupted_at_any_line(scripts):
    body = """
        before = state()
        conveyor.init()
        first = Actor.remote()
        conveyor.get(first.pid.remote())
        k, where = FIRST, "none"
        while where:
            k += STEP
            where = inject(k, Actor.remote)
        assert conveyor.get(Actor.remote().pid.remote()) != os.getpid()
        del first
        conveyor.shutdown()
        assert settled(lambda: state() == before), (state(), before)
        print("interrupted" if k > 50 else k)
    """
    assert scripts.run(program(body), timeout=220) == "interrupted\n"


STORM = """
    import random
    rng = random.Random(SEED)
    shots = 0

    def handler(number, frame):
        global shots
        if shots and frame.f_code.co_name != "<module>":  # not between the lines of this program
            shots -= 1
            raise KeyboardInterrupt

    def end():
        while conveyor.is_initialized() or shots:
            try:
                conveyor.shutdown()
            except KeyboardInterrupt:
                pass

    signal.signal(signal.SIGALRM, handler)
    before = state()
    for _ in range(12):
        conveyor.init()
        actor = Actor.remote()
        pid = conveyor.get(actor.pid.remote())
        signal.setitimer(signal.ITIMER_REAL, rng.random() * 0.01 + 1e-5, 0.0001 + rng.random() * 0.002)
        shots = 20
        while shots or conveyor.is_initialized():
            try:
                end()
            except KeyboardInterrupt:  # between the lines of `end`
                pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert settled(lambda: state() == before), (state(), before)
        # The wait for the killed process to be reaped may be what was interrupted.
        assert settled(lambda: not psutil.pid_exists(pid))
    print("calm again")
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_interrupts_ends_the_session(scripts, seed):
    body = STORM.replace("SEED", str(seed))
    assert scripts.run(program(body), timeout=220) == "calm again\n"


def test_ctrl_c_in_shutdown_ends_the_grace_period(scripts):
    body = """
        @conveyor.remote
        class Slow:
            def pid(self):
                return os.getpid()
            def __conveyor_exit__(self):
                open("ending", "w").close()
                time.sleep(600)

        def interrupt():
            while not os.path.exists("ending"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        before = state()
        conveyor.init(grace_seconds=100)
        actor = Slow.remote()
        pid = conveyor.get(actor.pid.remote())
        threading.Thread(target=interrupt).start()
        begun = time.monotonic()
        try:
            conveyor.shutdown()
        except KeyboardInterrupt:
            assert time.monotonic() - begun < 60
        else:
            raise AssertionError("not interrupted")
        assert not psutil.pid_exists(pid)
        assert settled(lambda: state() == before), (state(), before)
        print("ended")
    """
    assert scripts.run(program(body)) == "ended\n"


def test_a_handler_shuts_the_session_down_in_the_middle_of_a_call(scripts):
    # The main thread, which it has interrupted, holds a lock that the end needs.
    body = """
        from conveyor.engines.local import launcher
        from conveyor.exceptions import ConveyorError
        from conveyor.runtime import context
        from conveyor.driver.supervisor import Supervisor

        launcher.CLOSE_TIMEOUT = 100
        before = state()
        took = []

        def trace(frame, event, arg):
            if frame.f_code is not Supervisor._is_there.__code__:
                return None
            if event == "line" and not took and driver.table.lock._is_owned():
                begun = time.monotonic()
                conveyor.shutdown()
                took.append(time.monotonic() - begun)
                assert driver.table.lock._is_owned()
            return trace

        conveyor.init()
        driver = context.current()
        other = Actor.remote()
        conveyor.get(other.pid.remote())
        sys.settrace(trace)
        try:
            actor = Actor.remote()
        except ConveyorError:
            pass
        sys.settrace(None)
        # Where nobody hears of the actors' ends, each wait for them takes as long as it may.
        assert took and took[0] < 60, took
        assert settled(lambda: state()[1:] == before[1:]), (state(), before)
        print("ended")
    """
    assert scripts.run(program(body)) == "ended\n"


def test_a_handler_shuts_the_session_down_while_arguments_are_encoded(scripts):
    # The interrupted call holds its link's lock, and a thread that the end waits for needs it.
    body = """
        from conveyor.exceptions import ConveyorError
        from conveyor.runtime import context

        class Ends:
            def __reduce__(self):
                signal.raise_signal(signal.SIGUSR1)
                return Ends, ()

        def end(signum, frame):
            driver.pump.add(link)  # as a call would that has to wait there
            conveyor.shutdown()
            ended.append(True)

        @conveyor.remote
        class Takes:
            def take(self, x=None):
                return x

        ended = []
        signal.signal(signal.SIGUSR1, end)
        conveyor.init()
        driver = context.current()
        actor = Takes.remote()
        conveyor.get(actor.take.remote())
        link = driver.link(actor._id)
        try:
            actor.take.remote(Ends())
        except ConveyorError:
            pass
        assert ended
        print("ended")
    """
    assert scripts.run(program(body)) == "ended\n"


@pytest.mark.parametrize("num_gpus", [1, 0.5])
def test_an_interrupted_start_gives_its_gpus_back(scripts, num_gpus):
    body = """
        from conveyor.engines.local.engine import LocalProcessEngine, LocalSpawning
        from conveyor.exceptions import ActorStartError

        steps = [LocalProcessEngine.spawn, LocalSpawning.ask, LocalSpawning.wait]
        steps = {step.__code__ for step in steps}

        def trace(frame, event, arg):
            global left
            if frame.f_code not in steps:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return trace

        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
        conveyor.init()
        line = 0
        while True:
            line += 1
            left = line
            sys.settrace(trace)
            try:
                Actor.options(num_gpus=NUM_GPUS).remote()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            limit = time.monotonic() + 60
            while True:  # until the process that was started is gone
                try:
                    conveyor.kill(Actor.options(num_gpus=2).remote())
                    break
                except ActorStartError:
                    assert time.monotonic() < limit, line
                    time.sleep(0.01)
            if left > 0:
                break
        assert line > 5
        print("ended")
    """
    assert scripts.run(program(body.replace("NUM_GPUS", str(num_gpus)))) == "ended\n"


def test_a_ctrl_c_in_the_first_pickling_tells_of_nothing_else(scripts):
    body = """
        from conveyor.codec.pickling import pickler

        def interrupted(*args):
            raise KeyboardInterrupt

        pickler.drop_picklers()
        pickler._full_pickler = interrupted
        try:
            pickler.dump(lambda: 1, None)
        except KeyboardInterrupt as error:
            assert error.__context__ is None, error.__context__
            print("alone")
    """
    assert scripts.run(program(body)) == "alone\n"


def test_a_graph_that_is_interrupted_at_any_line(scripts):
    """Neither its channels stay nor, without handles, its actors."""
    body = """
        from conveyor.dag import InputNode
        from conveyor.runtime import context

        before = state()
        conveyor.init()
        a, b = Actor.remote(), Actor.remote()
        pids = conveyor.get([a.pid.remote(), b.pid.remote()])
        driver = context.running()
        with InputNode() as inp:
            dag = b.echo.bind(a.echo.bind(inp))
        k, where = FIRST, "none"
        while where:
            k += STEP
            where = inject(k, lambda: dag.compile().teardown())
            assert settled(lambda: len(driver.deployer) == 0), (k, where)
            if k % 10 == 0:
                graph = dag.compile()
                assert conveyor.get(graph.execute(k)) == k, (k, where)
                graph.teardown()
        del a, b, inp, dag
        graph = None
        assert settled(lambda: not any(map(psutil.pid_exists, pids)))
        conveyor.shutdown()
        assert settled(lambda: state() == before), (state(), before)
        print("interrupted" if k > 50 else k)
    """
    assert scripts.run(program(body), timeout=220) == "interrupted\n"
