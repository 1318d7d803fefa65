"""One rank of one parallel layout: compare with transformers, save, checkpoint, resume."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from areal_hpc.recipe.sections.trainer import (
    ActivationMemoryConfig,
    AdamConfig,
    LoraConfig,
    ParallelConfig,
    Recompute,
)
from areal_hpc.rundir.checkpoints import TrainerState, digest_base, find_latest_checkpoint
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.checkpoints.rank_state import load_checkpoint_into
from areal_hpc.trainer.checkpoints.store import CheckpointStore
from areal_hpc.trainer.model.families.architecture import parse_architecture
from areal_hpc.trainer.model.families.lora import switch_adapter_off
from areal_hpc.trainer.model.families.weight_map import HfTensorSpec
from areal_hpc.trainer.model.hf_weights import (
    HfModelReader,
    list_hf_specs,
    load_hf,
    save_hf_model,
    stream_hf_tensors,
)
from areal_hpc.trainer.model.policy import TrainedNetwork, build_policy
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.optimizer import build_optimizer
from areal_hpc.trainer.side_networks import load_frozen_network
from areal_hpc.trainer.step import (
    MicroBatch,
    make_micro_batches_of_this_rank,
    run_forward_backward,
    score_rows,
    train_step,
)
from tests.support.layouts import LOGPROB_BOUND
from tests.support.reference_models import ADAPTERS, SIZES, by_checkpoint_name, hf_model
from tests.support.routed_reference import following, give_random_routes

LR = 1e-3


def make_rows(seed: int) -> list[TrainingRow]:
    generator = np.random.default_rng(seed)
    rows = []
    for length in generator.integers(4, 41, size=11):
        mask = (generator.random(length) < 0.6).astype(np.uint8)
        mask[-1] = 1
        rows.append(
            TrainingRow(
                generator.integers(0, SIZES["vocab_size"], length).astype(np.int32),
                mask,
                {
                    "advantage": generator.normal(size=length).astype(np.float32),
                    "temperature": np.full(length, generator.choice([0.7, 1.0]), np.float32),
                    "expected": np.zeros(length, np.float32),
                },
            )
        )
    return rows


PEFT_PREFIX = "base_model.model."
CHANNELS = ("advantage", "temperature", "expected")


def reference(model: Any, rows: list[TrainingRow]) -> dict[str, torch.Tensor]:
    """Fill each row's `expected` channel; the gradients of the token-mean loss by name."""
    model.zero_grad()
    tokens = sum(int(row.loss_mask_T[1:].sum()) for row in rows)
    for row in rows:
        ids = torch.from_numpy(row.input_ids_T).long()
        with following(model, row):
            logits = model(ids[None]).logits[0] / row.channels["temperature"][0]
        logprobs = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[1:, None])[:, 0]
        np.copyto(row.channels["expected"][1:], logprobs.detach().numpy())
        weight = torch.from_numpy(row.channels["advantage"][1:] * row.loss_mask_T[1:])
        (-(logprobs * weight).sum() / tokens).backward()
    return by_checkpoint_name(
        {
            name.removeprefix(PEFT_PREFIX): parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
    )


def weighted_loss(batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
    gaps = (logprobs_N.detach() - batch.channels_N["expected"]).abs()
    total = -(logprobs_N * batch.channels_N["advantage"]).sum()
    largest = gaps.max().item() if gaps.numel() else 0.0
    sums = {"loss": total.item(), "tokens": len(logprobs_N)}
    return total, LossStats(sums, {"gap": largest})


def gather_gradients(policy: TrainedNetwork) -> None:
    assert policy.ddp_module is not None
    for buffer in policy.ddp_module.buffers + policy.ddp_module.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def exported_gradients(policy: TrainedNetwork) -> dict[str, torch.Tensor]:
    """The reduced gradients, carried out by the same way as weights."""
    if policy.ddp_module is None:
        named: Any = policy.gpt.causal_lm.named_parameters()
        return by_checkpoint_name({name: parameter.grad.full_tensor() for name, parameter in named})
    gather_gradients(policy)
    weights = {parameter: parameter.data for parameter in policy.gpt.parameters()}
    for parameter in weights:
        parameter.data = parameter.main_grad
    gradients = {name: tensor.clone() for name, tensor in stream_hf_tensors(policy)}
    for parameter, data in weights.items():
        parameter.data = data
    return gradients


class Case:
    lora: LoraConfig | None = None
    digest = ""

    def __init__(
        self,
        family: str,
        parallel: ParallelConfig,
        folder: Path,
        layers: int = SIZES["num_hidden_layers"],
    ) -> None:
        self.family = family
        # The experts' groups exist for every family of a launch; dense ones do not use them.
        spread = {} if family.endswith("moe") else {"ep": 1}
        self.parallel = parallel.model_copy(update=spread)
        self.folder = folder / family
        self.model = self.make_model(layers)
        self.arch = parse_architecture(self.model.config.to_dict(), family, self.lora)
        self.policy, self.optimizer = self.build()
        self.load_numbers(self.policy)
        if self.policy.ddp_module is not None:
            self.optimizer.reload_model_params()

    def make_model(self, layers: int) -> Any:
        self.plain = hf_model(self.family, layers)
        return self.plain

    def load_numbers(self, policy: TrainedNetwork) -> None:
        self.state = by_checkpoint_name(self.model.state_dict())
        load_hf(policy, lambda tensor, part: self.state[tensor.name][part])

    def expected_export(self) -> dict[str, torch.Tensor]:
        return self.state

    def gradients(self, policy: TrainedNetwork) -> dict[str, torch.Tensor]:
        return exported_gradients(policy)

    def build(self) -> tuple[TrainedNetwork, Any]:
        policy = build_policy(self.arch, self.parallel, torch.float32, torch.device("cpu"))
        load_hf(policy, lambda tensor, part: torch.zeros(tensor.shape)[part])
        config = AdamConfig(lr=LR, weight_decay=0.1, clip_grad=1.0)
        return policy, build_optimizer(policy, config)

    def batches(self, policy: TrainedNetwork, rows: list[TrainingRow]) -> list[MicroBatch]:
        return make_micro_batches_of_this_rank(policy, rows, CHANNELS, max_tokens=90)

    def step(self, policy: TrainedNetwork, optimizer: Any, seed: int) -> tuple[float, float]:
        """Take one update; return the loss before it, and the gradient norm."""
        batches = self.batches(policy, make_rows(seed))
        tally, norm = train_step(policy, optimizer, batches, weighted_loss, LR)
        total = tally.reduce_over_ranks(("loss", "tokens"), ()).sums
        return total["loss"] / total["tokens"], norm

    def compare(self) -> dict[str, Any]:
        exported = {name: tensor.clone() for name, tensor in stream_hf_tensors(self.policy)}
        specs = [(name, shape) for name, shape, _ in list_hf_specs(self.policy)]
        state = self.expected_export()
        gaps = self.measure_gaps(self.policy, make_rows(seed=1))
        return {
            "export_is_exact": all(torch.equal(exported[name], state[name]) for name in exported),
            "specs_match": specs == [(name, tuple(t.shape)) for name, t in exported.items()],
            **gaps,
        }

    def compare_routed(self, recompute: Recompute) -> dict[str, Any]:
        """Against transformers with the same routes, which are computed again for the gradients."""
        assert self.arch.mixture is not None
        activations = ActivationMemoryConfig(recompute=recompute)
        policy = build_policy(
            self.arch, self.parallel, torch.float32, torch.device("cpu"), activations
        )
        self.load_numbers(policy)
        rows = make_rows(seed=6)
        give_random_routes(rows, self.arch.mixture, seed=6)
        return self.measure_gaps(policy, rows)

    def measure_gaps(self, policy: TrainedNetwork, rows: list[TrainingRow]) -> dict[str, Any]:
        """Measure the gaps of log-probabilities and gradients to those of transformers."""
        expected = reference(self.model, rows)
        batches = self.batches(policy, rows)
        tally = run_forward_backward(policy, batches, weighted_loss, backward=True)
        total = tally.reduce_over_ranks(("tokens", "followed", "rerouted"), ("gap",))
        gradients = self.gradients(policy)
        if policy.ddp_module is None:
            self.optimizer.zero_grad()
        else:
            policy.ddp_module.zero_grad_buffer()
        return {
            "missing": sorted(set(expected) - set(gradients)),
            "rerouted": total.sums["rerouted"] / max(1, total.sums["followed"]),
            "micro_batches": len(batches),
            "tokens": total.sums["tokens"],
            "logprob_gap": total.maxima["gap"],
            "gradient_gap": max(
                ((gradients[name] - expected[name]).abs().max() / expected[name].abs().max()).item()
                for name in expected
            ),
        }

    def save_and_resume(self) -> dict[str, Any]:
        """Two steps, a checkpoint, a third step; then the third step again from the checkpoint."""
        store = CheckpointStore(self.folder / "checkpoints", keep=2)
        expected = reference(self.model, make_rows(2))
        whole = torch.cat([part.double().flatten() for part in expected.values()])
        expected_norm = whole.norm().item()
        _, norm = self.step(self.policy, self.optimizer, 2)
        self.step(self.policy, self.optimizer, 3)
        state = TrainerState(step=2, generation=1, seed=0, base=self.digest)
        logprobs = self.logprobs(make_rows(1))
        store.begin_save(self.policy, self.optimizer, state)
        store.finish_save()
        store.close()
        loss, _ = self.step(self.policy, self.optimizer, 4)
        save_hf_model(self.policy, self.folder, self.folder / "after_step_3")
        resumed, resumed_loss = self.resume(store)
        return {
            "norm_gap": abs(norm / expected_norm - 1),
            "checkpoint_logprobs": logprobs,
            "loss_after_step_3": loss,
            "resume_is_bitwise": loss == resumed_loss
            and all(
                torch.equal(tensor[1], other[1])
                for tensor, other in zip(
                    stream_hf_tensors(resumed), stream_hf_tensors(self.policy), strict=True
                )
            ),
        }

    def logprobs(self, rows: list[TrainingRow]) -> list[float]:
        """The trainer's log-probability of every scored token, row after row, temperature 1."""
        length = 0
        for row in rows:
            positions = np.arange(length, length + len(row.input_ids_T), dtype=np.float32)
            np.copyto(row.channels["expected"], positions)
            row.channels["temperature"].fill(1.0)
            length += len(positions)
        logprobs: dict[int, float] = {}

        def remember(batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
            keys = batch.channels_N["expected"].int().tolist()
            logprobs.update(zip(keys, logprobs_N.tolist(), strict=True))
            return logprobs_N.sum(), LossStats()

        run_forward_backward(self.policy, self.batches(self.policy, rows), remember, backward=False)
        parts: list[dict[int, float]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, logprobs)
        merged = {key: value for part in parts for key, value in part.items()}
        return [merged[key] for key in sorted(merged)]

    def resume(self, store: CheckpointStore) -> tuple[TrainedNetwork, float]:
        """Another trainer that takes the third step from the checkpoint; its loss."""
        checkpoint = find_latest_checkpoint(store._directory)
        assert checkpoint is not None
        policy, optimizer = self.build()
        load_hf(policy, lambda tensor, part: self.state[tensor.name][part])
        load_checkpoint_into(policy, optimizer, checkpoint.path)
        loss, _ = self.step(policy, optimizer, 4)
        return policy, loss

    def resume_from_other_layout(self, folder: Path) -> dict[str, float]:
        """Take the third step from another layout's checkpoint: the largest differences."""
        policy, loss = self.resume(CheckpointStore(folder / self.family / "checkpoints", keep=2))
        report = json.loads((folder / "report.0.json").read_text())
        expected = HfModelReader(folder / self.family / "after_step_3")
        return {
            "loss_gap": abs(loss - report[self.family]["loss_after_step_3"]),
            "weight_gap": max(
                (tensor - expected.read_tensor(HfTensorSpec(name, tuple(tensor.shape))))
                .abs()
                .max()
                .item()
                for name, tensor in stream_hf_tensors(policy)
            ),
        }

    def save(self) -> None:
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.plain.config.architectures = [type(self.plain).__name__]  # SGLang reads it
            self.plain.config.save_pretrained(self.folder)
        dist.barrier()  # another rank may have to read it
        save_hf_model(self.policy, self.folder, self.folder / "saved", file_bytes=64 * 1024)

    def is_scored_alike_when_frozen(self) -> bool:
        """Check that the saved model, loaded as one that is never trained, gives the same bits."""
        rows = make_rows(5)
        frozen = load_frozen_network(
            self.folder / "saved", self.parallel, torch.float32, torch.device("cpu"), "reference"
        )
        expected = score_rows(self.policy, rows, minibatch_count=3, max_tokens=90)
        with frozen.hold_weights_on_device() as network:
            actual = score_rows(network, rows, minibatch_count=3, max_tokens=90)
        return all(np.array_equal(row, other) for row, other in zip(actual, expected, strict=True))


class AdaptedCase(Case):
    def __init__(self, name: str, parallel: ParallelConfig, folder: Path, layers: int) -> None:
        family, settings = ADAPTERS[name]
        self.lora = LoraConfig(rank=4, alpha=6, **settings)
        self.base = folder / name / "base"
        super().__init__(family, parallel, folder, layers)
        self.folder = folder / name
        self.family = name

    def make_model(self, layers: int) -> Any:
        import peft  # takes seconds, which other cases do without

        assert self.lora is not None
        base = super().make_model(layers)
        if dist.get_rank() == 0:
            base.save_pretrained(self.base)
        dist.barrier()
        self.digest = digest_base(self.base)
        self.state = by_checkpoint_name(base.state_dict())
        targets = self.lora.target_modules
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=self.lora.rank,
            lora_alpha=self.lora.alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            use_rslora=self.lora.rslora,
            use_dora=self.lora.dora,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
            adapted = peft.get_peft_model(copy.deepcopy(base), config)
        generator = torch.Generator().manual_seed(3)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                drawn = torch.randn(parameter.shape, generator=generator) * 0.05
                parameter.data.copy_(drawn + ("magnitude" in name) * parameter.data)
        return adapted

    def load_numbers(self, policy: TrainedNetwork) -> None:
        load_hf(policy, lambda tensor, part: self.state[tensor.name][part])
        held = self.model.state_dict()
        with torch.no_grad():
            for name, parameter in policy.gpt.causal_lm.named_parameters():
                assert parameter.requires_grad == (".lora_" in name)
                if parameter.requires_grad:
                    parameter.copy_(held[PEFT_PREFIX + name])

    def expected_export(self) -> dict[str, torch.Tensor]:
        return by_checkpoint_name(copy.deepcopy(self.model).merge_and_unload().state_dict())

    def gradients(self, policy: TrainedNetwork) -> dict[str, torch.Tensor]:
        gather_gradients(policy)
        named = policy.gpt.causal_lm.named_parameters()
        return {name: p.main_grad.clone() for name, p in named if p.requires_grad}

    def is_scored_alike_when_frozen(self) -> bool:
        """Check that the adapter, switched off, gives the results of its base."""
        rows = make_rows(5)
        reference(self.plain, rows)
        batches = self.batches(self.policy, rows)
        with switch_adapter_off(self.policy.gpt):
            tally = run_forward_backward(self.policy, batches, weighted_loss, backward=False)
        return tally.reduce_over_ranks((), ("gap",)).maxima["gap"] <= LOGPROB_BOUND


def go_through(scenario: dict[str, Any], paths: RunPaths) -> dict[str, Any]:
    """Compare every family of the scenario; an act of `replay_worker`."""
    parallel = ParallelConfig(**scenario["trainer"]["parallel"])
    findings: dict[str, Any] = {}
    for family in scenario["families"]:
        kind = AdaptedCase if family in ADAPTERS else Case
        case = kind(family, parallel, paths.root, scenario["layers"])
        report = case.compare()
        if case.arch.mixture:
            report["routed"] = [
                case.compare_routed(recompute) for recompute in ("full", "selective")
            ]
        case.save()
        report["frozen_is_exact"] = case.is_scored_alike_when_frozen()
        report |= case.save_and_resume()
        report["resumed_from"] = {
            Path(other).name: case.resume_from_other_layout(Path(other))
            for other in scenario["others"]
            if (Path(other) / family).exists()
        }
        findings[family] = report
    return findings
