"""`conveyor status`: what another process sees of a session."""

import errno
import json
import os
import signal
import subprocess
import sys

import cloudpickle
import psutil
import pytest
from integration_helpers import chain, get, hold

import conveyor
from conveyor import descriptors
from conveyor.dag import InputNode
from conveyor.driver.deployments import DeployedGraph, GraphList, read_graph_list

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Actor:
    def pid(self):
        return os.getpid()

    def hold(self, inside, go):
        open(inside, "w").close()
        hold(go)
        return "held"

    def echo(self, x):
        return x


def status(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "conveyor", "status", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def seen(*arguments):
    code, out, err = status(*arguments, "--json")
    assert code == 0, err
    # Tests of the core that this process has run before may have boards of their own here, of nobody else.
    here = {0, os.getpid()}
    (session,) = [
        one for one in json.loads(out) if {process["pid"] for process in one["processes"]} - here
    ]
    return session


def test_who_does_what_is_seen_from_outside(tmp_path):
    works, idle = Actor.options(name="works").remote(), Actor.options(name="idle").remote()
    get([works.pid.remote(), idle.pid.remote()])
    inside, go = tmp_path / "inside", tmp_path / "go"
    with chain(works.echo, idle.echo).compile(name="through both"):
        (graph,) = seen(os.getpid())["graphs"]
        assert graph["name"] == "through both"
    assert seen(os.getpid())["graphs"] == []
    held = works.hold.remote(str(inside), str(go))
    hold(inside)
    session = seen(os.getpid())
    assert session["pid"] == os.getpid()
    with open("/proc/self/cmdline") as words:
        assert session["program"] == words.read().rstrip("\0").replace("\0", " ")
    by_name = {process["name"]: process for process in session["processes"]}
    assert by_name["works"]["state"] == "running"
    assert by_name["works"]["method"] == "hold"
    assert by_name["driver"]["driver"]
    assert by_name["driver"]["pid"] == os.getpid()
    # Any process of the session names it.
    assert seen(by_name["idle"]["pid"])["pid"] == os.getpid()
    code, out, _ = status(os.getpid())
    assert code == 0
    assert "running hold (call " in out
    assert f"  idle (pid {by_name['idle']['pid']})" in out
    go.touch()
    assert get(held) == "held"


def test_a_task_of_a_graph_has_its_name(tmp_path):
    actor = Actor.options(name="tasked").remote()
    inside, go = str(tmp_path / "inside"), str(tmp_path / "go")
    with InputNode() as inp:
        dag = actor.hold.bind(inp[0], inp[1])
    with dag.compile() as graph:
        ref = graph.execute(inside, go)
        hold(inside)
        (works,) = [one for one in seen(os.getpid())["processes"] if one["name"] == "tasked"]
        assert (works["method"], works["execution"]) == ("tasked.hold", 0)
        open(go, "w").close()
        assert get(ref) == "held"


def test_who_is_stopped_is_seen_and_requested_nothing(wait_until):
    actor = Actor.options(name="sleeper").remote()
    pid = get(actor.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        (works,) = [one for one in seen(pid)["processes"] if one["name"] == "sleeper"]
        assert works["state"] == "stopped"
    finally:
        os.kill(pid, signal.SIGCONT)


LATE = """
    import os, re, signal, subprocess, sys, threading
    import conveyor

    @conveyor.remote
    class Actor:
        def parent(self):
            return os.getppid()

    def line_of_late():
        command = [sys.executable, "-m", "conveyor", "status", str(os.getpid())]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return "".join(line for line in shown.splitlines() if "late, " in line)

    if __name__ == "__main__":
        server = conveyor.get(Actor.remote().parent.remote())
        started = []
        starter = threading.Thread(target=lambda: started.append(Actor.options(name="late").remote()))
        os.kill(server, signal.SIGSTOP)
        starter.start()
        while not (line := line_of_late()):
            pass
        says = f"starting, waiting for the fork server (pid {server}), which is stopped"
        assert line.endswith(": " + says), line
        call = conveyor.get_actor("late").parent.remote()
        try:
            conveyor.get(call, timeout=0.1)
        except conveyor.exceptions.WaitTimeoutError as error:
            assert says in str(error), error
        else:
            raise AssertionError("it cannot have started")
        os.kill(server, signal.SIGCONT)
        starter.join()
        assert conveyor.get(call) == server
        assert "fork server" not in line_of_late()
"""


def test_who_waits_for_the_fork_server_says_so(scripts):
    scripts.run(LATE)


def test_what_is_not_there_is_said():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        code, out, err = status(child.pid)
        assert (code, out) == (1, "")
        assert f"process {child.pid} has no part in a session of Conveyor" in err
    finally:
        child.communicate(b"\n")
    code, out, err = status(child.pid)
    assert (code, out) == (1, "")
    assert f"there is no process {child.pid} on this machine" in err
    code, _, err = status("nonsense")
    assert code == 2
    assert "invalid int value" in err


def test_the_last_graph_takes_the_list_with_it(opened_since):
    graph_list = GraphList()
    opened = opened_since()

    def lists():
        # The session's threads have descriptors of their own for a moment.
        return [what for what in opened().values() if "conveyor-graphs" in what]

    try:
        for number in range(3):
            graph_list.note(number, f"graph {number}", {0: "some.task"})
            assert len(lists()) == 1
            graph_list.note(number + 10, "another", {})
            graph_list.forget(number)
            assert len(lists()) == 1
            graph_list.forget(number + 10)
            graph_list.forget(number + 10)
            assert not lists()
    finally:
        graph_list.close()


def test_a_list_without_descriptors_keeps_no_graph_from_its_end(monkeypatch):
    graph_list = GraphList()
    try:
        graph_list.note(0, "stays", {0: "some.task"})
        names = dict.fromkeys(range(100), "some.task" * 100)
        for number in (1, 2):
            graph_list.note(number, "goes", names)
        with monkeypatch.context() as patch:

            def refuse(name):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            patch.setattr(descriptors, "memory_file", refuse)
            graph_list.forget(1)
            graph_list.forget(2)
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                graph_list.note(3, "is refused", names)
            graph_list.forget(3)
        graph_list.note(4, "comes later", {0: "another.task"})
        (file,) = [
            f"/proc/self/fd/{fd}"
            for fd in os.listdir("/proc/self/fd")
            if "conveyor-graphs" in _target(fd)
        ]
        with open(file, "rb") as lines:
            assert sorted(read_graph_list(lines)) == [0, 4]
    finally:
        graph_list.close()


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("deployed", [1, 40])
def test_the_list_stays_small(deployed, opened_since):
    graph_list, opened = GraphList(), opened_since()
    try:
        for number in range(2_000):
            graph_list.note(number, f"graph {number}", {0: "some.task" * 10})
            graph_list.forget(number - deployed)
            graph_list.forget(number - deployed)
        (file,) = [
            f"/proc/self/fd/{fd}" for fd, what in opened().items() if "conveyor-graphs" in what
        ]
        assert os.stat(file).st_size < 100_000
        with open(file, "rb") as lines:
            graphs = read_graph_list(lines)
        assert sorted(graphs) == list(range(2_000 - deployed, 2_000))
        assert graphs[1_999] == DeployedGraph(1_999, "graph 1999", {0: "some.task" * 10})
    finally:
        graph_list.close()
    # What is being written has no end yet.
    whole = b'{"number":1,"name":"a","tasks":{}}\n'
    assert read_graph_list([whole, whole[:-5]]) == {1: DeployedGraph(1, "a", {})}


HOSTILE = """
import os, select, socket, sys, threading
import conveyor
from conveyor.command.status import _files
from conveyor.dag import InputNode
from conveyor.cluster import display
from conveyor.local_sockets import LocalListener, new_key, new_name
from conveyor.driver.deployments import FILE

@conveyor.remote
class Actor:
    def echo(self, x):
        return x

actor = Actor.options(name="its actor").remote()
with InputNode() as inp:
    graph = actor.echo.bind(inp).compile()
pid = os.getpid()
((graphs, _),) = _files(pid, FILE)
((process_table, _),) = _files(pid, "conveyor-process-table")
with open(graphs, "r+b") as file:
    file.write(b"no JSON, \\xff, and a line\\n")
copies = [os.memfd_create("conveyor-process-table") for _ in range(3)]
for copy, size in zip(copies, (None, 4096, 10)):
    with open(process_table, "rb") as file:
        os.write(copy, file.read()[:size])

def pour(connection, _number):
    def run():
        try:
            while True:
                connection.sendall(bytes(1 << 20))
        except OSError:
            pass
    connection.setblocking(True)
    threading.Thread(target=run, daemon=True).start()

key, name = new_key(), new_name()
told = os.memfd_create(display.FILE)
os.write(told, key + name.encode())
listener = LocalListener(name, socket.SOCK_STREAM, lambda _: key, pour)
print(pid, flush=True)
poll = select.poll()
for one in (listener, sys.stdin):
    poll.register(one, select.POLLIN)
while sys.stdin.fileno() not in dict(poll.poll()):
    listener.serve()
"""


def test_memory_and_sockets_of_others_are_not_trusted():
    """A session whose files hold nonsense, and whose driver's answer does not end. Its memory may shrink, its
    names are commands for a terminal."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import os; exec(os.environ['HOSTILE'])", "\x1b[2J\x9b5n\x07"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOSTILE": HOSTILE},
    )
    try:
        pid = int(child.stdout.readline())
        session = seen(pid)
        assert {one["name"] for one in session["processes"]} == {"driver", "its actor"}
        assert session["graphs"] == []
        ((unknown),) = session["unknown"]
        assert "its answer has more than" in unknown["why"]
        code, out, err = status(pid)
        assert (code, err) == (0, "")
        assert out.count("session of pid") == 1
        assert "\\x1b[2J\\x9b5n\\x07" in out
        assert out.replace("\n", "").isprintable()
    finally:
        child.communicate("")
