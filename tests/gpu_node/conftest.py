"""This tier needs a node of eight GPUs. Without one it fails; `make test` leaves it out."""

import os

import pytest

from areal_hpc.jobs.node import find_visible_gpus

GPUS = 8


@pytest.fixture(scope="session", autouse=True)
def gpus() -> tuple[str, ...]:
    visible = find_visible_gpus(os.environ)
    if len(visible.ids) < GPUS:
        pytest.fail(
            f"tests/gpu_node needs {GPUS} GPUs; {len(visible.ids)} are visible ({visible.source}). "
            "Run `make gpu8` on a node that has them, `make gpu` on any other."
        )
    return visible.ids[:GPUS]
