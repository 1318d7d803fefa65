"""Train a CAMEL agent on a client that records, as AReaL's guide builds it.

python3 -m areal_hpc.areal.launcher.local examples/camel/train.py \
    --config examples/camel/config.yaml experiment_name=camel trial_name=trial0

CAMEL counts tokens with the tokenizer of `actor.path`.
"""

import sys
from typing import Any

from camel.agents import ChatAgent

from areal_hpc.areal.api.cli_args import AgentRLConfig, load_expr_config
from areal_hpc.areal.api.reward_api import AsyncRewardWrapper
from areal_hpc.areal.api.workflow_api import RolloutWorkflow
from areal_hpc.areal.dataset import get_custom_dataset
from areal_hpc.areal.experimental.camel.openai_model import AReaLOpenAICompatibleModel
from areal_hpc.areal.experimental.openai import ArealOpenAI
from areal_hpc.areal.experimental.trainer import PPOTrainer
from areal_hpc.reward.gsm8k import gsm8k_reward_fn


class CamelRLVRWorkflow(RolloutWorkflow):
    """One conversation of a ChatAgent; `gconfig.n_samples` is their number per task."""

    def __init__(self, tokenizer: str, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.reward = AsyncRewardWrapper(gsm8k_reward_fn)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        client = ArealOpenAI(engine=engine, tokenizer=self.tokenizer)
        model = AReaLOpenAICompatibleModel(
            openai_client=client,
            tokenizer=self.tokenizer,
            model_type="areal",
            model_config_dict={"max_tokens": self.max_tokens},
        )
        agent = ChatAgent("You are a helpful math assistant.", model)
        response = await agent.astep(data["messages"][-1]["content"])
        text = response.msg.content if response.msgs else ""
        task = {name: value for name, value in data.items() if name != "messages"}
        client.set_last_reward(await self.reward(data["messages"], text, None, None, **task))
        client.apply_reward_discount(turn_discount=0.9)
        exported = client.export_interactions(style="individual")
        await client.close()
        return exported


def main(args: list[str]) -> None:
    config, _ = load_expr_config(args, AgentRLConfig)
    train_dataset = get_custom_dataset("train", config.train_dataset)
    valid_dataset = config.valid_dataset and get_custom_dataset("test", config.valid_dataset)
    workflow = CamelRLVRWorkflow(config.tokenizer_path, config.gconfig.max_new_tokens)
    with PPOTrainer(config, train_dataset=train_dataset, valid_dataset=valid_dataset) as trainer:
        trainer.train(workflow=workflow)


if __name__ == "__main__":
    main(sys.argv[1:])
