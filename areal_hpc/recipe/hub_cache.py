"""Lookup of repositories in the local Hugging Face cache; never downloads.

The cache is `HF_HUB_CACHE`, else `$HF_HOME/hub`. It has to be on shared storage: jobs read it.
"""

from pathlib import Path
from typing import Literal, TypeAlias

from areal_hpc.errors import RecipeError

RepoKind: TypeAlias = Literal["model", "dataset"]

REPO_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$"
"""Pattern of repository names, `owner/name`."""


def find_snapshot(repo: str, kind: RepoKind, revision: str | None, key: str) -> Path:
    """The folder of a revision (branch, tag or whole commit hash; main when None) in the cache.

    Raises:
        RecipeError: It is not there, or no name of the hub's; names the recipe's `key`.
    """
    # Imported late: only recipes that name the hub pay for it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(repo, repo_type=kind, revision=revision, local_files_only=True)
        )
    except HFValidationError as error:
        raise RecipeError(str(error), key=key, hint="look the name up on the hub") from None
    except LocalEntryNotFoundError:
        raise RecipeError(
            f"{kind} {repo} (revision {revision or 'main'}) is not in the Hugging Face cache "
            f"{constants.HF_HUB_CACHE}; runs do not download",
            key=key,
            hint="run `areal-hpc prefetch RECIPE` on a machine with network access",
        ) from None
