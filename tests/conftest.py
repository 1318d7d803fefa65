"""What every tier needs: children of tests never outlive them, and the slow tests come first."""

import os
import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SLOWEST_FIRST = ("slurm", "integration", "contract", "unit")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# A shell starts what runs in the background deaf to Ctrl-C, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take whole files in this order, so none is left alone with a long one at the end."""
    items.sort(key=lambda item: (*SLOWEST_FIRST, tier_of(item)).index(tier_of(item)))


def tier_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]
