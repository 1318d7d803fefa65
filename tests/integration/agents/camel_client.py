"""Record a CAMEL agent: `python camel_client.py ENGINE MODEL_DIR REPORT`.

As in AReaL's guide, its model is `AReaLOpenAICompatibleModel` on an `ArealOpenAI`.
"""

import asyncio
import json
import sys
from pathlib import Path

from camel.agents import ChatAgent

from areal_hpc.client.areal_openai import ArealOpenAI
from areal_hpc.client.camel import AReaLOpenAICompatibleModel


async def record(engine: str, model_dir: str) -> dict[str, object]:
    client = ArealOpenAI(engine=engine, tokenizer=model_dir)
    agent = ChatAgent(
        system_message="You are a helpful math assistant.",
        model=AReaLOpenAICompatibleModel(
            openai_client=client,
            tokenizer=model_dir,
            model_type="areal",
            # CAMEL takes an empty reply for none, and a random model may give one.
            model_config_dict={"max_tokens": 20, "extra_body": {"regex": "[a-z ]{8}"}},
        ),
    )
    replies = [(await agent.astep(text)).msg.content for text in ("What is 1 + 2?", "Sure?")]
    client.set_final_reward(1.0)
    client.apply_reward_discount(turn_discount=0.5)
    rows = client.export_interactions(style="individual").values()
    await client.close()
    return {
        "heard": replies,
        "rows": [
            {
                "reward": row.reward,
                "messages": row.messages,
                "input_tokens": row.model_response.input_tokens,
                "output_tokens": row.model_response.output_tokens,
            }
            for row in rows
        ],
    }


if __name__ == "__main__":
    report = asyncio.run(record(sys.argv[1], sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(report))
