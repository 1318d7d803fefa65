"""Building blocks of the translation rules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Untranslatable:
    """A value has no counterpart."""

    reason: str


@dataclass(frozen=True, slots=True)
class ArealConfigValues:
    """AReaL's configuration, as rules see it."""

    leaves: Mapping[str, Any]
    """Dotted key -> value, AReaL's defaults included."""
    given: frozenset[str]
    """The keys that differ from the defaults, or that a file states."""
    train_rows: int | None
    """Rows of the training set, where known."""

    def __call__(self, key: str) -> Any:
        """A value; None if there is none."""
        return self.leaves.get(key)

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches of one walk over the training set; a last one that is not full is dropped."""
        if self.train_rows is None:
            return None
        return max(1, self.train_rows // int(self("train_dataset.batch_size")))

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, where they can be told."""
        steps = self("total_train_steps")
        if steps is not None:
            return int(steps)
        per_epoch = self.steps_per_epoch
        return None if per_epoch is None else per_epoch * int(self("total_train_epochs"))


TranslateValue = Callable[[Any, ArealConfigValues], "Mapping[str, Any] | Untranslatable"]
"""A value -> keys of a recipe with their values (none: it is so anyway), or a loss."""


@dataclass(frozen=True, slots=True)
class KeyRule:
    """One key of AReaL's."""

    key: str
    """Dotted; one that ends in `.*` stands for all keys below it."""
    recipe_counterpart_text: str
    """For people: the keys of a recipe, or what holds instead of them."""
    translate: TranslateValue
    only_if_given: bool = False
    """AReaL's default is not carried over."""


SLURM_OPTIONS_REASON = "what a job asks Slurm for is in the section `cluster`"


def renamed_rule(key: str, target: str, *, only_if_given: bool = False) -> KeyRule:
    """Rule for a key whose value stays and whose name changes."""
    return KeyRule(
        key,
        f"`{target}`",
        lambda value, _: {} if value is None else {target: value},
        only_if_given,
    )


def fixed_value_rule(key: str, value: Any, reason: str) -> KeyRule:
    """It is always so here; any other value is lost."""
    return KeyRule(
        key,
        f"always `{value}`; {reason}",
        lambda found, _: {} if found is None or found == value else Untranslatable(reason),
    )


def same_as_key_rule(key: str, repeated_key: str, reason: str) -> KeyRule:
    """It repeats another key; where it does not, it is lost."""
    return KeyRule(
        key,
        f"as `{repeated_key}`; {reason}",
        lambda found, areal_values: (
            {} if found in (None, "", areal_values(repeated_key)) else Untranslatable(reason)
        ),
    )


def repeated_run_key_rules(section: str, *, has_fileroot: bool = True) -> tuple[KeyRule, ...]:
    """Keys that sections of AReaL's repeat, so that each can name the run and its files."""
    repeated = {
        "experiment_name": ("experiment_name", "a run has one name"),
        "trial_name": ("trial_name", "a run has one name"),
        "fileroot": ("cluster.fileroot", "all files of a run are in one directory"),
    }
    if not has_fileroot:
        del repeated["fileroot"]
    return tuple(same_as_key_rule(f"{section}.{name}", *said) for name, said in repeated.items())


def unsupported_scheduling_rules(parent_section: str) -> tuple[KeyRule, ...]:
    """What AReaL's schedulers are told of `actor` and `rollout`."""
    return (
        unsupported_rule(f"{parent_section}.scheduling_spec.*", SLURM_OPTIONS_REASON),
        unsupported_rule(
            f"{parent_section}.scheduling_strategy.*", "trainer and replicas never share nodes"
        ),
    )


def ignored_rule(key: str, reason: str) -> KeyRule:
    """Whatever the value, the same happens here: nothing is lost by leaving it out."""
    return KeyRule(key, f"(not needed) {reason}", lambda value, _: {})


def unsupported_rule(key: str, reason: str) -> KeyRule:
    """No counterpart."""
    return KeyRule(
        key,
        f"(none) {reason}",
        lambda value, _: {} if value in (None, {}, []) else Untranslatable(reason),
    )


OPAQUE_SECTIONS = ("agent_builder_kwargs",)
"""A mapping that is one value: the arguments of a function."""


def flatten_to_dotted_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of the leaves of a nested mapping; a leaf may be an empty section."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value and f"{prefix}{name}" not in OPAQUE_SECTIONS:
            leaves |= flatten_to_dotted_keys(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def unflatten_dotted_keys(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree
