"""Forks of all kinds in drivers and actors, while they hold values in shared memory.

Each in a program of its own, so that what goes wrong in a child shows in its exit code and output.
"""

import importlib.util
import textwrap

import pytest

COMMON = """
    import gc, os, signal, sys, time
    import numpy as np
    import conveyor
    from conveyor.dag import InputNode

    N = 200_000

    @conveyor.remote
    class Maker:
        def __init__(self):
            self.kept = []

        def make(self, i):
            return np.full(N, float(i))

        def keep(self, x):
            self.kept.append(x)

        def kept_right(self):
            return [bool((x == i).all()) for i, x in enumerate(self.kept)]

        def echo(self, x):
            return x

    def finish(child):
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code == 0, f"the child ended with {code}"

    def churn(graph, n=30):
        # Uses memory again and again: what was freed too early is overwritten now.
        for i in range(1000, 1000 + n):
            value = conveyor.get(graph.execute(i), timeout=60)
            assert (value == i).all()
            del value

    def in_child(body):
        # Like a program's child: it runs, it ends with all its exit handlers.
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            body()
            gc.collect()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            if code:
                os._exit(code)
            sys.exit(0)

    maker = Maker.remote()
    with InputNode() as inp:
        graph = maker.make.bind(inp).compile(depth=2)
    held = [conveyor.get(graph.execute(i), timeout=60) for i in range(10)]

    BODY

    print("done")
"""


def program(body):
    lines = body.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return COMMON.replace("BODY", "\n".join("    " + x[indent:] for x in lines).lstrip())


def run(scripts, body):
    assert scripts.run(program(body)).splitlines()[-1:] == ["done"]
    assert "Traceback" not in scripts.stderr, scripts.stderr


def test_a_childs_end_takes_nothing_from_the_parent(scripts):
    run(
        scripts,
        """
        def body():
            global held
            assert all((x == i).all() for i, x in enumerate(held))
            held = None   # its finalizers run here
        for _ in range(3):
            finish(in_child(body))
        churn(graph)
        assert all((x == i).all() for i, x in enumerate(held))
        """,
    )


def test_a_child_keeps_its_values_when_the_parent_drops_its_own(scripts):
    run(
        scripts,
        """
        go_read, go_write = os.pipe()
        def body():
            os.close(go_write)
            os.read(go_read, 1)   # the parent has dropped, and used the memory again
            assert all((x == i).all() for i, x in enumerate(held))
        child = in_child(body)
        os.close(go_read)
        del held
        gc.collect()
        churn(graph)
        os.close(go_write)
        finish(child)
        """,
    )


def test_a_child_keeps_its_values_when_the_parent_has_shut_down(scripts):
    run(
        scripts,
        """
        go_read, go_write = os.pipe()
        def body():
            os.close(go_write)
            os.read(go_read, 1)
            assert all((x == i).all() for i, x in enumerate(held))
        child = in_child(body)
        os.close(go_read)
        conveyor.shutdown()
        os.close(go_write)
        finish(child)
        """,
    )


def test_a_child_that_writes_changes_nothing_of_the_parents(scripts):
    pytest.importorskip("torch")
    run(
        scripts,
        """
        import torch
        torch.set_num_threads(1)
        tensors = [conveyor.get(maker.echo.remote(torch.full((N,), float(i)))) for i in range(5)]
        def body():
            for tensor in tensors:
                tensor += 100
        finish(in_child(body))
        assert all((t == i).all() for i, t in enumerate(tensors))
        """,
    )


def test_a_forked_child_is_no_driver_of_the_parents_session(scripts):
    run(
        scripts,
        """
        from conveyor.exceptions import ConveyorError, RuntimeStateError
        pending = maker.echo.remote("pending")
        def refused(use):
            try:
                use()
            except RuntimeStateError:
                return
            raise AssertionError("no error")
        def body():
            refused(lambda: maker.echo.remote(1))
            refused(lambda: graph.execute(1))
            refused(lambda: pending.get(timeout=5))
            refused(lambda: conveyor.kill(maker))
            assert not conveyor.is_initialized()
            conveyor.shutdown()
        finish(in_child(body))
        assert conveyor.get(pending, timeout=60) == "pending"
        churn(graph)
        """,
    )


