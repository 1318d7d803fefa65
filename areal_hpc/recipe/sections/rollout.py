"""Recipe section `rollout`."""

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
    """Generation parameters that apply where the agent's own request is silent."""

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1 keeps all tokens."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 512
    """Maximum tokens of one reply."""


class AgentExecutionConfig(BaseConfig):
    """Process of the agent, and the way from an episode's interactions to training rows."""

    mode: Literal["inline", "subproc", "online"] = "inline"
    """`inline`: in the driver; `subproc`: worker processes; `online`: external programs."""
    sampling: Literal["agent", "recipe"] = "agent"
    """Whose temperature, top_p, top_k hold: the agent's where it asks, or always the recipe's."""
    auxiliary: Annotated[str, Field(pattern=r"^(keep|drop|[\w.]+:\w+)$")] = "keep"
    """`drop`: title and probe calls are not trained; `package.module:function`: those it names."""
    subproc_max_workers: Annotated[int, Field(ge=1)] = 4
    """Processes of a cell that run episodes in mode `subproc`."""
    python: str = ""
    """Python that runs the agent in mode `subproc`, without areal_hpc; empty: the driver's."""
    variables: tuple[str, ...] = ()
    """Variables of the job that agents in mode `subproc` see, besides `PATH` and such."""
    isolation: AgentIsolation | None = None
    """What `data["sandbox"]` is, where commands run; `none`: as you do; null: there is none."""
    sandbox: SandboxConfig = SandboxConfig()
    """What it sees, reaches and may use."""
    export_style: Literal["concat", "individual"] = "concat"
    """Packing: `concat`: a row per branch of the conversation; `individual`: one per model call."""
    credit: Literal["tree", "chronological"] = "tree"
    """Whom a reward passes back to: `tree`: what led to it; `chronological`: all earlier calls."""
    drop_retry_orphans: bool = True
    """Drop unused replies to a request that its client then sent again, and said so."""

    def build_export_settings(self, is_credited: bool) -> ExportSettings:
        """How rows are made; `is_credited` if the agent has passed rewards back itself."""
        return ExportSettings(self.export_style, self.credit, self.drop_retry_orphans, is_credited)


class EpisodeLimitsConfig(BaseConfig):
    """Limits of an episode on the model; a task may override it by a key `limits` of its own."""

    max_turns: Annotated[int, Field(ge=0)] = 0
    """Replies of the model in one episode; a further call is refused (400). 0: any number."""
    max_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens sampled in one episode: replies are cut, then calls refused (400). 0: any number."""


AGENT_DEFAULTS_BY_WORKFLOW: Mapping[str, Mapping[str, str]] = {
    "areal_hpc.agents.harness.harness_agent.HarnessAgent": {
        "sampling": "recipe",  # programs ask for temperature 0, on which nothing can be learnt
        "auxiliary": "drop",
    }
}
"""What `rollout.agent` is for these workflows, unless the recipe says otherwise."""


class RolloutConfig(BaseConfig):
    """The user's agent and how many of its episodes run at once."""

    workflow: str = ""
    """Dotted path of the agent class, `package.module.Class`; empty in mode `online`."""
    workflow_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the agent's constructor."""
    agent: AgentExecutionConfig = AgentExecutionConfig()
    """Process of the agent, and the way from its episodes to training rows."""
    n_samples: Annotated[int, Field(ge=1)] = 8
    """Episodes per task: the group whose rewards are compared."""
    extra_samples: Annotated[int, Field(ge=0)] = 0
    """Additional episodes per task; the first `n_samples` to finish are trained."""
    min_samples: Annotated[int | None, Field(ge=2)] = None
    """Train a group with at least this many episodes when the others failed; null: all."""
    filter_same_reward: bool = False
    """Leave out groups whose episodes all earned the same in all, whatever each reply earned."""
    should_accept: str = ""
    """`package.module:function` of `{"rewards": array, "task": row}`: whether to train it."""
    curriculum: str = ""
    """`package.module:function` that weights tasks by their past rewards; empty: in order."""
    max_concurrent_rollouts: Annotated[int, Field(ge=1)] = 64
    """Episodes in flight over all cells."""
    max_head_offpolicyness: Annotated[int, Field(ge=0)] = 0
    """Age, in versions, of a token's weights that admission keeps to; 0 is synchronous."""
    stale_groups: StaleGroupPolicy = "train_with_correction"
    """What to do with a group that exceeds it nevertheless; `drop` is biased against long ones."""
    sampling: SamplingConfig = SamplingConfig()
    """Training generation parameters."""
    limits: EpisodeLimitsConfig = EpisodeLimitsConfig()
    """What an episode may use; a task overrides them and `timeout_s` by a key `limits`."""
    episode_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """An episode that takes longer has failed."""
    max_episode_tries: Annotated[int, Field(ge=1)] = 3
    """Attempts per episode before it counts as failed (see `min_samples`)."""

    record_sampling_mask: bool = False
    """Record which tokens top_p, top_k, min_p or a grammar left, and train over these alone."""
    failed_episodes: Literal["retry", "drop"] | dict[Literal["reward"], float] = "retry"
    """Repeat them, leave them out of their group, or train them with `{reward: x}`."""

    @property
    def episodes_per_ticket(self) -> int:
        """Episodes that are started for one task."""
        return self.n_samples + self.extra_samples

    @property
    def min_group_size(self) -> int:
        """Episodes that must end well, or their ticket is dropped."""
        return self.n_samples if self.min_samples is None else self.min_samples

    @property
    def failure_reward(self) -> float | None:
        """What an episode earns whose agent failed; None where such episodes are not trained."""
        return self.failed_episodes["reward"] if isinstance(self.failed_episodes, dict) else None

    @property
    def tries_per_episode(self) -> int:
        """How often an episode fails before it is missing from its group."""
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
