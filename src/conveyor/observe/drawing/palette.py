"""Actors have colours, which the colour-blind can tell apart too, and which are light under text."""

from __future__ import annotations

from dataclasses import dataclass

INK = "#1b1f24"
MUTED = "#57606a"
LINE = "#6e7781"
PAPER = "#ffffff"

# After Okabe and Ito; the yellow is darker, so that a line of it shows on white.
_HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f7a00", "#7a5cb8")
#: How much of the hue is in the fill: each round through the hues takes the next.
_STRENGTHS = (0.22, 0.42, 0.10)


@dataclass(frozen=True, slots=True)
class Colour:
    """``fill`` is light enough for black text, ``stroke`` stands out from white; ``#rrggbb``."""

    fill: str
    stroke: str


def actor_colour(index: int) -> Colour:
    """Return the colour of an actor; they repeat only after 24. A negative number is the driver's grey."""
    if index < 0:
        return Colour("#eaeef2", LINE)
    hue = _HUES[index % len(_HUES)]
    strength = _STRENGTHS[index // len(_HUES) % len(_STRENGTHS)]
    return Colour(_mix(hue, strength), hue)


def rgb(colour: str) -> tuple[int, int, int]:
    """Return the three components, 0 to 255, of ``#rrggbb``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _mix(colour: str, share: float) -> str:
    """Mix ``colour`` into white."""
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in rgb(colour))
