"""Download of a recipe's models, data sets and images, on a machine with network access.

`huggingface_hub` downloads to its cache, so `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` and
`HF_HUB_OFFLINE` have their usual meanings. Files in the cache are not fetched again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.dataset.harbor.image_build import build_task_images
from areal_hpc.errors import Problem, RecipeError
from areal_hpc.recipe.hub_cache import RepoKind, parse_hub_files
from areal_hpc.recipe.recipe import Recipe

MODEL_FILE_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Weights, configuration and tokenizer, without weights in other formats and without code."""


@dataclass(frozen=True, slots=True)
class ModelOrDataset:
    key: str
    """Recipe key."""
    name: str
    """`owner/name[@revision]` on the hub, or a path."""
    kind: RepoKind
    patterns: tuple[str, ...] = ()
    """Patterns of the repository's files; empty for a path, which cannot be fetched."""
    is_harbor: bool = False


def list_downloads(recipe: Recipe) -> list[ModelOrDataset]:
    model = recipe.model
    downloads = []
    if model.hub is not None:
        downloads.append(ModelOrDataset("model.hub", model.hub, "model", MODEL_FILE_PATTERNS))
    if model.path is not None:
        downloads.append(ModelOrDataset("model.path", str(model.path), "model"))
    for part, key in recipe.task_sets_with_keys:
        if part.hub is not None:
            repo, pattern = parse_hub_files(part.hub)
            downloads.append(ModelOrDataset(f"{key}.hub", repo, "dataset", (pattern,)))
        if part.path is not None:
            name, is_harbor = str(part.path), part.is_harbor
            downloads.append(ModelOrDataset(f"{key}.path", name, "dataset", is_harbor=is_harbor))
    return downloads


def prefetch_files(recipe: Recipe, print_line: Callable[[str], None]) -> None:
    """Download everything; print a line for each model and data set.

    Raises:
        RecipeError: Something cannot be fetched; lists all problems.
    """
    problems: list[Problem] = []
    for item in list_downloads(recipe):
        try:
            if item.is_harbor:
                build_task_images(Path(item.name), item.key, print_line)
            folder = _download_item(item)
            sizes = [file.stat().st_size for file in _list_wanted_files(folder, item)]
        except RecipeError as error:
            problems += error.problems
            continue
        commit = f"at {folder.name[:12]}" if item.patterns else ""
        mib = sum(sizes) / 2**20
        print_line(f"{item.key:<24} {item.name} {commit} ({len(sizes)} files, {mib:.1f} MiB)")
    if problems:
        raise RecipeError.from_problems(problems)


def _download_item(item: ModelOrDataset) -> Path:
    if not item.patterns:
        path = Path(item.name).resolve()
        if not path.exists():
            raise RecipeError(f"there is nothing at {path}", key=item.key, hint="copy it there")
        return path
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    name, _, revision = item.name.partition("@")
    try:
        return Path(
            snapshot_download(
                name,
                repo_type=item.kind,
                revision=revision or None,
                allow_patterns=list(item.patterns),
            )
        )
    except HFValidationError as error:
        hint = "look the name up on the hub"
        raise RecipeError(str(error), key=item.key, hint=hint) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        first = str(error).strip().split("\n")[0]
        raise RecipeError(
            f"{item.name} cannot be fetched from {constants.ENDPOINT}: {first}",
            key=item.key,
            hint="run this with network access; HF_ENDPOINT selects a mirror, HF_TOKEN gives "
            "access to gated repositories",
        ) from error


def _list_wanted_files(folder: Path, item: ModelOrDataset) -> list[Path]:
    if folder.is_file():
        return [folder]
    is_dataset = item.kind == "dataset"
    patterns = (is_dataset and item.patterns) or ("**/*",)
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    if not files:
        key, hint = item.key, "look at the files of the repository"
        message = f"{item.name} has no file that matches {', '.join(patterns)}"
        raise RecipeError(message, key=key, hint=hint)
    return sorted(files)
