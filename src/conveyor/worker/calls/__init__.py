"""Calls of an actor's methods, and its instance, which they are calls of."""
