"""Answers of TRL and verl to every case: run by .venvs/oracles, which has both.

`python -m tests.support.oracle_program OUT.npz` writes an array for each question, with the seeds
first. The libraries' own functions are called, in float64.
"""

import importlib
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.support.oracle_cases import (
    ADVANTAGE_CASES,
    CLIP_VALUE,
    DISCOUNT,
    DUAL,
    HIGH,
    KL_COEF,
    LAMBDA,
    LOSS_CASES,
    LOW,
    SEEDS,
    TOKENS,
    AdvantageCase,
    Array,
    LossCase,
    OracleBatch,
    make_oracle_batch,
)

GRPO = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
VERL = importlib.import_module("verl.trainer.ppo.core_algos")
CORRECTION = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
ACTOR = importlib.import_module("verl.workers.config").ActorConfig
ACCELERATOR = importlib.import_module("accelerate").Accelerator(cpu=True)


def ask_loss(case: LossCase, batch: OracleBatch) -> Array:
    """The loss, then its gradient [1 + B T]."""
    logprobs = torch.tensor(batch.logprobs, requires_grad=True)
    loss = (_ask_trl if case.library == "TRL" else _ask_verl)(case, batch, logprobs)
    loss.backward()
    assert logprobs.grad is not None
    return np.concatenate([[loss.item()], logprobs.grad.numpy().ravel()])


def _ask_trl(case: LossCase, batch: OracleBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """The method of the trainer, on an object that has the settings it looks at."""
    settings = {
        "importance_sampling_level": "token",
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "beta": 0.0,
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
        "use_bias_correction_kl": False,
        **case.theirs,
    }
    trainer = SimpleNamespace(
        **settings,
        args=SimpleNamespace(**settings),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        max_completion_length=TOKENS,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
    )
    mask = torch.tensor(batch.mask)
    prompt = torch.zeros((len(batch.mask), 1), dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.zeros(batch.mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor(batch.advantages),
        "old_per_token_logps": torch.tensor(batch.proximal),
        "ref_per_token_logps": torch.tensor(batch.reference),
        "num_items_in_batch": mask.sum(),
    }
    loss: torch.Tensor = GRPO._compute_loss(trainer, None, inputs)
    return loss


def _ask_verl(case: LossCase, batch: OracleBatch, logprobs: torch.Tensor) -> torch.Tensor:
    config = ACTOR(
        strategy="fsdp",
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
    )
    mask = torch.tensor(batch.mask)
    weights = None
    if case.correction:
        weights, _ = CORRECTION.compute_rollout_correction_weights(
            torch.tensor(batch.proximal - batch.behavior),
            mask,
            rollout_is_threshold=case.correction,
        )
    loss: torch.Tensor
    loss, _ = VERL.get_policy_loss_fn(case.theirs["loss_mode"])(
        old_log_prob=torch.tensor(batch.proximal),
        log_prob=logprobs,
        advantages=torch.tensor(batch.advantages)[:, None].expand_as(mask),
        response_mask=mask,
        loss_agg_mode=case.theirs["loss_agg_mode"],
        config=config,
        rollout_is_weights=weights,
    )
    return loss


def ask_advantages(case: AdvantageCase, batch: OracleBatch) -> Array:
    """The advantage of each episode [B]; of REINFORCE++ where all have the same length."""
    arguments = dict(case.theirs)
    name = arguments.pop("estimator")
    mask = torch.ones(batch.mask.shape, dtype=torch.float64)
    if not name.startswith("reinforce"):
        mask = torch.tensor(batch.mask)
    rewards = torch.zeros_like(mask)
    rewards[:, -1] = torch.tensor(batch.rewards)
    if name == "reinforce_plus_plus":
        arguments["config"] = SimpleNamespace(gamma=1.0)
    else:
        arguments["index"] = batch.groups
    advantages, _ = VERL.get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, **arguments
    )
    values: Array = advantages[:, 0].numpy()
    return values


def ask_values(batch: OracleBatch) -> dict[str, Array]:
    """GAE's returns and whitened advantages, and the loss of a critic with its gradient."""
    mask = torch.tensor(batch.mask)
    last = batch.mask.shape[1] - 1 - batch.mask[:, ::-1].argmax(axis=1)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(mask)), torch.tensor(last)] = torch.tensor(batch.rewards)
    advantages, returns = VERL.compute_gae_advantage_return(
        rewards, torch.tensor(batch.values), mask, gamma=DISCOUNT, lam=LAMBDA
    )
    values = torch.tensor(batch.logprobs, requires_grad=True)
    before = torch.tensor(batch.proximal)
    loss, _ = VERL.compute_value_loss(
        values, torch.tensor(batch.returns), before, mask, cliprange_value=CLIP_VALUE
    )
    loss.backward()
    assert values.grad is not None
    return {
        "gae returns": returns.numpy(),
        "gae advantages": advantages.numpy(),
        "value loss": np.concatenate([[loss.item()], values.grad.numpy().ravel()]),
    }


def ask_divergence(kind: str, batch: OracleBatch) -> Array:
    logprobs = torch.tensor(batch.logprobs, requires_grad=True)
    estimates: torch.Tensor = VERL.kl_penalty(logprobs, torch.tensor(batch.reference), kind)
    (KL_COEF * estimates).sum().backward()
    assert logprobs.grad is not None
    return np.stack([estimates.detach().numpy(), logprobs.grad.numpy() / KL_COEF])


def main() -> None:
    answers: dict[str, list[Any]] = defaultdict(list)
    for seed in SEEDS:
        batch = make_oracle_batch(seed)
        for index, case in enumerate(LOSS_CASES):
            answers[f"loss {index}"].append(ask_loss(case, batch))
        for index, advantage_case in enumerate(ADVANTAGE_CASES):
            answers[f"advantage {index}"].append(ask_advantages(advantage_case, batch))
        for name, values in ask_values(batch).items():
            answers[name].append(values)
        for kind in ("k1", "k2", "k3"):
            answers[kind].append(ask_divergence(kind, batch))
    arrays: dict[str, Any] = {name: np.array(values) for name, values in answers.items()}
    np.savez(sys.argv[1], **arrays)


if __name__ == "__main__":
    main()
