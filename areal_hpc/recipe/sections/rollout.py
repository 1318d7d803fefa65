"""Recipe section `rollout`: the agent, its sampling, its limits, groups of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from areal_hpc.recipe.base import BaseConfig
from areal_hpc.recipe.sections.sandbox import AgentIsolation, SandboxConfig
from areal_hpc.wire.agent_reward import MAX_REWARD
from areal_hpc.wire.ledger import StaleGroupPolicy
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import MAX_TEMPERATURE


class SamplingConfig(BaseConfig):
    """Default generation parameters of the agent's requests."""

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of nucleus sampling."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Number of likeliest tokens to sample from; -1 keeps all."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 512
    """Maximum number of tokens of one reply."""


class AgentExecutionConfig(BaseConfig):
    """Process of the agent, and conversion of an episode's interactions to training rows."""

    mode: Literal["inline", "subproc", "online"] = "inline"
    """`inline`: in the driver; `subproc`: worker processes; `online`: external programs."""
    train_on: Literal["programs", "people"] = "programs"
    """Sessions that mode `online` trains: `people` adds those of `areal-hpc start`."""
    sampling: Literal["agent", "recipe"] = "agent"
    """Source of temperature, top_p and top_k: the agent's request if it has them, or the recipe."""
    auxiliary: Annotated[str, Field(pattern=r"^(keep|drop|[\w.]+:\w+)$")] = "keep"
    """`drop`: title and probe calls are not trained; `package.module:function` chooses others."""
    subproc_max_workers: Annotated[int, Field(ge=1)] = 4
    """Processes of a cell that run episodes in mode `subproc`."""
    python: str = ""
    """Python that runs the agent in mode `subproc`, without areal_hpc; empty: the driver's."""
    variables: tuple[str, ...] = ()
    """Variables of the job that agents in mode `subproc` see, beside `PATH` and the like."""
    isolation: AgentIsolation | None = None
    """Runtime of `data["sandbox"]`, which runs commands; `none`: as you; null: no sandbox."""
    sandbox: SandboxConfig = SandboxConfig()
    """Files, network and limits of the sandbox."""
    export_style: Literal["concat", "individual"] = "concat"
    """Rows: `concat`: one for each branch of the conversation; `individual`: one for each call."""
    credit: Literal["tree", "agents", "chronological"] = "tree"
    """Calls that share in a reward: `tree`: those that led to it; `agents`: and their sub-agents'
    by id; `chronological`: all earlier."""
    drop_retry_orphans: bool = True
    """Drop unused replies to a request that its client has repeated and marked as a retry."""

    def build_export_settings(self, is_credited: bool) -> ExportSettings:
        """Build the settings of rows; `is_credited`: the agent has propagated rewards itself."""
        return ExportSettings(self.export_style, self.credit, self.drop_retry_orphans, is_credited)


class EpisodeLimitsConfig(BaseConfig):
    """Limits of an episode's use of the model; a task may override them by a key `limits`."""

    max_turns: Annotated[int, Field(ge=0)] = 0
    """Replies of the model in one episode; further calls are refused (400). 0: no limit."""
    max_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens sampled in one episode: replies are cut, then calls refused (400). 0: no limit."""


AGENT_DEFAULTS_BY_WORKFLOW: Mapping[str, Mapping[str, str]] = {
    "areal_hpc.agents.harness.harness_agent.HarnessAgent": {
        "sampling": "recipe",  # programs request temperature 0, at which nothing can be learned
        "auxiliary": "drop",
    }
}
"""Defaults of `rollout.agent` for these workflows."""


class RolloutConfig(BaseConfig):
    """The user's agent, and the number and treatment of its episodes."""

    workflow: str = ""
    """Dotted path of the agent class, `package.module.Class`; empty in mode `online`."""
    workflow_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the agent's constructor."""
    agent: AgentExecutionConfig = AgentExecutionConfig()
    """Process of the agent, and conversion of its episodes to training rows."""
    n_samples: Annotated[int, Field(ge=1)] = 8
    """Episodes of a task: the group whose rewards are compared."""
    extra_samples: Annotated[int, Field(ge=0)] = 0
    """Additional episodes of a task; the first `n_samples` to finish are trained."""
    min_samples: Annotated[int | None, Field(ge=2)] = None
    """Least number of episodes to train a group with if the others failed; null: all."""
    filter_same_reward: bool = False
    """Whether to leave out groups whose episodes all have the same total reward."""
    should_accept: str = ""
    """`package.module:function` of `{"rewards": array, "task": row}`: true to train the group."""
    curriculum: str = ""
    """`package.module:function` that weights tasks by their past rewards; empty: in order."""
    max_concurrent_rollouts: Annotated[int, Field(ge=1)] = 64
    """Concurrent episodes of all cells together."""
    adaptive_concurrency: bool = False
    """Run fewer while requests wait at a cell's servers (docs/admission.md)."""
    max_head_offpolicyness: Annotated[int, Field(ge=0)] = 0
    """Bound of admission on the age of a token's weights, in versions; 0 is synchronous."""
    stale_groups: StaleGroupPolicy = "train_with_correction"
    """Treatment of a group above this bound; `drop` is biased against long episodes."""
    sampling: SamplingConfig = SamplingConfig()
    """Training generation parameters."""
    limits: EpisodeLimitsConfig = EpisodeLimitsConfig()
    """Limits of an episode; a task overrides them and `timeout_s` by a key `limits`."""
    episode_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time after which an episode fails."""
    max_episode_tries: Annotated[int, Field(ge=1)] = 3
    """Attempts per episode before it counts as failed (see `min_samples`)."""

    record_sampling_mask: bool = False
    """Record the tokens that top_p, top_k, min_p or a grammar kept, and train over these alone."""
    failed_episodes: Literal["retry", "drop"] | dict[Literal["reward"], float] = "retry"
    """Repeat failed episodes, leave them out of their group, or train them with `{reward: x}`."""

    @property
    def episodes_per_ticket(self) -> int:
        """Number of episodes started for one task."""
        return self.n_samples + self.extra_samples

    @property
    def min_group_size(self) -> int:
        """Number of episodes that must succeed, or their ticket is dropped."""
        return self.n_samples if self.min_samples is None else self.min_samples

    @property
    def failure_reward(self) -> float | None:
        """Reward of an episode whose agent failed; None if such episodes are not trained."""
        return self.failed_episodes["reward"] if isinstance(self.failed_episodes, dict) else None

    @property
    def tries_per_episode(self) -> int:
        """Number of tries after which a failed episode is missing from its group."""
        return 1 if self.failed_episodes == "drop" else self.max_episode_tries

    @model_validator(mode="before")
    @classmethod
    def _fill_in_agent_defaults(cls, section: Any) -> Any:
        own = AGENT_DEFAULTS_BY_WORKFLOW.get(
            str(section.get("workflow")) if isinstance(section, dict) else ""
        )
        agent = section.get("agent") or {} if own else None
        return (
            {**section, "agent": {**own, **agent}} if own and isinstance(agent, dict) else section
        )

    @model_validator(mode="after")
    def _check_failed_episodes(self) -> RolloutConfig:
        reward = self.failure_reward if self.failed_episodes else None
        if self.failed_episodes in ("retry", "drop"):
            return self
        if reward is None or not abs(reward) <= MAX_REWARD:
            raise ValueError(
                f"failed_episodes is retry, drop, or {{reward: x}} with a finite number x, got "
                f"{self.failed_episodes}"
            )
        return self
