"""Actor processes as processes: how they start, what they find, how they end."""

import errno
import importlib.util
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import warm_start

from conveyor.engines.local import launcher as launcher_module
from conveyor.engines.local.launcher import Launcher
from conveyor.engines.local.logs import LogPrinter
from conveyor.engines.local.spec import ChildSpec
from conveyor.exceptions import ActorStartError, RuntimeStateError
from conveyor.runtime import waiting as patience_module
from conveyor.runtime.events import EventLoop

pytestmark = pytest.mark.cold_start

HERE = Path(__file__).parent
WAIT = 60.0  # a bound for what should take milliseconds
NOBODY = 0  # no actor's pid


class Actor:
    """A process that evaluates what it is asked."""

    def __init__(self, pid, link):
        self.pid = pid
        self._link = link
        self._file = link.makefile("rw")
        link.settimeout(WAIT)

    def ask(self, expression, kind="eval"):
        self._file.write(json.dumps([kind, expression]) + "\n")
        self._file.flush()
        return json.loads(self._file.readline())

    def do(self, statements):
        self.ask(statements, "exec")

    def close(self):
        self._file.close()
        self._link.close()


class Host:
    """A launcher that remembers what it was told."""

    def __init__(self, preload=("random",)):
        self.changed = threading.Condition()
        self.happened = []
        self.exits = {}
        self.output = {}
        self.printer = LogPrinter()
        self.events = EventLoop()
        self.launcher = Launcher(self.events, self._exited, self._printed, preload=preload)
        self.actors = []

    def _exited(self, pid, status):
        with self.changed:
            self.happened.append(("exit", pid))
            self.exits[pid] = os.waitstatus_to_exitcode(status)
            self.changed.notify_all()

    def _printed(self, pid, stream, data):
        self.printer.feed(pid, stream, data)
        with self.changed:
            if pid != self.launcher.server_pid:
                self.happened.append((stream, pid))
            self.output[pid, stream] = self.output.get((pid, stream), b"") + data
            self.changed.notify_all()

    def _spawned(self, pid):
        with self.changed:
            self.happened.append(("spawned", pid))

    def spec(self, entry="serve", **changes):
        fields = {
            "name": "Test",
            "payload": b"",
            "cwd": os.getcwd(),
            "sys_path": (str(HERE), *sys.path),
            "argv": tuple(sys.argv),
            "environ": dict(os.environ),
            "env_vars": {},
            "num_cpus": None,
            "gpu_ids": (),
            "entry": f"test_launcher_entries:{entry}",
        }
        return ChildSpec(**{**fields, **changes})

    def run(self, entry, payload=b"", **changes):
        """The exit code of a process, and what it wrote."""
        pid = self.launcher.spawn(self.spec(entry, payload=payload, **changes), [], self._spawned)
        code = self.exit_code(pid)
        return code, *(self.output.get((pid, s), b"").decode() for s in ("stdout", "stderr"))

    def actor(self, fds=(), **changes):
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self.launcher.spawn(self.spec(**changes), [theirs.fileno(), *fds])
        self.actors.append(Actor(pid, ours))
        return self.actors[-1]

    def exit_code(self, pid):
        self.wait(lambda: pid in self.exits)
        return self.exits[pid]

    def wait(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, WAIT)

    def close(self):
        self.launcher.close()
        self.printer.close(WAIT)
        self.events.close()
        for actor in self.actors:
            actor.close()


@pytest.fixture
def host():
    host = Host()
    yield host
    host.close()


def await_end(pidfds, seconds):
    """Wait until all processes of ``pidfds`` have ended."""
    deadline = time.monotonic() + seconds
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        left = max(0.0, deadline - time.monotonic())
        assert poll.poll(left * 1000), "a process lives on"
        os.close(pidfd)


@contextmanager
def fills_its_line(launcher):
    """The fork server is stopped, and so many messages are before the next that there is no room for it.
    The thread that waits with one."""
    launcher.start()
    server = os.pidfd_open(launcher.server_pid)
    signal.pidfd_send_signal(server, signal.SIGSTOP)
    try:
        waiting = []
        while not waiting:
            launcher.end_headless(NOBODY)
            waiting = [t for t in threading.enumerate() if t.name == "conveyor-headless"]
        yield waiting[0]
    finally:
        with suppress(ProcessLookupError):  # a test has ended it
            signal.pidfd_send_signal(server, signal.SIGCONT)
        os.close(server)


