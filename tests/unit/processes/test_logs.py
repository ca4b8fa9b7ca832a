import io
import os
import sys
import threading

import pytest

from conveyor.engines.local import engine
from conveyor.engines.local.engine import LogPrinter

PID = 7


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def printer(clock, monkeypatch):
    printer = LogPrinter(clock=clock)
    monkeypatch.setattr(printer, "_print_later", engine._print)  # at once
    printer.add(PID, "Ann")
    return printer


def lines(capsys):
    """What was printed, without the prefix that each line must have."""
    out = capsys.readouterr().out
    prefix = "(Ann pid=7) "
    assert all(line.startswith(prefix) for line in out.splitlines())
    return [line.removeprefix(prefix) for line in out.split("\n")][:-1]


def test_each_line_has_the_name(printer, capsys):
    printer.feed(PID, "stdout", b"one\ntwo\n\n")
    printer.feed(PID, "stderr", b"three\n")
    captured = capsys.readouterr()
    assert captured.out == "(Ann pid=7) one\n(Ann pid=7) two\n(Ann pid=7) \n"
    assert captured.err == "(Ann pid=7) three\n"


def test_a_partial_line_waits_for_its_end(printer, capsys):
    printer.feed(PID, "stdout", b"on")
    assert lines(capsys) == []
    printer.feed(PID, "stdout", b"e\ntw")
    assert lines(capsys) == ["one"]
    printer.feed(PID, "stdout", b"")
    assert lines(capsys) == ["tw"]
    printer.feed(PID, "stdout", b"")
    assert lines(capsys) == []


def test_characters_cut_by_a_chunk(printer, capsys):
    for byte in "über €\n".encode():
        printer.feed(PID, "stdout", bytes([byte]))
    assert lines(capsys) == ["über €"]


def test_undecodable_bytes(printer, capsys):
    printer.feed(PID, "stdout", b"a\xff\xfeb\n")
    assert lines(capsys) == ["a\ufffd\ufffdb"]


def test_windows_line_ends(printer, capsys):
    printer.feed(PID, "stdout", b"one\r\ntwo\r")
    printer.feed(PID, "stdout", b"\n")
    assert lines(capsys)[0] == "one"


@pytest.mark.parametrize(
    "length", [engine._LINE_BYTES - 1, engine._LINE_BYTES, engine._LINE_BYTES + 1]
)
def test_lines_up_to_the_limit(printer, capsys, length):
    printer.feed(PID, "stdout", b"x" * length + b"\n")
    assert [len(line) for line in lines(capsys)] == [
        n for n in (min(length, engine._LINE_BYTES), length - engine._LINE_BYTES) if n > 0
    ]


def test_a_line_without_end_takes_bounded_memory(printer, capsys):
    text = "é" * 1000
    for _ in range(1000):
        printer.feed(PID, "stdout", text.encode())
    assert len(printer._actors[PID].stdout._partial) <= 2 * engine._LINE_BYTES
    printer.feed(PID, "stdout", b"")
    shown = lines(capsys)
    assert "".join(shown) == text * 1000
    assert max(len(line.encode()) for line in shown) <= engine._LINE_BYTES


class TestProgressBars:
    def test_one_state_a_second_and_the_last(self, printer, clock, capsys):
        for percent in range(100):
            clock.now += 0.1
            printer.feed(PID, "stdout", f"\r{percent}%".encode())
        shown = lines(capsys)
        assert 9 <= len(shown) <= 11
        assert shown == sorted(shown, key=lambda line: int(line[:-1]))
        printer.feed(PID, "stdout", b"\r100%\nnext\n")
        assert lines(capsys) == ["100%", "next"]

    def test_returns_at_the_end(self, printer, capsys):
        printer.feed(PID, "stdout", b"50%\r")
        printer.feed(PID, "stdout", b"60%\r")
        printer.feed(PID, "stdout", b"100%\r")
        printer.feed(PID, "stdout", b"\n")
        assert lines(capsys) == ["50%", "100%"]

    def test_a_state_is_not_shown_twice(self, printer, clock, capsys):
        printer.feed(PID, "stdout", b"done\r")
        clock.now += 5
        printer.feed(PID, "stdout", b"\r")
        printer.feed(PID, "stdout", b"\n")
        printer.feed(PID, "stdout", b"done\n")
        assert lines(capsys) == ["done", "done"]

    def test_a_bar_that_never_ends_takes_bounded_memory(self, printer, capsys):
        for _ in range(1000):
            printer.feed(PID, "stdout", b"\r" + b"#" * 1000)
        assert len(printer._actors[PID].stdout._partial) < 3000
        printer.feed(PID, "stdout", b"")
        assert len(lines(capsys)) == 1


