"""Count the bytes that all living tensors would have. The tensors have a shape, but no memory."""

import weakref
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """While entered, counts the storages of the tensors that operations return, until they are freed.

    now: the bytes that are in use. peak: the most since the start, or since `peak` was set.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # of each living storage, by its identity

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        live = self

        # FSDP2 empties and fills the storages of gathered weights by this call, which is not an operation.
        def resize_(storage: Any, size: int) -> Any:
            found = live._resize(storage, size)
            live._count(storage)
            return found

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            # A DTensor runs the operation on its shard, and that call is counted here.
            return NotImplemented
        found = function(*args, **(kwargs or {}))
        for each in tree_iter(found):
            if isinstance(each, Tensor):
                self._count(each.untyped_storage())
        return found

    def _count(self, storage: Any) -> None:
        key = storage._cdata  # noqa: SLF001 - several Python objects may be one storage; this identifies it
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        size = storage.nbytes()
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
