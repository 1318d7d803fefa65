"""Any agent of the OpenAI Agents SDK, by the function that builds it."""

from __future__ import annotations

from typing import Any

from agents import ModelSettings, OpenAIProvider, RunConfig, Runner

from areal_hpc.utils.dynamic_import import import_from_string
from areal_hpc.workflow.judging import GSM8K, Judge
from areal_hpc.workflow.openai.math_agent import client_of


class OpenAIAgentWorkflow:
    """Builds the agent for every episode, runs it, and judges its final output.

    Hand-offs and tools are calls: `inference.tool_call_parser` must name the model's format.

    Args:
        agent_builder_path: Dotted path of a function that returns an `agents.Agent`.
        agent_builder_kwargs: Its arguments.
        reward_fn_path: Dotted path of the reward function.
        max_turns: Model calls at most; an agent that needs more has failed.
        use_responses: Speak the Responses API instead of chat completions.
        settings: The SDK's `ModelSettings`, for all agents: `temperature`, `max_tokens`, ...
    """

    def __init__(
        self,
        agent_builder_path: str,
        agent_builder_kwargs: dict[str, Any] | None = None,
        reward_fn_path: str = GSM8K,
        max_turns: int = 10,
        use_responses: bool = False,
        **settings: Any,
    ) -> None:
        self.build = import_from_string(agent_builder_path)
        self.builder_kwargs = agent_builder_kwargs or {}
        self.judge = Judge(reward_fn_path)
        self.max_turns = max_turns
        self.use_responses = use_responses
        self.settings = ModelSettings(**settings)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """One episode; see `areal_hpc.rollout.agent.Agent`."""
        text = await self.ask(client_of(extra_kwargs), list(data["messages"]))
        return await self.judge(text, data)

    async def ask(self, client: Any, messages: list[Any]) -> str:
        """The agent's final output."""
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
