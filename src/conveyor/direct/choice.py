"""Choice of the route for those tensors of a value that others cannot read where they lie."""

from __future__ import annotations

import sys

from conveyor.codec.direct import Route
from conveyor.dag.hints import known_transports
from conveyor.later import import_later


def route_for(transport: str) -> Route | None:
    """The route of a value that is to stay, by the name of its transport. ``None``: it needs none."""
    if transport not in known_transports:
        managed: Route | None = import_later("conveyor.direct.managers.registry").route(transport)
        if managed is not None:
            return managed
    if "torch" in sys.modules and import_later("conveyor.device").in_use():
        devices: Route = import_later("conveyor.direct.devices.route").DEVICES
        return devices
    return None
