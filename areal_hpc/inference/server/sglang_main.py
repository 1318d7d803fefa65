"""Start of SGLang's own server with patches for RL.

The patches hide keys, score prompts while SGLang is paused, keep the expert routes of retracted
requests, and load an adapter from weight updates. SGLang spawns its schedulers, which import this
module as `__mp_main__`. It runs in SGLang's environment and imports nothing that is missing there.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from areal_hpc.jobs.processes.stack_dumps import answer_stack_requests
from areal_hpc.wire.replicas import ADAPTER_VARIABLE

log = logging.getLogger(__name__)
KEYS_FILE_VARIABLE = "AREAL_HPC_SGLANG_KEYS_FILE"
"""Environment variable with the path of the file of the server's keys; without it the server
requires none. Every user of the node could read keys on the command line, and all children of the
server would inherit keys in the environment."""
SCORING_ID_PREFIX = "areal-score-"

_is_scoring = ContextVar("is_scoring", default=False)


def main() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args([*sys.argv[1:], *consume_keys_file()]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def write_keys_file(folder: Path, api_key: str, admin_key: str) -> Path:
    """Write the file for `consume_keys_file`, readable by its owner only."""
    path = folder / "keys.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump({"--api-key": api_key, "--admin-api-key": admin_key}, stream)
    return path


def consume_keys_file() -> list[str]:
    """Read the keys as arguments of SGLang, and delete their file; no arguments without a file.

    From then on no log line of this process has the keys: SGLang logs all its arguments.
    """
    file_name = os.environ.get(KEYS_FILE_VARIABLE, "")
    if not file_name:
        return []
    path = Path(file_name)
    keys: dict[str, str] = json.loads(path.read_text())
    path.unlink()
    _hide_secrets_in_logs([*keys.values()])
    return [f"{option}={key}" for option, key in keys.items()]


def _hide_secrets_in_logs(secrets: list[str]) -> None:
    make_record = logging.getLogRecordFactory()

    def make_clean_record(*args: object, **options: object) -> logging.LogRecord:
        record = make_record(*args, **options)
        try:
            text = record.getMessage()
        except Exception:  # boundary: a handler would report the faulty call and continue
            text = f"{record.msg} {record.args}"
            record.msg, record.args = text, ()
        if any(secret in text for secret in secrets):
            for secret in secrets:
                text = text.replace(secret, "(hidden)")
            record.msg, record.args = text, ()
        return record

    logging.setLogRecordFactory(make_clean_record)


# Scoring while paused (sglang 0.5.23, private APIs) -------------------------------------------


def install_paused_scoring() -> None:
    """Patch SGLang to score prompts while it is paused, in the tokenizer and in the scheduler.

    After a weight update a replica proves its weights by the log-probabilities of a fixed prompt,
    before any other request may use them. SGLang runs no request while it is paused. The patches
    let requests pass whose id begins with `SCORING_ID_PREFIX`: the tokenizer does not hold them,
    and the scheduler runs each at once and alone, while the other requests wait.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    generate, is_paused = TokenizerManager.generate_request, TokenizerManager.is_pause
    add_request = Scheduler._add_request_to_queue

    async def generate_also_paused(manager: Any, request: Any, *args: Any, **options: Any) -> Any:
        # Each HTTP request is handled in a context of its own.
        _is_scoring.set(str(request.rid).startswith(SCORING_ID_PREFIX))
        async for reply in generate(manager, request, *args, **options):
            yield reply

    def queue_request(scheduler: Any, request: Any, *args: Any, **options: Any) -> None:
        if scheduler._engine_paused and request.rid.startswith(SCORING_ID_PREFIX):
            _run_alone(
                scheduler, len(request.origin_input_ids), lambda: add_request(scheduler, request)
            )
        else:
            add_request(scheduler, request, *args, **options)

    TokenizerManager.generate_request = generate_also_paused
    TokenizerManager.is_pause = property(
        lambda manager: is_paused.fget(manager) and not _is_scoring.get(), is_paused.fset
    )
    Scheduler._add_request_to_queue = queue_request


