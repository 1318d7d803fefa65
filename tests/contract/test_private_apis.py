"""Private APIs of dependencies exist in the pinned versions, and one file uses each."""

import inspect
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import omegaconf
import pytest
import submitit
import torch
from submitit.core.core import Job as SubmititJob
from submitit.local.local import LocalJob
from torch.distributed import distributed_c10d as c10d

from areal_hpc.inference.server import sglang_server
from areal_hpc.jobs.config import FLIGHT_RECORDER_VARIABLES, TRAINER_WEIGHT_UPDATE_VARIABLES
from areal_hpc.launch.checks.model import SGLANG_FAMILIES_WITHOUT_WINDOW
from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter

from areal_hpc.trainer.process_groups import FLIGHT_RECORD_VARIABLES
from tests.support.environments import CHECKOUT, sources

SGLANG = next((CHECKOUT / ".venvs/serve/lib").glob("python3*/site-packages/sglang"))

OWNERS = {
    "areal/api/cli_args.py": ["_get_node"],
    "inference/cpu/sglang_cpu.py": ["_set_envs_and_config", "ALLOC_MEMORY_FUNCS"],
    "inference/server/sglang_main.py": ["_maybe_collect_routed_experts", "release_req"],
    "session/chat_template.py": ["root_render_func"],
    "slurm/submit.py": [*("_job._process", "_make_submission_file_text", "_submitit_command_str")],
    "trainer/private_apis/megatron_private.py": [
        *("_get_main_param_and_optimizer_states", "_get_model_param_range_map"),
        "model_param_group_index_map",
        *("_postprocess", "_maybe_dtoh_and_synchronize", "shard_fp32_from_float16_groups"),
        *("shard_float16_groups", "_copy_main_params_to_model_params"),
        "get_replay_topk",
    ],
    "trainer/model/cpu/megatron_cpu.py": [
        *("_get_cuda_rng_state", "_set_cuda_rng_state"),
        *("maybe_move_tensor_to_cpu", "te_general_gemm"),
    ],
    "trainer/private_apis/torch_private.py": [
        *("_get_default_store", "_flash_attention_forward"),
        *("_record_memory_history", "_dump_snapshot"),
    ],
    "weights/process_group.py": ["_new_process_group_helper", "pg_group_ranks"],
}
"""Every private name that the package uses, by the one module that may."""

SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (
        token_dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize,
        "self point tokens_per_expert",
    ),
    (DistributedOptimizer._get_main_param_and_optimizer_states, "self model_param"),
    (DistributedOptimizer._get_model_param_range_map, "self param"),
    (DistributedOptimizer._copy_main_params_to_model_params, "self"),
    (GPTModel._postprocess, "self hidden_states"),
    (parallel_random._get_cuda_rng_state, ""),
    (parallel_random._set_cuda_rng_state, "new_state"),
    (token_dispatcher.maybe_move_tensor_to_cpu, "tensor as_numpy record_stream"),
    (c10d._get_default_store, ""),
    (
        c10d._new_process_group_helper,
        "group_size group_rank global_ranks_in_group backend store group_name",
    ),
    (torch.cuda.memory._record_memory_history, "enabled"),
    (torch.cuda.memory._dump_snapshot, "filename"),
    (submitit.SlurmExecutor._make_submission_file_text, "self command uid"),
    (omegaconf.DictConfig._get_node, "self key"),
]
"""The first parameters of functions that are called or replaced."""

SOURCES: list[tuple[object, list[str]]] = [
    # Attributes for the optimizer's ranges and states.
    (
        DistributedOptimizer,
        [
            # Master weights of the optimizer, in lists of one group each, and their use in a step.
            *("shard_fp32_from_float16_groups.append(", "shard_main_param.grad = "),
            "shard_model_param.data.copy_(shard_main_param)",
            "shard_float16_groups.append(shard_float16_params_this_group)",
            *("self.model_param_group_index_map", '["param_map"]', '"param": torch.Tensor'),
            *('"exp_avg": torch.Tensor', '"exp_avg_sq": torch.Tensor'),
        ],
    ),
    # Name that code looks up and that may be unbound.
    (moe_utils, ["te_general_gemm is not None"]),
    # Router that chooses the experts of a token.
    (
        moe_utils.topk_routing_with_score_function,
        [
            "return router_replay.get_replay_topk(\n"
            "                scores, topk, num_groups, group_topk, _compute_topk\n"
        ],
    ),
    (TopKRouter, ["self.router_replay = None", "router_replay=self.router_replay,"]),
    # Default that asks for Transformer Engine.
    (parallel_random.CheckpointWithoutOutput, ["fp8=False", "self.fp8 = fp8 is not None"]),
    (LocalJob, ["self._process = "]),
]


@pytest.mark.parametrize("owner", OWNERS)
def test_a_private_name_is_used_in_one_module(owner: str) -> None:
    for name in OWNERS[owner]:
        pattern = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
        assert [module for module, text in sources().items() if pattern.search(text)] == [owner]


@pytest.mark.parametrize(("function", "leading"), SIGNATURES)
def test_private_functions_take_our_arguments(function: Callable[..., Any], leading: str) -> None:
    expected = leading.split()
    assert list(inspect.signature(function).parameters)[: len(expected)] == expected


@pytest.mark.parametrize(("where", "texts"), SOURCES)
def test_sources_keep_what_is_read_and_replaced(where: Any, texts: list[str]) -> None:
    source = inspect.getsource(where)
    assert [text for text in texts if text not in source] == []


