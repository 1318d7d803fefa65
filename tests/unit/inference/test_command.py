import itertools
import json

import pytest
from pydantic import ValidationError

from areal_hpc.inference.server.command import (
    Device,
    NodeOptions,
    ServerCommand,
    ServerPorts,
    build_replica_command,
    compute_replica_seed,
)
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.recipe.sections.trainer import LoraConfig
from areal_hpc.wire.replicas import ADAPTER_VARIABLE


def command(
    config: InferenceConfig,
    device: Device,
    index: int = 0,
    part: NodeOptions | None = None,
    *,
    updates_in_place: bool = False,
    reads_images: bool = False,
    returns_routes: bool = False,
) -> ServerCommand:
    return build_replica_command(
        config,
        python="py",
        model_path="/models/m",
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        index=index,
        ports=ServerPorts(31001, 31002),
        random_seed=7,
        updates_in_place=updates_in_place,
        reads_images=reads_images,
        returns_routes=returns_routes,
        node_options=part,
    )


def test_on_a_gpu_each_replica_takes_its_own_devices() -> None:
    config = InferenceConfig(
        tp=2, context_length=4096, tool_call_parser="qwen25", extra_args=("--enable-metrics",)
    )
    replica = command(config, "cuda", index=3)
    expected = (
        "py -m areal_hpc.inference.server.sglang_main"
        " --model-path /models/m --host 127.0.0.1 --port 31001 --nccl-port 31002 --device cuda"
        " --dtype bfloat16 --tp 2 --random-seed 7"
        " --weight-version unset --log-level-http warning --incremental-streaming-output"
        " --enable-fp32-lm-head --base-gpu-id 6 --mem-fraction-static 0.85 --context-length 4096"
        " --tool-call-parser qwen25 --enable-metrics"
    )
    assert " ".join(replica.argv) == expected
    assert replica.environment == {"HF_HUB_OFFLINE": "1"}


def test_a_gpu_finishes_each_step_before_weights_change_in_place() -> None:
    plain, in_place = (
        command(InferenceConfig(), "cuda", updates_in_place=wanted).argv for wanted in (False, True)
    )
    assert {*in_place} - {*plain} == {"--disable-overlap-schedule"}
    on_cpu = command(InferenceConfig(), "cpu", updates_in_place=True).argv
    assert on_cpu.count("--disable-overlap-schedule") == 1


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        *(("--quantization", "no update could be verified"), ("--modelopt-quant=fp8", "no update")),
        *(("--api-key", "keys of its own"), ("--admin-api-key=x", "keys of its own")),
        *(("--speculative-algorithm", "drafts"), ("--dp", "ranks"), ("--pp-size=2", "ranks")),
        *(("--tensor-parallel-size", "own keys"), ("--model", "own keys"), ("--dtype", "own keys")),
    ],
)
def test_options_that_break_a_replica_are_refused(option: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=f"cannot be given: .*{reason}"):
        InferenceConfig(extra_args=(option, "2"))


def test_a_model_beside_a_tower_is_served_without_it() -> None:
    plain, alone = (command(InferenceConfig(), "cuda", reads_images=flag) for flag in (False, True))
    flags = ("--json-model-override-args", '{"language_model_only": true}')
    assert alone.argv == (*plain.argv, *flags)


def test_a_server_returns_routes_where_the_trainer_replays_them() -> None:
    plain, routed = (
        command(InferenceConfig(), "cuda", returns_routes=wanted).argv for wanted in (False, True)
    )
    assert {*routed} - {*plain} == {"--enable-return-routed-experts"}


def test_tensor_parallel_ranks_on_a_cpu_are_bound_to_cores() -> None:
    environment = command(InferenceConfig(tp=2), "cpu").environment
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_parts_of_a_server_meet_on_the_first_node_and_share_the_seed() -> None:
    config = InferenceConfig(tp=4, nodes_per_replica=2)
    first = command(config, "cuda")
    second = command(config, "cuda", part=NodeOptions(1, 2, "10.0.0.1:31002", "10.0.0.2"))
    extra = ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:31002")
    assert second.argv == (*first.argv, *extra)
    assert second.environment == {**first.environment, "SGLANG_HOST_IP": "10.0.0.2"}


@pytest.mark.parametrize("wrong", [{"tp": 3}, {"tp": 2, "replicas_per_cell": 2}])
def test_ranks_that_do_not_fill_their_nodes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"inference\.nodes_per_replica=2"):
        InferenceConfig.model_validate({"nodes_per_replica": 2, **wrong})


def test_sampling_seeds_repeat_with_the_run_and_differ_between_replicas() -> None:
    facts = list(itertools.product((0, 1), ("cell-0", "cell-1"), (0, 1), (1, 2)))
    seeds = [compute_replica_seed(*fact) for fact in facts]
    assert seeds == [compute_replica_seed(*fact) for fact in facts]
    assert len(set(seeds)) == len(facts)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_server_that_is_sent_an_adapter_knows_its_settings() -> None:
    adapter = LoraConfig(rank=4, alpha=6, rslora=True, target_modules=("q_proj", "v_proj"))
    replica = build_replica_command(
        InferenceConfig(), python="py", model_path="/models/m", device="cuda", dtype="bfloat16",
        index=0, ports=ServerPorts(31001, 31002), random_seed=7, adapter=adapter,
    )  # fmt: skip
    words = " ".join(replica.argv)
    assert " --enable-lora --max-lora-rank 4 --max-loras-per-batch 2 " in words
    assert " --lora-target-modules q_proj v_proj --" in words
    assert json.loads(replica.environment[ADAPTER_VARIABLE]) == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 12.0,
        "target_modules": ["q_proj", "v_proj"],
    }
