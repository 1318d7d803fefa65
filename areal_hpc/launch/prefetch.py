"""Put a recipe's models, data sets and images in place, on a machine that has a network.

Downloads go to the Hugging Face cache by `huggingface_hub`, so `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`
and `HF_HUB_OFFLINE` mean what they always do. What is there already is not fetched again.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.dataset.harbor.image_build import build_task_images
from areal_hpc.errors import Problem, RecipeError
from areal_hpc.recipe.hub_cache import RepoKind, parse_hub_files
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.rundir.paths import RunPaths

MODEL_FILE_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Weights, shapes and tokenizer; not the same weights in other formats, and no code."""


@dataclass(frozen=True, slots=True)
class ModelOrDataset:
    key: str
    """Its place in the recipe."""
    name: str
    """`owner/name[@revision]` on the hub, or a path."""
    kind: RepoKind
    patterns: tuple[str, ...] = ()
    """Files of the repository; empty for a path, which cannot be fetched."""


def list_models_and_datasets(recipe: Recipe) -> list[ModelOrDataset]:
    model = recipe.model
    found = []
    if model.hub is not None:
        found.append(ModelOrDataset("model.hub", model.hub, "model", MODEL_FILE_PATTERNS))
    if model.path is not None:
        found.append(ModelOrDataset("model.path", str(model.path), "model"))
    for part, key in recipe.task_sets_with_keys:
        if part.hub is not None:
            repo, pattern = parse_hub_files(part.hub)
            found.append(ModelOrDataset(f"{key}.hub", repo, "dataset", (pattern,)))
        if part.harbor is not None:
            found.append(ModelOrDataset(f"{key}.harbor", str(part.harbor), "dataset"))
        if part.path is not None:
            found.append(ModelOrDataset(f"{key}.path", str(part.path), "dataset"))
    return found


def prefetch_files_and_build_images(
    recipe: Recipe, paths: RunPaths, print_line: Callable[[str], None]
) -> None:
    """Put everything in place and write `prefetch.json`: revisions, files, sizes, SHA-256.

    Raises:
        RecipeError: Something cannot be had, or a file of the cache is not what the hub says it
            is; all problems at once.
    """
    before = _read_earlier_entries(paths.prefetch_record)
    record: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for want in list_models_and_datasets(recipe):
        try:
            if want.key.endswith(".harbor") and Path(want.name).is_dir():
                build_task_images(Path(want.name), want.key, print_line)
            folder = _download_if_missing(want)
            wanted = _list_wanted_files(folder, want)
            files = [_record_file(path, folder, before) for path in wanted]
        except RecipeError as error:
            problems += error.problems
            continue
        entry = {"key": want.key, "name": want.name, "folder": str(folder), "files": files}
        if want.patterns:
            revision = want.name.partition("@")[2] or "main"
            entry |= {"revision": revision, "commit": folder.name}
        record.append(entry)
        mib = sum(file["bytes"] for file in files) / 2**20
        where = f"at {folder.name[:12]}" if want.patterns else ""
        print_line(f"{want.key:<24} {want.name} {where} ({len(files)} files, {mib:.1f} MiB)")
    if problems:
        raise RecipeError.from_problems(problems)
    write_atomic(paths.prefetch_record, json.dumps(record, indent=2).encode())


def _download_if_missing(prefetch_item: ModelOrDataset) -> Path:
    if not prefetch_item.patterns:
        path = Path(prefetch_item.name).resolve()
        if not path.exists():
            raise RecipeError(
                f"there is nothing at {path}", key=prefetch_item.key, hint="copy it there"
            )
        return path
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    name, _, revision = prefetch_item.name.partition("@")
    try:
        return Path(
            snapshot_download(
                name,
                repo_type=prefetch_item.kind,
                revision=revision or None,
                allow_patterns=list(prefetch_item.patterns),
            )
        )
    except HFValidationError as error:
        hint = "look the name up on the hub"
        raise RecipeError(str(error), key=prefetch_item.key, hint=hint) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        first = str(error).strip().split("\n")[0]
        raise RecipeError(
            f"{prefetch_item.name} cannot be fetched from {constants.ENDPOINT}: {first}",
            key=prefetch_item.key,
            hint="run this with network access; HF_ENDPOINT selects a mirror, HF_TOKEN gives "
            "access to gated repositories",
        ) from error


def _list_wanted_files(folder: Path, prefetch_item: ModelOrDataset) -> list[Path]:
    if folder.is_file():
        return [folder]
    is_dataset = prefetch_item.kind == "dataset"
    patterns = (is_dataset and prefetch_item.patterns) or ("**/*",)
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    if not found:
        key, hint = prefetch_item.key, "look at the files of the repository"
        message = f"{prefetch_item.name} has no file that matches {', '.join(patterns)}"
        raise RecipeError(message, key=key, hint=hint)
    return sorted(found)


def _record_file(path: Path, folder: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    """What is noted of a file; its digest is computed again if it has changed since `before`."""
    state = path.stat()
    entry = {
        "name": path.name if path == folder else str(path.relative_to(folder)),
        "bytes": state.st_size,
        "modified_ns": state.st_mtime_ns,
    }
    known = before.get(str(path), {})
    if all(known.get(name) == value for name, value in entry.items()):
        return {**entry, "sha256": known["sha256"]}
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    blob = path.resolve().name
    if path.is_symlink() and re.fullmatch(r"[0-9a-f]{64}", blob) and blob != digest:
        raise RecipeError(
            f"{path} is damaged: its SHA-256 is {digest}, the hub's {blob}",
            key=str(path),
            hint=f"rm {path.resolve()} and repeat",
        )
    return {**entry, "sha256": digest}


def _read_earlier_entries(record: Path) -> dict[str, Any]:
    known = {}
    for entry in json.loads(record.read_bytes()) if record.exists() else ():
        folder = Path(entry["folder"])
        for file in entry["files"]:
            known[str(folder if folder.name == file["name"] else folder / file["name"])] = file
    return known
