"""Train any agent by its dotted path, from a script as AReaL's users write it.

python3 examples/agent_workflow/train.py --config examples/agent_workflow/config.yaml \
    scheduler.type=local actor.path=/models/mine \
    workflow=areal_hpc.agents.openai_agent.OpenAIMathToolAgent
"""

import sys

from areal_hpc.areal.api.cli_args import AgentRLConfig, load_expr_config
from areal_hpc.areal.dataset import get_custom_dataset
from areal_hpc.areal.experimental.trainer import PPOTrainer
from areal_hpc.areal.utils.hf_utils import load_hf_tokenizer


def main(args: list[str]) -> None:
    config, _ = load_expr_config(args, AgentRLConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train_dataset = get_custom_dataset("train", config.train_dataset, tokenizer)
    valid_dataset = config.valid_dataset and get_custom_dataset("test", config.valid_dataset)
    with PPOTrainer(config, train_dataset=train_dataset, valid_dataset=valid_dataset) as trainer:
        trainer.train(workflow=config.workflow)


if __name__ == "__main__":
    main(sys.argv[1:])
