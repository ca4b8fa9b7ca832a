"""Trace of a graph's processes, in the trace event format of Chrome and Perfetto.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from conveyor import _core
from conveyor.graph.lifecycle import GraphInfo
from conveyor.graph.telemetry import (
    BRIEF_TIME_LIMIT,
    TIME_LIMIT,
    Alignment,
    Events,
    Question,
    Recording,
    RemoteStatus,
    Track,
)
from conveyor.observe.dataflow import participant_name, printable
from conveyor.observe.units import duration
from conveyor.plan.model import EXECUTOR, Plan

logger = logging.getLogger("conveyor")


class Trace:
    """The body of ``with graph.trace(path)``.

    path: the file.
    events: afterwards, the number of slices in the file.
    dropped: afterwards, the number of slices that there was no room for.
    """

    def __init__(self, graph: GraphInfo, path: str | os.PathLike[str], max_events: int) -> None:
        if max_events < 1:
            raise ValueError(f"max_events must be at least 1, not {max_events}")
        self.path = Path(path)
        self.events = 0
        self.dropped = 0
        self._graph = graph
        self._max_events = max_events
        self._stack = ExitStack()
        self._begun = RemoteStatus()
        self._partial = Path()
        self._pid = os.getpid()

    def __enter__(self) -> Trace:
        graph = self._graph
        graph.check_open()
        recording = graph.recording.traced(graph.name, str(self.path), self._max_events)
        # First the lock, so that a second trace does not touch the first one's file.
        self._stack.enter_context(recording)
        try:
            self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
            self._partial.touch()
            most = max(self._max_events // len(graph.recording.recorders), 1)
            self._begun = graph.remote_status(Question(trace="begin", events=most), TIME_LIMIT)
        except BaseException:
            with suppress(FileNotFoundError):
                self._partial.unlink()
            self._stack.close()
            with suppress(Exception):  # other nodes may have begun, and would not end otherwise
                graph.remote_status(Question(trace="end"), BRIEF_TIME_LIMIT)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the trace is its parent's
        try:
            members = self._graph.tracks()
            ended = self._graph.remote_status(Question(trace="end"), TIME_LIMIT)
            self._stack.close()
            until = _core.monotonic_ns()
            remote = remote_events(self._graph.hosts, self._begun, ended)
            recording = self._graph.recording
            slices = Slices(self._graph.plan, recording, members, until, remote.events)
            self.events, self.dropped = slices.count, sum(slices.dropped.values())
            names = {t.native_id: t.name for t in threading.enumerate() if t.native_id}
            with _opened(self._partial, compressed=self.path.suffix == ".gz") as file:
                write_events(file, self._graph.name, slices, members, names, remote)
            self._partial.replace(self.path)
        finally:
            self._stack.close()  # for an interrupt too: waiting for other nodes may take long
            with suppress(FileNotFoundError):  # renamed already
                self._partial.unlink()
        if self.dropped:
            logger.warning(
                "%s: %d events found no room in the trace %s: its metadata says whose",
                self._graph.name,
                self.dropped,
                self.path,
            )


def remote_events(
    hosts: Mapping[int, str], begun: RemoteStatus, ended: RemoteStatus
) -> RemoteTrace:
    """Combine the answers of other nodes about their actors: ``begun`` from the trace's begin, ``ended`` from
    its end. ``hosts``: the node's name, by actor."""
    events: dict[int, RemoteEvents] = {}
    unknown: dict[int, str] = {}
    for participant, host in hosts.items():
        if host == hosts[EXECUTOR]:
            continue
        snapshot = ended.seen.get(participant)
        before, after = begun.clocks.get(participant), ended.clocks.get(participant)
        if participant not in begun.seen:
            unknown[participant] = begun.why_unknown(host)
        elif snapshot is None:
            unknown[participant] = ended.why_unknown(host)
        elif snapshot.events is None:
            unknown[participant] = "the graph was laid anew while it was traced"
        elif before is None or after is None:
            unknown[participant] = "its host's clock has not answered"
        else:
            events[participant] = RemoteEvents(snapshot.events, Alignment(before, after))
    return RemoteTrace(hosts, events, unknown)


def _opened(path: Path, *, compressed: bool) -> IO[str]:
    if compressed:
        return gzip.open(path, "wt", compresslevel=5, encoding="utf-8")
    return open(path, "w", encoding="utf-8")


# The events of a trace.


