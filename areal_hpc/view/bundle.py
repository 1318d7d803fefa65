"""Bundle of a run for those who check a paper: one file with its records and a digest of each.

`areal-hpc report RUN --bundle` writes it, and `areal-hpc audit --bundle FILE` checks it on any
machine. It is a tar.gz:

| name          | holds                                                                        |
|---------------|------------------------------------------------------------------------------|
| MANIFEST.json | `Manifest`                                                                   |
| MODEL_CARD.md | model, tasks, rewards, audit                                                 |
| report.html   | the pages of the run with its curves (`areal-hpc report`)                    |
| uv.lock       | lock of the environments, if the run was made from a checkout                |
| run/          | part of the run directory: recipe, provenance, metrics, evaluations, and all |
|               | that an audit reads but the shards                                           |
"""

import gzip
import hashlib
import importlib.metadata
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from areal_hpc.checkout import find_checkout
from areal_hpc.errors import Problem, RecipeError
from areal_hpc.metrics.step_line import format_metric
from areal_hpc.recipe.keys import hide_private_values_equal_in
from areal_hpc.rundir.checkpoints import (
    COMPLETE_MARKER_FILE,
    TRAINER_STATE_FILE,
    find_latest_checkpoint,
)
from areal_hpc.rundir.files import open_temporary_beside
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import get_recipe_value, read_run_recipe
from areal_hpc.sandbox.unpacked_tree import UnpackedTree
from areal_hpc.shards.schema import SHARD_SUFFIX
from areal_hpc.view.audit import AuditReport, audit_run, classify_tickets, read_ticket_records
from areal_hpc.view.dashboard.report import write_report
from areal_hpc.view.state.run_view import RunView
from areal_hpc.view.state.summary import describe_evaluations
from areal_hpc.wire.decoding import decode_json

MANIFEST_FILE = "MANIFEST.json"
RUN_DIR = "run"
"""Folder of the bundle for files of the run directory."""
MAX_BUNDLE_BYTES = 8 << 30
MAX_BUNDLE_FILES = 1_000_000
TASK_KEYS = ("hub", "path", "generator")


