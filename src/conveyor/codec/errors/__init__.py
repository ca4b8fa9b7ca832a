"""Exceptions as values, and the errors that values and the native core lead to."""