# Layout as in native/recorder.h: begin, end, execution, bytes, index, thread, kind, flags.
_EVENT = struct.Struct("<QQQQIIHHI")
assert _EVENT.size == _core.EVENT_BYTES
_TASK, _WAIT, _RECEIVE, _SEND, _EXECUTE, _ROOM = range(1, 7)
_FAILED, _IN_VAIN = 1, 2
_CATEGORIES = {
    _TASK: "task",
    _WAIT: "wait",
    _RECEIVE: "receive",
    _SEND: "send",
    _EXECUTE: "execute",
    _ROOM: "wait",
}


class _Slice(NamedTuple):
    """A span of time in a trace. Slices sort as a viewer wants them: one that contains others comes first.
    Times are nanoseconds."""

    begin: int
    negative_length: int
    track: tuple[int, int]
    kind: int
    number: int
    execution: int
    bytes: int
    flags: int
    participant: int


@dataclass(frozen=True, slots=True)
class _Flow:
    """A frame that went from the slice that sent it to the slice that received it.

    edge: the number of its edge.
    sent, received: the track and the time of the two slices.
    """

    edge: int
    sent: tuple[tuple[int, int], int]
    received: tuple[tuple[int, int], int]


class RemoteEvents(NamedTuple):
    """Events of a process on another node, with the alignment of that node's clock."""

    events: Events
    clock: Alignment


def _same(time: int) -> int:
    return time


class Slices:
    """Slices of a trace, in order. ``dropped``: by process, the number that there was no room for."""

    def __init__(
        self,
        plan: Plan,
        recording: Recording,
        members: Sequence[Track],
        until: int,
        remote_status: Mapping[int, RemoteEvents],
    ) -> None:
        """``until``: now, which is the end of slices that have not ended. ``remote_status``: the events of
        processes on other nodes."""
        self.plan = plan
        self.dropped: dict[int, int] = {}
        self.unfinished: list[_Slice] = []
        collected = recording.events()
        made: list[_Slice] = []
        for member in members:
            where = recording.layouts[member.participant]
            numbers = {
                _TASK: where.tasks,
                _WAIT: where.receives,
                _RECEIVE: where.receives,
                _SEND: where.sends,
                _EXECUTE: (0,),
                _ROOM: (0,),
            }
            remote = remote_status.get(member.participant)
            if remote is None:
                data, self.dropped[member.participant] = collected[member.participant]
                running = recording.recorders[member.participant].running
                here: Callable[[int], int] = _same
            else:
                data, self.dropped[member.participant] = remote.events.data, remote.events.dropped
                running, here = remote.events.running, remote.clock.here
            for begin, end, execution, size, index, thread, kind, flags, _ in _EVENT.iter_unpack(
                data
            ):
                begin, end = here(begin), here(end)
                track = (member.pid, thread if member.track is None else member.track)
                number = numbers[kind][index]
                made.append(
                    _Slice(
                        begin,
                        begin - end,
                        track,
                        kind,
                        number,
                        execution,
                        size,
                        flags,
                        member.participant,
                    )
                )
            if running is not None:
                task, execution, since = running
                since = min(here(since), until)
                track = (member.pid, member.pid if member.track is None else member.track)
                number = where.tasks[task]
                self.unfinished.append(
                    _Slice(
                        since,
                        since - until,
                        track,
                        _TASK,
                        number,
                        execution,
                        0,
                        0,
                        member.participant,
                    )
                )
        made.sort()
        self.slices = made
        self.count = len(made)

    def flows(self) -> Iterator[_Flow]:
        """Find the frames whose sending and receiving are both in the trace."""
        sent = {(s.number, s.execution): (s.track, s.begin) for s in self.slices if s.kind == _SEND}
        for s in self.slices:
            if s.kind == _RECEIVE:
                source = sent.get((s.number, s.execution))
                if source is not None:
                    yield _Flow(s.number, source, (s.track, s.begin))


class RemoteTrace(NamedTuple):
    """Part of a trace that comes from other nodes. hosts: the node's name, by process, if there are several
    nodes. unknown: why there are no events, by the processes without any."""

    hosts: Mapping[int, str]
    events: Mapping[int, RemoteEvents]
    unknown: Mapping[int, str]

    def clock(self, participant: int) -> dict[str, Any]:
        """Describe how the times of a process were converted to this node's clock."""
        clock = self.events[participant].clock
        return {
            "host": self.hosts[participant],
            "ahead_ns": clock.after.ahead,
            "error_ns": clock.error,
        }

    def where(self, participant: int) -> str:
        """Return the text after a process's name: its node, and the error of its times or why it has none."""
        if participant in self.events:
            error = duration(self.events[participant].clock.error / 1e9)
            return f" on {self.hosts[participant]}, times within {error}"
        if participant in self.unknown:
            return f" on {self.hosts[participant]}: {self.unknown[participant]}"
        return ""


