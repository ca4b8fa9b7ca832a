"""Sparse torch tensors: the dense ones that they consist of.

Torch's own way back keeps each of them for ever (in a list that only ``torch.load`` empties), and with it the
memory that its values were read in; and it forgets that they require gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def reduce_sparse(tensor: torch.Tensor) -> Any:
    """Reduce a sparse tensor to its parts; ``None`` for another layout."""
    import torch

    plain = tensor.detach()
    parts: tuple[torch.Tensor, ...]
    if plain.layout is torch.sparse_coo:
        parts = plain._indices(), plain._values()
        coalesced = plain.is_coalesced()
    else:
        coalesced = False
        if plain.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = plain.crow_indices(), plain.col_indices(), plain.values()
        elif plain.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = plain.ccol_indices(), plain.row_indices(), plain.values()
        else:
            return None
    layout = str(plain.layout).removeprefix("torch.")
    return _rebuild, (layout, tuple(plain.shape), coalesced, tensor.requires_grad, *parts)


def _rebuild(
    layout: str, shape: tuple[int, ...], coalesced: bool, requires_grad: bool, *parts: torch.Tensor
) -> torch.Tensor:
    import torch

    # They were valid where they came from, and to check that again reads all of them.
    if len(parts) == 2:
        made = torch.sparse_coo_tensor(
            *parts, size=shape, check_invariants=False, is_coalesced=coalesced
        )
    else:
        kind = getattr(torch, layout)
        made = torch.sparse_compressed_tensor(
            *parts, size=shape, layout=kind, check_invariants=False
        )
    return made.requires_grad_(requires_grad)
