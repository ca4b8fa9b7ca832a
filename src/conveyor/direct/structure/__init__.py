"""What a value is made of: its tensors and arrays, and what they are in.

``leaves`` finds them in lists, tuples and mappings, ``objects`` in anything, by its pickler; ``skeleton`` is
a value that has stayed elsewhere, without its memory.
"""
