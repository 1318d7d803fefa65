"""Paths in the state directory of a devcluster."""

from pathlib import Path


def get_default_root(uid: int, runtime_dir: str | None) -> Path:
    if runtime_dir:
        return Path(runtime_dir) / "areal-hpc-devcluster"
    return Path(f"/tmp/areal-hpc-devcluster-{uid}")


class DevclusterPaths:
    """The state directory and the names inside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made_of = root / "cluster.json"
        """The settings and facts that this cluster was planned from. Without it there is none."""
        self.config_dir = root / "etc"
        """Slurm looks for its other files beside slurm.conf."""
        self.slurm_conf = self.config_file("slurm.conf")
        self.log_dir = root / "log"
        """One log per daemon, and `<name>.out` for what it writes to its terminal."""
        self.pid_dir = root / "run"
        """Files that the daemons insist on writing. Pids of nodes are those of their namespaces."""
        self.spool_dir = root / "spool"
        """One folder per node: slurmd's memory across a loss of power."""
        self.controller_state = root / "state"
        """Jobs and nodes as slurmctld knows them."""
        self.gpu_dir = root / "gpus"
        """The files that stand for GPUs."""
        self.munge_dir = root / "munge"
        """Key, seed and socket of munge."""
        self.munge_key = self.munge_dir / "key"
        self.munge_socket = self.munge_dir / "socket"
        """How clients and daemons reach munged."""
        self.database_dir = root / "database"
        self.database_socket = root / "database.socket"
        """How slurmdbd reaches MariaDB; nothing else does."""

    def config_file(self, template_name: str) -> Path:
        return self.config_dir / template_name

    def log_file(self, daemon_name: str) -> Path:
        return self.log_dir / f"{daemon_name}.log"

    def output_file(self, daemon_name: str) -> Path:
        return self.log_dir / f"{daemon_name}.out"

    def process_record_file(self, daemon_or_node_name: str) -> Path:
        return self.pid_dir / f"{daemon_or_node_name}.json"
