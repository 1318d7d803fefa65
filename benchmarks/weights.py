"""New weights from the trainer's end to a replica, against a bare broadcast of the same bytes.

- codec: parameters into buckets, each filled while the one before it travels, to tensors in a
  second process. Its peer is `torch.distributed.broadcast` of buffers that are there already, to a
  receiver that does nothing with them.
- into SGLang: the same model, sent into a real replica that generates meanwhile: buckets, loading,
  the proof by a fixed prompt. `into_sglang_over_bare` counts what is on the way or being loaded,
  `verified_over_bare` the proof as well; the table has all that the stall consists of, as the
  sender sees it, and what the clients saw.
- disk: `weights.transport=disk`, into the same replica, from the first byte until it serves.

Codec and bare transfers alternate; so do the transports. NCCL is used where there are two GPUs,
else gloo over loopback.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.weights.broadcast import sends_tensors_unpacked
from areal_hpc.weights.buckets import (
    OpenBucket,
    PackingBuffers,
    TensorSpec,
    WaitSent,
    get_bucket_bytes,
    plan_buckets,
    send_buckets,
)
from areal_hpc.weights.process_group import UpdateProcessGroup
from benchmarks._pairs import (
    Samples,
    Side,
    add_out,
    measure_pairs,
    median_wall_s,
    print_samples,
    report,
    wall_ratio,
)
from benchmarks._weights_peer import TIMEOUT_S
from benchmarks._weights_replica import Update, measure, running_replica

PHASES = ("write", "pause_call", "transfer", "load", "verify", "flush", "resume")
STALLED = PHASES[1:]
"""Generation stands still."""


def make_weights(run_dir: Path, gib: float) -> dict[str, torch.Tensor]:
    """A Qwen3 of about that size in `run_dir`, and its tensors in memory of their own."""
    hidden = 1024 if gib > 0.5 else 256
    layer_bytes = 4 * (hidden * hidden * 5 // 2 + 12 * hidden * hidden)
    model_dir = RunPaths(run_dir).starting_model_dir
    make_tiny_model(
        model_dir, ["one two three"], layers=max(1, round(gib * 2**30 / layer_bytes)),
        hidden=hidden, heads=hidden // 64, kv_heads=hidden // 256, head_dim=64, ffn=4 * hidden,
        vocab=512,
    )  # fmt: skip
    held = load_file(model_dir / "model.safetensors")
    return {name: tensor.clone() for name, tensor in held.items()}


def no_refusal() -> bool:
    return False


class Sender:
    """Sending end of both transfers.

    Args:
        weights: Tensors to send.
        bucket_bytes: Size of a bucket.
        backend: `gloo` or `nccl`.
        folder: Folder of the receiver's configuration.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], bucket_bytes: int, backend: str, folder: Path
    ) -> None:
        is_nccl = backend == "nccl"
        self.device = torch.device("cuda:0" if is_nccl else "cpu")
        self._weights = {name: tensor.to(self.device) for name, tensor in weights.items()}
        specs = [
            TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in weights.items()
        ]
        self._buckets = plan_buckets(specs, bucket_bytes)
        self.size_bytes = sum(bucket.size_bytes for bucket in self._buckets)
        self._ready = [
            torch.ones(bucket.size_bytes, dtype=torch.uint8, device=self.device)
            for bucket in self._buckets
        ]
        packed = not sends_tensors_unpacked(backend, replicas_per_group=1)
        self._open_bucket = (
            PackingBuffers(self.device).open_bucket_in_older_buffer if packed else OpenBucket
        )
        self._pool = ThreadPoolExecutor(1)
        self._group = UpdateProcessGroup("bench", "127.0.0.1", 2, backend, TIMEOUT_S)
        self._done = torch.zeros(1, device=self.device)
        (folder / "specs.json").write_text(
            json.dumps([(spec.name, spec.shape, spec.dtype) for spec in specs])
        )
        config = {
            "specs": str(folder / "specs.json"),
            "bucket_bytes": bucket_bytes,
            "device": "cuda:1" if is_nccl else "cpu",
            "backend": backend,
            "packed": packed,
            "name": self._group.name,
            "port": self._group.port,
        }
        (folder / "peer.json").write_text(json.dumps(config))
        self._peer = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._weights_peer", str(folder / "peer.json")],
            stdin=subprocess.PIPE,
            text=True,
        )
        self._group.join(lambda: self._peer.poll() is not None)

    def bare(self) -> None:
        """Buffers that are there already, one after the other."""

        def send() -> None:
            for flat in self._ready:
                dist.broadcast(flat, src=0, group=self._raw)

        self._order("bare", send)

    def codec(self) -> None:
        """Fill buckets and send them, as a publisher does."""

        def ship(full: OpenBucket) -> WaitSent:
            return self._pool.submit(self._group.broadcast, full.tensors_to_send, no_refusal).result

        arrivals = iter(self._weights.items())
        self._order("codec", lambda: send_buckets(self._buckets, arrivals, self._open_bucket, ship))

    def _order(self, what: str, send: Callable[[], object]) -> None:
        assert self._peer.stdin is not None
        self._peer.stdin.write(f"{what}\n")
        self._peer.stdin.flush()
        send()
        dist.broadcast(self._done, src=1, group=self._raw)  # the receiver has all of it

    @property
    def _raw(self) -> dist.ProcessGroup:
        assert self._group._group is not None
        return self._group._group

    def close(self) -> None:
        """End the receiver."""
        assert self._peer.stdin is not None
        self._peer.stdin.close()
        self._peer.wait(30)
        self._group.close()
        self._pool.shutdown()


