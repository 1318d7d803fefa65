"""A workflow with clients of its own: two conversations for a task, side by side."""

import asyncio
from typing import Any

from areal_hpc.client.areal_openai import ArealOpenAI
from areal_hpc.rollout.agent import RolloutWorkflow


class TwoTries(RolloutWorkflow):
    """Workflow of two answers, each with a second thought; `tokenizer` is the model's directory."""

    def __init__(self, tokenizer: str, n_trajs: int = 2) -> None:
        self.tokenizer = tokenizer
        self.n_trajs = n_trajs

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        clients = [
            ArealOpenAI(engine=engine, tokenizer=self.tokenizer) for _ in range(self.n_trajs)
        ]
        await asyncio.gather(*(self.converse(client, data) for client in clients))
        exported = {}
        for client in clients:
            client.apply_reward_discount(turn_discount=0.9)
            exported.update(client.export_interactions(style="individual"))
            await client.close()
        return exported

    async def converse(self, client: ArealOpenAI, data: dict[str, Any]) -> None:
        messages: list[Any] = list(data["messages"])
        for remark in ("Are you sure?", None):
            reply = await client.chat.completions.create(model="default", messages=messages)
            text = reply.choices[0].message.content or ""
            messages += [reply.choices[0].message, {"role": "user", "content": remark}]
        client.set_final_reward(1.0 if data["answer"] in text else 0.0)
