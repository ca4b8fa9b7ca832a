"""Helpers for tests: transports and transfers that go wrong on purpose, and the checks that every transport
must pass, for graphs and for direct objects."""

from __future__ import annotations

from conveyor.exceptions import InjectedFault
from conveyor.testing.conformance import (
    Check,
    check_tensor_transport_manager,
    check_transport,
    transport_checks,
)
from conveyor.testing.faults import FaultyTransport, fail_transfers, hold_transfers

__all__ = [
    "Check",
    "FaultyTransport",
    "InjectedFault",
    "check_tensor_transport_manager",
    "check_transport",
    "fail_transfers",
    "hold_transfers",
    "transport_checks",
]