def measure_codec(
    weights: Mapping[str, torch.Tensor], bucket_bytes: int, backend: str, folder: Path, pairs: int
) -> Samples:
    sender = Sender(weights, bucket_bytes, backend, folder)
    sides = (Side("codec to codec", sender.codec), Side("bare broadcast", sender.bare))
    samples = measure_pairs(sides, pairs)
    megabytes = sender.size_bytes / 1e6
    print_samples(f"{megabytes:.0f} MB over {backend}", samples, megabytes)
    sender.close()
    return samples


def phase_ms(updates: Sequence[Update], name: str) -> float:
    return 1e3 * statistics.median(update.seconds.get(name, 0.0) for update in updates)


def moved_s(updates: Sequence[Update]) -> float:
    """Time on the way or in loading."""
    return (phase_ms(updates, "transfer") + phase_ms(updates, "load")) / 1e3


def publish_s(updates: Sequence[Update]) -> float:
    return statistics.median(update.publish_s for update in updates)


def print_updates(updates: Mapping[str, Sequence[Update]]) -> None:
    names = [*PHASES, "stall seen by clients", "all of it"]
    print(f"\n{'into SGLang, ms':<26}" + "".join(f"{name:>12}" for name in updates))
    for name in names:
        cells = []
        for held in updates.values():
            match name:
                case "stall seen by clients":
                    value = 1e3 * statistics.median(update.silence_s for update in held)
                case "all of it":
                    value = 1e3 * publish_s(held)
                case _:
                    value = phase_ms(held, name)
            cells.append(f"{value:>12.1f}")
        if any(cell.strip() != "0.0" for cell in cells):
            print(f"  {name:<24}" + "".join(cells))


def figures_of(updates: Mapping[str, Sequence[Update]], bare_s: float) -> dict[str, float]:
    """The figures of updates into SGLang."""
    sent, loaded = updates.values()
    return {
        "into_sglang_over_bare": bare_s / moved_s(sent),
        "verified_over_bare": bare_s / (moved_s(sent) + phase_ms(sent, "verify") / 1e3),
        "disk_over_broadcast": publish_s(loaded) / publish_s(sent),
        "stall_ms": 1e3 * statistics.median(update.silence_s for update in sent),
        "disk_stall_ms": 1e3 * statistics.median(update.silence_s for update in loaded),
        **{f"{name}_ms": phase_ms(sent, name) for name in STALLED},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="areal-hpc bench weights", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model")
    parser.add_argument("--bucket-mib", type=float, help="null in recipes: by the device")
    parser.add_argument("--pairs", type=int, default=9, help="codec and bare transfers that count")
    parser.add_argument("--updates", type=int, default=5, help="by each transport; 0: no SGLang")
    parser.add_argument("--dir", type=Path, help="folder in the place of shared storage")
    add_out(parser, "weights")
    arguments = parser.parse_args(argv)

    torch.set_num_threads(1)
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    bucket_bytes = get_bucket_bytes(
        int(arguments.bucket_mib * 2**20) if arguments.bucket_mib else None,
        "cpu" if backend == "gloo" else "cuda",
    )
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        run_dir = Path(folder)
        weights = make_weights(run_dir, arguments.gib)
        samples = measure_codec(weights, bucket_bytes, backend, run_dir, arguments.pairs)
        figures = {"broadcast_over_bare": wall_ratio(samples, "bare broadcast", "codec to codec")}
        if arguments.updates:
            with running_replica(run_dir, weights, bucket_bytes) as replica:
                updates = measure(replica, arguments.updates)
            print_updates(updates)
            figures |= figures_of(updates, median_wall_s(samples, "bare broadcast"))
    settings = {
        "bytes": sum(tensor.nbytes for tensor in weights.values()),
        "bucket_bytes": bucket_bytes,
        "backend": backend,
        "pairs": arguments.pairs,
        "updates": arguments.updates,
        "torch": torch.__version__,
    }
    report(figures, settings, arguments.out)


if __name__ == "__main__":
    main()
