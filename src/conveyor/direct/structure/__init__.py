"""Structure of a value: its tensors and arrays, and the containers and objects that they are in.

``leaves`` finds them in lists, tuples and mappings, ``objects`` in anything, by its pickler; ``skeleton`` is
a value that has stayed elsewhere, without its memory.
"""
