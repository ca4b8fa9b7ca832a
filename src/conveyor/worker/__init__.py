"""The actor's process: what it runs, and what it asks the driver for."""
