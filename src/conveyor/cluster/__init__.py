"""Nodes of one session: how they let each other in, and what travels between them beside the pump's frames.
That is: connections of processes, files, and memory that is fetched."""

from __future__ import annotations
