"""Makes `run_v1.tar.xz`: a finished run of two steps, which later versions must resume.

Made once, by the code of its time. Run it again only to start another file, `run_v2.tar.xz`.
"""

import tarfile
import tempfile
from pathlib import Path

from tests.support.earlier_run import ARCHIVE, EARLIER_STEPS, EarlierRun

LEFT_OUT = (
    *(
        "tensorboard",
        "export",
        "logs",
        "learning_curve.png",
        "launcher.log",
        "submitit",
        "rendezvous",
    ),
)
"""Names of what no resumed run reads, or what would be large."""


def is_kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """What goes into the archive, as of nobody in particular."""
    if any(part in LEFT_OUT for part in Path(member.name).parts):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        EarlierRun(root, EARLIER_STEPS).finish()
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            archive.add(root / "runs", "runs", filter=is_kept)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
