"""Commits: everything a restarted trainer needs, in one directory that appears whole.

`step_00000040/` holds Megatron's distributed checkpoint (`sharded.py`), `trainer.json`, and the
marker `COMMITTED`. It is built under a hidden name while training goes on: each rank copies its
part into memory that it shares with a writer process of its own, which puts it on disk. Rank 0
renames the directory once every writer is done and no newer trainer has taken over.

Random state needs no file: nothing draws random numbers but the order of data, which is a
function of `seed` and `step`.
"""

from __future__ import annotations

import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from areal_hpc.cluster.deadline import note_save
from areal_hpc.durable import sync_path
from areal_hpc.errors import ArealError, ClusterError
from areal_hpc.faults import fault_point
from areal_hpc.layout import step_name
from areal_hpc.trainer.commits import sharded
from areal_hpc.trainer.commits.refusal import commit_refused
from areal_hpc.trainer.commits.writer_peer import WriterPeer
from areal_hpc.trainer.fence import SupersededError
from areal_hpc.trainer.metrics import Line
from areal_hpc.trainer.model.policy import Policy
from areal_hpc.trainer.ranks import any_rank, from_rank_zero, largest, raise_together
from areal_hpc.trainer.untrained import Untrained
from areal_hpc.weights.version import Fork

MARKER = "COMMITTED"
STATE_FILE = "trainer.json"
VISIBLE_TIMEOUT_S = 60.0
"""How long rank 0's choice may take to become visible on another node of shared storage."""
POLL_S = 0.2

DONE, PENDING, FAILED = range(3)


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a commit stands in the run's history."""

    step: int
    """Optimizer batches behind these weights."""
    epoch: int
    """The start of the trainer that made the commit."""
    seed: int
    """Of everything random; with `step` it fixes what comes next."""
    parent: str | None = None
    """The commit this one was trained from."""
    consumed: list[int] = []
    """Steps of the manifests behind these weights, from the first."""
    forks: list[Fork] = []
    """Every epoch of this chain of commits, with the step it began from."""
    untrained: list[Untrained] = []
    """What those batches did not teach."""
    line: Line = {}
    """The metrics of this step as far as they were known: its line is written after the commit."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A complete commit on disk."""

    path: Path
    state: TrainerState


