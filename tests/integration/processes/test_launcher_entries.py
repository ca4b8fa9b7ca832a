"""Not tests: what the processes started by test_launcher.py run. Imports little, as actors do."""

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path


def serve(payload, fds):
    """Answer expressions sent over the first descriptor, until it is closed."""
    link = socket.socket(fileno=fds[0])
    scope = {"payload": payload, "fds": fds, **globals()}
    with link, link.makefile("rw") as file:
        for line in file:
            kind, text = json.loads(line)
            answer = None
            if kind == "eval":
                answer = eval(text, scope)
            else:
                exec(text, scope)
            file.write(json.dumps(answer) + "\n")
            file.flush()


def fail(payload, fds):
    raise ValueError("no luck")


def leave(payload, fds):
    sys.exit(eval(payload))


def run(payload, fds):
    exec(payload.decode(), {**globals(), "fds": fds})


# Run as a program it is a driver, to be killed or interrupted.


def drive(mode):
    from conveyor.engines.local.launcher import Launcher
    from conveyor.engines.local.spec import ChildSpec
    from conveyor.runtime.events import EventLoop

    here = str(Path(__file__).parent)
    ended = []
    events = EventLoop()
    launcher = Launcher(
        events, lambda pid, _: ended.append(pid), lambda *_: None, preload=["random"]
    )
    actors = {}

    def start():
        for index in range(3):
            ours, theirs = socket.socketpair()
            spec = ChildSpec(
                name=f"Actor{index}",
                payload=b"",
                cwd=os.getcwd(),
                sys_path=(here, *sys.path),
                argv=tuple(sys.argv),
                environ=dict(os.environ),
                env_vars={},
                num_cpus=None,
                gpu_ids=(),
                entry="test_launcher_entries:serve",
            )
            with theirs:
                actors[launcher.spawn(spec, [theirs.fileno()])] = ours.makefile("rw")

    def echo():
        for pid, file in actors.items():
            file.write('["eval", "os.getpid()"]\n')
            file.flush()
            assert json.loads(file.readline()) == pid

    # The thread that starts everything ends at once; the actors must not.
    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
    echo()
    grandchild = 0
    if mode == "grandchild":
        grandchild = os.fork()
        if grandchild == 0:
            while True:
                signal.pause()
    pids = [launcher.server_pid, *actors]
    started = json.dumps({"pids": pids, "grandchild": grandchild})
    if mode == "interrupt":
        try:
            print(started, flush=True)
            while True:
                signal.pause()
        except KeyboardInterrupt:
            echo()
            print(json.dumps({"ended": ended}), flush=True)
            launcher.close()
            events.close()
            return
    print(started, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    drive(sys.argv[1])
