"""Collectives as tasks of a graph."""
