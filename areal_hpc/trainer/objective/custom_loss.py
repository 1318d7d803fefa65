"""Custom losses: functions of the user's that compute the loss, and their inputs and outputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.recipe.user_functions import describe_user_error, load_user_function
from areal_hpc.trainer.objective.token_rows import TokenRowMap

CUSTOM_LOSS_RECIPE_KEY = "trainer.objective.custom"


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """Inputs of a custom loss: N tokens of some rows of a batch; N may be 0."""

    logprobs_N: torch.Tensor
    """Log-probabilities under the weights in training: the gradient flows through them."""
    proximal_N: torch.Tensor
    """Log-probabilities under the proximal policy (`trainer.objective.proximal`). No gradient."""
    behavior_N: torch.Tensor
    """The engine's log-probabilities under the policy that sampled the tokens. No gradient."""
    advantages_N: torch.Tensor
    rows: TokenRowMap
    """Row of each token. A row's tokens may lie on several ranks: values of a whole row come from
    `compute_row_means`, which all ranks must call, whatever their values."""
    config: ObjectiveConfig


@dataclass(frozen=True, slots=True, eq=False)
class LossOutputs:
    """Results of a custom loss for the N tokens."""

    terms_N: torch.Tensor
    """Terms to be maximized. They are multiplied by the correction's weights and the factors of
    `loss_agg`: a term must not depend on the other rows in the pass."""
    clipped_N: torch.Tensor | None = None
    """Tokens whose term was bounded or left out, for `ratio/clip_fraction`."""


CustomLoss = Callable[[LossInputs], LossOutputs]


def load_custom_loss(config: ObjectiveConfig) -> CustomLoss | None:
    """Load the function that `custom` names and try it on made-up tokens; None without a name."""
    if not config.custom:
        return None
    function: CustomLoss = load_user_function(config.custom, CUSTOM_LOSS_RECIPE_KEY)
    for count in (0, 4):  # a pass may have no tokens
        _check_on_made_up_tokens(function, config, count)
    return function


def _check_on_made_up_tokens(function: CustomLoss, config: ObjectiveConfig, count: int) -> None:
    logprobs_N = -torch.linspace(0.1, 2.0, count)
    inputs = LossInputs(
        logprobs_N.clone().requires_grad_(),
        logprobs_N - 0.1,
        logprobs_N + 0.1,
        torch.linspace(-1.0, 1.0, count),
        TokenRowMap(torch.arange(count) // 2, 2),
        config,
    )
    try:
        outputs = function(inputs)
    except Exception as error:  # boundary: the function is the user's code
        raise RecipeError(
            f"{config.custom!r} raised {describe_user_error(error)}\n"
            f"when it was tried on {count} made-up tokens",
            key=CUSTOM_LOSS_RECIPE_KEY,
            hint="examples/objectives has functions that work",
        ) from error
    if defect := _find_output_defect(outputs, count):
        raise RecipeError(
            f"{config.custom!r}, tried on {count} made-up tokens: {defect}",
            key=CUSTOM_LOSS_RECIPE_KEY,
            hint="return LossOutputs(terms_N) with a term for each of inputs.logprobs_N",
        )


def _find_output_defect(outputs: object, count: int) -> str | None:
    if not isinstance(outputs, LossOutputs):
        return f"expected LossOutputs, got {type(outputs).__name__}"
    for name, values_N in (("terms_N", outputs.terms_N), ("clipped_N", outputs.clipped_N)):
        if name == "clipped_N" and values_N is None:
            continue
        if not isinstance(values_N, torch.Tensor) or tuple(values_N.shape) != (count,):
            got = tuple(values_N.shape) if isinstance(values_N, torch.Tensor) else values_N
            return f"expected {name} to be a tensor of shape ({count},), got {got}"
    if not outputs.terms_N.requires_grad:
        return "no gradient flows through terms_N: they do not depend on inputs.logprobs_N"
    if not bool(torch.isfinite(outputs.terms_N).all()):
        return f"expected finite terms, got {outputs.terms_N.tolist()}"
    return None
