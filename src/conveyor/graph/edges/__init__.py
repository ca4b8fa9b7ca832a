"""The edges of a graph, where its rings and what goes beside them lie, and who opens them."""
