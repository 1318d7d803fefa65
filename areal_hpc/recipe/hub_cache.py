"""Lookup of repositories in the local cache of the Hugging Face hub; never downloads.

The cache is `HF_HUB_CACHE`, else `$HF_HOME/hub`. It must be on shared storage, where jobs read it.
"""

import re
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from areal_hpc.errors import RecipeError

RepoKind: TypeAlias = Literal["model", "dataset"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REVISION = r"(@(?:refs/(?:convert|pr)/\w+|[^@/]+))?"
REPO_PATTERN = rf"^{_NAME}(/{_NAME})?{_REVISION}$"
"""Pattern of `owner/name`, or `owner/name@revision`: a branch, tag or whole commit hash."""
_HUB_FILES_PATTERN = re.compile(rf"({_NAME}/{_NAME}{_REVISION})/(.+)")


class HubFiles(NamedTuple):
    """Files of a repository."""

    repo: str
    """`owner/name`, or `owner/name@revision`."""
    pattern: str


def parse_hub_files(text: str) -> HubFiles:
    """Split `owner/name[@revision]/PATTERN`.

    Raises:
        ValueError: The text has another form.
    """
    match = _HUB_FILES_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"expected OWNER/NAME/FILES, such as openai/gsm8k/main/train-*.parquet, got {text}"
        )
    return HubFiles(match[1], match[3])


def find_snapshot(repo: str, kind: RepoKind, key: str) -> Path:
    """Return the cached folder of `owner/name[@revision]`, by default of the branch main.

    Raises:
        RecipeError: It is not cached, or the name is invalid; the error names the recipe's `key`.
    """
    # Imported here, because only recipes that name the hub need this slow import.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    name, _, revision = repo.partition("@")
    try:
        return Path(
            snapshot_download(
                name, repo_type=kind, revision=revision or None, local_files_only=True
            )
        )
    except HFValidationError as error:
        raise RecipeError(str(error), key=key, hint="look the name up on the hub") from None
    except LocalEntryNotFoundError:
        raise RecipeError(
            f"{kind} {name} (revision {revision or 'main'}) is not in the Hugging Face cache "
            f"{constants.HF_HUB_CACHE}; runs do not download",
            key=key,
            hint="run `areal-hpc prefetch RECIPE` on a machine with network access",
        ) from None