class TestTail:
    def test_the_last_lines_of_stderr(self, printer):
        for index in range(30):
            printer.feed(PID, "stderr", b"line %d\n" % index)
        printer.feed(PID, "stdout", b"not this\n")
        printer.feed(PID, "stderr", b"end")
        printer.feed(PID, "stderr", b"")
        tail = printer.stderr_tail(PID).split("\n")
        assert tail == [*(f"line {index}" for index in range(11, 30)), "end"]

    def test_is_bounded(self, printer):
        for _ in range(100):
            printer.feed(PID, "stderr", b"x" * 100_000 + b"\n")
        assert len(printer.stderr_tail(PID)) < 50_000

    def test_is_without_passing_states(self, printer):
        printer.feed(PID, "stderr", b"\r1%\r2%\r3%\n")
        assert printer.stderr_tail(PID) == "3%"

    def test_is_forgotten(self, printer):
        printer.feed(PID, "stderr", b"x\n")
        printer.forget(PID)
        assert printer.stderr_tail(PID) == ""
        printer.forget(PID)

    def test_is_new_for_a_new_process_with_the_same_pid(self, printer, capsys):
        printer.feed(PID, "stderr", b"x\n")
        printer.add(PID, "Bob")
        assert printer.stderr_tail(PID) == ""
        printer.feed(PID, "stdout", b"y\n")
        assert capsys.readouterr().out == "(Bob pid=7) y\n"


def test_printing_nothing(capsys):
    printer = LogPrinter(show=False)
    printer.feed(PID, "stdout", b"x\n")
    printer.feed(PID, "stderr", b"y\n")
    assert capsys.readouterr() == ("", "")
    assert printer.stderr_tail(PID) == "y"


def test_an_unknown_process(capsys):
    printer = LogPrinter()
    printer.feed(5, "stdout", b"x\n")
    printer.close(60)
    assert capsys.readouterr().out == "(conveyor pid=5) x\n"


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("make", [lambda: None, Broken, io.StringIO])
def test_a_stream_that_takes_nothing(printer, monkeypatch, make):
    stream = make()
    if isinstance(stream, io.StringIO) and not isinstance(stream, Broken):
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    printer.feed(PID, "stdout", b"x\n")
    printer.feed(PID, "stderr", b"x\n")
    assert printer.stderr_tail(PID) == "x"


def test_a_stream_that_cannot_encode(printer, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    printer.feed(PID, "stdout", "é\n".encode())
    assert raw.getvalue() == b"(Ann pid=7) ?\n"


def test_a_child_forked_while_we_print_can_print(printer, monkeypatch):
    """The stream's lock must not be inherited in the locked state."""
    entered, leave = threading.Event(), threading.Event()

    class Slow(io.StringIO):
        def write(self, text):
            entered.set()
            leave.wait(0.2)
            return super().write(text)

    slow = Slow()
    monkeypatch.setattr(sys, "stdout", slow)
    thread = threading.Thread(target=printer.feed, args=(PID, "stdout", b"x\n"))
    thread.start()
    assert entered.wait(60)
    pid = os.fork()
    if pid == 0:
        # The fork has waited for the line, so it is whole and no lock is held.
        os._exit(0 if slow.getvalue() and not engine._printing.locked() else 1)
    thread.join(60)
    assert os.waitpid(pid, 0)[1] == 0
    assert not engine._printing.locked()


class Stuck(io.StringIO):
    """A stream whose reader does not read until it is let go on."""

    def __init__(self):
        super().__init__()
        self.writes, self.read = threading.Event(), threading.Event()

    def write(self, text):
        self.writes.set()
        assert self.read.wait(60)
        return super().write(text)


def test_what_nobody_reads_is_dropped_and_counted(monkeypatch):
    stuck = Stuck()
    monkeypatch.setattr(sys, "stdout", stuck)
    printer = LogPrinter(most_waiting=1000)
    printer.add(PID, "Ann")
    printer.feed(PID, "stdout", b"first\n")
    assert stuck.writes.wait(60)
    for i in range(1000):
        printer.feed(PID, "stdout", b"line %d\n" % i)
    assert not printer.flush(0)
    assert printer._waiting <= 1000
    stuck.read.set()
    assert printer.flush(60)
    printer.feed(PID, "stdout", b"last\n")
    printer.close(60)
    lines = stuck.getvalue().splitlines()
    assert (lines[0], lines[-1]) == ("(Ann pid=7) first", "(Ann pid=7) last")
    (told,) = [line for line in lines if line.startswith("(conveyor) ")]
    shown = sum(line.startswith("(Ann pid=7) line ") for line in lines)
    lost = sum(len(f"(Ann pid=7) line {i}\n") for i in range(shown, 1000))
    assert f"(conveyor) {lost} characters" in told
