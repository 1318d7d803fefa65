"""`python -m tests.support.update_sender CONFIG`: a trainer's end of updates, and no more.

Each line of standard input is an order; each line of standard output says what came of it.
"""

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets.plan import TensorSpec
from areal_hpc.weights.publisher import Publisher
from areal_hpc.wire.weight_version import WeightVersion

AWAIT_S = 20.0


def publish(publisher: Publisher, generation: int, order: dict[str, object]) -> dict[str, object]:
    """One update of all replicas that lack the version."""
    version = WeightVersion(generation, int(str(order["step"])))
    weights = load_file(Path(str(order["weights"])))
    specs = [
        TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in weights.items()
    ]
    replicas = publisher.outdated(version)
    give_up_at = time.monotonic() + AWAIT_S
    while len(replicas) < int(str(order["at_least"])) and time.monotonic() < give_up_at:
        replicas = publisher.outdated(version)  # a relay that was slow once is asked again
    began = time.monotonic()
    report = publisher.publish(version, specs, iter(weights.items()), replicas)
    return {
        "version": str(version),
        "ok": [key.place for key in report.ok],
        "failed": {f"{key.cell}.{key.index}": str(error) for key, error in report.failed.items()},
        "publish_s": round(time.monotonic() - began, 3),
        "ended_at": time.monotonic(),
        "seconds": report.seconds,
    }


def main() -> None:
    """Publish as told until standard input ends."""
    config = json.loads(sys.argv[1])
    publisher = Publisher(
        WeightsConfig(**config["weights"]),
        Path(config["rendezvous_dir"]),
        config["cells"],
        config["admin_key"],
        "gloo",
        torch.device("cpu"),
        Path(config["rendezvous_dir"]).parent / "weights",
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(publish(publisher, config["generation"], json.loads(line))), flush=True)
    publisher.close()


if __name__ == "__main__":
    main()
