"""Train an agent of the OpenAI Agents SDK, which the configuration names by what builds it.

python3 -m areal_hpc.areal.launcher.local examples/openai_agents/train_agents.py \
    --config examples/openai_agents/config.yaml experiment_name=team trial_name=trial0
"""

import sys

from areal_hpc.areal.api.cli_args import AgentRLConfig, load_expr_config
from areal_hpc.areal.dataset import get_custom_dataset
from areal_hpc.areal.experimental.trainer import PPOTrainer

BUILDERS = {
    "math": "areal_hpc.agents.openai_agents_sdk.build_single_agent",
    "multi_agent_math": "areal_hpc.agents.openai_agents_sdk.build_math_agent",
}
"""AReaL's older key `agent_type` names one of these."""


def main(args: list[str]) -> None:
    config, _ = load_expr_config(args, AgentRLConfig)
    train_dataset = get_custom_dataset("train", config.train_dataset)
    valid_dataset = config.valid_dataset and get_custom_dataset("test", config.valid_dataset)
    if config.n_trajs is not None:  # the older name of `gconfig.n_samples`
        config.gconfig.n_samples = config.n_trajs
    with PPOTrainer(config, train_dataset=train_dataset, valid_dataset=valid_dataset) as trainer:
        trainer.train(
            workflow="areal_hpc.agents.openai_agents_sdk.AgentsSdkWorkflow",
            workflow_kwargs={
                "agent_builder_path": BUILDERS.get(config.agent_type, config.agent_builder_path),
                "agent_builder_kwargs": config.agent_builder_kwargs,
                "reward_fn_path": config.reward_fn_path,
                "temperature": config.gconfig.temperature,
                "max_tokens": config.gconfig.max_new_tokens,
            },
        )


if __name__ == "__main__":
    main(sys.argv[1:])
