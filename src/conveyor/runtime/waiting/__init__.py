"""Waiting for results, calls and deadlines, and being able to say for what."""
