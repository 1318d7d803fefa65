"""Losses, advantages, estimators and chat templates against TRL's and verl's own.

`scripts/setup_oracles.sh` installs both into `.venvs/oracles` (or `ORACLES_DIR`). Writes the
results that docs/oracles.md and docs/chat-templates.md show.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.objective import CriticConfig, ObjectiveConfig
from areal_hpc.trainer.objective.advantages import (
    BatchCredit,
    ReplyReward,
    compute_advantages,
    estimate_advantages,
)
from areal_hpc.trainer.objective.custom_loss import load_custom_loss
from areal_hpc.trainer.objective.policy_loss import (
    compute_loss_aggregation_row_factors,
    compute_policy_loss,
    compute_value_loss,
    estimate_divergence,
)
from areal_hpc.trainer.objective.token_rows import TokenRowMap
from tests.support.environments import CHECKOUT
from tests.support.oracle_cases import (
    ADVANTAGE_CASES,
    CLIP_VALUE,
    DISCOUNT,
    LAMBDA,
    LOSS_CASES,
    SEEDS,
    AdvantageCase,
    Array,
    LossCase,
    OracleBatch,
    make_oracle_batch,
)
from tests.support.results import add_results, write_results
from tests.support.template_scenes import SCENES, build_template_and_encoder, play_scene

pytestmark = pytest.mark.timeout(900)

ORACLES = Path(os.environ.get("ORACLES_DIR", CHECKOUT / ".venvs" / "oracles"))
BOUND = 1e-6
GAE = "compute_gae_advantage_return"
WHITENED = (
    "verl takes off the mean over tokens and divides by the deviation; here they are divided "
    "by the root mean square, nothing taken off. Compared after the same whitening"
)
Row = tuple[str, str, float, str]
"""Quantity, library and function to compare with, largest gap, and its reason."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Array]:
    python, out = ORACLES / "bin" / "python", tmp_path_factory.mktemp("oracles") / "answers.npz"
    assert python.exists(), f"{python} is missing: scripts/setup_oracles.sh makes it"
    command = [str(python), "-m", "tests.support.oracle_program", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out, allow_pickle=False) as arrays:
        return dict(arrays)


def test_losses_and_gradients_are_theirs(answers: Mapping[str, Array]) -> None:
    rows = []
    for index, case in enumerate(LOSS_CASES):
        expected = answers[f"loss {index}"]
        ours = np.array([compute_loss(case, make_oracle_batch(seed)) for seed in SEEDS])
        call = dict(case.theirs)
        if case.correction:
            call["rollout_is_threshold"] = case.correction
        rows.append((case.name, ask(case.library, call), measure(ours, expected), case.difference))
    report("losses", rows)


def test_advantages_are_theirs(answers: Mapping[str, Array]) -> None:
    rows = []
    for index, case in enumerate(ADVANTAGE_CASES):
        expected = answers[f"advantage {index}"]
        ours = np.array([advantages_of(case, make_oracle_batch(seed)) for seed in SEEDS])
        rows.append((case.name, ask("verl", case.theirs), measure(ours, expected), case.difference))
    report("advantages", rows)


def ask(library: str, call: Mapping[str, Any]) -> str:
    return f"{library}: `{', '.join(f'{key}={value}' for key, value in call.items())}`"


def test_estimators_and_critics_are_theirs(answers: Mapping[str, Array]) -> None:
    rows: list[Row] = []
    for kind in ("k1", "k2", "k3"):
        ours = np.array([diverge(kind, make_oracle_batch(seed)) for seed in SEEDS])
        call = f"verl: `kl_penalty({kind})`"
        note = "verl holds it within 10" if kind == "k3" else "none"
        rows.append((f"KL estimator {kind}", call, measure(ours, answers[kind]), note))
    returns, whitened, losses = [], [], []
    for seed in SEEDS:
        batch = make_oracle_batch(seed)
        is_trained = batch.mask == 1
        advantages, own = estimate_values(batch)
        deviation = np.sqrt(advantages[is_trained].var(ddof=1) + 1e-8)
        whitened.append((advantages - advantages[is_trained].mean()) / deviation * batch.mask)
        returns.append(own * batch.mask)
        losses.append(critic_loss(batch))
    masks = np.array([make_oracle_batch(seed).mask for seed in SEEDS])
    for name, key, call, values, note in (
        ("GAE, what the critic learns", "gae returns", GAE, returns, "none"),
        ("GAE, advantages", "gae advantages", GAE, whitened, WHITENED),
        ("critic, clipped", "value loss", "compute_value_loss", losses, "none"),
    ):
        expected = answers[key] * masks if call == GAE else answers[key]
        rows.append((name, f"verl: `{call}`", measure(np.array(values), expected), note))
    report("values", rows)


def measure(ours: Array, expected: Array) -> float:
    """The largest difference of any batch, relative to the largest number of that batch."""
    apart = np.abs(ours - expected).reshape(len(ours), -1).max(axis=1)
    largest = np.abs(expected).reshape(len(ours), -1).max(axis=1)
    assert (largest > 0).all()
    return float((apart / largest).max())


def report(part: str, rows: list[Row]) -> None:
    """Keep the measurements, and fail where a number is not theirs."""
    add_results("oracles", **{part: rows})
    assert [row for row in rows if row[2] > BOUND] == []


