"""Bad input is refused before anything starts: exit code 78, the place, and a next step."""

import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_hpc.jobs.environment import get_interpreter
from areal_hpc.launch.tiny_model import build_tiny_config
from areal_hpc.recipe.recipe import TinyModelConfig
from tests.support.chatml import write_model_dir
from tests.support.commands import exit_code_of, run_program
from tests.support.environments import CHECKOUT
from tests.support.small_run import LIGHT_AGENT

QUICKSTART = "recipes/quickstart.yaml"


NO_DATA = "train_dataset.generator=null train_dataset.path=data/none.jsonl"
OWN_DATA = "train_dataset.generator=null train_dataset.path=DIR/tasks.jsonl train_dataset.kwargs={}"
OWN_MODEL = "model.tiny=null model.path=DIR"
FOUR_RANKS = "trainer.parallel.dp=2 inference.replicas_per_cell=2 inference.tp=2"
ON_GPUS = "trainer.device=cuda inference.device=cuda"
SUMS = "tests.support.sums"
MADE_UP = "train_dataset.generator=tests.support.made_up_tasks"
MAX_CHECKS_S = 15.0
"""Processor seconds, also where the Python of a role and the user's package have to start."""
AGENTS_PYTHON = get_interpreter("agents", "auto")

CASES = [
    # overrides (DIR has the files of the case), what is said
    # A misspelling on purpose: spelled right, the run starts and trains.
    ("trainer.optimzer.lr=1", "unknown key 'optimzer'", "did you mean optimizer?"),
    (
        f"{NO_DATA} cluster.serve.python=/no/such/python rollout.should_accept={SUMS}:no_such "
        f"rollout.curriculum={SUMS}:nothing",
        *("4 errors:", "there is no data set at", "at: train_dataset.path"),
        *("no Python interpreter for role serve at /no/such/python", "make setup"),
        *("at: rollout.should_accept", "no_such", "at: rollout.curriculum", "nothing"),
    ),
    (
        OWN_DATA,
        "row 1, limits: proxy.session_timeout_s=3600 is less than the 5400 s",
        "at: train_dataset",
    ),
    # The generator of tasks.
    (
        f"train_dataset.generator={SUMS}:taks",
        "the module 'tests.support.sums' has no 'taks'; did you mean 'tasks'?",
        "at: train_dataset.generator",
    ),
    (
        "train_dataset.generator=tests.support.sumz:tasks",
        "there is no module 'tests.support.sumz'; did you mean 'sums'?",
    ),
    (
        f"{MADE_UP}:questions train_dataset.kwargs.word=7",
        "got an unexpected keyword argument 'word'",
        "at: train_dataset.kwargs",
        "try: match its signature: questions(size: int, seed: int, terms: int, words: int = 5)",
    ),
    (
        f"{MADE_UP}:breaking",
        "raised KeyError: 'qestion'",
        "made_up_tasks.py:17 in breaking: yield make_task(number)",
        "made_up_tasks.py:23 in make_task:",
        "at: train_dataset.generator",
    ),
    # Each role's Python, the tokenizer, the context.
    (
        f"cluster.serve.python={AGENTS_PYTHON} cluster.train.python={AGENTS_PYTHON}",
        *("lacks sglang", "at: cluster.serve.python"),
        *("lacks torch, megatron.core", "at: cluster.train.python", "run make setup"),
    ),
    (
        f"trainer.device=cuda inference.device=cuda cluster.train.python={sys.executable}",
        "+cpu, which computes on CPUs alone",
        "at: cluster.train.python",
    ),
    (
        f"{OWN_MODEL}/foreign_tokenizer",
        "has token ids up to 339, but config.json says vocab_size 320: it belongs to another model",
        "at: model.path",
    ),
    (
        "inference.context_length=256 rollout.sampling.max_new_tokens=512",
        "rollout.sampling.max_new_tokens=512 leaves no room for a prompt in a context of 256",
    ),
    ("inference.context_length=16", "greater than or equal to 64", "at: inference.context_length"),
    (
        f"{MADE_UP}:questions train_dataset.kwargs.size=4 "
        "train_dataset.kwargs.words=600 sft.dataset.kwargs.size=64",
        "4 of 4 prompts of train_dataset leave no room for a reply: that of task 0 has",
        "the context has 512",
    ),
    (f"rollout.workflow={SUMS}.SumAgnt", "at: rollout.workflow", "SumAgent"),
    ("rollout.workflow=no_such_package.agent.Agent", "at: rollout.workflow", "try:"),
    ("rollout.workflow=nodots", "at: rollout.workflow", "try:"),
    (
        f"{OWN_MODEL} trainer.parallel.tp=4 trainer.parallel.pp=3 trainer.parallel.dp=2",
        "num_key_value_heads 2 must be a multiple of tp 4",
        "num_hidden_layers 2 must be a multiple of pp 3",
        *("has no tokenizer.json", "copy the tokenizer files"),
    ),
    (f"{OWN_MODEL}/mamba", "model_type must be one of llama, qwen2, qwen3, qwen3_moe, got 'mamba'"),
    (
        f"{OWN_MODEL}/quantized",
        "says that the weights are quantized (fp8); they can be neither trained nor updated",
        "at: model.path",
    ),
    (
        "inference.extra_args=[--quantization,fp8]",
        "--quantization cannot be given: a server that quantizes holds other weights",
        "at: inference.extra_args",
    ),
    (
        "inference.extra_args=[--enable-metriks]",
        "SGLang has no option --enable-metriks",
        *("at: inference.extra_args", "did you mean --enable-metrics?"),
    ),
    (
        "trainer.parallel.ep=2 trainer.parallel.dp=2",
        "at: trainer.parallel.ep",
        "the number of experts of a dense network, 1 must be a multiple of ep 2",
    ),
    (
        f"{FOUR_RANKS} {ON_GPUS} {NO_DATA}",
        "too few GPUs for the stage train: it needs 6 at once "
        "(trainer 2 ranks x 1 = 2, cell-0 2 replicas x tp 2 = 4), "
        "this machine shows 4 (CUDA_VISIBLE_DEVICES='3,5,7,9')",
        "there is no data set at",
    ),
    (
        "model.tiny=null model.path=/no/model rollout.workflow=nowhere.Agent "
        "valid_dataset.generator=null valid_dataset.path=/no/data.jsonl",
        "3 errors:",
    ),
]


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder of tasks and of a model without tokenizer, and below it one of an odd model."""
    folder = tmp_path / "given"
    (folder / "mamba").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(build_tiny_config(TinyModelConfig())))
    (folder / "model.safetensors").touch()
    (folder / "mamba" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    quantized = write_model_dir(folder / "quantized")
    (quantized / "config.json").write_text(
        json.dumps(
            {**build_tiny_config(TinyModelConfig()), "quantization_config": {"quant_method": "fp8"}}
        )
    )
    (quantized / "model.safetensors").touch()
    foreign = write_model_dir(folder / "foreign_tokenizer")
    config = {**build_tiny_config(TinyModelConfig()), "vocab_size": 320}
    (foreign / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    (foreign / "model.safetensors").touch()
    tasks = [{"question": "2+2"}, {"question": "3+3", "limits": {"timeout_s": 1800}}]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    return folder


@pytest.mark.parametrize(("overrides", "said"), [(one[0], one[1:]) for one in CASES])
def test_what_is_wrong_is_named_and_nothing_is_left_behind(
    overrides: str,
    said: Sequence[str],
    given: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(CHECKOUT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9")
    given_here = overrides.replace("DIR", str(given)).split()
    fileroot = f"cluster.fileroot={tmp_path}/runs"
    used_s = _measure_processor_s()
    assert exit_code_of("run", QUICKSTART, fileroot, LIGHT_AGENT, *given_here) == 78
    used_s = _measure_processor_s() - used_s
    shown = capfd.readouterr().err
    assert [part for part in said if part not in shown] == [], shown
    assert "Traceback" not in shown
    assert not (tmp_path / "runs").exists()
    assert used_s < MAX_CHECKS_S


def _measure_processor_s() -> float:
    """Processor seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(one) for one in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def test_commands_say_what_they_do_plan_without_data_and_refuse_what_is_no_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKOUT)
    assert exit_code_of("--help") == 0
    assert "train a recipe on this machine" in capfd.readouterr().out
    sources = "{sources: [{path: a.jsonl, weight: 3}, {path: b.jsonl}], generator: null}"
    assert exit_code_of("plan", QUICKSTART, f"train_dataset={sources}") == 0
    assert "ledger" in capfd.readouterr().out
    assert exit_code_of("status", tmp_path) == 78
    assert "there is no run at" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("mount_options", "expected"),
    [("ro", "Read-only file system"), ("size=1m", "is full: 1 MiB free")],
)
def test_full_or_read_only_run_directory(mount_options: str, expected: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # A mount namespace of its own: real file-system errors, no privileges, nothing to clean up.
    script = (
        f"mount -t tmpfs -o {mount_options} none {disk} && "
        f"exec {sys.executable} -m areal_hpc run {QUICKSTART} cluster.fileroot={disk} {LIGHT_AGENT}"
    )
    answer = run_program("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script)
    assert answer.returncode == 78, answer.stderr
    assert expected in answer.stderr
    assert "at: cluster.fileroot" in answer.stderr