class CommitStore:
    """The commits of one training stage. One may be in the writing at a time.

    Args:
        directory: Holds one folder per commit.
        keep: Complete commits kept; older ones are deleted.
        fence: Called on rank 0 before a commit becomes visible; raises when this trainer has been
            replaced.
    """

    def __init__(
        self, directory: Path, keep: int, fence: Callable[[], None] = lambda: None
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._fence = fence
        self._writer: WriterPeer | None = None
        self._begun: Commit | None = None
        self._copied_s = 0.0

    # Reading ---------------------------------------------------------------------------------

    def complete(self) -> list[Commit]:
        """Every complete commit, oldest first; a later epoch's come after an earlier one's.

        A trainer that was replaced may still commit a higher step. It sorts before the commits
        of its successor, so the newest epoch's chain is the one that is followed.
        """
        if not self._directory.is_dir():
            return []
        commits = []
        for path in self._directory.iterdir():
            if re.fullmatch(r"step_\d+", path.name) and (path / MARKER).exists():
                with suppress(FileNotFoundError):  # hidden just now by a trainer at work
                    commits.append(Commit(path, _read_state(path)))
        return sorted(commits, key=lambda commit: (commit.state.epoch, commit.state.step))

    def latest(self) -> Commit | None:
        """The commit to resume from, as this rank sees it."""
        commits = self.complete()
        return commits[-1] if commits else None

    def agree_on_latest(self) -> Commit | None:
        """Rank 0's latest commit, on every rank. A collective.

        Nodes may see a shared directory differently for some seconds: had each rank its own
        choice, they could resume from different steps.

        Raises:
            ClusterError: A rank cannot see the commit that rank 0 chose.
        """
        message = None
        if dist.get_rank() == 0:
            found = self.latest()
            message = msgspec.json.encode((found.path.name, found.state) if found else None)
        chosen = msgspec.json.decode(from_rank_zero(message), type=tuple[str, TrainerState] | None)
        if chosen is None:
            return None
        path = self._directory / chosen[0]
        give_up_at = time.monotonic() + VISIBLE_TIMEOUT_S
        while any_rank(is_hidden := not (path / MARKER).exists()):
            if any_rank(time.monotonic() >= give_up_at):
                trouble = ClusterError(
                    "rank 0 resumes from a commit that this rank cannot see",
                    key=str(path),
                    hint="check that every node mounts the run directory",
                )
                raise_together(trouble if is_hidden else None)
            time.sleep(POLL_S)
        return Commit(path, chosen[1])

    def clean(self, epoch: int) -> None:
        """Delete what interrupted commits left behind. For rank 0, before the first commit.

        Args:
            epoch: Of this trainer. A later one's commit in the writing is not ours to touch.
        """
        if not self._directory.is_dir():
            return
        for path in self._directory.glob(".step_*"):
            written_by = re.search(r"\.epoch_(\d+)$", path.name)
            if written_by is None or int(written_by[1]) <= epoch:
                # Renamed first: an older trainer that is stuck must not make it visible half gone.
                doomed = path.with_name(f".{step_name(0)}.{uuid.uuid4().hex}")
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)  # its writer may be about to be killed

    # Writing ---------------------------------------------------------------------------------

    def begin(self, policy: Policy, optimizer: Any, state: TrainerState) -> Path:
        """Copy the state and begin to write it. A collective; waits for an earlier commit first.

        Returns:
            The directory that the commit will have.

        Raises:
            ClusterError: The storage refused this commit or the one before.
        """
        self.finish()
        began = time.monotonic()
        target = self._directory / step_name(state.step)
        partial = self._partial(target, state.epoch)
        is_first = dist.get_rank() == 0
        with _storage(partial):
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            dist.barrier()
            self._writer = self._writer or WriterPeer()
            fault_point("checkpoint.before_copy")
            data = sharded.save(policy, optimizer, partial, self._writer.copy)
            fault_point("checkpoint.after_copy")
            small = []
            if is_first:  # the small files are all rank 0's
                (partial / STATE_FILE).write_bytes(msgspec.json.encode(state))
                small = [p.name for p in partial.iterdir() if p.suffix != sharded.DATA_SUFFIX]
            self._writer.write(partial / data, small)
            fault_point("checkpoint.while_writing")
        self._begun = Commit(target, state)
        self._copied_s = time.monotonic() - began
        return target

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Make the commit in the writing visible if all of it is on disk. A collective.

        Returns:
            True on every rank when the commit became visible and durable in this call.

        Raises:
            ClusterError: It could not be written.
            SupersededError: A newer trainer owns the run; the commit stays invisible.
            OtherRankFailed: One of these was raised on another rank.
        """
        if self._begun is None:
            return False
        assert self._writer is not None
        progress = PENDING
        trouble: ArealError | None = None
        try:
            progress = DONE if self._writer.poll(timeout_s) else PENDING
        except ClusterError as error:
            progress, trouble = FAILED, error
        slowest = largest(progress)
        if slowest == PENDING:
            return False
        if slowest == DONE and dist.get_rank() == 0:
            try:
                self._make_visible(self._begun)
                note_save(self._copied_s + self._writer.took_s)
            except ArealError as error:
                trouble = error
        raise_together(trouble)
        self._begun = None
        return True

    def finish(self) -> bool:
        """Wait for the commit in the writing; false when there was none. A collective."""
        if self._begun is None:
            return False
        while not self.poll(POLL_S):
            pass
        return True

    def commit(self, policy: Policy, optimizer: Any, state: TrainerState) -> Path:
        """Write a commit. A collective; returns when it is visible and durable."""
        target = self.begin(policy, optimizer, state)
        self.finish()
        return target

    def close(self) -> None:
        """End the writer, once it has deleted what it was told to."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _partial(self, target: Path, epoch: int) -> Path:
        return self._directory / f".{target.name}.epoch_{epoch}"

    def _make_visible(self, commit: Commit) -> None:
        """Rename the finished directory, and hide the ones it makes superfluous.

        Raises:
            ClusterError: The storage refused.
            SupersededError: A newer trainer owns the run.
        """
        partial = self._partial(commit.path, commit.state.epoch)
        fault_point("checkpoint.before_marker")
        with _storage(partial):
            (partial / MARKER).touch()
            sync_path(partial / MARKER)
            sync_path(partial)
            self._fence()
            fault_point("checkpoint.before_rename")
            self._put_in_place(partial, commit)
            fault_point("checkpoint.after_rename")
            sync_path(self._directory)
            for old in self.complete()[: -self._keep]:
                # Hidden first: a half-deleted commit must not look complete.
                doomed = old.path.with_name(f".{old.path.name}.old")
                old.path.rename(doomed)
                if self._writer is not None:
                    self._writer.remove(doomed)
        fault_point("checkpoint.after_commit")

    def _put_in_place(self, partial: Path, commit: Commit) -> None:
        target = commit.path
        if target.exists():  # of an abandoned epoch, or of the one that replaced this
            epoch = _read_state(target).epoch if (target / MARKER).exists() else -1
            if epoch > commit.state.epoch:
                raise SupersededError(
                    f"epoch {epoch} has committed {target.name} before epoch {commit.state.epoch}"
                )
            replaced = target.with_name(f".{target.name}.replaced")
            target.rename(replaced)
            partial.rename(target)
            shutil.rmtree(replaced)
        else:
            partial.rename(target)


def load_commit(policy: Policy, optimizer: Any, commit: Commit) -> None:
    """Restore weights and optimizer. A collective; the layout may differ from the saved one."""
    sharded.load(policy, optimizer, commit.path)


def _read_state(path: Path) -> TrainerState:
    return msgspec.json.decode((path / STATE_FILE).read_bytes(), type=TrainerState)


@contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise commit_refused(path, error) from error
