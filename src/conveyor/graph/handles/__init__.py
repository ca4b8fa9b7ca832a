"""A compiled graph in other processes than the one that executes it."""
