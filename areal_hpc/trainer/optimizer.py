"""AdamW whose state is divided over data-parallel ranks, by Megatron or with weights by FSDP2."""

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
    """Optimizer of a network: `MegatronAdamW` or `ShardedAdamW`."""

    param_groups: list[dict[str, Any]]

    def prepare_gradients(self) -> AbstractContextManager[float]:
        """Make gradients ready to be applied and measure their norm. A collective.

        The end of the block releases what this provides for them.
        """

    def apply_gradients(self, norm: float) -> None:
        """Clip the gradients, which have this norm, and step."""

    def zero_grad(self) -> None: ...

    def list_shards(self) -> list[OptimizerShard]:
        """List the numbers that this rank steps."""


class MegatronAdamW(ChainedOptimizer):  # type: ignore[misc]
    """Megatron's optimizers: one of the experts' parameters, one of all others."""

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
    """AdamW over the rows that this rank keeps of parameters that FSDP2 divides."""

    def __init__(self, decoder: torch.nn.Module, config: AdamConfig) -> None:
        trained = [item for item in decoder.named_parameters() if item[1].requires_grad]
        decayed = {name for name, p in trained if p.dim() > 1 and not name.endswith(".bias")}
        groups = [
            {
                "params": [p for name, p in trained if (name in decayed) == is_decayed],
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
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @contextmanager
    def prepare_gradients(self) -> Iterator[float]:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm: Any = get_total_norm(gradients)
        yield float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def apply_gradients(self, norm: float) -> None:
        if self.clip_grad > 0.0:
            clip_grads_with_norm_(self.parameters, self.clip_grad, torch.tensor(norm))
        self.step()

    def list_shards(self) -> list[OptimizerShard]:
        """List the rows that this rank keeps, as numbers of whole parameters: their own masters."""
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
    """Build AdamW over the policy's parameters, with zeroed moments.

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
    state_device = torch.device("cpu") if is_offloaded else policy.device
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            # Megatron leaves this product to its own scheduler, which this trainer does not use.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = config.betas, config.eps
            for parameter in group["params"]:
                part.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter, device=state_device),
                    "exp_avg_sq": torch.zeros_like(parameter, device=state_device),
                }
    if policy.device.type == "cuda":
        switch_adamw_to_fused_kernel(optimizer, policy.device)
    if is_offloaded:
        offload_optimizer(optimizer, policy.device)
    return optimizer


def switch_adamw_to_fused_kernel(optimizer: Any, device: torch.device) -> None:
    """Make AdamW step many parameters with one kernel, which reads and writes each number once.

    By default torch runs some ten kernels in sequence on a GPU, and copies all parameters in
    between. The fused kernel needs the step counts on the device.
    """
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["fused"] = True
        for state in part.optimizer.state.values():
            state["step"] = state["step"].to(device)


_NORM_ZERO, _NORM_FINITE, _NORM_NOT_FINITE = range(3)


def step_optimizer(optimizer: Optimizer, rate: float) -> float:
    """Apply the accumulated gradients at learning rate `rate`; return their norm before clipping.

    These are the parts of Megatron's own step, with a test of the norm before anything changes.
    Weights, moments and step counts keep their bits if the norm, which is equal on all ranks, is
    not finite or exactly 0 (`untrained.is_optimizer_step_taken`). It is 0 if all advantages are, or
    if every token is clipped or masked: earlier batches' momentum, and decay, would still move the
    weights. A collective.
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
    """AdamW over parts of parameters, its state on the host except for the chunk being stepped.

    The arithmetic, and so every bit, is the same as without offload: chunk after chunk is copied to
    the GPU, stepped by the same operations, rounded to the model's weights, and copied back.
    Between steps the state is ordinary host tensors, in checkpoints like those of a GPU.

    With float32 parameters there are no master weights: the parameters themselves are stepped, and
    only moments are offloaded.
    """

    step_device: torch.device
    """Device of the gradients, which computes steps."""
    chunk_elements: int
    _host: dict[torch.Tensor, dict[str, torch.Tensor]]
    """Host memory by parameter: of its master weights, if it has any, and its moments."""
    _weights: Mapping[torch.Tensor, torch.Tensor]
    """Model's weights by master weights, of which they are the rounded numbers."""

    @classmethod
    def take_over(
        cls,
        adam: AdamW,
        weights: Mapping[torch.Tensor, torch.Tensor],
        device: torch.device,
        chunk_elements: int,
    ) -> None:
        """Move an optimizer's state to the host; `weights` are the model's, by master weights."""
        # Not built anew: Megatron gave it tensors that are no leaves, which AdamW would refuse.
        adam.__class__ = cls
        assert isinstance(adam, cls)
        adam.step_device, adam.chunk_elements, adam._host = device, chunk_elements, {}
        adam._weights = weights
        parameters = [p for group in adam.param_groups for p in group["params"]]
        names = {p: (*((MASTER_NAME,) if p in weights else ()), *MOMENT_NAMES) for p in parameters}
        size = sum(len(names[p]) * p.numel() for p in parameters)
        memory = torch.empty(size, dtype=torch.float32)
        if device.type == "cuda" and size:
            pin_host_memory(memory)
        for p in parameters:
            parts = memory[: len(names[p]) * p.numel()].view(len(names[p]), *p.shape)
            memory = memory[parts.numel() :]
            adam._host[p] = dict(zip(names[p], parts.unbind(), strict=True))
        adam._move_to_host()

    def _move_to_host(self) -> None:
        for parameter, memory in self._host.items():
            moments = self.state[parameter]
            for name in MOMENT_NAMES:
                moments[name] = memory[name].copy_(moments[name])
            if MASTER_NAME in memory:
                parameter.data = memory[MASTER_NAME].copy_(parameter.data)

    def put_master_stand_ins_on_device(self) -> None:
        """Let master weights appear to be on the gradients' device, as torch requires.

        Until `restore_masters` an expanded tensor of one number keeps their shape.
        """
        for parameter, memory in self._host.items():
            if MASTER_NAME in memory:
                parameter.data = torch.zeros((), device=self.step_device).expand(parameter.shape)

    def restore_masters(self) -> None:
        """Undo `put_master_stand_ins_on_device`, and drop the gradients."""
        for parameter, memory in self._host.items():
            parameter.grad = None
            if MASTER_NAME in memory:
                parameter.data = memory[MASTER_NAME]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step, chunk after chunk. Afterwards the master weights are back in place."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._step_parameter(parameter, group)
        self.restore_masters()
        if self.step_device.type == "cuda":  # readers of the host's tensors wait for no stream
            torch.cuda.current_stream(self.step_device).synchronize()

    def _step_parameter(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        has_master = parameter in self._weights
        # Without master weights the model's own weights are stepped in place.
        weights = self._weights[parameter] if has_master else parameter.detach()
        tensors = (parameter.grad, weights, *self._host[parameter].values())
        chunks = (tensor.view(-1).split(self.chunk_elements) for tensor in tensors)
        count = self.state[parameter]["step"]
        for gradient, weight, *parts in zip(*chunks, strict=True):
            local = [torch.empty_like(gradient).copy_(part, non_blocking=True) for part in parts]
            _apply_adamw(local if has_master else [weight, *local], gradient, count.clone(), group)
            if has_master:
                weight.copy_(local[0])
            for part, stepped in zip(parts, local, strict=True):
                part.copy_(stepped, non_blocking=True)
        count += 1


def offload_optimizer(
    optimizer: Any, device: torch.device, chunk_elements: int = OPTIMIZER_CHUNK_ELEMENTS
) -> None:
    """Move the state of Megatron's optimizer to the host; from now on `HostAdamW` steps it."""
    for part in optimizer.chained_optimizers:
        weights = take_over_master_weights(part)
        HostAdamW.take_over(part.optimizer, weights, device, chunk_elements)


@contextmanager
def hold_master_stand_ins(optimizer: Any) -> Iterator[None]:
    """Keep stand-ins in place while gradients of master weights are set, measured and applied."""
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
