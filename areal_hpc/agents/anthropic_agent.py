"""Math agent with the Anthropic SDK."""

from typing import Any

from anthropic import AsyncAnthropic

from areal_hpc.agents.math_tools import DEFAULT_MATH_REWARD_PATH, SubprocessRewardFunction


class AnthropicMathAgent:
    """Agent of one model call. `request` has its further arguments, such as `temperature`."""

    def __init__(
        self, reward_fn_path: str = DEFAULT_MATH_REWARD_PATH, max_tokens: int = 1024, **request: Any
    ) -> None:
        self.reward = SubprocessRewardFunction(reward_fn_path)
        self.request = {"max_tokens": max_tokens, **request}

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        url = extra_kwargs.get("base_url")
        async with AsyncAnthropic(
            base_url=url and url.removesuffix("/v1"),  # the SDK adds `/v1`
            api_key=extra_kwargs.get("api_key"),
            max_retries=0,
        ) as client:
            text = await self.ask(client, list(data["messages"]))
        return await self.reward(text, data)

    async def ask(self, client: Any, messages: list[Any]) -> str:
        system = [message["content"] for message in messages if message["role"] == "system"]
        reply = await client.messages.create(
            model="default",
            messages=[message for message in messages if message["role"] != "system"],
            **({"system": "\n".join(system)} if system else {}),
            **self.request,
        )
        return "".join(block.text for block in reply.content if block.type == "text")
