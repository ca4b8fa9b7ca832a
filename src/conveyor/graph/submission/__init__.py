"""The way of one execution into a graph, and the way back of its results."""
