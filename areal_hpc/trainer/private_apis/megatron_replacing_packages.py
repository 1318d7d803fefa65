"""Packages that Megatron-core uses instead of its own code once it can import them. Imports none.

With Transformer Engine or Apex installed, Megatron takes its optimizer and parts of its checkpoints
from them. The fixes of AdamW's state (`megatron_private.py`, `optimizer.py`) are for torch's AdamW,
and this trainer has never run with another: such an environment is refused.
"""

import importlib.util
import sys

from areal_hpc.errors import ClusterError, Problem

MEGATRON_REPLACEMENTS = ("transformer_engine", "apex")
"""Modules whose presence Megatron tests."""
_DISTRIBUTIONS = {
    "transformer_engine": "transformer-engine transformer-engine-torch",
    "apex": "apex",
}


def build_installed_replacement_problem(module: str, python: str) -> Problem:
    """Describe what is wrong with an interpreter that has the module, and how to repair it."""
    return Problem(
        f"the Python of role train, {python}, has {module}, from which Megatron-core would take "
        "its optimizer; expected an environment without it",
        "cluster.train.python",
        f"uninstall it there ({python} -m pip uninstall {_DISTRIBUTIONS[module]}), or set "
        "cluster.train.python to an environment that make setup has made",
    )


def refuse_megatron_replacements() -> None:
    """Raise ClusterError in an environment that has such a package."""
    present = [name for name in MEGATRON_REPLACEMENTS if importlib.util.find_spec(name) is not None]
    if present:
        raise ClusterError.from_problems(
            [build_installed_replacement_problem(module, sys.executable) for module in present]
        )
