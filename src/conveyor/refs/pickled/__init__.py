"""Refs that are pickled in one process and loaded in another: who keeps their values, and who is told."""
