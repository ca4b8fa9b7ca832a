"""Promises about the tensors of an edge: checked, and carried out, where the tensors are sent."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from conveyor import _core
from conveyor import device as devices
from conveyor.exceptions import TransportError

if TYPE_CHECKING:
    import torch

Spec = tuple[str, tuple[int, ...], str]
"""dtype, shape and device of a tensor."""


class CheckedValue(NamedTuple):
    """A value to be sent, of which something is promised."""

    value: Any
    checker: PromiseChecker


class PromiseChecker:
    """Keeps to what was promised, at the writer of an edge.

    device: where the readers want the tensors; ``None``: where they come from.
    """

    def __init__(
        self,
        source: str,
        device: str | None,
        static_shape: bool,
        direct_return: bool,
        bundled: bool = False,
    ) -> None:
        """``source`` is what the edge carries, for errors; ``bundled``: each value is alone in a tuple."""
        self.source = source
        self.device = device
        self._expected: tuple[Spec, ...] | None = None
        self._static_shape = static_shape
        self._direct_return = direct_return
        self._bundled = bundled
        #: Class, dtype, shape and device of a tensor that was sent as it is, if one was.
        self._usual: Any = None
        #: Tensors of the value that is pickled, by their identity: it may be pickled twice before it is
        #: right.
        self._found: dict[int, tuple[Any, Spec]] = {}

    def pack(self, value: Any) -> Any:
        """Check ``value`` and return what is sent in its place.

        Raises:
            TransportError: it is not what was promised.
        """
        usual = self._usual
        if usual is not None and type(value) is usual[0]:
            if (value.dtype, value.shape, value.device) == usual[1]:
                return value
        elif type(value) is _core.Snapshot:
            value = value.decode()
        elif self._bundled and any(type(part) is _core.Snapshot for part in value):
            value = tuple([p.decode() if type(p) is _core.Snapshot else p for p in value])
        torch: Any = sys.modules.get("torch")
        if self._bundled and len(value) == 1:
            (alone,) = value
        else:
            alone = value
        is_tensor = torch is not None and isinstance(alone, torch.Tensor)
        if self._direct_return and not is_tensor:
            raise TransportError(
                f"{self.source}: _direct_return promises one tensor, and got {_kind(alone)}: leave the mark "
                f"out, or return the tensor itself"
            )
        if self.device in (None, "cpu"):
            if is_tensor and type(alone) is torch.Tensor and alone.device.type == "cpu":
                if self._static_shape:
                    self._compare((_spec(alone),))
                    if alone is value:
                        self._usual = torch.Tensor, (alone.dtype, alone.shape, alone.device)
                return value
            # Frames bring tensors to the kind of device that they were on. What is to leave it needs care.
            moves_to_host = self.device == "cpu" and torch is not None and devices.in_use()
            if not moves_to_host and not self._static_shape:
                return value
        return CheckedValue(value, self)

    @property
    def fresh(self) -> bool:
        """Whether there has been no first execution yet."""
        return self._expected is None

    def forget(self) -> None:
        """Forget the first execution: it has not begun."""
        self._expected = self._usual = None

    # While a value is pickled.

    def begin(self) -> None:
        """Begin to pickle the value from its beginning."""
        self._found.clear()

    def note(self, tensor: torch.Tensor) -> None:
        """Note a tensor of the value that the pickler has reached."""
        if self._static_shape and id(tensor) not in self._found:
            self._found[id(tensor)] = tensor, _spec(tensor)

    def note_storage(self, storage: torch.UntypedStorage) -> None:
        """Note a storage that the pickler has reached in a tensor of another class."""
        if self._static_shape and id(storage) not in self._found:
            spec = "bytes", (storage.nbytes(),), str(storage.device)
            self._found[id(storage)] = storage, spec

    def end(self) -> None:
        """End the pickling of the value.

        Raises:
            TransportError: its tensors are not those of the first execution.
        """
        specs = tuple([spec for _, spec in self._found.values()])
        self._found.clear()
        if self._static_shape:
            self._compare(specs)

    def target(self, tensor: torch.Tensor | torch.UntypedStorage) -> str:
        """Return the kind of device on which the readers want ``tensor``."""
        return self.device or tensor.device.type

    def _compare(self, specs: tuple[Spec, ...]) -> None:
        if self._expected is None:
            self._expected = specs
        elif specs != self._expected:
            raise TransportError(
                f"{self.source}: _static_shape promises the tensors of the first execution, "
                f"{_differ(self._expected, specs)}: leave the mark out, or send what is always the same"
            )


def _spec(tensor: torch.Tensor) -> Spec:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), str(tensor.device)


def _differ(expected: tuple[Spec, ...], got: tuple[Spec, ...]) -> str:
    if len(expected) != len(got):
        return f"of which there were {len(expected)}, and got {len(got)}"
    for number, (first, now) in enumerate(zip(expected, got, strict=True), 1):
        if first != now:
            which = "" if len(got) == 1 else f"number {number} of {len(got)} was "
            return f"{which}{_format_spec(first)}, and got {_format_spec(now)}"
    raise AssertionError("nothing differs")


def _format_spec(spec: Spec) -> str:
    dtype, shape, device = spec
    return f"({dtype}, shape {list(shape)}, on {device})"


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