def _run_alone(scheduler: Any, tokens: int, add_request: Callable[[], None]) -> None:
    """Run the added request as `Scheduler.event_loop_normal` does; leave all others unchanged."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    if not _has_room(scheduler, tokens):
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    saved = {
        name: getattr(scheduler, name)
        for name in ("waiting_queue", "running_batch", "last_batch", "chunked_req")
    }
    scheduler.waiting_queue, scheduler.last_batch, scheduler.chunked_req = [], None, None
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    try:
        add_request()
        while True:
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
            if not batch:
                break
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            scheduler.last_batch = batch
    finally:
        for name, value in saved.items():
            setattr(scheduler, name, value)


def _has_room(scheduler: Any, tokens: int) -> bool:
    """Return whether a prompt fits beside the requests that were paused in place."""
    pool = scheduler.token_to_kv_pool_allocator
    free_tokens = pool.available_size() + scheduler.tree_cache.evictable_size()
    return bool(
        scheduler.req_to_token_pool.available_size() > 0
        and free_tokens >= tokens + 2 * scheduler.page_size
    )


# Experts that tokens visited (sglang 0.5.23, private APIs) -------------------------------------


def keep_sampling_routes() -> None:
    """Patch SGLang to return the experts of the passes that sampled, also of retracted requests.

    SGLang stores them by the slots of keys, which a retracted request computes again, possibly with
    other weights. Ids are sent in one byte if that is enough, else in two.
    """
    import torch
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    release = schedule_batch.release_req
    collect = SchedulerBatchResultProcessor._maybe_collect_routed_experts

    def join_kept(req: Any, routes: torch.Tensor) -> torch.Tensor:
        kept = getattr(req, "areal_routes", routes[:0])[: len(routes)]
        return torch.cat([kept, routes[len(kept) :]])

    def release_keeping_routes(*, req: Any, req_to_token_pool: Any, **others: Any) -> bool:
        capturer = get_global_experts_capturer()
        if capturer is not None and req.return_routed_experts and req.output_ids:
            tokens = len(req.origin_input_ids) + len(req.output_ids)
            start = req.routed_experts_start_len
            routes = capturer.get_topk(req.kv.req_pool_idx, tokens, req_to_token_pool, start)
            req.areal_routes = join_kept(req, routes)
        released: bool = release(req=req, req_to_token_pool=req_to_token_pool, **others)
        return released

    def collect_joined_routes(processor: Any, req: Any) -> None:
        collect(processor, req)
        if req.routed_experts is not None:
            routes = join_kept(req, req.routed_experts)
            low, high = routes.aminmax() if routes.numel() else (0, 0)
            if low >= 0:
                req.routed_experts = routes.to(torch.uint8 if high < 256 else torch.uint16)

    schedule_batch.release_req = release_keeping_routes
    SchedulerBatchResultProcessor._maybe_collect_routed_experts = collect_joined_routes


# An adapter in place of weights (sglang 0.5.23, private APIs) -------------------------------


def serve_sent_adapter() -> None:
    """Patch SGLang to load the tensors of updates as an adapter, and to run all requests with it.

    In SGLang an adapter with new tensors has a new name, and requests keep the adapter that they
    started with. Here one adapter gets new tensors like weights: while nothing runs, and the caches
    of the old ones are flushed. So running requests continue with the new tensors.
    """
    settings_text = os.environ.get(ADAPTER_VARIABLE, "")
    if not settings_text:
        return
    import torch
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    settings = json.loads(settings_text)
    adapter = LoRARef(lora_id="sent", lora_name="sent", lora_path="sent", pinned=False)
    received: dict[str, torch.Tensor] = {}
    add_request = Scheduler._add_request_to_queue

    def keep_tensors(updater: Any, tensors: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        received.update(tensors)
        return True, "Kept for the end of the update."

    def load_kept_tensors(updater: Any, *, run_post_load: bool) -> None:
        manager = updater.get_model_runner().lora_manager
        manager.unload_lora_adapter(adapter)
        result = manager.load_lora_adapter_from_tensors(adapter, {**received}, settings)
        received.clear()
        if not result.success:
            # The update was cut off. The base model fails the proof, so it serves no request.
            log.error("the adapter cannot be loaded: %s", result.error_message)

    def add_with_adapter(scheduler: Any, request: Any, *args: Any, **options: Any) -> None:
        if adapter.lora_id in scheduler.tp_worker.model_runner.lora_manager.loras:
            request.lora_id = adapter.lora_id
        add_request(scheduler, request, *args, **options)

    WeightUpdater.load_weights_from_distributed = keep_tensors
    WeightUpdater.end_weight_update = load_kept_tensors
    Scheduler._add_request_to_queue = add_with_adapter


def install_patches() -> None:
    """Install all patches in this process; without an adapter, SGLang's adapters stay unchanged."""
    answer_stack_requests()
    serve_sent_adapter()  # first: prompts scored while paused must run with the adapter, too
    install_paused_scoring()
    keep_sampling_routes()


if __name__ in ("__main__", "__mp_main__"):
    install_patches()
if __name__ == "__main__":
    main()
