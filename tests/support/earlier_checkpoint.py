"""A checkpoint of format 1, which two ranks left with `tp: 2, ep: 2`, kept as an archive."""

import tarfile
from pathlib import Path

from tests.support.environments import CHECKOUT

ARCHIVE = CHECKOUT / "tests" / "golden" / "checkpoint_v1.tar.xz"
EARLIER_LAYOUT = {"tp": 2, "ep": 2, "layers": 1}
EARLIER_FAMILY = "qwen3_moe"
FOLDER = "earlier"


def unpack_earlier_checkpoint(root: Path) -> Path:
    """The folder of the launch that left it, as `layout_worker` resumes from it."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return root / FOLDER
