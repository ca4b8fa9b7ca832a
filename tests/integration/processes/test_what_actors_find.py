"""Processes of actors: what they find, what they are called, and what ends with them."""

import gc
import os
import random
import select
import signal
import sys
import threading
from pathlib import Path

import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import ActorDiedError, ActorStartError

pytestmark = pytest.mark.cold_start

VARIABLES = [f"{name}_NUM_THREADS" for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")]
HUGE = "THP_MEM_ALLOC_ENABLE"
GPUS = "CUDA_VISIBLE_DEVICES"


@conveyor.remote
class Probe:
    """Says what its process is like."""

    def pid(self):
        return os.getpid()

    def look(self, at):
        return at()

    def environ(self):
        return dict(os.environ)

    def children(self):
        import multiprocessing
        import subprocess
        import time

        sleeps = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        sleeps.start()
        return [sleeps.pid, subprocess.Popen(["sleep", "1000"]).pid]


@pytest.fixture
def begin(leaves_nothing, monkeypatch):
    """Begins a session in surroundings of the test's own."""
    for name in (*VARIABLES, HUGE, GPUS):
        monkeypatch.delenv(name, raising=False)
    with leaves_nothing():
        yield conveyor.init
        conveyor.shutdown()


def environ_of(**options):
    return get(Probe.options(**options).remote().environ.remote())


def await_end(pidfds):
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(WAIT * 1000), "a process lives on"
        os.close(pidfd)


def test_the_drivers_directory_path_arguments_and_environment(begin, monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("value = 5")
    begin()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", ["prog", "-x"])
    monkeypatch.setenv("ODD", "\udcff")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.delenv("HOME", raising=False)
    actor = Probe.options(env_vars={"MINE": "1", "PATH": "/mine"}).remote()
    assert get(actor.look.remote(os.getcwd)) == str(tmp_path)
    assert get(actor.look.remote(lambda: sys.path)) == sys.path
    assert get(actor.look.remote(lambda: sys.argv)) == ["prog", "-x"]
    assert get(actor.look.remote(lambda: __import__("only_here").value)) == 5
    assert get(actor.look.remote(lambda: __import__("time").localtime(0).tm_hour)) == 9
    environ = get(actor.environ.remote())
    assert (environ["PATH"], environ["MINE"], environ["ODD"]) == ("/mine", "1", "\udcff")
    assert "HOME" not in environ

    def known_to_c(name):
        return lambda: bool(__import__("ctypes").CDLL(None).getenv(name))

    assert not get(actor.look.remote(known_to_c(b"HOME")))
    assert get(actor.look.remote(known_to_c(b"MINE")))


def test_a_large_environment(begin, monkeypatch):
    for index in range(300):
        monkeypatch.setenv(f"VARIABLE_{index}", "x" * 1000)
    begin()
    found = environ_of()
    assert sum(len(value) for name, value in found.items() if name[:8] == "VARIABLE") == 300_000


def test_numeric_libraries_get_num_cpus_threads(begin, monkeypatch):
    begin()

    def threads(**options):
        found = environ_of(**options)
        return [found[name] for name in VARIABLES]

    assert threads() == ["1"] * 4
    assert threads(num_cpus=0.5) == ["1"] * 4
    assert threads(num_cpus=3) == ["3"] * 4
    assert threads(num_cpus=2, env_vars={VARIABLES[1]: "5"}) == ["2", "5", "2", "2"]
    monkeypatch.setenv(VARIABLES[0], "7")
    assert threads() == ["7", "1", "1", "1"]


def test_torch_is_told_to_have_huge_pages_unless_somebody_says_otherwise(begin, monkeypatch):
    begin()
    assert environ_of()[HUGE] == "1"
    assert environ_of(env_vars={HUGE: "0"})[HUGE] == "0"
    monkeypatch.setenv(HUGE, "0")
    assert environ_of()[HUGE] == "0"


def test_gpus(begin, monkeypatch):
    monkeypatch.setenv(GPUS, "4,5,6")
    begin()
    assert environ_of()[GPUS] == ""
    assert environ_of(env_vars={GPUS: "0"})[GPUS] == "0"
    two = Probe.options(num_gpus=2).remote()
    assert get(two.environ.remote())[GPUS] == "4,5"
    assert environ_of(num_gpus=1)[GPUS] == "6"
    monkeypatch.setenv("CONVEYOR_KEEP_CUDA_VISIBLE_DEVICES", "1")
    assert environ_of()[GPUS] == "4,5,6"


@pytest.mark.parametrize("end", ["kill", "drop", "death", "exit"])
def test_gpus_of_an_actor_that_is_ending_are_waited_for(begin, monkeypatch, end):
    monkeypatch.setenv(GPUS, "0")
    begin()
    for _ in range(5):
        actor = Probe.options(num_gpus=1).remote()
        assert get(actor.environ.remote())[GPUS] == "0"
        if end == "kill":
            conveyor.kill(actor)
        elif end == "drop":
            del actor
        else:
            with pytest.raises(ActorDiedError):
                get(actor.look.remote((lambda: os._exit(1)) if end == "death" else sys.exit))


def test_gpus_that_do_not_come_back_are_an_error(begin, monkeypatch, latches, wait_until):
    monkeypatch.setenv(GPUS, "0")
    monkeypatch.setattr("conveyor.driver.supervisor._KILLED_TIME_LIMIT", 0.2)
    begin()
    actor = Probe.options(num_gpus=1).remote()
    with pytest.raises(ActorStartError, match=r"too little is free \(GPU 0: 0 free\)$"):
        Probe.options(num_gpus=1).remote()
    go = latches()
    opened = go.path
    held = actor.look.remote(lambda: wait_until(lambda: os.path.exists(opened), WAIT))
    del actor  # it ends when it has done its calls
    with pytest.raises(ActorStartError, match=r"Probe is ending, and has not given its own back"):
        Probe.options(num_gpus=1).remote()
    with pytest.raises(ActorStartError, match=r"num_gpus=2 asked, .*free\)$"):
        Probe.options(num_gpus=2).remote()
    go.open()
    get(held)
    assert get(Probe.options(num_gpus=1).remote().environ.remote())[GPUS] == "0"


def test_signals_are_reset_but_interrupts_are_ignored(begin):
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    try:
        begin()
        actor = Probe.remote()
        pid = get(actor.pid.remote())
    finally:
        signal.signal(signal.SIGUSR2, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def ignored():
        return {s for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN}

    assert get(actor.look.remote(lambda: len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))) == 0
    assert get(actor.look.remote(ignored)) == {signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ}
    os.kill(pid, signal.SIGINT)
    assert get(actor.pid.remote()) == pid


def test_names_in_ps(begin):
    begin()
    actor = Probe.options(name="Länge" * 9).remote()
    pid = get(actor.pid.remote())
    assert Path(f"/proc/{pid}/comm").read_bytes().startswith(b"cv:L\xc3\xa4nge")
    command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
    assert command.decode() == "cv:" + "Länge" * 9
    server = get(actor.look.remote(os.getppid))
    assert Path(f"/proc/{server}/comm").read_text() == "cv-fork-server\n"


def test_stdin_is_empty_garbage_is_collected_and_random_numbers_differ(begin):
    begin()
    actors = [Probe.remote() for _ in range(5)]
    assert get(actors[0].look.remote(lambda: sys.stdin.read())) == ""
    assert get(actors[0].look.remote(gc.isenabled))
    assert len(set(get([actor.look.remote(lambda: random.random()) for actor in actors]))) == 5


def test_the_server_has_one_thread_and_the_drivers_session(begin):
    begin()
    actor = Probe.remote()
    pid, server = get(actor.pid.remote()), get(actor.look.remote(os.getppid))
    assert len(os.listdir(f"/proc/{server}/task")) == 1
    # The driver's session, because autogroup scheduling goes by sessions; groups of their own,
    # because Ctrl-C goes to a group.
    assert os.getsid(server) == os.getsid(pid) == os.getsid(0)
    assert (os.getpgid(server), os.getpgid(pid)) == (server, pid)


def test_what_an_actor_started_ends_with_it(begin):
    begin()
    actor = Probe.remote()
    pidfds = [os.pidfd_open(pid) for pid in get(actor.children.remote())]
    conveyor.kill(actor)
    await_end(pidfds)


def test_actors_outlive_the_thread_that_started_them_and_end_with_the_fork_server(begin):
    begin()
    actors = []
    starter = threading.Thread(target=lambda: actors.extend(Probe.remote() for _ in range(3)))
    starter.start()
    starter.join()
    server = get(actors[0].look.remote(os.getppid))
    pidfds = [os.pidfd_open(pid) for pid in get([actor.pid.remote() for actor in actors])]
    os.kill(server, signal.SIGKILL)
    await_end(pidfds)
    for actor in actors:
        with pytest.raises(ActorDiedError):
            get(actor.pid.remote())
    with pytest.raises(ActorStartError, match=r"fork server \(pid \d+\) was killed by sig"):
        get(Probe.remote().pid.remote())