def test_megatron_names_the_arguments_of_its_last_stage() -> None:
    assert "packed_seq_params" in inspect.signature(GPTModel._postprocess).parameters
    call = inspect.getsource(GPTModel.forward).partition("self._postprocess(")[2]
    arguments = call.partition("\n        )")[0].strip().splitlines()
    assert all("=" in argument for argument in arguments), arguments


def test_torchs_flash_attention_takes_what_it_is_given() -> None:
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    leading = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    assert names[:10] == [*leading.split(), "return_debug_mask"]
    assert "scale" in names
    assert {"window_size_left", "window_size_right"} <= {*names}
    assert schema.returns[0].name == "output"
    assert "FA4" in torch.nn.attention.list_flash_attention_impls()


def test_torch_translates_ranks_through_one_table() -> None:
    assert isinstance(c10d._world.pg_group_ranks, dict)


def test_submitits_local_job_is_a_job_and_its_command_a_property() -> None:
    assert issubclass(LocalJob, SubmititJob)
    assert isinstance(submitit.SlurmExecutor._submitit_command_str, property)


def test_omegaconf_keeps_the_type_of_an_absent_section() -> None:
    config = omegaconf.OmegaConf.create({"section": None})
    assert hasattr(config._get_node("section")._metadata, "ref_type")


def test_a_jinja_template_renders_from_a_context() -> None:
    template = jinja2.Template("{{ word }}")
    context = template.new_context({"word": "one"}, shared=True)
    assert "".join(template.root_render_func(context)) == "one"


TITLE = sglang_server._PROCESS_TITLE_PREFIX


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("entrypoints/engine.py", "def _set_envs_and_config(server_args: ServerArgs)"),
        ("entrypoints/engine.py", "        _set_envs_and_config(server_args)\n"),
        ("managers/scheduler.py", f'setproctitle.setproctitle(f"{TITLE}scheduler'),
        ("managers/detokenizer_manager.py", f'setproctitle("{TITLE}detokenizer'),
        # With overlap off a step's tokens are recorded before the next call is heard, and so
        # before `pause_generation`, which leaves them alone in place.
        (
            "managers/scheduler.py",
            "                result = self.run_batch(batch)\n"
            "                self.process_batch_result(batch, result)\n"
            "            else:\n"
            "                # When the server is idle",
        ),
        (
            "managers/scheduler.py",
            "        elif scheduler.enable_overlap:\n"
            "            scheduler.event_loop_overlap()\n"
            "        else:\n"
            "            scheduler.event_loop_normal()\n",
        ),
        ("managers/scheduler.py", "not get_schedule().disable_overlap_schedule and not use_mlx()"),
        ("server_args.py", sglang_server._PORT_TAKEN_MESSAGES[1]),
        ("sampling/sampling_params.py", "_SAMPLING_EPS = 1e-6"),  # GREEDY_TEMPERATURE_BOUND
        # Longer than `KEEP_ALIVE_S` of the clients of its routes.
        ("environ.py", "SGLANG_TIMEOUT_KEEP_ALIVE = EnvInt(5)"),
        ("sampling/sampling_params.py", "if 0 <= self.temperature < _SAMPLING_EPS:"),
        # Both ways out of a batch lead through the function that is replaced.
        ("managers/schedule_batch.py", "        release_req(\n            req=reqs[idx],\n"),
        (
            "managers/schedule_batch.py",
            "        return release_req(\n            req=self.reqs[idx],",
        ),
        (
            "managers/scheduler_components/batch_result_processor.py",
            "def _maybe_collect_routed_experts(self, req: Req):",
        ),
        (
            "model_executor/model_runner_components/weight_updater.py",
            "def end_weight_update(self: WeightUpdater, *, run_post_load: bool) -> None:",
        ),
        (
            "model_executor/model_runner_components/weight_updater.py",
            "    get_model_runner: Callable[[], ModelRunner]\n",
        ),
        (
            "managers/scheduler_components/weight_updater.py",
            "runner.weight_updater.load_weights_from_distributed(weights)",
        ),
        ("lora/lora_manager.py", "def load_lora_adapter_from_tensors("),
        ("state_capturer/base.py", "alloc = ALLOC_MEMORY_FUNCS[device]"),
        ("managers/io_struct.py", "# `[routed_experts_start_len, seqlen - 1)`."),
    ],
)
def test_sglangs_sources_have_what_is_replaced_and_read(path: str, text: str) -> None:
    assert text in (SGLANG / "srt" / path).read_text()


C10D_HEADERS = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"


@pytest.mark.parametrize("name", [*TRAINER_WEIGHT_UPDATE_VARIABLES, *FLIGHT_RECORDER_VARIABLES])
def test_torch_reads_the_variables_of_nccl_groups(name: str) -> None:
    headers = [C10D_HEADERS / f"{stem}.hpp" for stem in ("ProcessGroupNCCL", "FlightRecorder")]
    assert any(f'"{name}"' in header.read_text() for header in headers)


def test_torch_has_one_order_to_dump_for_all_nccl_groups_of_a_process() -> None:
    """Torch's order keeps a failed update group from ending the trainer with error handling off."""
    header = (C10D_HEADERS / "ProcessGroupNCCL.hpp").read_text()
    assert "static std::atomic<bool> shouldDump_;" in header
    assert "1: watchdog thread of any PG detects a collective timeout." in header


def test_torch_takes_the_names_of_flight_records_from_us() -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with (
        library.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert all(mapped.find(name.encode()) > 0 for name in FLIGHT_RECORD_VARIABLES)


@pytest.mark.parametrize("family", sorted(SGLANG_FAMILIES_WITHOUT_WINDOW))
def test_sglang_reads_no_window_of_families_that_are_refused_with_one(family: str) -> None:
    assert "sliding_window" not in (SGLANG / "srt" / "models" / f"{family}.py").read_text()
