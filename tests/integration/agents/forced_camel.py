"""Example agent, forced to call its tool first, as a random model would not."""

from typing import Any

from camel.agents import ChatAgent
from camel.toolkits import FunctionTool

from examples.frameworks.camel_agent import ToolAgent, add


class ForcedAgent(ToolAgent):
    """Agent whose model must call the tool at the first step and answers at the second."""

    async def ask(self, model: Any, question: str) -> str:
        model.model_config_dict.update(tool_choice="required", parallel_tool_calls=False)
        agent = ChatAgent(
            "You solve sums with your tool.", model, tools=[FunctionTool(add)], max_iteration=1
        )
        await agent.astep(question)
        for name in ("tool_choice", "parallel_tool_calls"):
            del model.model_config_dict[name]
        # CAMEL takes an empty reply for none, and a random model may give one.
        model.model_config_dict["extra_body"] = {"regex": "[a-z ]{12}"}
        response = await agent.astep("Now answer.")
        return str(response.msg.content)
