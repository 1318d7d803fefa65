"""Orchestrator that asks a sub-agent for a second answer, and is judged by its own last reply."""

from typing import Any

from openai import AsyncOpenAI

from examples.quickstart.task import verify


class OrchestratorAgent:
    """Agent that answers, has a sub-agent answer too, and decides; headers name who asks."""

    def __init__(self, max_tokens: int = 48) -> None:
        self.max_tokens = max_tokens

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )

        async def ask(messages: Any, agent: str, parent: str = "") -> Any:
            return await client.chat.completions.create(
                model="default",
                messages=messages,
                max_completion_tokens=self.max_tokens,
                extra_headers={"x-agent-id": agent, "x-parent-agent-id": parent},
            )

        messages = list(data["messages"])
        first = await ask(messages, "orchestrator")
        second = await ask(list(data["messages"]), "checker", "orchestrator")
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content or ""},
            {"role": "user", "content": f"Another: {second.choices[0].message.content}\nAnswer:"},
        ]
        last = await ask(messages, "orchestrator")
        return {last.id: float(verify(last.choices[0].message.content or "", data))}
