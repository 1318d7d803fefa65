"""Math agents with the OpenHands SDK, which blocks: use `rollout.agent.mode: subproc`.

The package is not in the locked environments, whose Python it is too new for.
"""

import importlib
import os
import tempfile
from typing import Any

from areal_hpc.agents.math_tools import DEFAULT_MATH_REWARD_PATH, SubprocessRewardFunction
from areal_hpc.errors import RecipeError


class OpenHandsMathAgent:
    """A conversation with OpenHands' agent; `llm` is what else its `LLM` takes.

    Raises:
        RecipeError: OpenHands is not installed.
    """

    tools: tuple[str, ...] = ()
    """OpenHands' names of what the agent may use."""

    def __init__(self, reward_fn_path: str = DEFAULT_MATH_REWARD_PATH, **llm: Any) -> None:
        self.sdk = _import_openhands_module("openhands.sdk")
        if self.tools:
            _import_openhands_module("openhands.tools")  # importing it registers them
        self.reward = SubprocessRewardFunction(reward_fn_path)
        self.llm = llm

    async def run(self, data: dict[str, Any]) -> float:
        llm = self.sdk.LLM(
            model="openai/default",  # LiteLLM then speaks chat completions to the address
            base_url=os.environ["OPENAI_BASE_URL"],
            api_key=os.environ["OPENAI_API_KEY"],
            **{"reasoning_effort": None, **self.llm},
        )
        tools = [self.sdk.Tool(name=name) for name in self.tools]
        with tempfile.TemporaryDirectory() as workspace:
            conversation = self.sdk.Conversation(
                agent=self.sdk.Agent(llm=llm, tools=tools), workspace=workspace
            )
            conversation.send_message(data["messages"][-1]["content"])
            conversation.run()
            said = _import_openhands_module("openhands.sdk.conversation.response_utils")
            text = said.get_agent_final_response(conversation.state.events)
        return await self.reward(text, data)


class OpenHandsTerminalAgent(OpenHandsMathAgent):
    """May use a terminal, which runs as you do: `rollout.agent.isolation` has to say `none`."""

    tools = ("terminal",)

    def check_isolation(self, isolation: str | None) -> None:
        if isolation != "none":
            raise RecipeError(
                "the terminal of OpenHands runs as you do, in no sandbox, and "
                f"rollout.agent.isolation is {isolation or 'null'}",
                key="rollout.agent.isolation",
                hint="say none: then the model can read and change all that you can; or use "
                "HarnessAgent with `harness: openhands` in a sandbox",
            )


def _import_openhands_module(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RecipeError(
            f"OpenHands cannot be imported ({error})",
            key="rollout.workflow",
            hint="it needs Python 3.12: pip install openhands-sdk openhands-tools in an agents "
            "environment of that Python, and name it in cluster.agents.python",
        ) from error
