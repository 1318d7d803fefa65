"""What a sandbox is asked for: its root, its network, its limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Network = Literal["none", "session-only", "open"]
"""`none`: loopback alone, with nothing on it; `session-only`: one address there, which a forwarder
outside serves; `open`: the network of the machine."""

SESSION_PORT = 8999
"""Port of 127.0.0.1 at which a sandbox with a `session-only` network finds its session."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What a sandbox may use. One that uses more memory ends; of the rest it gets no more."""

    memory_bytes: int = 2 << 30
    """Resident memory of all its processes together, and private memory of each of them."""
    processes: int = 256
    disk_bytes: int = 1 << 30
    """All that it writes, in memory of the node."""
    files: int = 100_000
    output_bytes: int = 1 << 20
    """What one command prints, each of its two streams; a command that prints more is killed."""
    inotify_instances: int = 64
    """Of which its user has few elsewhere, too."""
    watch_period_s: float = 0.5
    """Time between two looks at what no limit of the kernel's counts."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """A sandbox to start."""

    root: Path | None = None
    """Folder, tar or image of a root file system, which stays as it is; None: the machine's own."""
    network: Network = "none"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    writable_folders: tuple[str, ...] = ()
    """Places of further folders that commands may write in, empty at first."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of commands, besides what every sandbox has."""
    readonly_folders: tuple[str, ...] = ()
    """Folders of this machine that it shows at their own places, read-only."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """By name, files that it shows in `Sandbox.files_folder`, read-only."""
