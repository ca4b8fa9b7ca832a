"""A compiled graph, as the process that executes it holds it."""
