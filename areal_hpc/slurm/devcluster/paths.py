"""Paths in the state directory of a devcluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


def get_default_root(uid: int, runtime_dir: str | None) -> Path:
    """The state directory when none is named; `runtime_dir` is `$XDG_RUNTIME_DIR`."""
    if runtime_dir:
        return Path(runtime_dir) / "areal-hpc-devcluster"
    return Path(f"/tmp/areal-hpc-devcluster-{uid}")


@dataclass(frozen=True, slots=True)
class DevclusterPaths:
    """The state directory and the names inside it."""

    root: Path

    @property
    def made_of(self) -> Path:
        """The settings and facts that this cluster was planned from. Without it there is none."""
        return self.root / "cluster.json"

    @property
    def config_dir(self) -> Path:
        """Slurm looks for its other files beside slurm.conf."""
        return self.root / "etc"

    def config(self, name: str) -> Path:
        """A rendered template."""
        return self.config_dir / name

    @property
    def slurm_conf(self) -> Path:
        """File that `SLURM_CONF` names."""
        return self.config("slurm.conf")

    @property
    def log_dir(self) -> Path:
        """One log per daemon, and `<name>.out` for what it writes to its terminal."""
        return self.root / "log"

    def log(self, name: str) -> Path:
        """Slurm's own log of a daemon."""
        return self.log_dir / f"{name}.log"

    def output(self, name: str) -> Path:
        """Output of a daemon."""
        return self.log_dir / f"{name}.out"

    @property
    def pid_dir(self) -> Path:
        """Files that the daemons insist on writing. Pids of nodes are those of their namespaces."""
        return self.root / "run"

    def process(self, name: str) -> Path:
        """Which process of the host a daemon or node is."""
        return self.pid_dir / f"{name}.json"

    @property
    def spool_dir(self) -> Path:
        """One folder per node: slurmd's memory across a loss of power."""
        return self.root / "spool"

    @property
    def controller_state(self) -> Path:
        """Jobs and nodes as slurmctld knows them."""
        return self.root / "state"

    @property
    def gpu_dir(self) -> Path:
        """The files that stand for GPUs."""
        return self.root / "gpus"

    @property
    def munge_dir(self) -> Path:
        """Key, seed and socket of munge."""
        return self.root / "munge"

    @property
    def munge_key(self) -> Path:
        """Made for this cluster, mode 0600."""
        return self.munge_dir / "key"

    @property
    def munge_socket(self) -> Path:
        """How clients and daemons reach munged."""
        return self.munge_dir / "socket"

    @property
    def database_dir(self) -> Path:
        """MariaDB's files."""
        return self.root / "database"

    @property
    def database_socket(self) -> Path:
        """How slurmdbd reaches MariaDB; nothing else does."""
        return self.root / "database.socket"