def write_events(
    file: IO[str],
    name: str,
    slices: Slices,
    members: Sequence[Track],
    thread_names: Mapping[int, str],
    remote: RemoteTrace,
) -> None:
    """Write the whole trace of the graph ``name`` to ``file``."""
    plan = slices.plan
    metadata = {
        "graph": name,
        "clock": "CLOCK_MONOTONIC",
        "dropped_events": {participant_name(plan, p): n for p, n in slices.dropped.items()},
    }
    if remote.hosts:
        metadata["clock"] = f"CLOCK_MONOTONIC of {remote.hosts[EXECUTOR]}"
        metadata["clocks"] = {participant_name(plan, p): remote.clock(p) for p in remote.events}
        metadata["not_known"] = {
            participant_name(plan, p): why for p, why in remote.unknown.items()
        }
    file.write('{"displayTimeUnit": "ns", "otherData": ')
    json.dump(metadata, file)
    file.write(',\n"traceEvents": [\n')
    separator = ""
    for event in _all_events(name, slices, members, thread_names, remote):
        file.write(separator)
        file.write(event)
        separator = ",\n"
    file.write("\n]}\n")


def _all_events(
    name: str,
    slices: Slices,
    members: Sequence[Track],
    thread_names: Mapping[int, str],
    remote: RemoteTrace,
) -> Iterator[str]:
    plan = slices.plan
    tracks = {s.track: s.participant for s in slices.slices}
    tracks |= {s.track: s.participant for s in slices.unfinished}
    processes: dict[int, str] = {}
    for member in members:
        shared = [m for m in members if m.pid == member.pid]
        processes[member.pid] = member.name if len(shared) == 1 else "inline"
        if member.track is not None:
            tracks[member.pid, member.track] = member.participant
    shown = {member.pid: remote.where(member.participant) for member in members}
    for order, (pid, process) in enumerate(processes.items()):
        yield _metadata("process_name", pid, 0, {"name": process + shown[pid]})
        yield _metadata("process_sort_index", pid, 0, {"sort_index": order})
    for (pid, thread), participant in tracks.items():
        track = (
            thread_names.get(thread, f"thread {thread}")
            if participant == EXECUTOR
            else participant_name(plan, participant)
        )
        if participant != EXECUTOR and processes[pid] == track:
            track = name
        yield _metadata("thread_name", pid, thread, {"name": track})

    labels = {_TASK: [json.dumps(printable(t.label))[1:-1] for t in plan.tasks]}
    sources = [json.dumps(printable(e.source))[1:-1] for e in plan.edges]
    for kind, verb in ((_WAIT, "wait for"), (_RECEIVE, "receive"), (_SEND, "send")):
        labels[kind] = [f"{verb} {source}" for source in sources]
    labels[_EXECUTE] = ["execute"]
    labels[_ROOM] = ["wait for room"]
    for s in slices.slices:
        yield _slice(s, labels, "")
    for s in slices.unfinished:
        yield _slice(s, labels, ', "unfinished": true')
    for id, flow in enumerate(slices.flows(), 1):
        for phase, ((pid, thread), at) in (("s", flow.sent), ('f", "bp": "e', flow.received)):
            yield (
                f'{{"ph": "{phase}", "id": {id}, "name": "{sources[flow.edge]}", "cat": "edge", '
                f'"ts": {_us(at)}, "pid": {pid}, "tid": {thread}}}'
            )


def _slice(s: _Slice, labels: Mapping[int, Sequence[str]], more: str) -> str:
    if s.kind in (_RECEIVE, _SEND):
        more += f', "bytes": {s.bytes}'
    if s.flags & _FAILED:
        more += ', "error": true'
    if s.flags & _IN_VAIN:
        more += ', "in_vain": true'
    return (
        f'{{"ph": "X", "name": "{labels[s.kind][s.number]}", "cat": "{_CATEGORIES[s.kind]}", '
        f'"ts": {_us(s.begin)}, "dur": {_us(-s.negative_length)}, "pid": {s.track[0]}, '
        f'"tid": {s.track[1]}, "args": {{"execution": {s.execution}{more}}}}}'
    )


def _us(ns: int) -> str:
    """Write microseconds, to the nanosecond."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _metadata(name: str, pid: int, thread: int, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "name": name, "pid": pid, "tid": thread, "args": args})
