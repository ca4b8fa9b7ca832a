"""Values with tensors of all kinds, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Batch:
    """A value of a user's own class."""

    tokens: Any
    label: str


def _dtypes() -> Any:
    import torch

    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8]
    kinds += [torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64]
    return [torch.arange(7).to(dtype) for dtype in kinds]


def _shapes() -> Any:
    import torch

    shapes = [(), (0,), (1,), (3, 0, 2), (5, 4), (2, 3, 4, 5)]
    return [
        torch.arange(max(1, torch.Size(s).numel()))[: torch.Size(s).numel()].reshape(s)
        for s in shapes
    ]


def _layouts() -> Any:
    import torch

    base = torch.arange(60.0).reshape(3, 4, 5)
    image = torch.arange(48.0).reshape(1, 3, 4, 4)
    channels_last = image.to(memory_format=torch.channels_last)
    return [
        base.transpose(0, 2),
        base[:, ::2],
        base[1],
        base[..., 3],
        channels_last,
        base.expand(2, 3, 4, 5),
    ]


def _nested() -> Any:
    import torch

    return {
        "batch": Batch(torch.arange(5), "five"),
        "list": [torch.ones(2, 2), "text", 3, None, (torch.zeros(1), {"deep": torch.eye(3)})],
        7: b"bytes",
    }


def _aliases() -> Any:
    import torch

    base = torch.arange(100.0)
    return [base, base, base[10:20], base.reshape(10, 10)[:, 3]]


def _gradients() -> Any:
    import torch

    return [torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(2)), torch.ones(1)]


def _plain() -> Any:
    return {"no": "tensor", "numbers": [1, 2.5, None]}


def _lone() -> Any:
    import torch

    return torch.linspace(0, 1, 11)


def _many() -> Any:
    import torch

    return [torch.full((n % 7 + 1,), float(n)) for n in range(500)]


_samples: dict[str, Callable[[], Any]] = {
    "aliases": _aliases,
    "dtypes": _dtypes,
    "gradients": _gradients,
    "layouts": _layouts,
    "lone": _lone,
    "many": _many,
    "nested": _nested,
    "plain": _plain,
    "shapes": _shapes,
}

KINDS = tuple(_samples)


def sample(kind: str) -> Any:
    """Make the value of that name, which is the same each time."""
    return _samples[kind]()


def difference(got: Any, wanted: Any, at: str = "value") -> str:
    """Say where two values differ; empty if they do not."""
    import torch

    if type(got) is not type(wanted):
        return f"{at} is a {type(got).__name__}, not a {type(wanted).__name__}"
    if isinstance(wanted, torch.Tensor):
        if got.device.type != wanted.device.type:
            return f"{at} is on {got.device}, not {wanted.device}"
        for what in ("dtype", "shape", "requires_grad"):
            if getattr(got, what) != getattr(wanted, what):
                return f"{at} has {what} {getattr(got, what)}, not {getattr(wanted, what)}"
        return "" if torch.equal(got, wanted) else f"{at} has other elements"
    if isinstance(wanted, Batch):
        got, wanted = vars(got), vars(wanted)
    if isinstance(wanted, dict):
        if list(got) != list(wanted):
            return f"{at} has keys {list(got)}, not {list(wanted)}"
        pairs = [(got[key], wanted[key], f"{at}[{key!r}]") for key in wanted]
    elif isinstance(wanted, (list, tuple)):
        if len(got) != len(wanted):
            return f"{at} has {len(got)} elements, not {len(wanted)}"
        pairs = [(g, w, f"{at}[{i}]") for i, (g, w) in enumerate(zip(got, wanted, strict=True))]
    else:
        return "" if got == wanted else f"{at} is {got!r}, not {wanted!r}"
    return next((text for pair in pairs if (text := difference(*pair))), "")
