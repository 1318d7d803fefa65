"""Agents built with the OpenAI Agents SDK, and a math team."""

from typing import Any

from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, handoff
from agents.extensions.handoff_prompt import RECOMMENDED_PROMPT_PREFIX

from areal_hpc.agents.math_tools import DEFAULT_MATH_REWARD_PATH, SubprocessRewardFunction
from areal_hpc.agents.openai_agent import make_client
from areal_hpc.recipe.user_functions import import_by_path

MATH_AGENT_BUILDER_PATH = f"{__name__}.build_math_agent"


class AgentsSdkWorkflow:
    """Workflow that builds an SDK agent for every episode, and judges its final output.

    Hand-offs and tools are tool calls: `inference.tool_call_parser` must name the model's format.

    Args:
        agent_builder_path: Dotted path of a function that returns an `agents.Agent`.
        agent_builder_kwargs: Arguments of that function.
        reward_fn_path: Dotted path of the reward function.
        max_turns: Maximum number of model calls; an agent that needs more fails.
        use_responses: Whether to use the Responses API instead of chat completions.
        settings: The SDK's `ModelSettings`, for all agents: `temperature`, `max_tokens`, ...
    """

    def __init__(
        self,
        agent_builder_path: str,
        agent_builder_kwargs: dict[str, Any] | None = None,
        reward_fn_path: str = DEFAULT_MATH_REWARD_PATH,
        max_turns: int = 10,
        use_responses: bool = False,
        **settings: Any,
    ) -> None:
        self.build = import_by_path(agent_builder_path)
        self.builder_kwargs = agent_builder_kwargs or {}
        self.reward = SubprocessRewardFunction(reward_fn_path)
        self.max_turns = max_turns
        self.use_responses = use_responses
        self.settings = ModelSettings(**settings)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        text = await self.ask(make_client(extra_kwargs), list(data["messages"]))
        return await self.reward(text, data)

    async def ask(self, client: Any, messages: list[Any]) -> str:
        result = await Runner.run(
            self.build(**self.builder_kwargs),
            input=messages,
            max_turns=self.max_turns,
            run_config=RunConfig(
                model="default",
                model_provider=OpenAIProvider(
                    openai_client=client, use_responses=self.use_responses
                ),
                model_settings=self.settings,
                tracing_disabled=True,
            ),
        )
        return str(result.final_output)


def build_math_agent() -> Agent:
    """Build a coordinator that may hand off to an analyst, a solver or a verifier."""
    verifier = _build_team_member("Verifier", "You check a solution and state the final answer.")
    solver = _build_team_member("Solver", "You solve the problem step by step.", verifier)
    analyst = _build_team_member("Analyst", "You say what is given and what is asked.", solver)
    return _build_team_member("Coordinator", "You get a problem solved.", analyst, solver, verifier)


def build_single_agent(instructions: str = "You solve problems step by step.") -> Agent:
    """Build an agent without tools."""
    return Agent(name="Solver", instructions=instructions)


def _build_team_member(member_name: str, duty: str, *teammates: Agent) -> Agent:
    return Agent(
        name=member_name,
        instructions=f"{RECOMMENDED_PROMPT_PREFIX}\n{duty}",
        handoffs=[handoff(agent=other) for other in teammates],
    )


class AgentsSdkMathTeam(AgentsSdkWorkflow):
    def __init__(
        self, agent_builder_path: str = MATH_AGENT_BUILDER_PATH, **base_options: Any
    ) -> None:
        super().__init__(agent_builder_path, **base_options)
