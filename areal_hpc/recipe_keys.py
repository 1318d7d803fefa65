"""The reference of recipe keys, read off the configuration classes."""

from __future__ import annotations

from collections.abc import Iterator

from areal_hpc.config import StageConfig, section_of
from areal_hpc.recipe import Recipe


def describe_keys() -> str:
    """Every key of a recipe with its type, default and meaning, as a Markdown table."""
    lines = [
        "# Recipe keys",
        "",
        "Made by `areal-hpc keys`. Override any of them on the command line with `key=value`.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *_key_rows(Recipe, "")]) + "\n"


def _key_rows(model: type[StageConfig], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        section = section_of(field.annotation)
        if section is not None:
            yield f"| **`{key}`** | | | {field.description} |"
            yield from _key_rows(section, f"{key}.")
            continue
        kind = getattr(field.annotation, "__name__", None) or str(field.annotation)
        if hasattr(field.annotation, "__args__"):
            kind = str(field.annotation)
        for noise in ("typing.", "pathlib.", "pathlib._local."):
            kind = kind.replace(noise, "")
        default = "required"
        if not field.is_required():
            default = f"`{field.get_default(call_default_factory=True)}`"
        yield f"| `{key}` | {kind.replace('|', 'or')} | {default} | {field.description} |"
