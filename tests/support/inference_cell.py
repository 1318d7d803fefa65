"""A real cell: the inference job as its supervisor starts it, real SGLang on CPU, a tiny Qwen3."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_hpc.jobs.config import get_interpreter
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import derive_bearer_key, ensure_service_key, make_client_tls
from areal_hpc.wire.replicas import ReplicasOfCell, ReplicaView
from tests.support.chatml import write_model_dir
from tests.support.deadlines import Deadline, scaled
from tests.support.process_commands import command_of, is_scheduler, start_job_process
from tests.support.role_recipe import write_role_recipe
from tests.support.waiting import await_endpoint

VOCABULARY = 300
"""Size of the vocabulary: no multiple of 64, so SGLang pads it."""
START_TIMEOUT_S = 200.0
CALL_TIMEOUT_S = 120.0


def tiny_qwen3(seed: int, *, tied: bool = False) -> Qwen3ForCausalLM:
    """Large random weights, so that greedy choices are clear-cut."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


class Cell:
    def __init__(self, paths: RunPaths, name: str) -> None:
        self.paths = paths
        self.name = name
        self.generation = 1
        self._relays: list[httpx.Client] = []
        self.start()

    def start(self) -> None:
        """Run the job, for the first time or after its end. Its relay answers on return."""
        paths, config_path = self.paths, self.paths.root / f"{self.name}.json"
        self.service_key = ensure_service_key(paths.service_key)
        (paths.rendezvous_dir / f"control-{self.name}.json").unlink(missing_ok=True)
        self.job = start_job_process(
            "areal_hpc.inference.job:run", config_path, paths.root / f"{self.name}.log"
        )
        try:
            endpoint = await_endpoint(paths.rendezvous_dir, f"control-{self.name}", 20.0, self.job)
        except AssertionError:
            self.stop()
            raise
        key = derive_bearer_key(self.service_key, f"control-{self.name}")
        self.relay = httpx.Client(
            base_url=endpoint.url,
            headers={"authorization": f"Bearer {key}"},
            verify=make_client_tls(self.service_key),
            timeout=scaled(30),
            trust_env=False,
        )
        self._relays.append(self.relay)

    def stop(self) -> None:
        self.job.send_signal(signal.SIGTERM)
        self.job.wait(scaled(30))
        for relay in self._relays:
            relay.close()

    def replica(self, index: int = 0) -> ReplicaView:
        replicas = msgspec.json.decode(self.relay.get("/replicas").content, type=ReplicasOfCell)
        return replicas.replicas[index]

    def await_replica(
        self,
        wanted: Callable[[ReplicaView], bool],
        index: int = 0,
        *,
        timeout_s: float = START_TIMEOUT_S,
    ) -> ReplicaView:
        deadline = Deadline(timeout_s)
        while not wanted(view := self.replica(index)):
            assert self.job.poll() is None, self.logs()
            assert not deadline.is_over(), f"{view}\n{self.logs()}"
            time.sleep(0.05)
        return view

    def control(self, route: str, body: object = None, **headers: str) -> httpx.Response:
        """Make one relayed call, as a trainer of the current generation would."""
        headers = {
            "x-areal-incarnation": str(self.replica().incarnation),
            "x-areal-generation": str(self.generation),
        } | {f"x-areal-{name.replace('_', '-')}": value for name, value in headers.items()}
        return self.relay.post(f"/replicas/0/{route}", json=body or {}, headers=headers)

    def generate(self, input_ids: list[int], index: int = 0, **sampling: Any) -> dict[str, Any]:
        answer = httpx.post(**self._generation(input_ids, index, sampling))
        answer.raise_for_status()
        reply: dict[str, Any] = answer.json()
        return reply

    def generate_live(
        self, input_ids: list[int], index: int, heard: Callable[[int], None], **sampling: Any
    ) -> dict[str, Any]:
        """Generate, and call `heard` with the number of tokens whenever there are more."""
        pieces: list[dict[str, Any]] = []
        request = self._generation(input_ids, index, sampling, stream=True)
        with httpx.stream("POST", **request) as answer:
            answer.raise_for_status()
            for line in _split_lines(answer.iter_bytes()):
                if line.startswith(b"data: {"):  # each holds what is new
                    pieces.append(json.loads(line.removeprefix(b"data: ")))
                    heard(sum(len(piece["output_ids"]) for piece in pieces))
        reply, metas = pieces[-1], [piece["meta_info"] for piece in pieces]
        name = "output_token_logprobs"
        reply["output_ids"] = [token for piece in pieces for token in piece["output_ids"]]
        reply["meta_info"][name] = [entry for meta in metas for entry in meta[name]]
        return reply

    def _generation(
        self, input_ids: list[int], index: int, sampling: dict[str, Any], **more: bool
    ) -> dict[str, Any]:
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
        view = self.replica(index)
        return {
            "url": f"{view.url}/generate",
            "json": body | more,
            "headers": {"authorization": f"Bearer {view.keys.api}"},
            "timeout": scaled(CALL_TIMEOUT_S),
            "trust_env": False,
        }

    def engines(self) -> list[psutil.Process]:
        children = psutil.Process(self.job.pid).children()
        return [p for p in children if "areal_hpc.inference.cpu.sglang_cpu" in command_of(p)]

    def engine(self, index: int = 0) -> psutil.Process:
        port = self.replica(index).url.rpartition(":")[2]
        (engine,) = [engine for engine in self.engines() if port in command_of(engine)]
        return engine

    def scheduler(self, index: int = 0) -> psutil.Process:
        (scheduler,) = filter(is_scheduler, self.engine(index).children())
        return scheduler

    def engine_processes(self) -> list[psutil.Process]:
        return [p for engine in self.engines() for p in (engine, *engine.children(True))]

    def logs(self) -> str:
        tails = (
            f"== {path}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in self.paths.root.rglob("*.log")
        )
        return "\n".join(tails)


@contextmanager
def running_cell(
    run_dir: Path,
    model: Qwen3ForCausalLM,
    *,
    name: str = "cell-0",
    trainer: Mapping[str, Any] = MappingProxyType({}),
    **inference: Any,
) -> Iterator[Cell]:
    """Yield a cell with fp32 replicas of `model`, one by default, started but not yet ready."""
    paths = RunPaths(run_dir)
    model.save_pretrained(write_model_dir(paths.starting_model_dir))
    write_role_recipe(paths, inference=inference, trainer=trainer)
    config = {
        "run_dir": str(run_dir),
        "cell": name,
        "model_path": str(paths.starting_model_dir),
        "serve_python": get_interpreter("serve", "auto"),
    }
    (run_dir / f"{name}.json").write_text(json.dumps(config))
    cell = Cell(paths, name)
    try:
        yield cell
    finally:
        cell.stop()


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines of an event stream, in which a random model may well say a Unicode line separator."""
    left = b""
    for chunk in chunks:
        *lines, left = (left + chunk).split(b"\n")
        yield from lines


def logprob_error(
    model: Qwen3ForCausalLM, prompt: list[int], reply: dict[str, Any], span: slice = slice(None)
) -> float:
    """Compare log-probabilities of a span of a reply with those of transformers."""
    output = reply["output_ids"]
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + output])).logits[0].log_softmax(-1)
    expected = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(output)[:, None])[:, 0]
    sampled = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    return (sampled - expected)[span].abs().max().item()
