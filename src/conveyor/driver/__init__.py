"""The driver: the process that owns the session, its actors and its channels."""
