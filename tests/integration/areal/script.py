"""Training script in the form of AReaL's users, with its agents and its reward."""

import dataclasses
import sys

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import AgentWorkflow, RolloutWorkflow
from areal.experimental.openai import ArealOpenAI
from areal.experimental.trainer import PPOTrainer
from areal.utils.hf_utils import load_hf_tokenizer
from openai import AsyncOpenAI


@dataclasses.dataclass
class OwnConfig(GRPOConfig):
    favorite: str = dataclasses.field(default="e")


def count(text, favorite):
    """Reward that no other process can import, as it lives in the script."""
    return float(text.count(favorite)) / 10


class ChatAgent(AgentWorkflow):
    def __init__(self, favorite):
        self.reward = AsyncRewardWrapper(count)
        self.favorite = favorite

    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
            max_retries=0,
        )
        reply = await client.chat.completions.create(model="default", messages=data["messages"])
        return await self.reward(reply.choices[0].message.content or "", self.favorite)


class TwoClients(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer, favorite):
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer
        self.favorite = favorite

    async def arun_episode(self, engine, data):
        exported = {}
        for _ in range(2):
            client = ArealOpenAI(engine=engine, tokenizer=self.tokenizer)
            reply = await client.chat.completions.create(
                model="default",
                messages=data["messages"],
                max_completion_tokens=self.gconfig.max_new_tokens,
            )
            client.set_final_reward(count(reply.choices[0].message.content or "", self.favorite))
            exported.update(client.export_interactions(style="individual"))
        return exported


def main(args):
    config, _ = load_expr_config(args, OwnConfig)
    tasks = [{"messages": [{"role": "user", "content": f"Say {n}."}]} for n in range(16)]
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    with PPOTrainer(config, train_dataset=tasks, valid_dataset=iter(tasks[:4])) as trainer:
        trainer.train(
            workflow=TwoClients(config.gconfig, tokenizer, config.favorite),
            eval_workflow=ChatAgent,
            eval_workflow_kwargs={"favorite": config.favorite},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