class FileDigest(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """Digests of a bundle's files, and of files that are too large for it."""

    run: str
    """`experiment/trial`."""
    areal_hpc: str
    """Version that wrote the bundle."""
    time: str
    files: dict[str, FileDigest]
    """Digests of the bundle's files."""
    left_out: dict[str, FileDigest]
    """Digests of shards and of the exported model, by their paths in the run directory.

    The model is the newest export, else that of the SFT stage.
    """


@dataclass(frozen=True, slots=True)
class BundleCheck:
    manifest: Manifest
    audit: AuditReport
    problems: list[Problem]
    """Files that are missing, changed, or not in the manifest."""


def write_bundle(run: RunPaths, out: Path, cache_dir: Path) -> tuple[Manifest, str]:
    """Write the bundle of a run into a new private file; return its manifest and its digest.

    Values of the recipe that may be secrets are left out.
    """
    if out.exists():
        raise RecipeError(f"{out} exists", key="--out", hint="name another file, or remove it")
    version = importlib.metadata.version("areal-hpc")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy_records(run, RunPaths(folder / RUN_DIR))
        write_report([run], folder / "report.html", cache_dir)
        (folder / "MODEL_CARD.md").write_text(_format_model_card(RunView(run), version))
        if checkout := find_checkout():
            shutil.copyfile(checkout / "uv.lock", folder / "uv.lock")
        manifest = Manifest(
            run.run_name,
            version,
            datetime.now(UTC).isoformat(timespec="seconds"),
            _digest_files(folder, _list_files(folder)),
            _digest_files(run.root, _list_left_out(run)),
        )
        (folder / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        with (
            open_temporary_beside(out, mode=0o600) as stream,
            tarfile.open(fileobj=stream, mode="w:gz") as archive,
        ):
            for path in _list_files(folder):
                archive.add(path, path.relative_to(folder))
        digest = _digest_file(Path(stream.name)).sha256
        Path(stream.name).rename(out)
    return manifest, digest


def _copy_records(run: RunPaths, target: RunPaths) -> None:
    target.root.mkdir()
    for path in run.list_recipe_files():
        recipe = read_run_recipe(path)
        text = yaml.safe_dump(hide_private_values_equal_in(recipe, recipe), sort_keys=False)
        (target.root / path.name).write_text(text)
    checkpoint = find_latest_checkpoint(run.checkpoints_dir)
    state = (
        [checkpoint.path / name for name in (TRAINER_STATE_FILE, COMPLETE_MARKER_FILE)]
        if checkpoint
        else []
    )
    records = (
        *(run.provenance, run.metrics, run.sft_metrics, run.drops, run.finished_marker),
        *(run.provenance_dir, run.evaluations_dir, run.manifests_dir, run.quarantine_dir),
        *(run.shard_index_dir, *state),
    )
    for path in records:
        copy = target.root / path.relative_to(run.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copy)
        elif path.exists():
            shutil.copyfile(path, copy)


def _list_left_out(run: RunPaths) -> Iterator[Path]:
    yield from sorted(run.shards_dir.glob(f"*{SHARD_SUFFIX}"))
    exports = [path for path in run.export_dir("").glob("step_*") if path.is_dir()]
    yield from _list_files(max(exports, default=run.sft_export))


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest_files(root: Path, files: Iterable[Path]) -> dict[str, FileDigest]:
    return {str(path.relative_to(root)): _digest_file(path) for path in files}


def _digest_file(path: Path) -> FileDigest:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileDigest(stream.tell(), digest)


def _format_model_card(view: RunView, version: str) -> str:
    recipe = view.recipe
    commit = view.launches[-1].get("git_commit") if view.launches else None
    facts = {
        "base model": _find_value(recipe, "model.hub", "model.path") or "made for the run",
        "steps": f"{view.step} of {view.total_steps}",
        "seed": recipe.get("seed"),
        "software": f"areal-hpc {version}, commit {commit or 'unknown'}",
        "audit": audit_run(view.paths).summary_line,
    }
    if recipe.get("sft"):
        facts["demonstrations"] = _find_source(recipe, "sft.dataset")
        facts["loss on demonstrations"] = _describe_ends(view.sft, "loss")
        facts["held-out loss"] = _describe_ends(view.sft, "eval/loss")
    if not view.is_sft_alone:
        facts |= {
            "training tasks": _find_source(recipe, "train_dataset"),
            "agent": get_recipe_value(recipe, "rollout.workflow"),
            "tasks in a step": get_recipe_value(recipe, "trainer.batch_size"),
            "samples of a task": get_recipe_value(recipe, "rollout.n_samples"),
            "training reward": _describe_ends(view.trained_rows, "reward/mean"),
        }
    lines = [
        *("---", "library_name: transformers", "tags: [reinforcement-learning]", "---"),
        f"# {view.paths.run_name}\n\n| | |\n|---|---|",
        *(f"| {name} | {'' if value is None else value} |" for name, value in facts.items()),
        "",
        *(f"- {' '.join(line.split())}" for line in describe_evaluations(view)),
        "\n`areal-hpc audit --bundle FILE` checks the bundle that this card comes from.\n",
    ]
    return "\n".join(lines)


def _find_source(recipe: Mapping[str, Any], section: str) -> str:
    source = _find_value(recipe, *(f"{section}.{key}" for key in TASK_KEYS))
    return source or "several sources, in run/recipe.yaml"


def _describe_ends(rows: Iterable[Mapping[str, Any]], metric: str) -> str:
    values = [format_metric(row[metric], ".3f") for row in rows if metric in row]
    return f"{values[0]} at first, {values[-1]} at last" if values else "not measured"


def _find_value(recipe: Mapping[str, Any], *keys: str) -> Any:
    return next(filter(None, (get_recipe_value(recipe, key) for key in keys)), None)


def check_bundle(bundle: Path, run: RunPaths | None = None) -> BundleCheck:
    """Compare the files of a bundle with its manifest, and audit the run from them.

    With a run, its shards and its exported model are compared as well.

    Raises:
        RecipeError: The file is no bundle.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            tree = UnpackedTree(folder, max_bytes=MAX_BUNDLE_BYTES, max_files=MAX_BUNDLE_FILES)
            with gzip.open(bundle) as stream:
                tree.write_archive(stream)
            tree.remove_links_leading_out()
            manifest = decode_json((folder / MANIFEST_FILE).read_bytes(), Manifest)
        except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
            raise RecipeError(
                f"this is no bundle, or a damaged one: {error}",
                key=str(bundle),
                hint="areal-hpc report RUN --bundle writes one",
            ) from error
        problems = list(_compare(folder, manifest.files))
        problems += [
            Problem("the manifest does not name it", str(path.relative_to(folder)))
            for path in _list_files(folder)
            if str(path.relative_to(folder)) not in {MANIFEST_FILE, *manifest.files}
        ]
        if run is not None:
            problems += _compare(run.root, manifest.left_out)
        records = read_ticket_records(RunPaths(folder / RUN_DIR))
        shards = {
            Path(name).name: digest.bytes
            for name, digest in manifest.left_out.items()
            if name.endswith(SHARD_SUFFIX)
        }
        audit = classify_tickets(replace(records, file_bytes=shards))
        return BundleCheck(manifest, audit, problems)


def _compare(root: Path, digests: Mapping[str, FileDigest]) -> Iterator[Problem]:
    for name, expected in digests.items():
        path = root / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            yield Problem("the manifest names a file outside of its folder", name)
        elif not path.is_file():
            yield Problem("the file is missing", name)
        elif (found := _digest_file(path)) != expected:
            yield Problem(
                f"expected {expected.bytes} bytes with SHA-256 {expected.sha256}, got "
                f"{found.bytes} with {found.sha256}",
                name,
                "compare it with another copy",
            )
