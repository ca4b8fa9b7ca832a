"""Reading the limit of memory from a machine's files, under whichever groups the process is."""

import os

import pytest

from conveyor.engines.local.engine import MemoryKills
from conveyor.runtime.process import memory_groups, memory_limit

RAM = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
NO_LIMIT_V1 = "9223372036854771712"


def machine(tmp_path, groups, files):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        pytest.param("", {}, RAM, id="no groups"),
        pytest.param("0::/\n", {}, RAM, id="v2, the top group has no limit"),
        pytest.param(
            "0::/\n", {f"{V2}/memory.max": "1000\n"}, 1000, id="v2, a container's top group"
        ),
        pytest.param("0::/a/b\n", {f"{V2}/a/b/memory.max": "max\n"}, RAM, id="v2, max"),
        pytest.param("0::/a/b\n", {f"{V2}/a/b/memory.max": "3000"}, 3000, id="v2, the own group"),
        pytest.param(
            "0::/a/b\n",
            {f"{V2}/a/b/memory.max": "max", f"{V2}/a/memory.max": "2000"},
            2000,
            id="v2, a group around it",
        ),
        pytest.param(
            "0::/a/b\n",
            {f"{V2}/a/b/memory.max": "5000", f"{V2}/a/memory.max": "2000"},
            2000,
            id="v2, the least of several",
        ),
        pytest.param("0::/a b:c\n", {f"{V2}/a b:c/memory.max": "4000"}, 4000, id="v2, an odd name"),
        pytest.param(
            "0::/../x\n", {f"{V2}/memory.max": "6000"}, 6000, id="v2, outside of the namespace"
        ),
        pytest.param(
            "5:cpu:/q\n4:memory:/a/b\n",
            {f"{V1}/a/b/memory.limit_in_bytes": "7000\n"},
            7000,
            id="v1",
        ),
        pytest.param(
            "4:memory:/a/b\n",
            {
                f"{V1}/a/b/memory.limit_in_bytes": NO_LIMIT_V1,
                f"{V1}/a/memory.limit_in_bytes": "8000",
            },
            8000,
            id="v1, a group around it",
        ),
        pytest.param(
            "4:memory:/a\n", {f"{V1}/a/memory.limit_in_bytes": NO_LIMIT_V1}, RAM, id="v1, no limit"
        ),
        pytest.param(
            "4:memory:/docker/of-the-host\n",
            {f"{V1}/memory.limit_in_bytes": "9000"},
            9000,
            id="v1, the path is the host's",
        ),
        pytest.param(
            "7:cpu,memory:/a\n1:name=systemd:/b\n0::/c\n",
            {f"{V1}/a/memory.limit_in_bytes": "1100", "sys/fs/cgroup/unified/c/cgroup.procs": ""},
            1100,
            id="both versions, memory in v1",
        ),
        pytest.param("0::/a\n", {f"{V2}/a/memory.max": f"{RAM * 2}"}, RAM, id="more than there is"),
    ],
)
def test_the_limit(tmp_path, groups, files, limit):
    assert memory_limit(machine(tmp_path, groups, files)) == limit


def test_this_machine_s():
    assert 0 < memory_limit() <= RAM


def test_groups_from_within(tmp_path):
    root = machine(tmp_path, "0::/a/b\n", {})
    places = [os.path.relpath(path, root) for path in memory_groups(str(root))]
    assert places == [f"{V2}/a/b", f"{V2}/a", V2]


def test_kills_are_counted_in_the_same_group(tmp_path):
    files = {f"{V2}/a/memory.events": "oom 1\noom_kill 3\n", "proc/vmstat": "oom_kill 3\n"}
    root = machine(tmp_path, "0::/a/b\n", files)
    kills = MemoryKills(str(root))
    (root / f"{V2}/a/memory.events").write_text("oom 2\noom_kill 4\n")
    (root / "proc/vmstat").write_text("oom_kill 4\n")
    assert kills.killed(1) is True