def compute_loss(case: LossCase, batch: OracleBatch) -> Array:
    """The loss, then its gradient [1 + B T], as the trainer computes them."""
    keys: dict[str, Any] = {"off_policy_correction": "none", **case.ours}
    objective = ObjectiveConfig(**keys)
    is_trained = torch.tensor(batch.mask == 1)
    rows = torch.arange(len(batch.mask))[:, None].expand_as(is_trained)[is_trained]
    lengths = batch.mask.sum(axis=1).astype(int).tolist()
    scales = compute_loss_aggregation_row_factors(lengths, range(len(lengths)), objective)
    logprobs = torch.tensor(batch.logprobs, requires_grad=True)
    proximal, behavior, reference = (
        torch.tensor(values)[is_trained]
        for values in (batch.proximal, batch.behavior, batch.reference)
    )
    policy_loss = compute_policy_loss(
        logprobs[is_trained],
        proximal,
        behavior,
        torch.tensor(batch.advantages)[rows],
        TokenRowMap(rows, len(lengths)),
        objective,
        None if scales is None else torch.tensor(scales, dtype=torch.float64)[rows],
        custom=load_custom_loss(objective),
        reference_N=reference if objective.kl.coef else None,
    )
    loss = policy_loss.total / len(rows)
    loss.backward()
    assert logprobs.grad is not None
    return np.concatenate([[loss.item()], logprobs.grad.numpy().ravel()])


def advantages_of(case: AdvantageCase, batch: OracleBatch) -> Array:
    """Advantages here, with the constants put in that verl has besides."""
    objective = ObjectiveConfig(**case.ours)
    episodes = np.arange(len(batch.rewards))
    credit = BatchCredit(
        batch.rewards, batch.groups, episodes, np.ones(len(episodes)), [[] for _ in episodes]
    )
    ours = compute_advantages(credit, objective)
    if objective.scale_rewards == "group":
        spreads = np.array([batch.rewards[batch.groups == own].std(ddof=1) for own in batch.groups])
        ours = ours * spreads / (spreads + 1e-6)
    if objective.scale_rewards == "batch":
        ours = ours * _change_of_spread(ours, batch, objective)
    return ours


def _change_of_spread(ours: Array, batch: OracleBatch, objective: ObjectiveConfig) -> float:
    """Convert a deviation of B - 1 degrees of freedom to that of B T tokens with B numbers."""
    means = np.full(len(batch.rewards), batch.rewards.mean())
    if objective.baseline == "group_mean":
        means = np.array([batch.rewards[batch.groups == own].mean() for own in batch.groups])
    squares = np.square(batch.rewards - means).sum()
    tokens, episodes = batch.mask.size, len(ours)
    theirs = squares * batch.mask.shape[1] / (tokens - 1) + 1e-8
    return float(np.sqrt(squares / (episodes - 1) / theirs))


def diverge(kind: Any, batch: OracleBatch) -> Array:
    """The estimates and their derivatives [2, B, T]."""
    logprobs = torch.tensor(batch.logprobs, requires_grad=True)
    estimates = estimate_divergence(logprobs, torch.tensor(batch.reference), kind)
    estimates.sum().backward()
    assert logprobs.grad is not None
    return np.stack([estimates.detach().numpy(), logprobs.grad.numpy()])


def estimate_values(batch: OracleBatch) -> tuple[Array, Array]:
    """GAE's advantages and returns before they are scaled [B, T], 0 where nothing is trained."""
    objective = ObjectiveConfig(
        baseline="value",
        critic=CriticConfig(model="initial"),
        discount=DISCOUNT,
        gae_lambda=LAMBDA,
    )
    positions = [np.flatnonzero(row) for row in batch.mask]
    replies = [
        ReplyReward(0, row, own, float(batch.rewards[row]), np.zeros(len(own)), [], 1.0, True)
        for row, own in enumerate(positions)
    ]
    values = [batch.values[row][own] for row, own in enumerate(positions)]
    advantages, returns = np.zeros(batch.mask.shape), np.zeros(batch.mask.shape)
    for row, estimate in enumerate(estimate_advantages(replies, values, objective)):
        advantages[row, positions[row]] = estimate.advantages_t
        returns[row, positions[row]] = estimate.returns_t
    return advantages, returns


def critic_loss(batch: OracleBatch) -> Array:
    is_trained = torch.tensor(batch.mask == 1)
    values = torch.tensor(batch.logprobs, requires_grad=True)
    before, returns = torch.tensor(batch.proximal), torch.tensor(batch.returns)
    total, _ = compute_value_loss(
        values[is_trained], before[is_trained], returns[is_trained], CLIP_VALUE
    )
    loss = total / int(is_trained.sum())
    loss.backward()
    assert values.grad is not None
    return np.concatenate([[loss.item()], values.grad.numpy().ravel()])


MIN_TEMPLATES = 60


@pytest.mark.timeout(900)
def test_templates_in_use_show_what_came_back_once() -> None:
    (folder,) = ORACLES.glob("lib/python3*/site-packages/trl/chat_templates")
    paths = sorted(folder.glob("*.jinja"))
    assert len(paths) >= MIN_TEMPLATES
    names_by_outcomes: dict[tuple[str, ...], list[str]] = {}
    for path in paths:
        source = path.read_text()
        outcomes = tuple(", ".join(dict.fromkeys(play(source, scene))) for scene in SCENES)
        names_by_outcomes.setdefault(outcomes, []).append(path.stem)
    rows = [
        {"templates": names, "scenes": dict(zip(SCENES, outcomes, strict=True))}
        for outcomes, names in names_by_outcomes.items()
    ]
    write_results("chat_templates", rows)


def play(source: str, scene: str) -> Iterator[str]:
    template, _ = build_template_and_encoder(source)
    uses_tools = any(message["role"] == "tool" for message in SCENES[scene])
    try:
        template.require_messages(with_tools=uses_tools)
    except RecipeError:
        yield "refused at start"
        return
    for turn in play_scene(source, SCENES[scene]):
        assert (turn.is_spliced, turn.lost, turn.is_closed_twice) == (True, [], False)
        assert turn.outcome != "other"
        yield turn.outcome
