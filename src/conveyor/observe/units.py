"""Durations and sizes as text for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Write three digits and a unit: ``"71.3 us"``."""
    for factor, unit in ((1e9, "ns"), (1e6, "us"), (1e3, "ms")):
        # A number that would be rounded up to 1000 is the next unit's.
        if seconds * factor < 999.5:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def size(count: int) -> str:
    """Write three digits and a unit: ``"4.00 MiB"``; bytes are counted out."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 999.5:
            return f"{_three_digits(value)} {unit}"
    return f"{_three_digits(value / 1024)} TiB"


def _three_digits(value: float) -> str:
    if value == 0 or value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