def test_a_forked_child_can_have_a_session_of_its_own(scripts):
    run(
        scripts,
        """
        def body():
            own = Maker.remote()
            assert (conveyor.get(own.make.remote(3), timeout=60) == 3).all()
            with InputNode() as inp:
                mine = own.make.bind(inp).compile()
            churn(mine)
            mine.teardown()
            conveyor.shutdown()
        finish(in_child(body))
        churn(graph)
        assert all((x == i).all() for i, x in enumerate(held))
        """,
    )


def test_a_child_that_exits_without_ceremony(scripts):
    run(
        scripts,
        """
        for how in range(3):
            child = os.fork()
            if child == 0:
                if how == 0:
                    os._exit(0)
                if how == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                os.abort()
            os.waitpid(child, 0)
            churn(graph, 5)
            assert all((x == i).all() for i, x in enumerate(held))
            assert conveyor.get(maker.echo.remote(1), timeout=60) == 1
        """,
    )


def test_a_child_that_outlives_the_driver_keeps_no_actor_alive(scripts, wait_until):
    import os

    import psutil

    source = program(
        """
        child = os.fork()
        if child == 0:
            time.sleep(300)
            os._exit(0)
        print(child, *[p.pid for p in __import__("psutil").Process().children(recursive=True)
                       if p.pid != child], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    driver = scripts.start(source)
    child, *pids = map(int, driver.stdout.readline().split())
    driver.wait(60)
    try:
        assert pids
        wait_until(lambda: not any(map(psutil.pid_exists, pids)), 60, "the end of the actors")
    finally:
        os.kill(child, 9)


def test_arrays_made_in_place_are_a_childs_own(scripts):
    run(
        scripts,
        """
        arrays = [conveyor.empty((n,), np.uint8) for n in (100, N, 30 << 20)]
        for i, x in enumerate(arrays):
            x[:] = i
        go_read, go_write = os.pipe()
        wrote_read, wrote_write = os.pipe()
        def grandchild():
            assert all(x[0] == 77 for x in arrays)
            for x in arrays:
                x[1] = 78
        def body():
            os.close(go_write)
            for x in arrays:
                x[0] = 77
            pid = os.fork()
            if pid == 0:
                try:
                    grandchild()
                    os._exit(0)
                finally:
                    os._exit(1)
            finish(pid)
            os.write(wrote_write, b"x")
            os.read(go_read, 1)   # the parent has dropped, sent, and used the memory again
            for i, x in enumerate(arrays):
                assert x[0] == 77 and (x[1:] == i).all(), i
        child = in_child(body)
        os.close(go_read)
        os.read(wrote_read, 1)
        assert all((x == i).all() for i, x in enumerate(arrays))
        # What travels is a copy: the actor may keep it, and the child still reads the original.
        last = arrays.pop()
        assert (conveyor.get(maker.echo.remote(last)) == 2).all()
        sizes = [last.nbytes] + [x.nbytes for x in arrays]
        arrays.clear()
        del x, last
        gc.collect()
        for n in sizes * 3:
            assert (conveyor.get(maker.echo.remote(np.full(n, 5, np.uint8))) == 5).all()
            y = conveyor.empty((n,), np.uint8)
            y[:] = 6
            assert (conveyor.get(maker.echo.remote(y)) == 6).all()
        os.close(go_write)
        finish(child)
        """,
    )


def test_what_children_cost_a_parent_that_holds_values(scripts):
    run(
        scripts,
        """
        import threading
        def descriptors():
            return len(os.listdir("/proc/self/fd"))
        def wait_until(condition):
            end = time.monotonic() + 30
            while not condition():
                assert time.monotonic() < end, (before, descriptors())
                time.sleep(0.001)
        before = descriptors()
        for _ in range(50):
            finish(in_child(lambda: None))
        wait_until(lambda: descriptors() <= before)   # though nothing of ours is waited for
        go_read, go_write = os.pipe()
        def waiting():
            os.close(go_write)
            os.read(go_read, 1)
            assert all((x == i).all() for i, x in enumerate(held))
        children = []
        def forks():   # in a thread: the child has no other
            for _ in range(3):
                pid = os.fork()
                if pid == 0:
                    try:
                        waiting()
                        os._exit(0)
                    finally:
                        os._exit(1)
                children.append(pid)
        threads = [threading.Thread(target=forks) for _ in range(2)]
        for t in threads: t.start()
        for t in threads: t.join(60)
        assert descriptors() <= before + len(children) + 1 + 3, (before, descriptors())
        held.clear()
        gc.collect()
        churn(graph)
        os.close(go_write)
        for child in children:
            finish(child)
        os.close(go_read)
        wait_until(lambda: descriptors() <= before)
        churn(graph)
        """,
    )


def test_a_child_that_cannot_have_pages_of_its_own(scripts):
    scripts.run(
        program(
            """
        import resource
        x = conveyor.empty((N,), np.uint8)
        x[:] = 1
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_DATA, (1, 1))
            grandchild = os.fork()   # whose values cannot be made its own: but they were its parent's
            if grandchild == 0:
                x[0] = 7
                os._exit(0)
            _, status = os.waitpid(grandchild, 0)
            os._exit(int(x[0]) if os.waitstatus_to_exitcode(status) == 0 else 99)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 1, status
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (1, hard))
        child = os.fork()
        if child == 0:
            if x[5] != 1:   # it can be read
                os._exit(3)
            x[0] = 7
            os._exit(4)
        _, status = os.waitpid(child, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV, status
        assert (x == 1).all()
        """
        )
    )
    assert "cannot be made its own" in scripts.stderr


def test_multiprocessing_with_fork(scripts):
    run(
        scripts,
        """
        import multiprocessing
        context = multiprocessing.get_context("fork")
        def total(i):
            return float(held[i].sum())
        with context.Pool(2) as pool:
            assert pool.map(total, range(10)) == [float(i * N) for i in range(10)]
        process = context.Process(target=total, args=(1,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        churn(graph)
        assert all((x == i).all() for i, x in enumerate(held))
        """,
    )


def test_multiprocessing_with_spawn_and_subprocess(scripts):
    run(
        scripts,
        """
        import subprocess, multiprocessing
        for _ in range(3):
            assert subprocess.run(["true"]).returncode == 0
            assert os.system("true") == 0
            assert subprocess.run(["true"], preexec_fn=lambda: None).returncode == 0
        # No descriptor of ours goes into other programs.
        out = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True,
                             close_fds=False).stdout
        assert "conveyor" not in out and "eventfd" not in out, out
        churn(graph)
        assert all((x == i).all() for i, x in enumerate(held))
        """,
    )


def test_a_fork_while_other_threads_execute(scripts):
    run(
        scripts,
        """
        import threading
        stop, failures = threading.Event(), []
        with InputNode() as inp:
            second = maker.echo.bind(inp).compile()
        def work():
            try:
                i = 0
                while not stop.is_set():
                    assert conveyor.get(second.execute(i), timeout=60) == i
                    i += 1
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=work) for _ in range(2)]
        for t in threads:
            t.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                ok = all((x == i).all() for i, x in enumerate(held))
                os._exit(0 if ok else 1)
            finish(child)
        stop.set()
        for t in threads:
            t.join(60)
        assert not failures, failures
        """,
    )


PAUSED = """
    import threading

    # The garbage collector pauses while values of so many parts are encoded and decoded.
    inside, go_on = threading.Event(), threading.Event()
    in_thread = [None]
    def stop():
        if threading.current_thread() is in_thread[0]:
            inside.set()
            assert go_on.wait(60)
    class Encoded:
        def __reduce__(self):
            stop()
            return str, ()
    class Decoded:
        def __reduce__(self):
            return exec, ("import __main__; __main__.stop()",)
    many = [float(i) for i in range(20_000)]
    ref = conveyor.put({"first": Decoded(), "rest": [str(i) for i in many]})
    works = [
        lambda: conveyor.put([Encoded(), *many]),
        lambda: maker.echo.remote([Encoded(), *many]),
        lambda: conveyor.get(ref),
    ]
    def is_on_in_child():
        child = os.fork()
        if child == 0:
            found = gc.isenabled()
            own = conveyor._core.Uncollected()
            assert not gc.isenabled()
            own.end()
            assert gc.isenabled() == found
            os._exit(found)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    def start(work):
        inside.clear(), go_on.clear()
        thread = in_thread[0] = threading.Thread(target=work, daemon=True)
        thread.start()
        assert inside.wait(60)
        return thread
    def end(thread):
        go_on.set()
        thread.join(60)
        assert not thread.is_alive()
