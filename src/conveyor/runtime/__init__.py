"""Running a Plan, and calls: the driver, the actors' processes, graphs, refs, and how all of them wait."""
