"""For tests: a transport that goes wrong on purpose, and the checks that every transport must pass."""

from __future__ import annotations

from conveyor.testing.conformance import Check, check_transport, transport_checks
from conveyor.testing.faulty import FaultyTransport, InjectedFault

__all__ = ["Check", "FaultyTransport", "InjectedFault", "check_transport", "transport_checks"]
