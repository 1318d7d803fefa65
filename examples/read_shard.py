"""Read what a run recorded: `python examples/read_shard.py RUN/shards/....h5 RUN/data/model`.

Prints every row's reward, how many of its tokens are trained, and what the model said.
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer

from areal_hpc.shards.reader import ShardReader


def main(shard: Path, model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    reader = ShardReader(shard)
    for row, trajectory in enumerate(reader.read_rows(range(reader.num_rows))):
        trained_ids = trajectory.input_ids_T[trajectory.loss_mask_T != 0]
        print(f"row {row}: reward {trajectory.reward:g}, {len(trained_ids)} tokens trained")
        print(f"  {tokenizer.decode(trained_ids.tolist())!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
