"""Figures as text; the end of a figure's name says its unit."""

from __future__ import annotations

_TIMES = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))
_RATES = ((1e6, "M"), (1e3, "k"))


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def microseconds(value: float) -> str:
    scale, unit = next((pair for pair in _TIMES if abs(value) >= pair[0] * 0.9995), (1.0, "µs"))
    return f"{_digits(value / scale)} {unit}"


def show(value: float, figure: str) -> str:
    if figure.endswith("_us"):
        return microseconds(value)
    if figure.endswith("_ms"):
        return microseconds(value * 1e3)
    if figure.endswith("per_s"):
        scale, unit = next((pair for pair in _RATES if abs(value) >= pair[0] * 0.9995), (1.0, ""))
        return f"{_digits(value / scale)}{unit}/s"
    if figure.endswith("_mib"):
        return f"{_digits(value)} MiB"
    if figure.endswith("_percent"):
        return f"{_digits(value)} %"
    return _digits(value)


def times(ratio: float) -> str:
    return f"{_digits(ratio)}x"
