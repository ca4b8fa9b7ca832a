"""Processes are made known to each other, and the ends of channels meet."""
