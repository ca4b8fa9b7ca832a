"""Whose fault a SIGKILL was, from the kernel's counters and its log."""

import pytest

from conveyor.engines.local.engine import MemoryKills


class Machine:
    """The files of a machine, as far as they matter here."""

    def __init__(self, root, cgroup="v2", log=True):
        self.root = root
        self.cgroup = cgroup
        for folder in ("proc/self", "sys/fs/cgroup/mine", "sys/fs/cgroup/memory/mine", "dev"):
            (root / folder).mkdir(parents=True)
        if log:
            (root / "dev/kmsg").write_text("")
        self.counts(0, 0)
        line = {"v2": "0::/mine\n", "v1": "4:memory:/mine\n0::/\n", None: ""}[cgroup]
        (root / "proc/self/cgroup").write_text(line)

    def counts(self, machine, group):
        if machine is not None:
            (self.root / "proc/vmstat").write_text(f"nr_free 1\noom_kill {machine}\n")
        if self.cgroup == "v2":
            path, text = "mine/memory.events", f"high 0\noom {group}\noom_kill {group}\n"
        elif self.cgroup == "v1":
            path, text = "memory/mine/memory.oom_control", f"under_oom 0\noom_kill {group}\n"
        else:
            return
        (self.root / "sys/fs/cgroup" / path).write_text(text)

    def says(self, text):
        with open(self.root / "dev/kmsg", "a") as log:
            log.write(f"6,1,1,-;{text}\n")

    def kills(self):
        return MemoryKills(str(self.root))


@pytest.fixture(params=["v1", "v2"])
def machine(request, tmp_path):
    return Machine(tmp_path, request.param)


def test_nobody_was_killed_for_want_of_memory(machine):
    assert machine.kills().killed(7) is False


def test_one_kill_in_the_group_explains_one_end(machine):
    kills = machine.kills()
    machine.counts(1, 1)
    assert kills.killed(7) is True
    assert kills.killed(8) is False
    machine.counts(3, 3)
    assert [kills.killed(9), kills.killed(10), kills.killed(11)] == [True, True, False]


def test_a_kill_somewhere_else_leaves_it_open(machine):
    kills = machine.kills()
    machine.counts(1, 0)
    assert kills.killed(7) is None


def test_the_log_names_the_victim(machine):
    kills = machine.kills()
    machine.counts(1, 0)
    machine.says("Memory cgroup out of memory: Killed process 77 (cv:Actor) total-vm:1kB")
    assert kills.killed(7) is None
    assert kills.killed(77) is True


def test_nothing_can_be_read(tmp_path):
    assert MemoryKills(str(tmp_path)).killed(7) is None


def test_a_group_without_a_counter(tmp_path):
    machine = Machine(tmp_path, None)
    kills = machine.kills()
    assert kills.killed(7) is False
    machine.counts(1, 0)
    assert kills.killed(7) is None
