"""SGLang's server on a machine without a GPU: kernels are stubs, and all else is SGLang's.

PyPI's sglang imports three packages that exist, or can be imported, only with CUDA. Stand-ins
replace them before the first import; no file of SGLang is changed:

| package     | reason why it is missing                  | stand-in                              |
|-------------|-------------------------------------------|---------------------------------------|
| sgl_kernel  | CUDA wheels only                          | functions that raise when called      |
| torchvision | its wheel fails beside CPU torch          | names that can be imported and nested |
| triton      | 690 MB, useless without a GPU             | decorators that return the function   |

Without AMX tiles SGLang itself computes with plain torch on a CPU, so the model code is the same
as in a complete installation (sglang 0.5.23, `cpu_has_amx_support`).

SGLang spawns its scheduler and its detokenizer, which then import everything again: a third of
its start. This module forks them instead.

It runs in SGLang's environment and imports nothing that is missing there.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from areal_hpc.inference.cpu import delta_rule
from areal_hpc.inference.server import sglang_main
from areal_hpc.jobs.processes.process_ties import die_with_parent
from areal_hpc.wire.replicas import ADAPTER_VARIABLE


class _StubObject:
    def __init__(self, stub_name: str) -> None:
        self.__name__ = self.__qualname__ = stub_name

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]  # used as `@triton.jit`
        return lambda function: function  # used as `@triton.jit(...)`

    def __getattr__(self, name: str) -> _StubObject:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubObject(f"{self.__name__}.{name}")

    def __getitem__(self, grid: object) -> Any:
        raise NotImplementedError(f"{self.__name__} is a GPU kernel and was launched on a CPU")

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: object) -> _StubObject:
        return self  # in annotations

    __ror__ = __or__


def _make_missing_kernel(module_or_kernel_name: str) -> Callable[..., Any]:
    def missing(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{module_or_kernel_name} exists on GPUs only")

    return missing


def _make_triton_stub(module_or_kernel_name: str) -> Any:
    # torch calls isinstance(x, triton.runtime.JITFunction): such names must be classes.
    last = module_or_kernel_name.rpartition(".")[2]
    if not last[:1].isupper():
        return _StubObject(module_or_kernel_name)
    return type(last, (), {"__init__": lambda self, *args, **options: None})


class _StubModule(types.ModuleType):
    def __init__(self, stub_name: str, make: Callable[[str], Any]) -> None:
        super().__init__(stub_name)
        self.__path__: list[str] = []
        self.__version__ = "0.0.0"
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        value = sys.modules.get(full_name) or self._make(full_name)
        setattr(self, name, value)
        return value


class _StubModuleFinder:
    def __init__(self, roots: dict[str, Callable[[str], Any]]) -> None:
        self._roots = roots

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._roots:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # by protocol

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name, self._roots[spec.name.partition(".")[0]])

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: a stand-in has no code."""


def install_stub_modules() -> None:
    """Make SGLang importable on a machine without a GPU."""
    kernels = _StubModule("sgl_kernel", _make_missing_kernel)
    # Without a finder, because SGLang's guarded imports of `sgl_kernel.<x>` must fail.
    kernels.__spec__ = ModuleSpec("sgl_kernel", None, is_package=True)
    kernels.__version__ = "0.4.10"  # SGLang refuses to start with another version
    sys.modules["sgl_kernel"] = kernels
    makers: dict[str, Callable[[str], Any]] = {
        "torchvision": _StubObject,
        "triton": _make_triton_stub,
    }
    absent = {name: make for name, make in makers.items() if not PathFinder.find_spec(name)}
    sys.meta_path.insert(0, _StubModuleFinder(absent))
    if "triton" in absent:
        triton: Any = importlib.import_module("triton")
        triton.cdiv = lambda a, b: -(a // -b)  # called while modules are imported
        triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1


def _patch_sglang_to_fork() -> None:
    """Patch SGLang to fork its children after all imports and before it starts threads.

    With a GPU that would fail: CUDA does not survive a fork.
    """
    from sglang.srt.entrypoints import engine

    set_up = engine._set_envs_and_config

    def set_up_forking(server_args: Any) -> None:
        set_up(server_args)  # it selects spawning
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = set_up_forking
    forking: list[int] = []
    os.register_at_fork(
        before=lambda: forking.append(os.getpid()),
        after_in_parent=forking.clear,
        after_in_child=lambda: _die_with_parent(forking.pop()),
    )


def _keep_routes_in_plain_memory() -> None:
    """Allocate the buffer of routed experts (`--enable-return-routed-experts`) in unpinned memory.

    SGLang pins it with CUDA.
    """
    import torch
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = lambda shape, *, dtype, **_: torch.empty(shape, dtype=dtype)


def _ignore_pinned_memory() -> None:
    """Patch torch to ignore requests of SGLang's adapters for pinned memory, which needs CUDA."""
    import torch

    def make_unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, make_unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def _die_with_parent(parent: int) -> None:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    # Without it the states of convolutions are rounded to bfloat16 for every model.
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    delta_rule.install_kernels()
    delta_rule.replace_triton_norms()
    _patch_sglang_to_fork()
    _keep_routes_in_plain_memory()
    if os.environ.get(ADAPTER_VARIABLE):
        _ignore_pinned_memory()
    sglang_main.install_patches()
    sglang_main.main()


install_stub_modules()

if __name__ == "__main__":
    main()
