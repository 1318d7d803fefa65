"""Math agent with CAMEL's ChatAgent."""

from typing import Any

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.types import ModelPlatformType

from areal_hpc.agents.math_tools import DEFAULT_MATH_REWARD_PATH, SubprocessRewardFunction
from areal_hpc.client.camel import SessionTokenCounter


class CamelMathAgent:
    """Agent of one model call. `request` has its further arguments, such as `temperature`.

    `tokenizer` is the model's directory, or its `owner/name` in the hub's cache: CAMEL counts
    tokens, and would download OpenAI's tokenizer for an unknown model.
    """

    def __init__(
        self,
        tokenizer: str,
        system_message: str = "You are a helpful math assistant.",
        reward_fn_path: str = DEFAULT_MATH_REWARD_PATH,
        **request: Any,
    ) -> None:
        self.token_counter = SessionTokenCounter(tokenizer)
        self.system_message = system_message
        self.reward = SubprocessRewardFunction(reward_fn_path)
        self.request = request

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        model = ModelFactory.create(
            model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
            model_type="default",
            model_config_dict=dict(self.request),
            url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            token_counter=self.token_counter,
        )
        text = await self.ask(model, data["messages"][-1]["content"])
        return await self.reward(text, data)

    async def ask(self, model: Any, question: str) -> str:
        response = await ChatAgent(self.system_message, model).astep(question)
        return str(response.msg.content)
