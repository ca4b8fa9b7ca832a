"""Sessions are looked at from outside while their processes open and close files."""

import os

from conveyor.command import status as sessions


def test_a_number_that_is_another_file_by_now_is_not_read(tmp_path, monkeypatch):
    pipe, other = tmp_path / "pipe", tmp_path / "other"
    os.mkfifo(pipe)  # whose opening would wait
    other.write_bytes(b"no line of a list\n")
    for path in (other, pipe):
        monkeypatch.setattr(sessions, "_files", lambda pid, name, path=path: [(path, (0, 0))])
        assert sessions._graphs(1) == {}
        assert sessions._look(path, (0, 0)) is None
