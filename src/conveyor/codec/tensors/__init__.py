"""Torch tensors: in frames, and beside them."""
