"""Triton's language as far as a hash needs it, on arrays: kernels run from their own sources.

A kernel's programs run one after the other. Types are Triton's: 32 bits overflow as they do there.
"""

import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


class Lanes(np.ndarray[Any, Any]):
    """A value of the language: numbers of one type."""

    def to(self, dtype: Any) -> "Lanes":
        return self.astype(dtype).view(Lanes)


def _lanes(values: object, dtype: Any = None) -> Lanes:
    return np.asarray(values, dtype=dtype).view(Lanes)


class Pointer:
    """Into a tensor's memory, with offsets."""

    def __init__(self, memory: Any, offsets: Any = 0) -> None:
        self.memory = memory
        self.offsets = offsets

    def __add__(self, offsets: Any) -> "Pointer":
        return Pointer(self.memory, self.offsets + offsets)


class Language(types.ModuleType):
    """`triton.language`."""

    constexpr = int
    uint32, uint64, int64 = np.uint32, np.uint64, np.int64
    static_range = staticmethod(range)
    program = 0

    def program_id(self, axis: int) -> Lanes:
        return _lanes(self.program, np.int32)

    def full(self, shape: tuple[int, ...], value: int, dtype: Any) -> Lanes:
        return _lanes(np.full(shape, np.asarray(value).astype(dtype)))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Lanes:
        return _lanes(np.zeros(shape, dtype))

    def zeros_like(self, values: Lanes) -> Lanes:
        return _lanes(np.zeros_like(values))

    def arange(self, start: int, end: int) -> Lanes:
        return _lanes(np.arange(start, end, dtype=np.int32))

    def where(self, condition: Lanes, yes: Lanes, no: Lanes) -> Lanes:
        return _lanes(np.where(condition, yes, no))

    def sum(self, values: Lanes, axis: int) -> Lanes:
        return _lanes(values.sum(axis=axis, dtype=values.dtype))

    def load(self, pointer: Pointer, mask: Lanes, other: int, **options: Any) -> Lanes:
        flat = pointer.memory.reshape(-1)
        inside = np.where(mask, pointer.offsets, 0)
        return _lanes(np.where(mask, flat[inside], np.asarray(other, flat.dtype)))

    def store(self, pointer: Pointer, value: Lanes) -> None:
        pointer.memory.reshape(-1)[pointer.offsets] = value


LANGUAGE = Language("triton.language")


class Kernel:
    """A function of the language, called from another one or launched on a grid."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._function(*args, **named)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, num_stages: int = 1, **named: Any) -> None:
            held = [
                Pointer(one.numpy()) if isinstance(one, torch.Tensor) else _lanes(one)
                for one in args
            ]
            with np.errstate(over="ignore"):
                for LANGUAGE.program in range(grid[0]):
                    self._function(*held, **named)

        return launch


def jit(function: Any = None, **options: Any) -> Any:
    """`triton.jit`, with and without options."""
    return Kernel(function) if function is not None else Kernel


def load_with_stand_in(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module at a path, with this in the place of Triton."""
    triton: Any = types.ModuleType("triton")
    triton.jit, triton.language, triton.cdiv = jit, LANGUAGE, lambda a, b: -(a // -b)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", LANGUAGE)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
