"""Catalogue of the metrics of a step: everything that a row of `metrics.jsonl` may hold.

The tables of docs/metrics.md are made from it, and alerts take names and units from it. A contract
test keeps it equal to what the code writes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Direction = Literal["up", "down", "steady", "-"]
"""Where a healthy run goes: more is better, less is better, it should stay where it is, or the
number says nothing of health."""

MetricSource = Literal[
    "trainer", "batch", "records", "loss", "evaluation", "ledger", "events", "weights"
]
"""What it is computed from; a replay of a batch finds those of `batch`, `records`, `loss` again."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a step. A name that ends in `<name>` stands for any number of metrics."""

    name: str
    unit: str
    """Empty for a plain number; `share` is a number from 0 to 1."""
    meaning: str
    """The formula, or what is counted."""
    direction: Direction
    source: MetricSource


def _build_metrics_from_rows(
    metric_source: MetricSource, *rows: tuple[str, str, Direction, str]
) -> Iterator[Metric]:
    for name, unit, direction, meaning in rows:
        yield Metric(name, unit, meaning, direction, metric_source)


CATALOGUE: tuple[Metric, ...] = (
    *_build_metrics_from_rows(
        "trainer",
        ("step", "", "up", "batches trained"),
        ("version", "", "-", "the weights after the step, `generation.step`"),
        ("generation", "", "steady", "which start of the trainer wrote the row"),
        ("unix_time_s", "s", "-", "Unix time at which the row was complete"),
    ),
    *_build_metrics_from_rows(
        "batch",
        ("reward/mean", "", "up", "mean reward over episodes; of an episode, over its rows"),
        ("reward/std", "", "-", "standard deviation of the reward over episodes"),
        ("reward/min", "", "up", "lowest reward of an episode"),
        ("reward/max", "", "up", "highest reward of an episode"),
        ("reward/standard_error", "", "-",
         "standard deviation of the groups' mean rewards / sqrt(groups)"),
        ("groups/zero_variance", "share", "down",
         "groups in which no trained token has an advantage: they teach nothing"),
        ("groups/all_best", "share", "-",
         "groups of which every episode has the highest reward that the run has seen"),
        ("groups/all_worst", "share", "down",
         "groups of which every episode has the lowest reward that the run has seen"),
        ("advantage/abs_max", "", "steady",
         "largest advantage of a trained token, without its sign: at most sqrt(m) where "
         "`trainer.objective.scale_rewards` divides m numbers, without a teacher"),
        ("episodes", "", "-", "episodes of the batch"),
        ("groups", "", "-", "tickets of the batch whose episodes these are"),
        ("reply/tokens_mean", "tokens", "steady",
         "sampled tokens of a reply: of a stretch that the model sampled without a break"),
        ("reply/tokens_p95", "tokens", "steady", "95th percentile of the same"),
        ("reply/tokens_max", "tokens", "-", "the longest reply"),
        ("reply/repeated_fraction", "share", "down",
         "1 - distinct / all runs of 4 tokens, over the last 256 tokens of each reply"),
        ("tokens/trained", "tokens", "-", "tokens of the batch, prompts included"),
        ("tokens/sampled", "tokens", "-", "those of them that the model sampled"),
        ("tokens/untrainable", "tokens", "down",
         "those of them that are left out of the loss, as they were not sampled from the plain "
         "softmax, nor from a part of it that was recorded: greedy, `top_p`, `top_k`, `min_p`, a "
         "grammar, `logit_bias`, penalties"),
        ("staleness/mean", "steps", "down",
         "versions between the weights that sampled a token and those that it trains"),
        ("staleness/max", "steps", "down", "that of the oldest token"),
        ("staleness/mixed_version_rows", "", "-", "rows with tokens of several versions"),
    ),
    *_build_metrics_from_rows(
        "records",
        ("reward/part/<name>", "", "up", "mean over episodes of a part of `Reward(parts=...)`"),
        ("reward/metric/<name>", "", "-",
         "mean over episodes of a number of `Reward(metrics=...)`"),
        ("reply/cut_fraction", "share", "down",
         "replies that ended because they reached their limit of tokens"),
        ("reply/unrewarded", "", "down",
         "completed replies of the batch's episodes that are not trained, as no reward reaches "
         "them"),
        ("episode/turns_mean", "", "-", "model calls of an episode"),
        ("episode/turns_max", "", "-", "the most model calls of an episode"),
        ("episode/duration_mean_s", "s", "down", "from the start to the end of an episode"),
        ("episode/duration_max_s", "s", "down", "that of the slowest episode"),
        ("episode/tool_time_fraction", "share", "-",
         "time of episodes in which no model call of theirs was under way: tools and the agent"),
        ("cells/idle_s", "s", "down",
         "seconds that cells had no ticket, summed over cells, while the batch formed"),
        ("generation/tokens_per_s", "tokens/s", "up",
         "sampled tokens of the batch / seconds from its first model call to its last reply"),
        ("generation/cached_prompt_fraction", "share", "up",
         "prompt tokens that the engine took from its cache"),
        ("generation/slowest_cell_ratio", "", "up",
         "sampled tokens per second of model calls: the slowest cell's / the fastest's"),
    ),
    *_build_metrics_from_rows(
        "loss",
        ("loss", "", "-", "the objective, negated, per sampled token, penalties included"),
        ("grad_norm", "", "steady", "largest norm of the step's gradients, before clipping"),
        ("lr", "", "-", "learning rate"),
        ("entropy/mean", "nats", "steady",
         "entropy of the distribution that a sampled token came from, by the trainer's logits"),
        ("ratio/clip_fraction", "share", "down", "tokens whose gradient the clip removed"),
        ("importance_weight/mean", "", "steady", "proximal / pi_b before the bounds"),
        ("importance_weight/max", "", "down", "the largest of them"),
        ("importance_weight/out_of_bounds_fraction", "share", "down",
         "tokens that were clamped or masked"),
        ("importance_weight/effective_sample_fraction", "share", "up",
         "tokens of equal weight that would say as much, as a share of all"),
        ("kl/behavior", "nats", "down", "KL(pi_b || proximal) per token, estimated by k3"),
        ("kl/reference", "nats", "steady",
         "log pi - log reference per sampled token, with `trainer.objective.kl.coef`: an estimate "
         "of KL(pi || reference)"),
        ("kl/teacher", "nats", "down",
         "log pi - log teacher per sampled token, with `trainer.objective.teacher`, before the "
         "step: an estimate of KL(pi || teacher)"),
        ("critic/loss", "", "down",
         "with `trainer.objective.baseline=value`: half the squared error of the critic's values "
         "per trained token, clipped to `critic.clip_value`"),
        ("critic/explained_variance", "share", "up",
         "of the returns' variance, by the values before the step: 1 is perfect, 0 tells nothing"),
        ("critic/mean_value", "", "steady", "mean of these values"),
        ("critic/clip_fraction", "share", "steady",
         "trained tokens at which the clip took the critic's gradient away"),
        ("critic/grad_norm", "", "steady", "the critic's largest gradient norm of the step"),
        ("critic/lr", "", "-", "its learning rate"),
        ("logprob/engine_trainer_max_abs_diff", "nats", "down",
         "largest difference of a token's log-probability, engine against trainer, where both had "
         "the same weights"),
        ("logprob/engine_trainer_mean_abs_diff", "nats", "down", "the mean of the same"),
        ("logprob/engine_trainer_p99_abs_diff", "nats", "down",
         "its 99th percentile, to 4 %"),
        ("logprob/engine_trainer_kl", "nats", "down",
         "KL(engine || trainer) per token, estimated by k3"),
        ("logprob/compared_tokens", "tokens", "-",
         "tokens that these four are about; with several mini-batches and `proximal` of "
         "`log_linear` or `none` those of the first, as the others meet changed weights"),
        ("padding_waste", "share", "down", "places of forward passes that hold padding"),
        ("step/skipped", "", "down",
         "optimizer steps of the batch that were not taken: no gradient, or none that is finite"),
        ("step/nonfinite", "", "down", "those of them whose gradient was not finite"),
    ),
    *_build_metrics_from_rows(
        "trainer",
        ("throughput/wall_tokens_per_s", "tokens/s", "up", "`tokens/trained` / `time/step_s`"),
        ("throughput/train_phase_tokens_per_s", "tokens/s", "up",
         "`tokens/trained` / `time/train_s`"),
        ("throughput/tokens_per_s_per_gpu", "tokens/s", "up",
         "the same / ranks: each has a GPU, or none where `trainer.device` is `cpu`"),
        ("throughput/mfu", "share", "up",
         "model FLOP/s utilization: operations of the step / (`time/train_s` x ranks x peak FLOP/s "
         "of the GPU in bfloat16). Operations: 3 (2 w t + 2 v h s + 2 l a n) for w weights of the "
         "layers that a token meets, t tokens, v vocabulary, h hidden size, s scored tokens, "
         "l layers, a heads x their size, n sum of squared row lengths. null on a CPU, in float32 "
         "and for a GPU of unknown peak"),
        ("time/step_s", "s", "down", "from the row before to this one"),
        ("limit", "", "-",
         "what most of that time went to: `generation` (batch_wait, cell_wait), `training` "
         "(read, measure, pack, score, train, checkpoint, export, files), `weights` (publish) "
         "or `evaluation` (eval)"),
        ("time/batch_wait_s", "s", "down", "waiting for episodes"),
        ("time/cell_wait_s", "s", "down", "waiting for a replica that takes the weights"),
        ("time/read_s", "s", "down", "reading the batch, and checking its digests"),
        ("time/measure_s", "s", "down", "computing the metrics of its replies and episodes"),
        ("time/pack_s", "s", "down", "advantages and packing"),
        ("time/score_s", "s", "down",
         "log-probabilities under a reference, a teacher, and the policy before the step"),
        ("time/train_s", "s", "down", "forward, backward, optimizer"),
        ("time/publish_s", "s", "down", "finding replicas and sending them the weights"),
        ("time/checkpoint_s", "s", "down", "copying the state, and waiting for its writer"),
        ("time/eval_s", "s", "down", "waiting for held-out tasks"),
        ("time/export_s", "s", "down", "writing a Hugging Face model"),
        ("time/files_s", "s", "down",
         "writing the row before and events, and reading small files of the run directory"),
        ("memory/trainer_peak_bytes", "bytes", "down",
         "most memory that a rank has held so far: of its GPU, else resident"),
        ("disk/free_bytes", "bytes", "up", "free on the storage of the run directory"),
    ),
    *_build_metrics_from_rows(
        "evaluation",
        ("eval/reward", "", "up", "mean reward of the held-out set `valid`, of an evaluated step"),
        ("evaluation/<name>", "", "up",
         "`evaluation/SET/METRIC` of each evaluation set, and its 95 % interval as `_low` and "
         "`_high`: [evaluation sets](evaluation.md)"),
    ),
    *_build_metrics_from_rows(
        "ledger",
        ("tickets/stale_trained", "", "down",
         "tickets of the batch with a token older than the bound"),
        ("tickets/stale_dropped", "", "down", "tickets given up on because they were older"),
        ("tickets/stale_requeued", "", "down", "tickets issued again because they were older"),
        ("tickets/filtered", "", "down", "tickets finished and not accepted"),
        ("tickets/failed", "", "down", "tickets dropped because their agent kept failing"),
    ),
    *_build_metrics_from_rows(
        "events",
        ("episode/failures", "", "down",
         "tries of training episodes that raised or took too long since the row before"),
        ("episode/rewarded_failures", "", "down",
         "those of them that earn a reward all the same: `rollout.failed_episodes`"),
    ),
    *_build_metrics_from_rows(
        "weights",
        ("weights/group_join_s", "s", "down", "forming groups; near 0 while replicas stay"),
        ("weights/write_s", "s", "down", "by disk: writing"),
        ("weights/pause_call_s", "s", "down", "from here on generation stands still"),
        ("weights/transfer_s", "s", "down", "gathering, packing and sending"),
        ("weights/load_s", "s", "down",
         "what the slowest group waited for its replicas to load; by disk, reading too"),
        ("weights/verify_s", "s", "down", "scoring of a fixed prompt by all replicas"),
        ("weights/flush_s", "s", "down", "the cache of the old weights"),
        ("weights/resume_s", "s", "down", "back into service"),
        ("weights/generation_pause_version", "", "-",
         "the newest update that replicas told of"),
        ("weights/generation_pause_s", "s", "down",
         "the order to pause until the slowest replica serves again, in that update"),
    ),
)  # fmt: skip

_METRIC_BY_NAME = {metric.name: metric for metric in CATALOGUE}
_METRIC_PATTERNS = [
    (re.compile(re.escape(metric.name.removesuffix("<name>")) + ".+"), metric)
    for metric in CATALOGUE
    if metric.name.endswith("<name>")
]


def find_metric(metric_name: str) -> Metric | None:
    if (metric := _METRIC_BY_NAME.get(metric_name)) is not None:
        return metric
    matching = (one for pattern, one in _METRIC_PATTERNS if pattern.fullmatch(metric_name))
    return next(matching, None)
