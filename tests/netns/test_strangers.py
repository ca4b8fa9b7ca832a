"""A user of two machines reads the names of a session's sockets on one, and takes them on the other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from netns_actors import Stage, get, on

import conveyor

pytestmark = pytest.mark.cold_start

NAME = re.compile(r"@(conveyor-\S+)$", re.MULTILINE)
#: Takes the names, and says who comes, and what is said to it.
TAKES = r"""
import os, select, socket, sys
taken = {}
for name in sys.argv[1:]:
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        one = socket.socket(socket.AF_UNIX, kind)
        try:
            one.bind("\0" + name)
        except OSError:
            one.close()
            continue
        one.listen(8)
        taken[one.fileno()] = one
        break
print(len(taken), flush=True)
poll = select.poll()
for fd in (0, *taken):
    poll.register(fd, select.POLLIN)
while True:
    for fd, _ in poll.poll():
        if fd == 0:
            sys.exit()
        came, _ = taken[fd].accept()
        print("somebody has come, and said", came.recv(4096), flush=True)
"""


@pytest.mark.parametrize("tls", [False, True])
def test_names_taken_on_another_machine_are_nobodys(cluster, session, tls):
    with session(10, tls=tls):
        here = on(0)
        names = set(NAME.findall(Path("/proc/net/unix").read_text()))
        assert names
        words = cluster.spaces[1].command(sys.executable, "-c", TAKES, *names)
        stranger = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert int(stranger.stdout.readline()) == len(names)
            there = on(1, add=1)
            assert get(there.run.remote(get(here.run.remote(1)))) == 2
            kept = conveyor.get(Stage.options(resources={"host1": 0.1}).remote().put.remote(10))
            assert get(here.total.remote(kept)) == [45.0]
        finally:
            said, _ = stranger.communicate()
        assert said == ""
