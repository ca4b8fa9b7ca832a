"""Operations of torch on the device: each becomes a kernel on the current stream.

Its outputs are there at once, with shapes from a run on the device ``meta``; their values come when a thread
of the stream has run the operation on tensors of the CPU that lie in the same memory. An operation whose
shapes depend on values waits for the stream, and so does whatever gives a value to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerator.machine import KIND, Machine
from accelerator.memory import twin
from conveyor.later import LaterModule

if TYPE_CHECKING:
    import torch
    from torch.utils import _pytree as pytree
else:
    torch, pytree = LaterModule("torch"), LaterModule("torch.utils._pytree")


class Operations:
    """Carries out the operations of torch on simulated devices."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        # Kernels of torch that only look at a tensor's sizes do so on any device.
        self._as_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        self._special: dict[str, Callable[..., Any]] = {
            "aten::empty.memory_format": self._empty,
            "aten::empty_strided": self._empty_strided,
            "aten::_copy_from": self.copy,
            "aten::_copy_from_and_resize": self._copy_and_resize,
            "aten::_local_scalar_dense": self._value,
            "aten::resize_": self._resize,
        }
        self._kinds: dict[Any, Callable[..., Any]] = {}

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Carry out ``op``: the fallback of torch's dispatcher."""
        kind = self._kinds.get(op)
        if kind is None:
            kind = self._kinds[op] = self._kind_of(op)
        return kind(*args, **kwargs)

    def _kind_of(self, op: Any) -> Callable[..., Any]:
        special = self._special.get(op.name())
        if special is not None:
            return special
        aliases = [r.alias_info for r in op._schema.returns if r.alias_info is not None]
        if op.name().startswith("aten::set_") or any(not a.is_write for a in aliases):
            return lambda *args, **kwargs: op.redispatch(self._as_cpu, *args, **kwargs)
        written = [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
        places = {argument.name: place for place, argument in enumerate(op._schema.arguments)}

        def run(*args: Any, **kwargs: Any) -> Any:
            given = [
                kwargs[name] if name in kwargs else args[places[name]]
                for name in written
                if name in kwargs or places[name] < len(args)
            ]
            return self._kernel(op, args, kwargs, given)

        return run

    # Memory.

    def _empty(
        self,
        size: Any,
        *,
        dtype: Any = None,
        device: Any = None,
        memory_format: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        made = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
        return self._like(made, self._machine.index(device.index))

    def _empty_strided(
        self, size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **others: Any
    ) -> torch.Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return self._like(made, self._machine.index(device.index))

    def _like(self, shape: torch.Tensor, index: int) -> torch.Tensor:
        """Make a tensor with the dtype, shape and strides of one on ``meta``."""
        memory = self._machine.allocate(shape.untyped_storage().nbytes(), index)
        made = memory.view(shape.dtype)
        return self._set(made, memory.untyped_storage(), 0, shape.shape, shape.stride())

    def _set(self, tensor: torch.Tensor, *where: Any) -> torch.Tensor:
        change = torch.ops.aten.set_.source_Storage_storage_offset
        return change.redispatch(self._as_cpu, tensor, *where)

    def _resize(self, tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> Any:
        shape = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=memory_format)
        needed = shape.untyped_storage().nbytes() + tensor.storage_offset() * tensor.element_size()
        storage = tensor.untyped_storage()
        if needed > storage.nbytes():
            index = tensor.device.index
            larger = self._machine.allocate(needed, index)
            if storage.nbytes():
                old, new = self._bytes(storage), twin(larger)[: storage.nbytes()]
                stream = self._machine.current_stream(index)
                stream.enqueue("resize", _copying(old, new), shown=False)
            storage = larger.untyped_storage()
        self._set(tensor, storage, tensor.storage_offset(), shape.shape, shape.stride())
        return tensor

    def _bytes(self, storage: Any) -> torch.Tensor:
        here = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), torch.device("cpu"), storage.nbytes()
        )
        return torch.empty(0, dtype=torch.uint8).set_(here)

    # Kernels.

    def _kernel(self, op: Any, args: Any, kwargs: Any, written: list[Any]) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        index = self._index_of(op, tensors, kwargs.get("device"))
        stream = self._machine.current_stream(index)
        name = op.name().partition("::")[2].partition(".")[0]
        seconds = self._machine.kernel_seconds(name, tensors)
        writes = [leaf for leaf in pytree.tree_leaves(written) if _is_tensor(leaf)]
        metas: dict[int, Any] = {}
        try:
            meta_args, meta_kwargs = pytree.tree_map(lambda x: _on_meta(x, metas), (args, kwargs))
            shapes = op(*meta_args, **meta_kwargs)
        except Exception:  # the shapes depend on values, or the operation is none for meta
            return self._at_once(op, args, kwargs, writes, stream, seconds)
        for tensor in writes:
            meta = metas[id(tensor)]
            if meta.shape != tensor.shape:
                self._resize(tensor, meta.shape)
        given = {id(meta): tensor for tensor in tensors if (meta := metas[id(tensor)]) is not None}
        made: list[torch.Tensor] = []

        def output(shape: Any) -> Any:
            if not _is_tensor(shape):
                return shape
            if id(shape) in given:
                return given[id(shape)]
            made.append(self._like(shape, index))
            return made[-1]

        result = pytree.tree_map(output, shapes)
        here_args, here_kwargs = pytree.tree_map(_here, (args, kwargs))
        targets = [twin(tensor) for tensor in made]
        kept = [place for place, s in enumerate(_tensors(shapes)) if id(s) not in given]

        def work() -> None:
            with torch.inference_mode():
                values = _tensors(op(*here_args, **here_kwargs))
                for target, place in zip(targets, kept, strict=True):
                    target.copy_(values[place])

        stream.enqueue(name, work, seconds)
        return result

    def _at_once(
        self, op: Any, args: Any, kwargs: Any, writes: list[Any], stream: Any, seconds: float
    ) -> Any:
        """Carry out an operation whose outputs have a shape that only its values tell."""
        stream.synchronize()
        here: dict[int, Any] = {}

        def at_host(leaf: Any) -> Any:
            made = _here(leaf)
            if _is_tensor(leaf):
                here[id(leaf)] = made
            return made

        here_args, here_kwargs = pytree.tree_map(at_host, (args, kwargs))
        outcome: list[Any] = []
        name = op.name().partition("::")[2].partition(".")[0]

        def work() -> None:
            with torch.inference_mode():
                outcome.append(op(*here_args, **here_kwargs))

        number = stream.enqueue(name, work, seconds)
        stream.wait_for(number)
        given = {id(here[id(tensor)]): tensor for tensor in writes}

        def output(value: Any) -> Any:
            if not _is_tensor(value):
                return value
            if id(value) in given:
                return given[id(value)]
            made = self._like(value.to("meta"), stream.index)
            twin(made).copy_(value)
            return made

        return pytree.tree_map(output, outcome[0])

    def _index_of(self, op: Any, tensors: list[torch.Tensor], device: Any) -> int:
        found = {t.device.index for t in tensors if t.device.type == KIND}
        if device is not None and device.type == KIND:
            found.add(self._machine.index(device.index))
        others = {
            str(t.device)
            for t in tensors
            if t.device.type != KIND and t.ndim and not op.name().startswith("aten::index")
        }
        if len(found) != 1 or others:
            where = sorted([*others, *(f"{KIND}:{index}" for index in found)])
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {', '.join(where)} ({op.name()})"
            )
        return int(found.pop())

    # Copies, and values for the host.

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        """Copy from or to a device, or from one to another."""
        there, here = target.device, source.device
        if there.type == here.type == KIND:
            if there.index == here.index:
                self._copy_here(source, target)
            else:
                self._copy_across(source, target)
            return target
        on_host, direction = (source, f"to {KIND}") if there.type == KIND else (target, "to host")
        index = there.index if there.type == KIND else here.index
        stream = self._machine.current_stream(index)
        waits = not non_blocking or not self._is_pinned(on_host)
        storage = on_host.untyped_storage()
        pinned = None
        if not waits:
            pinned = self._machine.begin_copy(storage.data_ptr(), storage.nbytes())
        if pinned is None:
            from_, to = _here(source, whole=True), _here(target, whole=True)
        else:  # nobody keeps it for the device
            from_, to = twin(source), twin(target)
        nbytes, copying = source.numel() * source.element_size(), _copying(from_, to)

        def work() -> None:
            try:
                if pinned is not None:
                    self._machine.check_pages(pinned)
                self._machine.engine(index, direction, nbytes, copying)
            finally:
                if pinned is not None:
                    self._machine.end_copy(pinned)

        number = stream.enqueue(f"copy {direction}", work)
        if waits:
            stream.wait_for(number)
        return target

    def _copy_here(self, source: torch.Tensor, target: torch.Tensor) -> None:
        from_, to = twin(source), twin(target)
        stream = self._machine.current_stream(target.device.index)
        seconds = self._machine.kernel_seconds("copy_", [source, target])
        stream.enqueue("copy_", _copying(from_, to), seconds)

    def _copy_across(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """On the source's stream, behind and before what is on the target's: as CUDA does."""
        stream = self._machine.current_stream(source.device.index)
        other = self._machine.current_stream(target.device.index)
        from_, to = twin(source), twin(target)
        nbytes, index = source.numel() * source.element_size(), source.device.index
        copying = _copying(from_, to)
        stream.wait_stream(other)
        stream.enqueue(
            "copy across",
            lambda: self._machine.engine(index, "across", nbytes, copying),
        )
        other.wait_stream(stream)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return self._machine.is_pinned(storage.data_ptr(), storage.nbytes())

    def _copy_and_resize(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target.resize_(source.shape)
        return self.copy(source, target)

    def _value(self, tensor: torch.Tensor) -> Any:
        self._machine.current_stream(tensor.device.index).synchronize()
        return twin(tensor).item()


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if _is_tensor(leaf)]


def _on_meta(leaf: Any, made: dict[int, Any]) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not _is_tensor(leaf):
        return leaf
    if id(leaf) not in made:
        shape = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        made[id(leaf)] = shape
    return made[id(leaf)]


def _here(leaf: Any, whole: bool = False) -> Any:
    """Find what a kernel works on: of the host's tensors what they are now, unless ``whole``."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if not _is_tensor(leaf):
        return leaf
    if leaf.device.type == KIND:
        return twin(leaf)
    return leaf.detach() if whole else leaf.detach().clone()


def _copying(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        with torch.inference_mode():  # either may have been made in it
            target.copy_(source)

    return copy
