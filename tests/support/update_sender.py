"""`python -m tests.support.update_sender CONFIG`: a trainer's end of updates, and no more.

Each line of standard input is an order; each line of standard output says what came of it.
"""

import json
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

from areal_hpc.wire.weight_version import WeightVersion
from tests.support.weight_updates import await_outdated, publishing, read_probe, specs_of


def main() -> None:
    """Publish as told until standard input ends."""
    config = json.loads(sys.argv[1])
    place = (Path(config["rendezvous_dir"]), config["service_key"])
    with publishing(*place, cells=config["cells"], **config["weights"]) as publisher:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            version = WeightVersion(config["generation"], order["step"])
            weights = load_file(order["weights"])
            replicas = await_outdated(publisher, version, order["at_least"])
            began = time.monotonic()
            report = publisher.transport.update(
                version,
                specs_of(weights),
                iter(weights.items()),
                replicas,
                read_probe(Path(order["weights"])),
            )
            failed = {f"{key.cell}.{key.index}": str(why) for key, why in report.failed.items()}
            outcome = {
                "version": str(version),
                "ok": [key.cell_and_index for key in report.ok],
                "failed": failed,
                "publish_s": round(time.monotonic() - began, 3),
                "ended_at": time.monotonic(),
                "seconds": report.seconds,
            }
            print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
