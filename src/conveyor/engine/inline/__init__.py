"""Actors in the driver's own process, for the debugger."""
