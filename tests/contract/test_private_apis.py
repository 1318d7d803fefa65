"""Private APIs of dependencies: there on the pinned versions, and each used in one file."""

import inspect
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

from areal_hpc.inference import sglang_server
from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)

# isort: split
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher

PACKAGE = Path(__file__).parents[2] / "areal_hpc"
SGLANG = next((PACKAGE.parent / ".venvs/serve/lib").glob("python3*/site-packages/sglang"))

OWNERS = {
    "_job._process": "slurm/submit.py",
    "_make_submission_file_text": "slurm/submit.py",
    "_submitit_command_str": "slurm/submit.py",
    "_replace_state_dict_keys_with_sharded_keys": "trainer/megatron_private.py",
    "mcore_to_pyt_state_dict": "trainer/megatron_private.py",
    "_get_main_param_and_optimizer_states": "trainer/megatron_private.py",
    "_set_main_param_and_optimizer_states": "trainer/megatron_private.py",
    "get_parameter_state_dp_zero": "trainer/megatron_private.py",
    "gbuf_ranges": "trainer/megatron_private.py",
    "model_param_group_index_map": "trainer/megatron_private.py",
    "_postprocess": "trainer/megatron_private.py",
    "_get_cuda_rng_state": "trainer/model/cpu/megatron_cpu.py",
    "_set_cuda_rng_state": "trainer/model/cpu/megatron_cpu.py",
    "maybe_move_tensor_to_cpu": "trainer/model/cpu/megatron_cpu.py",
    "te_general_gemm": "trainer/model/cpu/megatron_cpu.py",
    "_get_default_store": "trainer/torch_private.py",
    "_flash_attention_forward": "trainer/torch_private.py",
    "_new_process_group_helper": "weights/transports/process_group.py",
    "pg_group_ranks": "weights/transports/process_group.py",
    "_get_node": "areal/loading.py",
    "root_render_func": "session/chat_template.py",
    "_set_envs_and_config": "inference/cpu/sglang_cpu.py",
}
"""Every private name that the package uses, and the one module that may."""

SIGNATURES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "megatron: state by key": (
        megatron_torch._replace_state_dict_keys_with_sharded_keys,
        ["sharded_state_dict", "keep_only_main_replica"],
    ),
    "megatron: state for PyTorch": (megatron_torch.mcore_to_pyt_state_dict, ["state_dict"]),
    "megatron: moments of a parameter": (
        DistributedOptimizer._get_main_param_and_optimizer_states,
        ["self", "model_param"],
    ),
    "megatron: moments put back": (
        DistributedOptimizer._set_main_param_and_optimizer_states,
        ["self", "model_param", "tensors"],
    ),
    "megatron: gathering of moments": (
        DistributedOptimizer.get_parameter_state_dp_zero,
        ["self", "use_gloo_comm", "empty_data", "return_on_all_ranks"],
    ),
    "megatron: last stage": (GPTModel._postprocess, ["self", "hidden_states"]),
    "megatron: random state": (parallel_random._get_cuda_rng_state, []),
    "megatron: random state put back": (parallel_random._set_cuda_rng_state, ["new_state"]),
    "megatron: sizes to the host": (
        token_dispatcher.maybe_move_tensor_to_cpu,
        ["tensor", "as_numpy", "record_stream"],
    ),
    "torch: default store": (c10d._get_default_store, []),
    "torch: process group": (
        c10d._new_process_group_helper,
        ["group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"],
    ),
    "submitit: script": (
        submitit.SlurmExecutor._make_submission_file_text,
        ["self", "command", "uid"],
    ),
    "omegaconf: node": (omegaconf.DictConfig._get_node, ["self", "key"]),
}


@pytest.mark.parametrize("name", OWNERS)
def test_a_private_name_is_used_in_one_module(name: str) -> None:
    pattern = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    modules = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    users = {module for module, path in modules.items() if pattern.search(path.read_text())}
    assert users == {OWNERS[name]}


@pytest.mark.parametrize("what", SIGNATURES)
def test_a_private_function_takes_what_it_is_given(what: str) -> None:
    function, leading = SIGNATURES[what]
    assert list(inspect.signature(function).parameters)[: len(leading)] == leading


def test_megatron_names_the_arguments_of_its_last_stage() -> None:
    assert "packed_seq_params" in inspect.signature(GPTModel._postprocess).parameters
    call = inspect.getsource(GPTModel.forward).partition("self._postprocess(")[2]
    arguments = call.partition("\n        )")[0].strip().splitlines()
    assert all("=" in argument for argument in arguments), arguments


def test_megatrons_optimizer_keeps_its_ranges_where_they_are_read() -> None:
    source = inspect.getsource(DistributedOptimizer)
    assert "self.gbuf_ranges = []" in source
    assert "self.model_param_group_index_map" in source
    for key in ("param_map", "gbuf_local"):
        assert f'["{key}"]' in source
    for state in ("param", "exp_avg", "exp_avg_sq"):
        assert f'"{state}": torch.Tensor' in source


def test_megatron_looks_a_name_up_that_it_may_not_have_bound() -> None:
    assert "te_general_gemm is not None" in inspect.getsource(moe_utils)


def test_torchs_flash_attention_takes_what_it_is_given() -> None:
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
        "is_causal", "return_debug_mask",
    ]  # fmt: skip
    assert "scale" in names
    assert schema.returns[0].name == "output"


def test_torch_translates_ranks_through_one_table() -> None:
    assert isinstance(c10d._world.pg_group_ranks, dict)


def test_submitits_local_job_keeps_its_process() -> None:
    assert "self._process = " in inspect.getsource(LocalJob)
    assert issubclass(LocalJob, SubmititJob)
    assert isinstance(submitit.SlurmExecutor._submitit_command_str, property)


def test_omegaconf_keeps_the_type_of_an_absent_section() -> None:
    config = omegaconf.OmegaConf.create({"section": None})
    assert hasattr(config._get_node("section")._metadata, "ref_type")


def test_a_jinja_template_renders_from_a_context() -> None:
    template = jinja2.Template("{{ word }}")
    context = template.new_context({"word": "one"}, shared=True)
    assert "".join(template.root_render_func(context)) == "one"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("srt/entrypoints/engine.py", "def _set_envs_and_config(server_args: ServerArgs)"),
        ("srt/entrypoints/engine.py", "        _set_envs_and_config(server_args)\n"),
        (
            "srt/managers/scheduler.py",
            f'setproctitle.setproctitle(f"{sglang_server._PROCESS_TITLE_PREFIX}scheduler',
        ),
        (
            "srt/managers/detokenizer_manager.py",
            f'setproctitle("{sglang_server._PROCESS_TITLE_PREFIX}detokenizer',
        ),
        ("srt/server_args.py", sglang_server._PORT_TAKEN_MESSAGES[1]),
    ],
)
def test_sglangs_sources_have_what_is_replaced_and_read(path: str, text: str) -> None:
    assert text in (SGLANG / path).read_text()
