"""Hosts that belong together: how they let each other in. What goes over their connections is the pump's."""

from __future__ import annotations
