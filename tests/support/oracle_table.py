"""The table of docs/objectives.md: how far losses and advantages are from TRL's and verl's."""

from tests.support.oracle_cases import ADVANTAGE_CASES, LOSS_CASES, AdvantageCase, LossCase
from tests.support.results import read_results, write_results
from tests.support.tables import markdown

RESULTS = "oracles"
VALUES = {
    "k1": ("KL estimator k1", "kl_penalty(k1)", "none"),
    "k2": ("KL estimator k2", "kl_penalty(k2)", "none"),
    "k3": ("KL estimator k3", "kl_penalty(k3)", "verl holds it within 10"),
    "gae returns": ("GAE, what the critic learns", "compute_gae_advantage_return", "none"),
    "gae advantages": (
        "GAE, advantages",
        "compute_gae_advantage_return",
        "verl takes off the mean over tokens and divides by the deviation; here they are divided "
        "by the root mean square, nothing taken off. Compared after the same whitening",
    ),
    "value loss": ("critic, clipped", "compute_value_loss", "none"),
}


def key_of(case: LossCase | AdvantageCase) -> str:
    """The name that its figure is kept under."""
    library = case.library if isinstance(case, LossCase) else "verl"
    return f"{library}: {case.name} ({_call_of(case)})"


def _call_of(case: LossCase | AdvantageCase) -> str:
    call = ", ".join(f"{key}={value}" for key, value in case.theirs.items())
    threshold = case.correction if isinstance(case, LossCase) else ""
    return f"{call}, rollout_is_threshold={threshold}" if threshold else call


def keep(part: str, off: dict[str, float]) -> None:
    """Put the figures of a part in the place of earlier ones."""
    write_results(RESULTS, read_results(RESULTS, {}) | {part: off})


def table() -> str:
    """All cases with their largest relative difference, and what is not the same."""
    measured: dict[str, float] = {}
    for part in read_results(RESULTS, {}).values():
        measured |= part
    rows = []
    cases: tuple[LossCase | AdvantageCase, ...] = (*LOSS_CASES, *ADVANTAGE_CASES)
    for case in cases:
        library = case.library if isinstance(case, LossCase) else "verl"
        figure = _format(measured.get(key_of(case)))
        rows.append([case.name, f"{library}: `{_call_of(case)}`", figure, case.difference])
    for key, (name, call, difference) in VALUES.items():
        rows.append([name, f"verl: `{call}`", _format(measured.get(key)), difference])
    return markdown(["quantity", "asked of", "apart by", "difference"], rows)


def _format(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.0e}"
