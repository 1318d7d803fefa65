"""Makes `checkpoint_v1.tar.xz`: a checkpoint of several ranks, which later versions must resume.

Made once, by the code of its time. Run it again only to start another file, `checkpoint_v2.tar.xz`.
"""

import tarfile
import tempfile
from pathlib import Path

from tests.golden.make_run_v1 import is_kept as is_anyones
from tests.support.earlier_checkpoint import ARCHIVE, EARLIER_FAMILY, EARLIER_LAYOUT, FOLDER
from tests.support.layout_launch import launch
from tests.support.rank_server import rank_server


def is_kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """The checkpoint, and what the third step made of it."""
    if any(part in ("saved", "ranks.log") for part in Path(member.name).parts):
        return None
    return is_anyones(member)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with rank_server() as ranks:
            launch(ranks, root / FOLDER, EARLIER_LAYOUT, [EARLIER_FAMILY])
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            archive.add(root / FOLDER, FOLDER, filter=is_kept)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
