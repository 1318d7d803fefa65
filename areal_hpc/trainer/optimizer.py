"""AdamW, sharded over data-parallel ranks by Megatron's DistributedOptimizer."""

import math
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from areal_hpc.recipe.sections.trainer import AdamConfig
from areal_hpc.trainer.collectives import all_reduce_max
from areal_hpc.trainer.model.policy import TrainedNetwork
from areal_hpc.trainer.optimizer_offload import hold_master_stand_ins, offload_optimizer


def build_optimizer(
    policy: TrainedNetwork, config: AdamConfig, *, is_offloaded: bool = False
) -> Any:
    """Megatron's optimizer over the policy's parameters, its moments already zeroed.

    Moments exist from the start: a checkpoint is loaded into them. With `is_offloaded` the state
    is on the host between steps (`optimizer_offload.py`).
    """
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=policy.dtype == torch.bfloat16,
            params_dtype=policy.dtype,
            use_distributed_optimizer=True,
        ),
        [policy.ddp_module],
    )
    place = torch.device("cpu") if is_offloaded else policy.device
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            # Megatron leaves this product to its own scheduler, which is not used here.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = config.betas, config.eps
            for parameter in group["params"]:
                part.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter, device=place),
                    "exp_avg_sq": torch.zeros_like(parameter, device=place),
                }
    if policy.device.type == "cuda":
        switch_adamw_to_fused_kernel(optimizer, policy.device)
    if is_offloaded:
        offload_optimizer(optimizer, policy.device)
    return optimizer


def switch_adamw_to_fused_kernel(optimizer: Any, device: torch.device) -> None:
    """Have AdamW step many parameters with one kernel, which reads and writes each number once.

    By itself torch takes a chain of some ten kernels on a GPU, with copies of all parameters in
    between. The kernel wants the counts of steps on the device.
    """
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["fused"] = True
        for state in part.optimizer.state.values():
            state["step"] = state["step"].to(device)


_NORM_ZERO, _NORM_FINITE, _NORM_NOT_FINITE = range(3)


def step_optimizer_if_norm_is_usable(policy: TrainedNetwork, optimizer: Any, rate: float) -> float:
    """Apply the accumulated gradients at learning rate `rate`; their norm before clipping.

    These are the parts of Megatron's own step, with a look at the norm before anything is
    changed. Weights, moments and step counts stay the same to the bit when the norm, which is the
    same on every rank, is not finite or exactly 0 (`untrained.is_optimizer_step_taken`). It is 0
    when all advantages are, or every token is clipped or masked: momentum and decay would move the
    weights all the same, by what earlier batches taught. A collective.
    """
    with hold_master_stand_ins(optimizer):
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        kind = _NORM_NOT_FINITE if not math.isfinite(norm) else _NORM_FINITE if norm else _NORM_ZERO
        agreed = all_reduce_max(kind)
        if agreed == _NORM_FINITE:
            for group in optimizer.param_groups:
                group["lr"] = rate
            for part in optimizer.chained_optimizers:
                if part.config.clip_grad > 0.0 and (parameters := part.get_parameters()):
                    clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
            optimizer.step_with_ready_grads()
    policy.ddp_module.zero_grad_buffer()
    optimizer.zero_grad()
    return math.nan if agreed == _NORM_NOT_FINITE and kind != agreed else norm
