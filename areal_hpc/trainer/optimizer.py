"""AdamW, its state divided over data-parallel ranks by Megatron or, with the weights, by FSDP2."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.adamw import AdamW, adamw

from areal_hpc.recipe.sections.trainer import AdamConfig
from areal_hpc.trainer.collectives import all_reduce_max
from areal_hpc.trainer.model.memory_estimate import OPTIMIZER_CHUNK_ELEMENTS
from areal_hpc.trainer.model.policy import TrainedNetwork
from areal_hpc.trainer.model.sharding import find_first_row
from areal_hpc.trainer.private_apis.megatron_private import (
    OptimizerShard,
    list_optimizer_shards,
    take_over_master_weights,
)
from areal_hpc.trainer.private_apis.torch_private import pin_host_memory


class Optimizer(Protocol):
    """What trains a network: `MegatronAdamW` or `ShardedAdamW`."""

    param_groups: list[dict[str, Any]]

    def prepare_gradients(self) -> AbstractContextManager[float]:
        """Make gradients ready to be applied and measure their norm. A collective.

        What that lends is given back at the end.
        """

    def apply_gradients(self, norm: float) -> None:
        """Clip the gradients of this norm, and step."""

    def zero_grad(self) -> None: ...

    def list_shards(self) -> list[OptimizerShard]:
        """What this rank steps."""


class MegatronAdamW(ChainedOptimizer):  # type: ignore[misc]
    """Megatron's optimizers, of the experts' parameters and of all others."""

    def __init__(self, optimizers: list[Any], replica: DistributedDataParallel) -> None:
        super().__init__(optimizers)
        self._replica = replica

    @contextmanager
    def prepare_gradients(self) -> Iterator[float]:
        with hold_master_stand_ins(self):
            self.prepare_grads()
            yield float(self.get_grad_norm())

    def apply_gradients(self, norm: float) -> None:
        for part in self.chained_optimizers:
            if part.config.clip_grad > 0.0 and (parameters := part.get_parameters()):
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
        self.step_with_ready_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._replica.zero_grad_buffer()
        super().zero_grad(set_to_none)

    def list_shards(self) -> list[OptimizerShard]:
        return list_optimizer_shards(self)


class ShardedAdamW(AdamW):
    """AdamW over the rows that this rank keeps of what FSDP2 divides."""

    def __init__(self, decoder: torch.nn.Module, config: AdamConfig) -> None:
        trained = [item for item in decoder.named_parameters() if item[1].requires_grad]
        decayed = {name for name, one in trained if one.dim() > 1 and not name.endswith(".bias")}
        groups = [
            {
                "params": [one for name, one in trained if (name in decayed) == is_decayed],
                "weight_decay": config.weight_decay if is_decayed else 0.0,
            }
            for is_decayed in (True, False)
        ]
        is_on_gpu = trained[0][1].is_cuda
        super().__init__(groups, config.lr, config.betas, config.eps, fused=is_on_gpu or None)
        self.clip_grad = config.clip_grad
        for _, parameter in trained:
            self.state[parameter] = {
                "step": torch.tensor(0.0, device=parameter.device if is_on_gpu else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @property
    def parameters(self) -> list[Any]:
        return [one for group in self.param_groups for one in group["params"]]

    @contextmanager
    def prepare_gradients(self) -> Iterator[float]:
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        norm: Any = get_total_norm(gradients)
        yield float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def apply_gradients(self, norm: float) -> None:
        if self.clip_grad > 0.0:
            clip_grads_with_norm_(self.parameters, self.clip_grad, torch.tensor(norm))
        self.step()

    def list_shards(self) -> list[OptimizerShard]:
        """The rows that this rank keeps, as numbers of the whole parameters: their own masters."""
        shards = []
        for parameter in self.parameters:
            master = parameter.detach().to_local().view(-1)
            start = find_first_row(parameter) * (parameter.numel() // len(parameter))
            moments = {
                name: tensor.to_local().view(-1) if isinstance(tensor, DTensor) else tensor
                for name, tensor in self.state[parameter].items()
            }
            stop = start + len(master)
            shards.append(OptimizerShard(parameter, start, stop, master, master, moments))
        return shards


def build_optimizer(
    policy: TrainedNetwork, config: AdamConfig, *, is_offloaded: bool = False
) -> Optimizer:
    """AdamW over the policy's parameters, its moments already zeroed.

    Moments exist from the start: a checkpoint is loaded into them. With `is_offloaded` the state is
    on the host between steps (`HostAdamW`).
    """
    if policy.ddp_module is None:
        return ShardedAdamW(policy.gpt, config)
    megatron = get_megatron_optimizer(
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
    optimizer = MegatronAdamW(megatron.chained_optimizers, policy.ddp_module)
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


def step_optimizer(optimizer: Optimizer, rate: float) -> float:
    """Apply the accumulated gradients at learning rate `rate`; their norm before clipping.

    These are the parts of Megatron's own step, with a look at the norm before anything is
    changed. Weights, moments and step counts stay the same to the bit when the norm, which is the
    same on every rank, is not finite or exactly 0 (`untrained.is_optimizer_step_taken`). It is 0
    when all advantages are, or every token is clipped or masked: momentum and decay would move the
    weights all the same, by what earlier batches taught. A collective.
    """
    with optimizer.prepare_gradients() as norm:
        kind = _NORM_NOT_FINITE if not math.isfinite(norm) else _NORM_FINITE if norm else _NORM_ZERO
        agreed = all_reduce_max(kind)
        if agreed == _NORM_FINITE:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.apply_gradients(norm)
    optimizer.zero_grad()
    return math.nan if agreed == _NORM_NOT_FINITE and kind != agreed else norm


MASTER_NAME = "master"
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


class HostAdamW(AdamW):
    """AdamW over parts of parameters, its state on the host but for what is being stepped.

    The arithmetic stays where it is without offload, and so do its bits: chunk after chunk is
    copied to the GPU, stepped by the same operations, rounded to the model's weights, and copied
    back. Between steps the state consists of ordinary tensors of the host, which checkpoints read
    and write as they would those of a GPU.

    With float32 parameters there are no master weights: the parameters themselves are stepped, and
    only moments are offloaded.
    """

    step_device: torch.device
    """Where gradients are, and steps are computed."""
    chunk_elements: int
    _host: dict[torch.Tensor, dict[str, torch.Tensor]]
    """By parameter: the places of its master weights, if it has some, and moments."""
    _weights: Mapping[torch.Tensor, torch.Tensor]
    """By master weights: the model's, which are the same numbers rounded."""

    @classmethod
    def take_over(
        cls,
        adam: AdamW,
        weights: Mapping[torch.Tensor, torch.Tensor],
        device: torch.device,
        chunk_elements: int,
    ) -> None:
        """Make an optimizer one of this class, and move its state to the host.

        `weights`: those of the model by their master weights.
        """
        # Not built anew: Megatron gave it tensors that are no leaves, which AdamW would refuse.
        adam.__class__ = cls
        assert isinstance(adam, cls)
        adam.step_device, adam.chunk_elements, adam._host = device, chunk_elements, {}
        adam._weights = weights
        everything = [one for group in adam.param_groups for one in group["params"]]
        names = {
            one: (*((MASTER_NAME,) if one in weights else ()), *MOMENT_NAMES) for one in everything
        }
        size = sum(len(names[one]) * one.numel() for one in everything)
        places = torch.empty(size, dtype=torch.float32)
        if device.type == "cuda" and size:
            pin_host_memory(places)
        for one in everything:
            parts = places[: len(names[one]) * one.numel()].view(len(names[one]), *one.shape)
            places = places[parts.numel() :]
            adam._host[one] = dict(zip(names[one], parts.unbind(), strict=True))
        adam._move_to_host()

    def _move_to_host(self) -> None:
        for parameter, places in self._host.items():
            moments = self.state[parameter]
            for name in MOMENT_NAMES:
                moments[name] = places[name].copy_(moments[name])
            if MASTER_NAME in places:
                parameter.data = places[MASTER_NAME].copy_(parameter.data)

    def put_master_stand_ins_on_device(self) -> None:
        """Let master weights claim to be where gradients are, which a gradient's parameter must.

        Meanwhile an expanded tensor of one number keeps their shape.
        """
        for parameter, places in self._host.items():
            if MASTER_NAME in places:
                parameter.data = torch.zeros((), device=self.step_device).expand(parameter.shape)

    def restore_masters(self) -> None:
        """Undo `put_master_stand_ins_on_device`, and forget the gradients."""
        for parameter, places in self._host.items():
            parameter.grad = None
            if MASTER_NAME in places:
                parameter.data = places[MASTER_NAME]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step, chunk after chunk. The master weights are taken back."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._step_parameter(parameter, group)
        self.restore_masters()
        if self.step_device.type == "cuda":  # whoever reads the host's tensors waits for no stream
            torch.cuda.current_stream(self.step_device).synchronize()

    def _step_parameter(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradients = parameter.grad.view(-1).split(self.chunk_elements)
        has_master = parameter in self._weights
        # Without master weights the model's are stepped themselves, in place.
        weights = self._weights[parameter] if has_master else parameter.detach()
        hosts = [
            place.view(-1).split(self.chunk_elements) for place in self._host[parameter].values()
        ]
        count = self.state[parameter]["step"]
        for gradient, weight, *parts in zip(
            gradients, weights.view(-1).split(self.chunk_elements), *hosts, strict=True
        ):
            lent = [torch.empty_like(gradient).copy_(part, non_blocking=True) for part in parts]
            _apply_adamw(lent if has_master else [weight, *lent], gradient, count.clone(), group)
            if has_master:
                weight.copy_(lent[0])
            for part, own in zip(parts, lent, strict=True):
                part.copy_(own, non_blocking=True)
        count += 1


def offload_optimizer(
    optimizer: Any, device: torch.device, chunk_elements: int = OPTIMIZER_CHUNK_ELEMENTS
) -> None:
    """Move the state of Megatron's optimizer to the host, where it is stepped from now on."""
    for part in optimizer.chained_optimizers:
        weights = take_over_master_weights(part)
        HostAdamW.take_over(part.optimizer, weights, device, chunk_elements)


@contextmanager
def hold_master_stand_ins(optimizer: Any) -> Iterator[None]:
    """The time in which gradients are handed to master weights, measured, clipped and applied."""
    parts = [part.optimizer for part in optimizer.chained_optimizers]
    offloaded = [adam for adam in parts if isinstance(adam, HostAdamW)]
    for adam in offloaded:
        adam.put_master_stand_ins_on_device()
    try:
        yield
    finally:
        for adam in offloaded:
            adam.restore_masters()


def _apply_adamw(
    stepped: Sequence[torch.Tensor], gradient: torch.Tensor, count: Any, group: dict[str, Any]
) -> None:
    weight, mean, square = stepped
    beta1, beta2 = group["betas"]
    adamw(
        [weight],
        [gradient],
        [mean],
        [square],
        [],
        [count],
        foreach=group["foreach"],
        capturable=group["capturable"],
        differentiable=group["differentiable"],
        fused=group["fused"],
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
