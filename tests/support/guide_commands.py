"""Commands of the guides, typed into a shell in an environment of the agents'."""

import json
import os
from pathlib import Path

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import audit_of, run_program
from tests.support.document_commands import COMMANDS, OWN_MODULE, overrides
from tests.support.documents import blocks
from tests.support.environments import CHECKOUT, python_of
from tests.support.run_files import logs_of
from tests.support.small_run import processes_of
from tests.support.talking_model import make_talking_model

BLOCKS = {block.key: block for block in blocks()}
TASKS = [
    {"messages": [{"role": "user", "content": f"What is {n} + {n}?"}], "answer": str(2 * n)}
    for n in range(1, 5)
]


def make_inputs(folder: Path) -> tuple[Path, Path]:
    """A model that writes text and ends, and a folder of tasks."""
    model_dir, data_dir = folder / "model", folder / "data"
    make_talking_model(model_dir)
    data_dir.mkdir()
    for split in ("train", "test"):
        (data_dir / f"{split}.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    return model_dir, data_dir


def typed(key: str, fileroot: Path, inputs: tuple[Path, Path]) -> None:
    """Run a block of a guide with overrides, and assert that it trained."""
    command, block = COMMANDS[key], BLOCKS[key]
    small = overrides(fileroot, *inputs)
    text = command.text_of(block).rstrip("\n")
    if block.language == "python":
        script = fileroot / "script.py"
        script.write_text(text)
        (fileroot / "my_module.py").write_text(OWN_MODULE)
        name = command.run.partition("/")[0].replace("-", "_")
        text = f"python3 -m areal_hpc.areal {script} --config examples/{name}/config.yaml"
    separator = "\n" if text.endswith("\\") else " "
    environ = {
        **os.environ,
        "PATH": f"{python_of(command.environment).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(CHECKOUT),
        "OMP_NUM_THREADS": "1",
    }
    shell = ("bash", "-c", text + separator + " ".join(small))
    answer = run_program(*shell, environ=environ, timeout_s=360)
    paths = RunPaths(fileroot / command.run)
    assert answer.returncode == 0, answer.stdout + answer.stderr + logs_of(paths)
    steps = [row["step"] for row in read_readable_records(paths.metrics)]
    assert steps == [0, 1], answer.stdout
    assert audit_of(paths.root) == "trained_once=1 duplicates=0 lost=0 open=0"
    assert processes_of(paths.root) == []
