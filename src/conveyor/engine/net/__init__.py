"""Hosts that belong together: how they let each other in, and what goes between them beside the frames, which
are the pump's: what processes say over connections of their own, files, and memory that is fetched."""

from __future__ import annotations
