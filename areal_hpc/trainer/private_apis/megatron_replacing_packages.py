"""Packages that Megatron-core takes over from as soon as they can be imported. Imports none.

With Transformer Engine or Apex beside it, Megatron takes its optimizer and parts of its checkpoints
from there. The fixes of AdamW's state (`megatron_private.py`, `optimizer.py`) are for torch's
AdamW, and nothing here has ever run with another: such an environment is refused.
"""

import importlib.util
import sys

from areal_hpc.errors import ClusterError, Problem

MEGATRON_REPLACEMENTS = ("transformer_engine", "apex")
"""Modules by which Megatron knows them."""
_DISTRIBUTIONS = {
    "transformer_engine": "transformer-engine transformer-engine-torch",
    "apex": "apex",
}


def build_installed_replacement_problem(module: str, python: str) -> Problem:
    """What is wrong with an interpreter that finds the module, and the way out."""
    return Problem(
        f"the Python of role train, {python}, has {module}, from which Megatron-core would take "
        "its optimizer; expected an environment without it",
        "cluster.train.python",
        f"uninstall it there ({python} -m pip uninstall {_DISTRIBUTIONS[module]}), or set "
        "cluster.train.python to an environment that make setup has made",
    )


def refuse_megatron_replacements() -> None:
    """Refuse to train in an environment that has such a package."""
    found = [name for name in MEGATRON_REPLACEMENTS if importlib.util.find_spec(name) is not None]
    if found:
        raise ClusterError.from_problems(
            [build_installed_replacement_problem(one, sys.executable) for one in found]
        )
