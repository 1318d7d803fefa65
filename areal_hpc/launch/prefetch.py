"""Put a recipe's models, data sets and images in place, on a machine that has a network.

Downloads go to the Hugging Face cache by `huggingface_hub`, so `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`
and `HF_HUB_OFFLINE` mean what they always do. What is there already is not fetched again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.dataset.harbor.image_build import build_task_images
from areal_hpc.errors import Problem, RecipeError
from areal_hpc.recipe.hub_cache import RepoKind, parse_hub_files
from areal_hpc.recipe.recipe import Recipe

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
    is_harbor: bool = False


def list_downloads(recipe: Recipe) -> list[ModelOrDataset]:
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
        if part.path is not None:
            name, is_harbor = str(part.path), part.is_harbor
            found.append(ModelOrDataset(f"{key}.path", name, "dataset", is_harbor=is_harbor))
    return found


def prefetch_files(recipe: Recipe, print_line: Callable[[str], None]) -> None:
    """Put everything in place; a line for each model and data set.

    Raises:
        RecipeError: Something cannot be had; all problems at once.
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
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    if not found:
        key, hint = item.key, "look at the files of the repository"
        message = f"{item.name} has no file that matches {', '.join(patterns)}"
        raise RecipeError(message, key=key, hint=hint)
    return sorted(found)
