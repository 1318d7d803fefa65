"""Commands show usage and an example on errors; dry runs and SGLang's options stay as recorded."""

import os
import shlex
from pathlib import Path

import pytest

from areal_hpc.launch.checks.inputs import find_extra_args_problems
from areal_hpc.launch.prepare import write_run_recipe
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.paths import RunPaths
from tests.golden.make_slurm import GOLDEN, SITES, describe
from tests.support.commands import exit_code_of, run_program, write_program
from tests.support.environments import CHECKOUT

QUICKSTART = "recipes/quickstart.yaml"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train", "there is no command 'train'; did you mean `areal-hpc run`?"),
        ("stauts x", "did you mean `areal-hpc status`?"),
        (f"run {QUICKSTART} --n_samples 4", "or rollout.n_samples=4"),
        (f"run {QUICKSTART} --n-samples=4", "or rollout.n_samples=4"),
        (f"submit {QUICKSTART} --trainer.total_steps 9", "write trainer.total_steps=9"),
        (f"plan {QUICKSTART} --totl_steps 9", "write sft.total_steps=9 or trainer.total_steps=9"),
        (f"run {QUICKSTART} --nonsense", "keys of a recipe are written as key=value"),
        ("status somewhere --nonsense", "usage: areal-hpc status"),
        (f"run {QUICKSTART} --nonsense", "usage: areal-hpc run"),
        ("shards ls somewhere --nonsense", "usage: areal-hpc shards ls"),
        ("", "expected a command (`areal-hpc --help` lists all)"),
        ("run", "the following arguments are required: recipe\n"),
        ("logs", "the following arguments are required: run\n"),
        ("migrate", "the following arguments are required: config\n"),
        ("rejudge runs", "the following arguments are required: --reward\n"),
        ("shards", "the following arguments are required: {ls,show,export,verify}\n"),
    ],
)
def test_a_usage_error_is_that_of_the_command_and_says_what_to_write(
    words: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(*words.split()) == 2
    assert message in capfd.readouterr().err


PROXY = "proxy --tokenizer nowhere --admin-key-file nowhere --port"
UPSTREAM = "--upstream http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "migrate tests/contract/areal_config.yaml --rows 9 --out nowhere/x.yaml",
            "No such file or directory\n  at: nowhere/x.yaml\n  try: check how it is written",
        ),
        (f"{PROXY} 0 --upstream x", "error: an upstream is an address such as"),
        (f"{PROXY} 70000 {UPSTREAM}", "it must be less than or equal to 65535, got 70000"),
        (f"{PROXY} 0 {UPSTREAM} --set max_sesions=1", "did you mean max_sessions?"),
    ],
)
def test_an_argument_that_cannot_be_used_is_told_without_a_traceback(
    words: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(*words.split()) == 78
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        *("install_browser", "install_sandbox_runtime", "install_slurm"),
        *("setup", "setup_framework_programs", "setup_gyms", "setup_harnesses", "setup_oracles"),
    ],
)
def test_a_script_that_is_asked_for_help_installs_nothing(name: str, tmp_path: Path) -> None:
    for program in ("apt-get", "curl", "npm", "pip", "sudo"):
        write_program(tmp_path / program, "exit 1")  # a script that continues would install
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {**os.environ, "UV": "true", "PATH": path}
    ended = run_program(CHECKOUT / "scripts" / f"{name}.sh", "--help", environ=environ)
    assert (ended.returncode, ended.stdout) == (78, "")
    assert "\n  try: " in ended.stderr


def test_a_dry_run_starts_nothing(tmp_path: object, capfd: pytest.CaptureFixture[str]) -> None:
    fileroot = f"cluster.fileroot={tmp_path}/runs"
    assert exit_code_of("run", "--dry-run", "recipes/gpu64_math_qwen2.5_7b.yaml", fileroot) == 0
    shown = capfd.readouterr().out
    assert "GPUs at once" in shown
    assert "job trainer: 32 tasks, 1 GPU each: ledger, trainer" in shown
    assert "nothing was started" in shown
    assert exit_code_of("status", f"{tmp_path}/runs") == 78
    assert exit_code_of("run", "--dry-run", "recipes/quickstart.yaml", fileroot) == 0
    assert len(capfd.readouterr().out.splitlines()) <= 12
    words = ("sft", "recipes/quickstart.yaml", fileroot)
    assert exit_code_of("run", "--dry-run", *words) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith(f"areal-hpc plan {shlex.join(words)} shows")


def test_a_dry_run_refuses_what_the_run_would_refuse(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "--dry-run", QUICKSTART, f"cluster.fileroot={tmp_path}")
    recipe = load_recipe(QUICKSTART, words[3:])
    recipe.run_dir.mkdir(parents=True)
    write_run_recipe(recipe, RunPaths(recipe.run_dir).recipe)
    assert exit_code_of(*words, "trainer.total_steps=30") == 0
    shown = capfd.readouterr().out
    assert "changed  trainer.total_steps: 25 -> 30" in shown
    assert "goes on after step 0" in shown
    assert exit_code_of(*words, "rollout.n_samples=2") == 78
    assert "rollout.n_samples cannot change" in capfd.readouterr().err
    assert exit_code_of(*words, "rollout.n_samples=2", "--fresh") == 0
    assert "a run would write to" in capfd.readouterr().out


def test_without_sglang_nothing_is_said(tmp_path: Path) -> None:
    python = write_program(tmp_path / "python", "echo no module named sglang >&2; exit 1")
    recipe = load_recipe(CHECKOUT / "recipes" / "quickstart.yaml")
    inference = recipe.inference.model_copy(update={"extra_args": ("--enable-metriks",)})
    odd = recipe.model_copy(update={"inference": inference})
    assert list(find_extra_args_problems(odd, str(python))) == []
    assert list(find_extra_args_problems(recipe, "/nowhere/python")) == []


@pytest.mark.parametrize("site", SITES)
def test_the_dry_run_of_a_site_is_the_golden_one(site: str) -> None:
    golden = (GOLDEN / f"{site}.txt").read_text()
    assert describe(site) == golden, "look at it, then: python -m tests.golden.make_slurm"
