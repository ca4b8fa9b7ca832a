"""What the processes of a graph note about themselves, and how it is looked at, here and on other hosts."""
