"""An actor's part of each graph."""
