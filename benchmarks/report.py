"""Results as a markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

from benchmarks.bars import OURS, Verdict, evaluate
from benchmarks.model import PLACEMENTS, Growth
from benchmarks.results import Results, Row
from benchmarks.units import show, times
from benchmarks.workloads import SYSTEMS, workloads

STEEP = 1.1
"""What grows faster than this, beyond the first step from number to number, needs a reason."""

FLOORS = ("floor", "memcpy")


@dataclass(frozen=True)
class Table:
    """One table: the workloads of ``sections`` that have ``figure``; ``second`` is shown beside."""

    title: str
    sections: tuple[str, ...]
    figure: str
    second: str = ""
    floor: str = ""
    more_is_better: bool = False


TABLES = (
    Table("Latency, hot: p50 / p99", ("latency",), "p50_us", "p99_us", "floor"),
    Table("Latency, paced: p50 / p99", ("paced",), "p50_us", "p99_us", "floor"),
    Table("Executions per second", ("throughput",), "per_s", floor="floor", more_is_better=True),
    Table("Payloads, warm: p50 / p99", ("payload",), "p50_us", "p99_us", "memcpy"),
    Table(
        "Payloads, cold: first execution / mean of the first ten",
        ("payload",),
        "first_us",
        "first10_us",
        "memcpy",
    ),
    Table("Values made in place: send and reply, p50 / p99", ("in-place",), "p50_us", "p99_us"),
    Table("Eager call and asyncio echo: p50 / p99", ("calls",), "p50_us", "p99_us"),
    Table(
        "CPU time per execution, all processes",
        ("latency", "paced", "throughput", "payload", "calls", "core", "core values"),
        "cpu_us",
        floor="floor",
    ),
    Table(
        "Compile and first execution: median / the first since the system's start",
        ("lifecycle",),
        "compile_ms",
        "compile_first_ms",
    ),
    Table("Teardown", ("lifecycle",), "teardown_ms"),
    Table(
        "Actors, start to first reply: first time / again",
        ("start",),
        "start_ms",
        "again_ms",
        "floor",
    ),
    Table("Import", ("start",), "import_ms"),
    Table(
        "Steps per second of stages on simulated devices",
        ("executor",),
        "per_s",
        more_is_better=True,
    ),
    Table(
        "The same: share of the devices' time that is idle / p99 between two steps",
        ("executor",),
        "device_idle_percent",
        "p99_us",
    ),
    Table(
        "Allreduce of float32, each rank on a core: p50 / p99", ("collectives",), "p50_us", "p99_us"
    ),
    Table(
        "Tensors of a simulated accelerator, without and with overlap: p50 / as simulated",
        ("overlap",),
        "p50_us",
        "simulated_us",
    ),
    Table(
        "Values that stay with their maker, fetched and used: p50 / p99",
        ("direct",),
        "p50_us",
        "p99_us",
        "floor",
    ),
    Table("The same, until they are there: p50", ("direct",), "had_us", floor="floor"),
    Table(
        "The same, where the reader copies without the maker", ("direct",), "read_us", floor="floor"
    ),
    Table("The maker's processor time for each", ("direct",), "maker_cpu_us", floor="floor"),
    Table("Calls, functions, references: p50 / p99 of one", ("core",), "p50_us", "p99_us"),
    Table("Values as people pass them: p50 / p99", ("core values",), "p50_us", "p99_us"),
    Table("CPU while idle, all processes", ("idle",), "idle_percent"),
    Table("Memory: PSS per bare actor / all processes", ("memory",), "pss_mib", "tree_mib"),
    Table("SIGKILL to the exception: median / largest", ("death",), "death_ms", "death_max_ms"),
)


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([row(header), rule, *(row(line) for line in lines)])


def _value(row: Row | None, table: Table) -> float | None:
    return None if row is None else row.figures.get(table.figure)


def _cell(row: Row | None, table: Table, ours: float | None) -> str:
    if row is None:
        return ""
    value = _value(row, table)
    if value is None:
        if row.status == "ok":
            return ""  # it has other figures
        return "n/a" if row.status == "unavailable" else f"{row.status}: {row.reason[:40]}"
    text = show(value, table.figure)
    second = row.figures.get(table.second)
    if second is not None:
        text += f" / {show(second, table.second)}"
    if ours:
        text += f" ({times(ours / value if table.more_is_better else value / ours)})"
    return text


def _lines(results: Results, table: Table, systems: Sequence[str]) -> list[list[str]]:
    lines = []
    for workload in workloads().values():
        if workload.section not in table.sections:
            continue
        for placement in PLACEMENTS:
            rows = {name: results.row(workload.name, name, placement) for name in systems}
            if not any(row is not None and _relevant(row, table) for row in rows.values()):
                continue
            ours = _value(rows.get(OURS), table)
            line = [workload.name, placement]
            for name, row in rows.items():
                line.append(_cell(row, table, ours if name not in (OURS, table.floor) else None))
                if name == table.floor:
                    line += _distance(ours, _value(row, table), table)
            lines.append(line)
    return lines


def _relevant(row: Row, table: Table) -> bool:
    """Whether ``row`` says something in ``table``: a value, or that there is none."""
    if row.status in ("failed", "hung"):
        return table.figure in _PRIMARY
    return table.figure in row.figures


_PRIMARY = ("p50_us", "per_s", "compile_ms", "start_ms", "idle_percent", "pss_mib", "death_ms")


def _distance(ours: float | None, floor: float | None, table: Table) -> list[str]:
    if ours is None or not floor:
        return ["", ""]
    if table.more_is_better:
        return ["", times(floor / ours)]
    return [show(ours - floor, table.figure), times(ours / floor)]


def _render(results: Results, table: Table) -> str:
    present = {case.system for case in results.rows}
    systems = [name for name in SYSTEMS if name in present]
    systems = [name for name in systems if name not in FLOORS or name == table.floor]
    lines = _lines(results, table, systems)
    header = ["workload", "placement"]
    for name in systems:
        header.append(name)
        if name == table.floor:
            header += [f"{OURS} - {name}", f"{OURS} ÷ {name}"]
    if table.more_is_better and len(header) > 4:
        header = [
            text.replace(f"{OURS} ÷ {table.floor}", f"{table.floor} ÷ {OURS}") for text in header
        ]
    keep = [i for i in range(len(header)) if i < 1 or any(line[i] for line in lines)]
    if not lines:
        return ""
    kept = [[line[i] for i in keep] for line in lines]
    return f"## {table.title}\n\n" + markdown_table([header[i] for i in keep], kept)


def _placement(results: Results) -> str:
    """On which cores the free hot cases really ran."""
    lines = []
    for case, row in results.rows.items():
        if case.placement != "free" or workloads()[case.workload].section != "latency":
            continue
        samples = row.cores
        if not samples or case.system not in (OURS, "floor"):
            continue
        together = sum(len(set(sample)) == 1 for sample in samples)
        typical = max(samples, key=samples.count)
        where = f"{typical[0]} + {' '.join(map(str, typical[1:]))}"
        lines.append([case.workload, case.system, f"{100 * together / len(samples):.0f} %", where])
    if not lines:
        return ""
    header = ["workload", "system", "samples on one core", "most frequent: driver + workers"]
    return "## Cores used in free placement\n\n" + markdown_table(header, lines)


def _growth(results: Results) -> str:
    """Times of many things, each with the slope from the number before: 1 is a line, 2 a square."""
    lines: list[list[str]] = []
    for case, row in results.rows.items():
        spec = workloads()[case.workload].spec
        if not isinstance(spec, Growth) or not row.good:
            continue
        cells = [_times(row, count) for count in spec.counts]
        for place, slope in enumerate(slopes(row, spec.counts), 1):
            text = f"{slope:.2f}"
            cells[place] += f" (**{text}**)" if place > 1 and slope > STEEP else f" ({text})"
        lines.append([case.workload, *cells])
    widest = max(map(len, lines), default=0)
    for line in lines:
        line += [""] * (widest - len(line))
    if not lines:
        return ""
    header = ["workload", *["number: time / CPU time (slope)"] * (widest - 1)]
    text = "In parentheses: the slope of the CPU time of all processes from the number before"
    return f"## Growth\n\n{text}.\n\n" + markdown_table(header, lines)


def _times(row: Row, count: int) -> str:
    time, cpu = (show(row.figures[f"{name}{count}_us"], "_us") for name in ("of", "cpu"))
    return f"{count:,}: {time} / {cpu}"


def slopes(row: Row, counts: Sequence[int]) -> list[float]:
    spent = [row.figures[f"cpu{count}_us"] for count in counts]
    return [
        log(b / a) / log(n / m)
        for (a, b), (m, n) in zip(pairwise(spent), pairwise(counts), strict=True)
    ]


def _bars(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    missed = [v for v in verdicts if v.state.startswith("missed")]
    met = sum(v.state == "met" for v in verdicts)
    lines = [[v.text, v.measured, v.limit, v.reference, v.state] for v in verdicts]
    header = ["bar", "measured", "limit", "reference", "verdict"]
    return f"## Bars: {met} met, {len(missed)} missed\n\n" + markdown_table(header, lines)


def _not_ok(results: Results) -> str:
    lines = [
        f"- {case}: {_tally(row)}: {row.reason}"
        for case, row in results.rows.items()
        if row.reason and row.status != "unavailable"
    ]
    absent = {
        case.system: row.reason for case, row in results.rows.items() if row.status == "unavailable"
    }
    lines += [f"- {system} is not available: {reason}" for system, reason in absent.items()]
    lines += [f"- {warning}" for warning in results.warnings]
    return "## Not in order\n\n" + "\n".join(lines) if lines else ""


def _tally(row: Row) -> str:
    bad = [outcome.status for outcome in row.outcomes if outcome.status != "ok"]
    return f"{bad[-1]} in {len(bad)} of {len(row.outcomes)} rounds"


def _rounds(results: Results) -> str:
    counts = [len(row.outcomes) for row in results.rows.values()] or [0]
    fewest, most = min(counts), max(counts)
    if fewest != most:
        return f"{fewest} to {most} rounds"
    return f"{most} round" if most == 1 else f"{most} rounds"


def _head(results: Results) -> str:
    machine, settings = results.machine, results.settings
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items())
    return "\n".join(
        [
            "# Benchmarks",
            "",
            f"{machine['date']}, commit {machine['commit']}. {machine['cpu']}, "
            f"cores {machine['cores']} (cgroup cpu.max: {machine['cgroup_cpu_max']}), "
            f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, "
            f"Python {machine['python']}; {versions}.",
            f"Load when it began: {machine['load_average']}. "
            f"Medians over {_rounds(results)}; "
            f"took {settings.get('minutes_taken', 0):.1f} minutes.",
            *settings.get("notes", []),
            "",
            "In parentheses: how many times worse than Conveyor in the same row. Placement "
            "`free`: the kernel's choice; `pinned`: all processes on one core; `split`: the "
            "driver on one core, the workers on the other.",
        ]
    )


def render(results: Results) -> str:
    parts = [_head(results), _bars(evaluate(results))]
    parts += [_render(results, table) for table in TABLES]
    parts += [_growth(results), _placement(results), _not_ok(results)]
    return "\n\n".join(part for part in parts if part) + "\n"
