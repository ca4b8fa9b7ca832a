"""Drawings of a Plan and of a timeline, as text and as pictures."""
