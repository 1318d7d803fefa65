"""Operations that PyTorch dispatches in a block, forward and backward."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

FREE = ("view", "transpose", "split", "unsqueeze", "empty", "detach", "slice", "select", "alias")
"""How the names of views and allocations begin."""
READS = ("local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")
"""How the names of operations begin whose result, or its size, must be known to the host."""
INDEXING = ("index", "index_put", "index_put_impl")
"""Operations that turn a mask, where they are given one, into indices: `nonzero`."""


class OperationLog(TorchDispatchMode):
    """The names of all operations, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__.strip("_")
        if name in INDEXING:
            kinds = [str(index.dtype) for index in args[1] if index is not None]
            if "torch.bool" in kinds or "torch.uint8" in kinds:
                name = "nonzero"
        self.names.append(name)
        return func(*args, **(kwargs or {}))

    @property
    def computing(self) -> list[str]:
        """Those that are more than a view or an allocation."""
        return [name for name in self.names if not name.startswith(FREE)]

    @property
    def reads(self) -> list[str]:
        """Those for which the host would wait for a device."""
        return [name for name in self.names if name.startswith(READS)]
