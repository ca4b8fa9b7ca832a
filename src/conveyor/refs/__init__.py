"""Refs: results that are on their way, here and in other processes."""
