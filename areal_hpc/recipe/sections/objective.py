"""Recipe section `trainer.objective`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from areal_hpc.recipe.base import BaseConfig


class OverlongConfig(BaseConfig):
    """Treatment of replies that reached their limit of tokens, or came near it."""

    mask: bool = False
    """Leave replies cut at their limit out of the loss; their rewards still count in the group."""
    penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Largest deduction from the reward of a long reply (DAPO's soft penalty: 1)."""
    expected_tokens: Annotated[int, Field(ge=0)] | None = None
    """Length of a reply up to which there is no penalty."""
    cache_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens beyond it over which the penalty grows to its maximum."""

    @model_validator(mode="after")
    def _check_penalty_keys(self) -> OverlongConfig:
        lengths = (self.expected_tokens, self.cache_tokens)
        if (self.penalty > 0) != (None not in lengths) or lengths.count(None) == 1:
            raise ValueError(
                "penalty, expected_tokens and cache_tokens belong together, got "
                f"penalty={self.penalty}, expected_tokens={lengths[0]}, cache_tokens={lengths[1]}: "
                "set all three, or none"
            )
        return self


CorrectionAggregate = Literal["mean", "sum", "max"]


class KlConfig(BaseConfig):
    """Penalty on the divergence of the trained policy from a reference, KL(pi || reference)."""

    coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the penalty; 0 loads no reference."""
    placement: Literal["reward", "loss"] = "reward"
    """`reward`: deducted from a reply's reward; `loss`: a term of the loss at each token."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the divergence from d = log pi - log reference at a sampled token: d, d^2 / 2,
    or exp(-d) - 1 + d, whose gradient as a loss is biased."""
    reference: Literal["initial"] | Path = "initial"
    """`initial`: the model that reinforcement learning starts from; or a model directory."""

    @model_validator(mode="after")
    def _check_kl_keys(self) -> KlConfig:
        if self.coef == 0 and self != KlConfig.model_construct():
            raise ValueError("without coef there is no penalty: set coef, or leave the others out")
        if self.placement == "reward" and self.estimator != "k1":
            raise ValueError(
                f"estimator={self.estimator} with placement=reward follows another gradient than "
                "that of the divergence (norm ratio .24 to .60): set estimator=k1"
            )
        if self.placement == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator=k1 with placement=loss has an expected gradient of 0: set estimator=k2, "
                "or placement=reward"
            )
        return self


class TeacherConfig(BaseConfig):
    """Distillation: the policy is trained toward its own tokens that a teacher finds likely."""

    path: Path | None = None
    """Directory of the teacher's model, with the policy's tokenizer."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+/?$")] | None = None
    """Instead of path, URL of an SGLang server of such a model: `http://node7:30000`."""
    api_key_file: Path | None = None
    """With url: file of mode 0600 with the server's API key."""
    coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Factor of log teacher - log pi of a token, which is added to the token's advantage."""

    @model_validator(mode="after")
    def _check_keys(self) -> TeacherConfig:
        if self.path is not None and self.url is not None:
            raise ValueError(
                f"path={self.path} and url={self.url} both name a teacher: leave one of them out"
            )
        if (self.path is None and self.url is None) != (self.coef == 0):
            raise ValueError(
                f"a teacher and coef belong together, got path={self.path} and url={self.url} "
                f"with coef={self.coef}: set path or url with coef, or none of them"
            )
        if self.api_key_file is not None and self.url is None:
            raise ValueError("without url no server is called, got api_key_file: leave it out")
        try:
            _ = urlsplit(self.url or "").port
        except ValueError as error:
            raise ValueError(f"url={self.url} is no address of a server: {error}") from error
        return self


class CriticConfig(BaseConfig):
    """Network that learns the reward of the rest of an episode, as a baseline for each token."""

    model: Literal["initial"] | Path | None = None
    """Its initial weights: `initial`, the policy's initial model, or a model directory."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate of the critic; other settings are those of `trainer.optimizer`."""
    clip_value: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 0.2
    """Largest change of a value in one step, beyond which it is clipped; null: no bound."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps of the critic, in which it is trained and the policy is not."""


GROUP_SETTINGS = (
    *(("baseline", "group_mean"), ("baseline", "leave_one_out")),
    *(("scale_rewards", "group"), ("scale_rewards", "group_mean")),
)
"""Settings that compare the episodes of one task."""
RATIO_SETTINGS = (("surrogate", "cispo"), ("surrogate", "dppo"), ("ratio_level", "sequence"))
"""Settings that change nothing if every ratio is 1."""