def switches_of(thread):
    """How often it has gone to sleep."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def settled(look):
    """What ``look()`` says once it says it twice."""
    seen, before = look(), None
    while seen != before:
        time.sleep(0.02)
        seen, before = look(), seen
    return seen


def children():
    """Those of this process, but for what other tests start their sessions with."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in found if int(pid) not in warm_start.pids]


class TestStart:
    def test_echo_through_a_socket_that_was_passed(self, host):
        actor = host.actor(payload=b"\0payload\xff" * 1000)
        assert actor.ask("os.getpid()") == actor.pid
        assert actor.ask("os.getppid()") == host.launcher.server_pid
        assert actor.ask("payload == b'\\0payload\\xff' * 1000")

    def test_descriptors_arrive_in_order_and_nothing_else_is_open(self, host):
        files = [os.memfd_create(f"file{index}") for index in range(20)]
        for index, fd in enumerate(files):
            os.write(fd, b"%d" % index)
        actor = host.actor(fds=files[::-1])
        assert actor.ask("[int(os.pread(fd, 9, 0)) for fd in fds[1:]]") == [*range(20)][::-1]
        listing = "{int(fd) for fd in os.listdir('/proc/self/fd')}"
        others = f"{listing} - {{0, 1, 2, *fds}}"
        # The listing's own descriptor is one of them, and closed afterwards.
        assert actor.ask(f"[os.path.lexists(f'/proc/self/fd/{{fd}}') for fd in {others}]") == [
            False
        ]
        assert not actor.ask("any(os.get_inheritable(fd) for fd in fds)")
        for fd in files:
            os.fstat(fd)  # the caller keeps its own
            os.close(fd)

    def test_ten_start_in_parallel(self, host):
        host.actor().ask("0")
        begin = time.monotonic()
        # Each of them stays until all have started.
        actors = [host.actor() for _ in range(10)]
        assert len({actor.ask("os.getpid()") for actor in actors}) == 10
        assert time.monotonic() - begin < WAIT

    def test_spawn_from_many_threads(self, host):
        pids = []
        threads = [
            threading.Thread(target=lambda: pids.append(host.actor().ask("os.getpid()")))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert len(set(pids)) == 8

    def test_a_module_to_preload_may_be_absent(self):
        host = Host(preload=["conveyor.there_is_no_such_module", "colorsys"])
        try:
            assert host.actor().ask("'colorsys' in sys.modules")
        finally:
            host.close()

    def test_preloading_what_starts_a_thread_is_reported(self, tmp_path, monkeypatch):
        (tmp_path / "threaded.py").write_text(
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
        )
        monkeypatch.syspath_prepend(tmp_path)
        host = Host(preload=["threaded"])
        try:
            host.launcher.start()
            key = (host.launcher.server_pid, "stderr")
            host.wait(
                lambda: b"has 2 threads after importing threaded" in host.output.get(key, b"")
            )
        finally:
            host.close()

    def test_being_born_is_told_before_output_and_end(self, host):
        for _ in range(20):
            host.happened.clear()
            host.run("run", b"print('x')")
            kinds = [kind for kind, _ in host.happened]
            assert kinds[0] == "spawned"
            assert kinds[-1] == "exit"
            assert kinds.count("stdout") >= 2  # the line, the end
            assert kinds.count("stderr") == 1  # the end

    @pytest.mark.parametrize("variable", ["", "A=B", "NU\0LL"])
    def test_an_impossible_variable(self, host, variable):
        with pytest.raises(ActorStartError, match="cannot be an environment variable"):
            host.launcher.spawn(host.spec(env_vars={variable: "x"}), [])

    def test_too_many_descriptors(self, host):
        with pytest.raises(ActorStartError, match="at most 250 fit"):
            host.launcher.spawn(host.spec(), [0] * 251)
        actor = host.actor(fds=[0] * 249)
        assert actor.ask("len(fds)") == 250

    def test_a_descriptor_that_is_closed(self, host):
        with pytest.raises(ActorStartError, match="Bad file descriptor") as caught:
            host.launcher.spawn(host.spec(), [1 << 20])
        assert isinstance(caught.value.__cause__, OSError)

    def test_a_server_that_cannot_start(self, monkeypatch):
        monkeypatch.setattr(sys, "executable", "/bin/false")
        host = Host()
        with pytest.raises(ActorStartError, match=r"'Test'.*ended with exit code 1"):
            host.launcher.spawn(host.spec(), [])
        host.close()
        monkeypatch.setattr(sys, "executable", "/there/is/no/python")
        host = Host()
        with pytest.raises(ActorStartError, match="No such file"):
            host.launcher.start()
        host.close()
        assert children() == []

    def test_what_a_failing_server_said_is_in_the_error(self, monkeypatch):
        monkeypatch.setattr(launcher_module, "_BOOTSTRAP", "raise OSError('out of luck')")
        host = Host()
        with pytest.raises(ActorStartError, match="out of luck"):
            host.launcher.spawn(host.spec(), [])
        host.close()


class TestSurroundings:
    def test_it_starts_after_it_could_not_twice(self, monkeypatch, opened_since):
        opened, host = opened_since(), Host()

        def refuses(*_):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        for owner, name in ((host.events, "add"), (launcher_module, "Room")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, refuses)
                with pytest.raises(ActorStartError, match="Too many open files"):
                    host.launcher.start()
            assert children() == []
        assert host.run("run", b"print('x')")[0] == 0
        host.close()
        assert not opened()

    def test_the_drivers_directory_path_arguments_environment(self, host, tmp_path):
        host.launcher.start()
        (tmp_path / "only_here.py").write_text("value = 5")
        actor = host.actor(
            cwd=str(tmp_path),
            sys_path=("", str(HERE), *sys.path),
            argv=("prog", "-x"),
            environ={"PATH": "/bin", "ODD": "\udcff", "TZ": "Asia/Tokyo"},
            env_vars={"MINE": "1", "PATH": "/mine"},
        )
        assert actor.ask("os.getcwd()") == str(tmp_path)
        assert actor.ask("sys.path") == ["", str(HERE), *sys.path]
        assert actor.ask("sys.argv") == ["prog", "-x"]
        assert actor.ask("__import__('only_here').value") == 5
        environ = actor.ask("dict(os.environ)")
        assert environ["PATH"] == "/mine"
        assert environ["MINE"] == "1"
        assert environ["ODD"] == "\udcff"
        assert "HOME" not in environ
        assert actor.ask("__import__('time').localtime(0).tm_hour") == 9
        # C code sees the same.
        probe = "__import__('ctypes').CDLL(None).getenv"
        assert actor.ask(f"{probe}(b'HOME')") == 0
        assert actor.ask(f"{probe}(b'MINE')") != 0

    def test_a_large_environment(self, host):
        environ = {f"VARIABLE_{index}": "x" * 1000 for index in range(300)}
        actor = host.actor(environ=environ, payload=b"y" * (5 << 20))
        assert actor.ask("sum(len(v) for k, v in os.environ.items() if k[:4] == 'VARI')") == 300_000
        assert actor.ask("len(payload)") == 5 << 20

    def test_a_directory_that_is_gone(self, host, tmp_path):
        code, _, stderr = host.run("serve", cwd=str(tmp_path / "gone"))
        assert code == 1
        assert "FileNotFoundError" in stderr

    def test_numeric_libraries_get_num_cpus_threads(self, host):
        clean = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
        variables = ("OMP", "MKL", "OPENBLAS", "NUMEXPR")

        def threads(**changes):
            actor = host.actor(**changes)
            return [actor.ask(f"os.environ['{name}_NUM_THREADS']") for name in variables]

        assert threads(environ=clean) == ["1"] * 4
        assert threads(environ=clean, num_cpus=0.5) == ["1"] * 4
        assert threads(environ=clean, num_cpus=3) == ["3"] * 4
        assert threads(environ={**clean, "OMP_NUM_THREADS": "7"}) == ["7", "1", "1", "1"]
        assert threads(environ=clean, num_cpus=2, env_vars={"MKL_NUM_THREADS": "5"}) == [
            "2",
            "5",
            "2",
            "2",
        ]

    def test_torch_is_told_to_have_huge_pages_unless_somebody_says_otherwise(self, host):
        name = "THP_MEM_ALLOC_ENABLE"
        clean = {k: v for k, v in os.environ.items() if k != name}
        asked = f"os.environ['{name}']"
        assert host.actor(environ=clean).ask(asked) == "1"
        assert host.actor(environ={**clean, name: "0"}).ask(asked) == "0"
        assert host.actor(environ=clean, env_vars={name: "0"}).ask(asked) == "0"

    @pytest.mark.torch
    @pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
    def test_torch_obeys(self, host):
        clean = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
        payload = b"import torch; print(torch.get_num_threads())"
        assert host.run("run", payload, environ=clean)[1] == "1\n"
        # MKL takes no more than there are cores, whatever it is told.
        two = min(2, len(os.sched_getaffinity(0)))
        assert host.run("run", payload, environ=clean, num_cpus=2)[1] == f"{two}\n"

    def test_gpus(self, host):
        def seen(**changes):
            return host.actor(**changes).ask("os.environ.get('CUDA_VISIBLE_DEVICES')")

        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,6"}
        keep = {"CONVEYOR_KEEP_CUDA_VISIBLE_DEVICES": "1"}
        assert seen(environ=environ) == ""
        assert seen(environ=environ, gpu_ids=("5", "6")) == "5,6"
        assert seen(environ={**environ, **keep}) == "4,5,6"
        assert seen(environ={**environ, **keep}, gpu_ids=("5",)) == "5"
        assert seen(environ=environ, env_vars={"CUDA_VISIBLE_DEVICES": "0"}) == "0"

    def test_signals_are_reset_but_interrupts_are_ignored(self):
        host = Host()

        def start():
            # As a driver might be at that moment.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
            host.launcher.start()

        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        try:
            thread = threading.Thread(target=start)
            thread.start()
            thread.join(WAIT)
            actor = host.actor()
            assert actor.ask("len(signal.pthread_sigmask(signal.SIG_BLOCK, []))") == 0
            ignored = "[s for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN]"
            assert {*actor.ask(ignored)} == {signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ}
            os.kill(actor.pid, signal.SIGINT)
            assert actor.ask("1") == 1
            host.launcher.kill(actor.pid, signal.SIGTERM)
            assert host.exit_code(actor.pid) == -signal.SIGTERM
        finally:
            signal.signal(signal.SIGUSR2, before)
            host.close()

    def test_names_in_ps(self, host):
        actor = host.actor(name="Länge" * 9)
        actor.ask("0")
        assert Path(f"/proc/{actor.pid}/comm").read_bytes().startswith(b"cv:L\xc3\xa4nge")
        command = Path(f"/proc/{actor.pid}/cmdline").read_bytes().rstrip(b"\0")
        assert command.decode() == "cv:" + "Länge" * 9
        assert Path(f"/proc/{host.launcher.server_pid}/comm").read_text() == "cv-fork-server\n"

    def test_stdin_is_empty_and_main_is_new(self, host):
        actor = host.actor()
        assert actor.ask("sys.stdin.read()") == ""
        assert actor.ask("[n for n in vars(sys.modules['__main__']) if n[0] != '_']") == []
        assert actor.ask("__import__('gc').isenabled()")

    def test_random_numbers_differ(self, host):
        draw = "__import__('random').random()"
        assert len({host.actor().ask(draw) for _ in range(5)}) == 5

    def test_the_server_has_one_thread_and_the_drivers_session(self, host):
        actor = host.actor()
        actor.ask("0")
        server = host.launcher.server_pid
        assert len(os.listdir(f"/proc/{server}/task")) == 1
        # The driver's session, because autogroup scheduling goes by sessions; groups of their own,
        # because Ctrl-C goes to a group.
        assert os.getsid(server) == os.getsid(actor.pid) == os.getsid(0)
        assert os.getpgid(server) == server
        assert os.getpgid(actor.pid) == actor.pid


class TestOutput:
    def test_lines_bear_the_actors_name(self, host, capsys):
        def spawned(pid):
            host.printer.add(pid, "Ann")

        pid = host.launcher.spawn(
            host.spec(
                "run",
                payload=b"import sys; print('one\\ntwo\\u00e4'); print('three', file=sys.stderr)",
            ),
            [],
            spawned,
        )
        host.exit_code(pid)
        assert host.printer.flush(WAIT)  # a thread of its own prints
        captured = capsys.readouterr()
        assert captured.out == f"(Ann pid={pid}) one\n(Ann pid={pid}) two\u00e4\n"
        assert captured.err == f"(Ann pid={pid}) three\n"
        assert host.printer.stderr_tail(pid) == "three"

    def test_output_comes_while_the_actor_runs(self, host):
        actor = host.actor()
        actor.do("print('now')")
        host.wait(lambda: host.output.get((actor.pid, "stdout")) == b"now\n")

    def test_what_is_buffered_comes_once(self, host):
        payload = b"""
import atexit, ctypes
atexit.register(print, "atexit", end="")
ctypes.CDLL(None).printf(b"from C")
os.write(1, b"raw ")
print("python ", end="")
"""
        code, stdout, stderr = host.run("run", payload)
        assert (code, stderr) == (0, "")
        # When C's buffer is written depends on PYTHONUNBUFFERED.
        assert stdout.replace("from C", "", 1) == "raw python atexit"

    def test_much_output_arrives_whole(self, host):
        code, stdout, _ = host.run("run", b"for i in range(100_000): print('line', i)")
        assert code == 0
        assert stdout == "".join(f"line {i}\n" for i in range(100_000))

    def test_a_detached_process_that_keeps_writing_holds_nothing_up(self, host):
        payload = b"""
import subprocess
process = subprocess.Popen(["yes"], start_new_session=True)
os.write(fds[0], b"%d" % process.pid)
"""
        reader, writer = os.pipe()
        pid = host.launcher.spawn(host.spec("run", payload=payload), [writer])
        os.close(writer)
        assert host.exit_code(pid) == 0
        yes = os.pidfd_open(int(os.read(reader, 99)))
        os.close(reader)
        await_end([yes], WAIT)  # nobody reads its pipe any more

    def test_a_callback_that_fails_does_not_end_the_reading(self, capsys):
        got = []
        done = threading.Event()

        def broken(pid, stream, data):
            got.append(data)
            raise RuntimeError("cannot print")

        events = EventLoop()
        launcher = Launcher(events, lambda *_: done.set(), broken, preload=[])
        helper = Host()
        launcher.spawn(helper.spec("run", payload=b"print('a')"), [])
        assert done.wait(WAIT)
        launcher.close()
        events.close()
        assert b"".join(got) == b"a\n"
        assert got.count(b"") == 2
        assert "cannot print" in capsys.readouterr().err


class TestEnd:
    @pytest.mark.parametrize(
        ("entry", "payload", "code"),
        [
            ("run", b"", 0),
            ("leave", b"None", 0),
            ("leave", b"3", 3),
            ("leave", b"'a message'", 1),
            ("fail", b"", 1),
            ("run", b"os._exit(5)", 5),
            ("run", b"os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
            ("run", b"os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
            ("run", b"os.abort()", -signal.SIGABRT),
            ("there_is_no_such_function", b"", 1),
        ],
    )
    def test_how_it_ended_is_reported(self, host, entry, payload, code):
        assert host.run(entry, payload)[0] == code

    def test_an_uncaught_exception_is_printed(self, host):
        _, _, stderr = host.run("fail")
        assert "Traceback" in stderr
        assert stderr.endswith("ValueError: no luck\n")
        assert host.run("leave", b"'a message'")[2] == "a message\n"

    def test_kill(self, host):
        first, second = host.actor(), host.actor()
        host.launcher.kill(first.pid)
        assert host.exit_code(first.pid) == -signal.SIGKILL
        host.launcher.kill(first.pid)  # gone already
        host.launcher.kill(os.getpid())  # none of ours
        host.launcher.kill(1)
        assert second.ask("1") == 1

    def test_what_an_actor_started_ends_with_it(self, host):
        actor = host.actor()
        actor.do("import subprocess, multiprocessing, time")
        actor.do("a = subprocess.Popen(['sleep', '1000'])")
        actor.do("b = multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,))")
        actor.do("b.start()")
        pidfds = [os.pidfd_open(pid) for pid in actor.ask("[a.pid, b.pid]")]
        host.launcher.kill(actor.pid)
        await_end(pidfds, WAIT)

    def test_close_ends_all(self, host, monkeypatch):
        monkeypatch.setattr(launcher_module, "CLOSE_TIMEOUT", 2 * WAIT)
        actors = [host.actor() for _ in range(3)]
        for actor in actors:
            actor.do("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
        begin = time.monotonic()
        host.launcher.close()
        assert time.monotonic() - begin < WAIT
        assert {pid: host.exits[pid] for pid in host.exits} == {
            actor.pid: -signal.SIGKILL for actor in actors
        }
        assert children() == []
        host.launcher.close()
        with pytest.raises(RuntimeStateError, match="closed"):
            host.launcher.spawn(host.spec(), [])

    def test_close_before_anything(self):
        Host().close()

    def test_close_at_once(self):
        host = Host()
        host.launcher.start()
        host.close()
        assert children() == []

    def test_the_fork_server_is_killed(self, host):
        actors = [host.actor() for _ in range(3)]
        pidfds = [os.pidfd_open(actor.pid) for actor in actors]
        os.kill(host.launcher.server_pid, signal.SIGKILL)
        await_end(pidfds, WAIT)
        for actor in actors:
            assert host.exit_code(actor.pid) == -signal.SIGKILL
        for _ in range(2):
            with pytest.raises(ActorStartError, match=r"fork server \(pid \d+\) was killed by sig"):
                host.launcher.spawn(host.spec(), [])
        assert children() == []

    def test_spawning_while_the_fork_server_dies(self):
        for _ in range(5):
            host = Host()
            host.launcher.start()
            failed = threading.Event()

            def keep_spawning(host=host, failed=failed):
                try:
                    while True:
                        host.launcher.spawn(host.spec("run"), [])
                except ActorStartError as error:
                    if "fork server" in str(error):
                        failed.set()

            thread = threading.Thread(target=keep_spawning, daemon=True)
            thread.start()
            host.wait(lambda host=host: host.exits)
            os.kill(host.launcher.server_pid, signal.SIGKILL)
            assert failed.wait(WAIT)
            host.close()

    def test_a_stopped_fork_server(self, monkeypatch):
        monkeypatch.setattr(launcher_module, "SPAWN_TIMEOUT", 0.2)
        monkeypatch.setattr(launcher_module, "CLOSE_TIMEOUT", 0.2)
        host = Host()
        host.launcher.start()
        host.wait(lambda: True)
        server = host.launcher.server_pid
        os.kill(server, signal.SIGSTOP)
        ours, theirs = socket.socketpair()
        with pytest.raises(ActorStartError, match=r"has not answered for 0\.2 s"), theirs:
            host.launcher.spawn(host.spec(), [theirs.fileno()])
        # The process that nobody waits for any more is ended as soon as it is there.
        os.kill(server, signal.SIGCONT)
        ours.settimeout(WAIT)
        assert ours.recv(1) == b""
        ours.close()
        monkeypatch.setattr(launcher_module, "SPAWN_TIMEOUT", WAIT)
        actor = host.actor()
        os.kill(server, signal.SIGSTOP)
        host.close()
        assert host.exits[actor.pid] == -signal.SIGKILL
        assert children() == []

    def test_who_waits_for_a_stopped_fork_server_says_so(self, host, monkeypatch, caplog):
        host.launcher.start()
        host.wait(lambda: True)
        server = host.launcher.server_pid
        monkeypatch.setattr(patience_module, "LOG_AFTER", 0.05)
        os.kill(server, signal.SIGSTOP)
        said = threading.Event()
        handler = logging.Handler()
        handler.emit = lambda record: said.set()
        logging.getLogger("conveyor").addHandler(handler)
        try:
            actors = []
            thread = threading.Thread(target=lambda: actors.append(host.actor()))
            thread.start()
            assert said.wait(WAIT)
        finally:
            logging.getLogger("conveyor").removeHandler(handler)
            os.kill(server, signal.SIGCONT)
        thread.join(WAIT)
        assert len(actors) == 1
        assert re.search(
            rf"waiting for actor \S+ to be started since .*; the fork server \(pid {server}\) is stopped",
            caplog.text,
        )

    def test_who_waits_for_a_full_line_sleeps_until_there_is_room(self, host):
        with fills_its_line(host.launcher) as waiting:
            switches = settled(lambda: switches_of(waiting))
            time.sleep(0.5)  # what would look ten times a second has looked some times by then
            assert switches_of(waiting) == switches
        waiting.join(WAIT)
        assert not waiting.is_alive()
        assert host.run("run", b"print('x')")[0] == 0

    def test_a_spawn_that_a_full_line_holds_up_is_broken_off(self, host):
        def interrupt():
            while not any(t.name == "conveyor-uninterrupted" for t in threading.enumerate()):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        with fills_its_line(host.launcher):
            thread = threading.Thread(target=interrupt)
            thread.start()
            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                host.launcher.spawn(host.spec(), [])
            assert time.monotonic() - begin < launcher_module.SPAWN_TIMEOUT / 2
            thread.join()
        assert host.run("run", b"print('x')")[0] == 0

    def test_who_waits_for_a_full_line_is_told_of_the_fork_servers_end(self, host):
        with fills_its_line(host.launcher) as waiting:
            os.kill(host.launcher.server_pid, signal.SIGKILL)
            waiting.join(WAIT)
            assert not waiting.is_alive()
            with pytest.raises(ActorStartError, match="was killed by signal 9"):
                host.launcher.spawn(host.spec(), [])

    def test_nothing_leaks(self, monkeypatch, opened_since):
        for limit in ("CLOSE_TIMEOUT", "KILL_TIMEOUT", "PRINT_TIMEOUT"):
            monkeypatch.setattr(launcher_module, limit, 2 * WAIT)

        def round_trip():
            host = Host()
            try:
                host.actor().ask("1")
                host.run("run", b"print('x')")
                with pytest.raises(ActorStartError):
                    host.launcher.spawn(host.spec(), [1 << 20])
            finally:
                begin = time.monotonic()
                host.close()
            # No time limit of the launcher's has hidden that a message was lost.
            assert time.monotonic() - begin < WAIT

        round_trip()
        opened, threads = opened_since(), set(threading.enumerate())
        for _ in range(12):
            round_trip()
        assert not opened()
        assert threads.issuperset(threading.enumerate())
        assert children() == []


class TestForkedDriver:
    def test_a_forked_child_disturbs_nothing(self, host):
        actor = host.actor()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                host.launcher.close()
                host.launcher.kill(actor.pid)
                host.events.add(0, print)
                host.events.remove(host.launcher._control.fileno())
                host.events.call(print)
                host.events.close()
                try:
                    host.launcher.spawn(host.spec(), [])
                except RuntimeStateError as error:
                    status = 0 if "forked child" in str(error) else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        assert actor.ask("1") == 1
        assert host.actor().ask("2") == 2
        assert host.exits == {}

    def test_a_forked_child_may_have_a_launcher_of_its_own(self, host):
        host.actor().ask("1")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                own = Host()
                status = 0 if own.actor().ask("3") == 3 else 2
                own.close()
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        assert host.actor().ask("2") == 2


class Driver:
    """A driver in a process of its own, and pidfds of all that it started."""

    def __init__(self, mode):
        source = Path(launcher_module.__file__).parents[3]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "test_launcher_entries.py"), mode],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(source)},
            start_new_session=True,
        )
        answer = self.read()
        self.grandchild = answer["grandchild"]
        self.pidfds = [os.pidfd_open(pid) for pid in answer["pids"]]

    def read(self):
        return json.loads(self.process.stdout.readline())

    def close(self):
        if self.grandchild:
            os.kill(self.grandchild, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class TestDriverEnds:
    @pytest.mark.parametrize("mode", ["plain", "grandchild"])
    def test_killed(self, mode):
        driver = Driver(mode)
        try:
            driver.process.kill()
            await_end(driver.pidfds, WAIT)
        finally:
            driver.close()

    def test_interrupted_it_still_has_its_actors(self):
        driver = Driver("interrupt")
        try:
            os.killpg(driver.process.pid, signal.SIGINT)
            assert driver.read() == {"ended": []}
            assert driver.process.wait(WAIT) == 0
            await_end(driver.pidfds, WAIT)
        finally:
            driver.close()
