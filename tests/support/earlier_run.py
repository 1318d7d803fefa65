"""A run directory that an earlier version left, kept as an archive."""

import tarfile
from pathlib import Path

from tests.support.environments import CHECKOUT
from tests.support.small_run import LIGHT, SmallRun

ARCHIVE = CHECKOUT / "tests" / "golden" / "run_v1.tar.xz"
EARLIER_STEPS = 2
"""What was trained when it was put away."""
TINY = "{layers: 1, hidden: 32, heads: 2, kv_heads: 2, head_dim: 16, ffn: 32, vocab: 300}"
"""A model so small that checkpoints of it are, too."""


class EarlierRun(SmallRun):
    """The run, which made its model itself: its recipe names nothing outside its directory."""

    def __init__(self, root: Path, steps: int) -> None:
        super().__init__(
            root / "runs",
            *LIGHT,
            f"model.tiny={TINY}",
            *("sft.total_steps=2", "sft.dataset.kwargs.size=32"),
            f"trainer.total_steps={steps}",
            "trainer.checkpoint_every_steps=2",
            "evaluation.every_steps=0",
            "inference.context_length=256",
        )


def unpack_earlier_run(root: Path, steps: int) -> EarlierRun:
    """The run as it was put away, with so many steps to come to."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return EarlierRun(root, steps)