class ObjectiveConfig(BaseConfig):
    """Policy-gradient objective; pi_b is the policy that sampled a token."""

    preset: Literal[
        "default",
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "rloo",
        "reinforce",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "ppo",
        "icepop",
        "opd",
        "max_rl",
        "dppo",
        "length_aware",
    ] = "default"
    """Known algorithm, which sets keys, also of other sections, that the recipe lacks."""
    credit: Literal["episode", "turn"] = "episode"
    """`episode`: a reply earns all its episode's rewards; `turn`: its own and those passed back."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """With credit=turn: share of the rewards of later replies that passes back to a reply."""
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "value", "none"] = "group_mean"
    """Deducted mean: of the group, its other episodes, or the batch; or a critic's values (GAE)."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """With baseline=value: 1 compares with all later rewards, 0 with the next value alone."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With baseline=value: factor of later rewards and values, for each step."""
    gae_unit: Literal["token", "turn"] = "token"
    """With baseline=value: a step is a token, or a whole reply."""
    critic: CriticConfig = CriticConfig()
    """Network that estimates values."""
    scale_rewards: Literal["group", "group_mean", "batch", "none"] = "group"
    """Divisor of differences: their standard deviation over the group or the batch, the mean of
    the group (MaxRL), or 1."""
    std_ddof: Literal[0, 1] = 1
    """Degrees of freedom subtracted in a standard deviation; 0 is AReaL's biased one."""
    min_reward_std: Annotated[float, Field(gt=0)] = 1e-4
    """Least standard deviation of a group's differences; below it their advantages are zero."""
    surrogate: Literal["clip", "cispo", "dppo", "none"] = "clip"
    """Term of ratio r and advantage A: min(r A, clip(r) A); clip(r) A log pi; r A, or 0 where A
    moves pi - proximal further out of its bounds; or A log pi."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Ratios of each token, or their geometric mean over the row (GSPO)."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower clip of the ratio to the proximal policy, at 1 - this; with dppo: of pi - proximal, at
    minus this."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Upper clip of the ratio to the proximal policy, at 1 + this; with dppo: of pi - proximal."""
    clip_dual: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Bound on terms with A < 0, which are at least this times A; null: no bound."""
    loss_agg: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
    ] = "token_mean"
    """Mean of all tokens' terms; or mean over episodes of their means, sums or scaled sums."""
    loss_scale_tokens: Annotated[int, Field(ge=1)] | None = None
    """With seq_mean_token_sum_norm: divisor of sums; default: `rollout.sampling.max_new_tokens`."""
    entropy_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the entropy of each token's distribution, which the loss then increases."""
    observation_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the mean cross-entropy of the tokens between two replies, such as results of tools
    (ECHO); 0 leaves them out."""
    overlong: OverlongConfig = OverlongConfig()
    """Treatment of replies at or near their limit of tokens."""
    brevity_bonus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Share by which the reward of an episode grows as its replies get shorter than the mean of its
    group's successes (rewards above 0)."""
    kl: KlConfig = KlConfig()
    """Penalty on the divergence from a reference policy."""
    teacher: TeacherConfig = TeacherConfig()
    """Distillation from a teacher, token by token."""
    proximal: Literal["recompute", "log_linear", "none"] = "recompute"
    """Denominator of ratios: the step's initial weights, their log-linear estimate, or pi_b."""
    off_policy_correction: Literal["clamp", "mask", "none"] = "clamp"
    """Weights proximal / pi_b of tokens: clamped to bounds (TIS), masked outside (IcePop), or 1."""
    off_policy_correction_level: Literal["token", "sequence"] = "token"
    """Bounds on each token, or on its row (a row's weight is its ratios' geometric mean)."""
    off_policy_correction_metric: Literal["ratio", "kl", "k1", "k2"] = "ratio"
    """Bounded quantity: r = proximal / pi_b, r - 1 - log r, log r, or (log r)^2 / 2."""
    off_policy_correction_low: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Lower bound; 0 is none; negative with k1."""
    off_policy_correction_high: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    """Upper bound."""
    custom: str = ""
    """`package.module:function` of LossInputs: a term for each token, instead of surrogate's."""
    off_policy_correction_agg: CorrectionAggregate = "mean"
    """At level sequence: the bounded mean, sum or maximum over the row (of ratios: of logs)."""

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.baseline == "value"

    @property
    def advantages_need_logprobs(self) -> bool:
        """Whether advantages depend on log-probabilities of the weights that a step begins with."""
        return (self.kl.coef > 0 and self.kl.placement == "reward") or self.teacher.coef > 0

    @model_validator(mode="after")
    def _check_advantage_keys(self) -> ObjectiveConfig:
        if self.credit == "episode" and self.turn_discount != 1:
            raise ValueError(
                "with credit=episode all replies earn the same, and no turn is discounted by "
                f"turn_discount={self.turn_discount}: set credit=turn"
            )
        if self.brevity_bonus and (self.credit == "turn" or self.has_critic):
            raise ValueError(
                "brevity_bonus compares the lengths of a group's episodes, got "
                f"credit={self.credit} and baseline={self.baseline}: set credit=episode without "
                "baseline=value, or leave it out"
            )
        if self.scale_rewards in ("none", "group_mean") and self.std_ddof != 1:
            raise ValueError(
                f"with scale_rewards={self.scale_rewards} nothing is divided by a standard "
                f"deviation, got std_ddof="
                f"{self.std_ddof}: leave it out, or set scale_rewards=group"
            )
        return self

    @model_validator(mode="after")
    def _check_critic_keys(self) -> ObjectiveConfig:
        if self.baseline == "value":
            if self.scale_rewards == "group_mean":
                raise ValueError(
                    "scale_rewards=group_mean divides by the mean of a group, and baseline=value "
                    "compares no group: set scale_rewards=batch"
                )
            if self.observation_coef:
                raise ValueError(
                    "observation_coef trains tokens that have no value, and baseline=value learns "
                    "a value for every trained token: leave one of them out"
                )
            if self.critic.model is None:
                raise ValueError(
                    "baseline=value takes its values from a critic: set critic.model=initial, or "
                    "a model directory"
                )
            if self.turn_discount != 1:
                raise ValueError(
                    f"turn_discount={self.turn_discount} has no effect with baseline=value, where "
                    "rewards pass back by discount and gae_lambda: set discount, with gae_unit=turn"
                )
            if self.std_ddof != 1:
                raise ValueError(
                    "baseline=value scales by a root mean square, which loses no degree of "
                    f"freedom, got std_ddof={self.std_ddof}: leave it out"
                )
            return self
        fields = type(self).model_fields
        changed = [
            f"{name}={getattr(self, name)}"
            for name in ("gae_lambda", "discount", "gae_unit")
            if getattr(self, name) != fields[name].default
        ]
        if self.critic != CriticConfig.model_construct():
            changed.append(f"critic.model={self.critic.model}")
        if changed:
            raise ValueError(
                f"baseline={self.baseline} has no critic, got {' and '.join(changed)}: set "
                "baseline=value, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_loss_keys(self) -> ObjectiveConfig:
        if self.clip_dual is not None and self.surrogate != "clip":
            raise ValueError(
                f"clip_dual bounds the terms of surrogate=clip, got surrogate={self.surrogate}: "
                "leave it out"
            )
        if self.ratio_level == "sequence" and self.surrogate == "dppo":
            raise ValueError(
                "surrogate=dppo bounds the probability of each token, got ratio_level=sequence: "
                "set ratio_level=token"
            )
        if self.ratio_level == "sequence" and self.surrogate == "none":
            raise ValueError(
                "surrogate=none has no ratio, so ratio_level=sequence means nothing: "
                "set ratio_level=token, or surrogate=clip"
            )
        if (self.loss_scale_tokens is None) == (self.loss_agg == "seq_mean_token_sum_norm"):
            raise ValueError(
                "loss_scale_tokens belongs to loss_agg=seq_mean_token_sum_norm, got "
                f"loss_scale_tokens={self.loss_scale_tokens} with loss_agg={self.loss_agg}: set "
                "both (to rollout.sampling.max_new_tokens, for one), or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_custom_keys(self) -> ObjectiveConfig:
        if not self.custom:
            return self
        if self.preset != "default":
            raise ValueError(
                f"custom={self.custom} replaces the objective of preset={self.preset}: leave one "
                "of them out, and set the keys that the function needs"
            )
        default = type(self).model_fields
        for name in ("surrogate", "ratio_level", "clip_dual"):
            if getattr(self, name) != default[name].default:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect with custom={self.custom}, which "
                    "gives the terms itself: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _check_correction_keys(self) -> ObjectiveConfig:
        if self.off_policy_correction == "none":
            return self
        low, high = self.off_policy_correction_low, self.off_policy_correction_high
        if self.proximal == "none":
            raise ValueError(
                "with proximal=none the sampling policy is the proximal one and no weight between "
                f"them is left for off_policy_correction={self.off_policy_correction}: "
                "set off_policy_correction=none"
            )
        metric, agg = self.off_policy_correction_metric, self.off_policy_correction_agg
        if agg != "mean" and self.off_policy_correction_level == "token":
            raise ValueError(
                f"off_policy_correction_agg={agg} is for bounds on rows: set "
                "off_policy_correction_level=sequence, or leave it out"
            )
        if metric != "ratio" and self.off_policy_correction == "clamp":
            raise ValueError(
                "off_policy_correction=clamp needs off_policy_correction_metric=ratio: "
                f"use mask with {metric}"
            )
        if metric in ("kl", "k2") and low != 0:
            raise ValueError(
                f"a divergence is bounded above only, got off_policy_correction_low={low}"
            )
        if metric == "k1" and low > 0:
            raise ValueError(
                "k1 is 0 where the policies are equal, which its bounds must enclose, got "
                f"off_policy_correction_low={low}: use a negative one, or 0 for none"
            )
        if metric == "ratio" and not 0 <= low <= 1 <= high:
            raise ValueError(
                "the bounds of a ratio must enclose 1, that of equal policies, got "
                f"off_policy_correction_low={low} and off_policy_correction_high={high}"
            )
        return self
