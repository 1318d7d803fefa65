"""Table of `rules.yaml`: the treatment of each key of AReaL's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

OPAQUE_SECTIONS = ("agent_builder_kwargs",)
"""Mappings that count as one value: the arguments of a function."""


class UntranslatableError(Exception):
    """Error for a value without a counterpart in a recipe; the text has the reason."""


@dataclass(frozen=True, slots=True)
class ArealConfig:
    """AReaL's configuration by dotted keys."""

    leaves: Mapping[str, Any]
    """Values by dotted keys, with AReaL's defaults."""
    stated: frozenset[str]
    """Keys that the file has, or that differ from the defaults."""
    train_rows: int | None

    def get(self, key: str) -> Any:
        return self.leaves.get(key)

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of full batches in the training set; None if its size is unknown."""
        if self.train_rows is None:
            return None
        return max(1, self.train_rows // int(self.get("train_dataset.batch_size")))

    @property
    def total_steps(self) -> int | None:
        steps = self.get("total_train_steps")
        if steps is not None:
            return int(steps)
        per_epoch = self.steps_per_epoch
        return None if per_epoch is None else per_epoch * int(self.get("total_train_epochs"))


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Line of the table; of the six fields explained at the table's top one is set."""

    rename: str = ""
    values: dict[Any, Any] = {}
    convert: str = ""
    always: Any = msgspec.UNSET
    same_as: str = ""
    drop: str = ""
    refuse: str = ""
    note: str = ""
    if_stated: bool = False

    @property
    def counterpart(self) -> str:
        """Text for users: the keys of a recipe, or what replaces them."""
        if self.rename:
            changed = [
                f"{new} for {old}" for old, new in self.values.items() if new not in (None, old)
            ]
            return f"`{self.rename}`{': ' if changed else ''}{', '.join(changed)}"
        if self.convert:
            return self.note
        if self.same_as:
            return f"as `{self.same_as}`; {self.note}"
        if self.drop:
            return f"(not needed) {self.drop}"
        if self.refuse:
            return f"(none) {self.refuse}"
        return f"always `{self.always}`; {self.note}"


RULE_BY_KEY: dict[str, Rule] = msgspec.convert(
    yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text()), dict[str, Rule]
)


def find_rule_key(key: str) -> str:
    """Find the table's key for a key: itself or its section's; empty if there is none."""
    sections = key.split(".")
    candidates = [key] + [".".join(sections[:end]) + ".*" for end in range(len(sections), 0, -1)]
    return next((name for name in candidates if name in RULE_BY_KEY), "")


def flatten_to_dotted_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nested mapping by dotted keys; a leaf may be an empty section."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value and f"{prefix}{name}" not in OPAQUE_SECTIONS:
            leaves |= flatten_to_dotted_keys(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def unflatten_dotted_keys(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree
