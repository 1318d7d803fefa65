"""Recipe sections `trainer` and `sft`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from areal_hpc.recipe.base import BaseConfig
from areal_hpc.recipe.sections.objective import ObjectiveConfig


class ParallelConfig(BaseConfig):
    """Division of the model and the batch over ranks; the world has tp x pp x cp x dp ranks."""

    tp: Annotated[int, Field(ge=1)] = 1
    """Tensor parallelism: ranks that share each layer's matrices."""
    pp: Annotated[int, Field(ge=1)] = 1
    """Pipeline parallelism: stages that share the layers."""
    cp: Annotated[int, Field(ge=1)] = 1
    """Context parallelism: ranks that share each sequence."""
    dp: Annotated[int, Field(ge=1)] = 1
    """Data parallelism: copies of the model."""
    ep: Annotated[int, Field(ge=1)] = 1
    """Expert parallelism: ranks, of a stage's tp x cp x dp, that share a mixture's experts."""
    shard_parameters: bool = False
    """Whether to divide weights, gradients and moments over all dp x cp ranks, layer by layer
    (FSDP2); for models of transformers' own layers."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tp * self.pp * self.cp * self.dp


Recompute = Literal["none", "selective", "full"] | Annotated[int, Field(ge=1)]


class ActivationMemoryConfig(BaseConfig):
    """Treatment of activations before the backward pass, from the keys of `trainer`."""

    recompute: Recompute = "none"
    offload: bool = False

    def count_recomputed_layers(self, layers: int) -> int:
        """Count the layers of a pipeline stage that keep only their input."""
        if isinstance(self.recompute, int):
            return min(self.recompute, layers)
        return layers if self.recompute == "full" else 0


KEEP_ALL_ACTIVATIONS = ActivationMemoryConfig()
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]


class OffloadConfig(BaseConfig):
    """Data that is kept in host memory while the GPU does not need it."""

    activations: bool = False
    """Whether the forward pass copies the activations to the host, and the backward pass back."""
    optimizer: bool = False
    """Whether master weights and moments stay on the host, and visit the GPU at each step."""


DENSE_LINEAR_MODULES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
"""Linear layers of a plain decoder, except the head."""


class LoraConfig(BaseConfig):
    """Low-rank adapter in PEFT's terms; the weights that it changes are frozen.

    The trainer builds the network of transformers' own modules.
    """

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank: rows of each layer's matrix A, and columns of its B."""
    alpha: Annotated[int, Field(ge=1)] = 32
    """Scaling: a layer's weight changes by alpha / rank times B A."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of A's inputs that training passes leave out."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Adapted layers: the ends of their names, a pattern, or all linear ones."""
    rslora: bool = False
    """Whether to scale by alpha / sqrt(rank) instead."""
    dora: bool = False
    """Whether to learn the norm of each row of a weight separately from its direction."""
    sync: Literal["merged", "adapter"] = "merged"
    """Weights sent to servers: merged with the adapter, or the adapter alone."""

    @model_validator(mode="after")
    def _check_sync(self) -> LoraConfig:
        if self.sync == "merged":
            return self
        is_pattern = isinstance(self.target_modules, str) and self.target_modules != "all-linear"
        if self.dora or is_pattern:
            raise ValueError(
                "sync=adapter is for target_modules that are named, without dora: SGLang has "
                "neither; use sync=merged"
            )
        named = set(self.served_modules)
        if unknown := sorted(named.difference(DENSE_LINEAR_MODULES)):
            raise ValueError(
                f"sync=adapter is for target_modules of {', '.join(DENSE_LINEAR_MODULES)}, and not "
                f"{', '.join(unknown)}; use sync=merged"
            )
        # SGLang fuses q, k and v, and gate and up; of these only a missing k counts as zero.
        if named.intersection(("q_proj", "k_proj", "v_proj")) and not {"q_proj", "v_proj"} <= named:
            raise ValueError("sync=adapter needs q_proj and v_proj together; use sync=merged")
        if "up_proj" in named and "gate_proj" not in named:
            raise ValueError("sync=adapter needs gate_proj beside up_proj; use sync=merged")
        return self

    @property
    def served_modules(self) -> tuple[str, ...]:
        """Ends of names of the layers that a server adapts with sync=adapter."""
        if isinstance(self.target_modules, str):
            return DENSE_LINEAR_MODULES
        return tuple(name.rpartition(".")[2] for name in self.target_modules)

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class SftAdamConfig(BaseConfig):
    """AdamW of supervised fine-tuning, with linear warm-up."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay, not of norms and biases."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate grows to its peak."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, down to `min_lr_ratio` at the last step."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate as a share of the peak."""


class AdamConfig(SftAdamConfig):
    """AdamW with linear warm-up."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """Decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term added to the root of the second moment."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 does not clip."""


def compute_learning_rate(step: int, total_steps: int, config: SftAdamConfig) -> float:
    """Compute the learning rate of optimizer step `step`, from 0, out of `total_steps`."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    last = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, max(0.0, (step - config.warmup_steps) / last))
    if config.decay == "constant":
        return config.lr * warmup
    linear = 1.0 - progress
    share = linear if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * warmup * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


class ProfileConfig(BaseConfig):
    """Steps that the trainer and SGLang trace with torch.profiler."""

    steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    """Steps to trace."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Trainer ranks that trace them."""
    memory: bool = False
    """Whether these ranks also write a snapshot of the GPU's memory, with its history."""
    server_seconds: Annotated[float, Field(ge=0)] = 2.0
    """Time for which each server traces, from when it serves the weights before a step; 0: never.
    Servers that span nodes do not."""


def _convert_false_to_off(value: object) -> object:
    return "off" if value is False else value


class TrainerConfig(BaseConfig):
    """Megatron-core training."""

    parallel: ParallelConfig = ParallelConfig()
    """Division of model and batch over ranks."""
    lora: LoraConfig | None = None
    """Adapter that is trained instead of all weights; null: none."""
    device: Device = "auto"
    """Device of trainer and servers; `auto` is the GPU if the node has one."""
    dtype: Dtype = "bfloat16"
    """Type of parameters and activations, also of servers; master weights, gradients: float32."""
    total_steps: Annotated[int, Field(ge=1)] = 100
    """Number of batches to train on."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Tickets (tasks) in a batch, each with `rollout.n_samples` episodes."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps in a batch."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=16)] = 16384
    """Maximum number of tokens in one forward pass of one data-parallel rank."""
    recompute: Recompute = "none"
    """Activations computed again in the backward pass: none, those of norms and feed-forward parts,
    those of all layers, or of this many layers of each pipeline stage."""
    offload: OffloadConfig = OffloadConfig()
    """Use of host memory instead of GPU memory."""
    optimizer: AdamConfig = AdamConfig()
    """AdamW."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """Training objective (clipped policy gradient)."""
    router_replay: bool = True
    """Whether training routes a mixture's tokens to the same experts as the sampling pass."""
    checkpoint_every_steps: Annotated[int, Field(ge=1)] = 5
    """Steps between checkpoints, and so the most that a kill can cost."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Number of complete checkpoints that are kept."""
    export_every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between exports in Hugging Face format; 0 exports only the last step."""
    annotate: Annotated[
        Literal["off", "sampled", "all"], BeforeValidator(_convert_false_to_off)
    ] = "sampled"
    """Rows of a step whose tokens are annotated for viewing: none, 64 in whole groups, or all."""
    profile: ProfileConfig | None = None
    """Steps to trace for profiling; null: none."""

    @model_validator(mode="after")
    def _check_sharding(self) -> TrainerConfig:
        if self.parallel.shard_parameters and self.offload != OffloadConfig():
            raise ValueError(
                "parallel.shard_parameters and offload exclude each other: divided parameters "
                "stay on the GPUs of their ranks; leave offload out"
            )
        if self.parallel.shard_parameters and self.lora is not None:
            raise ValueError(
                "parallel.shard_parameters and lora exclude each other: each rank has the whole "
                "frozen base; leave one of them out"
            )
        return self

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the policy without its adapter."""
        return self.lora is not None and self.objective.kl.reference == "initial"

    @property
    def ratios_are_one(self) -> bool:
        """Whether the proximal policy is always the one that is trained."""
        return self.minibatches == 1 and self.objective.proximal != "none"

    @property
    def activations(self) -> ActivationMemoryConfig:
        """Treatment of activations before the backward pass."""
        return ActivationMemoryConfig(recompute=self.recompute, offload=self.offload.activations)


class SftConfig(BaseConfig):
    """Supervised fine-tuning."""

    total_steps: Annotated[int, Field(ge=1)]
    """Optimizer steps."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Demonstrations in a step."""
    optimizer: SftAdamConfig = SftAdamConfig()
    """AdamW."""
    checkpoint_every_steps: Annotated[int, Field(ge=1)] = 500
    """Steps between checkpoints."""
    lora: LoraConfig | None = None
    """Adapter that SFT trains instead of all weights, which its export has merged; null: none."""