"""


def paused(body):
    return textwrap.dedent(PAUSED).strip("\n") + "\n" + textwrap.dedent(body)


def test_a_child_collects_garbage_where_a_thread_of_its_parent_paused_that(scripts):
    run(
        scripts,
        paused("""
            for work in works:
                thread = start(work)
                assert not gc.isenabled()
                assert is_on_in_child()
                assert not gc.isenabled()
                end(thread)
                assert gc.isenabled()
                assert is_on_in_child()
            # Who has turned it off himself finds it so.
            gc.disable()
            for work in works:
                thread = start(work)
                assert not is_on_in_child()
                end(thread)
                assert not gc.isenabled()
            gc.enable()
        """),
    )


def test_a_child_that_is_forked_while_its_own_thread_pauses_the_collector(scripts):
    run(
        scripts,
        paused("""
            found = []
            class Forks:
                def __reduce__(self):
                    child = os.fork()
                    found.append(child)
                    return int, ()
            for others in (False, True):
                thread = start(works[0]) if others else None
                try:
                    conveyor.put([Forks(), *many])
                except conveyor.exceptions.ConveyorError:
                    assert 0 in found
                if 0 in found:
                    collects = gc.isenabled()
                    os._exit(0 if collects else 1)
                finish(found.pop())
                if others:
                    end(thread)
                assert gc.isenabled()
        """),
    )


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


@needs_torch
def test_a_data_loader_with_workers(scripts):
    run(
        scripts,
        """
        import torch
        torch.set_num_threads(1)
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return len(held)
            def __getitem__(self, i):
                assert (held[i] == i).all()
                return torch.from_numpy(held[i].copy())[:10]
        for _ in range(2):
            loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2)
            rows = torch.cat(list(loader))
            assert rows[:, 0].tolist() == list(range(10))
            churn(graph, 10)
        assert all((x == i).all() for i, x in enumerate(held))
        """,
    )


ACTOR = """
    class Forker(Maker.__wrapped__):
        def fork(self, times):
            codes = []
            for _ in range(times):
                child = os.fork()
                if child == 0:
                    ok = all((x == i).all() for i, x in enumerate(self.kept))
                    self.kept.clear()
                    gc.collect()
                    if not ok:
                        os._exit(1)
                    sys.exit(0)
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return codes

        def pool(self):
            # Functions of __main__ are no names in an actor, so no Pool.map: plain processes.
            import multiprocessing
            context = multiprocessing.get_context("fork")
            totals = []
            for x in self.kept:
                here, there = context.Pipe()
                process = context.Process(target=lambda: there.send(float(x.sum())))
                process.start()
                assert here.poll(60)
                totals.append(here.recv())
                process.join(60)
                assert process.exitcode == 0, process.exitcode
            return totals

        def subprocess(self):
            import subprocess
            return subprocess.run(["echo", "text"], capture_output=True, text=True).stdout

        def loader(self):
            import torch
            torch.set_num_threads(1)
            class Data(torch.utils.data.Dataset):
                def __len__(data):
                    return len(self.kept)
                def __getitem__(data, i):
                    return float(self.kept[i].sum())
            loader = torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=2)
            return list(loader)

    forker = conveyor.remote(Forker).remote()
    with InputNode() as inp:
        keep = forker.keep.bind(maker.make.bind(inp)).compile(depth=2)
    conveyor.get([keep.execute(i) for i in range(5)], timeout=60)

    def still_right():
        churn(graph)
        return conveyor.get(forker.kept_right.remote(), timeout=60) == [True] * 5
"""


def run_actor(scripts, body):
    lines = body.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    whole = ACTOR.rstrip("\n") + "\n" + "\n".join("    " + x[indent:] for x in lines)
    run(scripts, whole)


def test_an_actor_that_forks(scripts):
    run_actor(
        scripts,
        """
        assert conveyor.get(forker.fork.remote(3), timeout=60) == [0, 0, 0]
        assert still_right()
        with InputNode() as inp:
            forking = forker.fork.bind(inp).compile()
        assert conveyor.get(forking.execute(2), timeout=60) == [0, 0]
        assert still_right()
        """,
    )


def test_an_actor_with_multiprocessing_and_subprocesses(scripts):
    run_actor(
        scripts,
        """
        assert conveyor.get(forker.pool.remote(), timeout=60) == [float(i * N) for i in range(5)]
        assert conveyor.get(forker.subprocess.remote(), timeout=60) == "text\\n"
        assert still_right()
        """,
    )


@needs_torch
def test_an_actor_with_a_data_loader(scripts):
    run_actor(
        scripts,
        """
        assert conveyor.get(forker.loader.remote(), timeout=60) == [float(i * N) for i in range(5)]
        assert still_right()
        """,
    )
