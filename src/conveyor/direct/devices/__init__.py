"""Tensors of devices that stay: others open their memory, and copy what they want of it.

``route`` is that way, ``filled`` waits until they have their values, and ``opened`` keeps memory of others
open for the next fetch.
"""
