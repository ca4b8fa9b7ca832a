"""Other libraries' names over ours; nothing else may import it."""
