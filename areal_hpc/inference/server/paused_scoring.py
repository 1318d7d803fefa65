"""SGLang scores one prompt while generation is paused (sglang 0.5.23, private APIs).

After an update of its weights a replica proves them by the log-probabilities of a fixed prompt,
before any other request may see them. SGLang runs nothing while it is paused, so two places let
requests pass whose id begins with `SCORING_ID_PREFIX`: the tokenizer does not hold them back, and
the scheduler runs each at once and alone, with the requests that wait put aside.

This module runs in SGLang's environment and imports nothing that is missing there.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

SCORING_ID_PREFIX = "areal-score-"

_is_scoring = ContextVar("is_scoring", default=False)


def install_paused_scoring() -> None:
    """Patch SGLang in this process, which tokenizes, or runs the model, or forks both."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    generate, is_paused = TokenizerManager.generate_request, TokenizerManager.is_pause
    add_request = Scheduler._add_request_to_queue

    async def generate_also_paused(manager: Any, request: Any, *args: Any, **options: Any) -> Any:
        # Each HTTP request is handled in a context of its own.
        _is_scoring.set(str(request.rid).startswith(SCORING_ID_PREFIX))
        async for reply in generate(manager, request, *args, **options):
            yield reply

    def add_or_score(scheduler: Any, request: Any, *args: Any, **options: Any) -> None:
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
    Scheduler._add_request_to_queue = add_or_score


def _run_alone(scheduler: Any, tokens: int, add_request: Callable[[], None]) -> None:
    """Run what is added as `Scheduler.event_loop_normal` does, and leave all else as it is."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    if not _has_room(scheduler, tokens):
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    held = {
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
        for name, value in held.items():
            setattr(scheduler, name, value)


def _has_room(scheduler: Any, tokens: int) -> bool:
    """Whether a prompt fits in beside requests that were paused in place."""
    pool = scheduler.token_to_kv_pool_allocator
    free_tokens = pool.available_size() + scheduler.tree_cache.evictable_size()
    return bool(
        scheduler.req_to_token_pool.available_size() > 0
        and free_tokens >= tokens + 2 * scheduler.page_size
    )
