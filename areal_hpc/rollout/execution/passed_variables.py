"""Environment of what runs a user's agent: variables by allow-list."""

import fnmatch
from collections.abc import Mapping, Sequence

from areal_hpc.recipe.sections.reward import ISOLATION_VARIABLE

PASSED_VARIABLE_PATTERNS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR", "XDG_*"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"),
)
"""Patterns of variables that hold no secret, and without which programs do not run."""
SAME_PYTHON_PASSED_VARIABLES = (
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "VIRTUAL_ENV"),
    ISOLATION_VARIABLE,
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
"""Seen besides by agents that run with the driver's Python; none of them holds a secret."""


def select_passed_variables(
    environ: Mapping[str, str], extra_patterns: Sequence[str]
) -> dict[str, str]:
    """The variables of an environment that `PASSED_VARIABLE_PATTERNS` or further patterns name."""
    allowed = (*PASSED_VARIABLE_PATTERNS, *extra_patterns)
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)
    }


def select_driver_python_variables(
    environ: Mapping[str, str], extra_patterns: Sequence[str]
) -> dict[str, str]:
    return select_passed_variables(environ, (*SAME_PYTHON_PASSED_VARIABLES, *extra_patterns))
