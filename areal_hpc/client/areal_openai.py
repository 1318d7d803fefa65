"""`ArealOpenAI`: an `AsyncOpenAI` client that answers and records its requests in this process.

It runs the proxy's own application behind a transport without a socket, so that all that the proxy
serves (dialects, tools, token reuse) behaves the same here. It is for agents that take a client
rather than an address; it exports their training rows itself. A stream arrives only when complete.
"""

import importlib
import secrets
from typing import Any, Literal

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai import __version__ as sdk_version
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from areal_hpc.client.in_process_engine import (
    EngineEndpoint,
    SingleServerRouter,
    get_shared_parsers,
    load_tokenizer,
)
from areal_hpc.client.recorded_interaction import RecordedInteraction
from areal_hpc.proxy.completion.service import CompletionService
from areal_hpc.proxy.config import ProxyLimits
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.http.app import ProxyApp, Receive, Scope
from areal_hpc.proxy.http.driver_api import DriverApi
from areal_hpc.proxy.http.event_stream import Send
from areal_hpc.proxy.sessions.recorder import MemoryRecorder
from areal_hpc.proxy.sessions.store import SessionOpened, compute_key_digest, generate_key
from areal_hpc.session.credit import (
    CreditRule,
    compute_credited_rewards,
    find_interaction_to_reward,
    find_retry_orphans,
    give_reward,
    parse_reward,
)
from areal_hpc.session.export import ExportStyle, RowPlan, plan_rows_with_unrewarded
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.proxy import EngineAddress, StartSessionRequest

PLACEHOLDER_BASE_URL = "http://in-process.invalid/v1"
"""Address that the SDK requires and nothing resolves."""
MAX_REQUEST_BYTES = 1 << 30
DEFAULT_CONTEXT_TOKENS = 32768
"""Longest sequence if neither the caller nor the tokenizer sets one."""


class ArealOpenAI(AsyncOpenAI):
    """Client of one session: its conversations with the model, their rewards and training rows.

    Args:
        engine: Server with SGLang's `/generate`, or its address.
        tokenizer: Fast tokenizer of `transformers`, or the directory of the model.
        tool_call_parser: SGLang's name of the format of the model's tool calls, by default that of
            Qwen as in AReaL; None leaves calls in the text.
        reasoning_parser: SGLang's name of the format of its reasoning.
        engine_max_tokens: Longest prompt plus reply; None takes the tokenizer's limit.
        chat_template_type: `concat` permits the export of that name. Both re-use tokens of
            earlier turns verbatim.
        serve_python: Interpreter of SGLang's environment, which runs the parsers; `auto`: the
            checkout's own.
        request_timeout_s: Longest time one call may take.
    """

    def __init__(
        self,
        engine: EngineEndpoint | EngineAddress | str,
        tokenizer: Any,
        tool_call_parser: str | None = "qwen",
        reasoning_parser: str | None = None,
        engine_max_tokens: int | None = None,
        chat_template_type: Literal["hf", "concat"] = "hf",
        *,
        serve_python: str = "auto",
        request_timeout_s: float = 3600.0,
    ) -> None:
        if chat_template_type not in ("hf", "concat"):
            raise ValueError(f"chat_template_type is hf or concat, got {chat_template_type!r}")
        template, encoder = load_tokenizer(tokenizer)
        context_tokens = engine_max_tokens or _get_max_sequence_tokens(tokenizer)
        model = ServedModel(
            "areal",
            template,
            encoder,
            context_tokens,
            tool_call_parser,
            reasoning_parser,
        )
        key = generate_key()
        # Ids have no bound: a model may sample an id of its embedding that its tokenizer lacks.
        recorder = MemoryRecorder()
        session_id = f"client-{secrets.token_hex(6)}"
        recorder.record(
            SessionOpened(
                session_id, compute_key_digest(key), StartSessionRequest("client", disposable=True)
            )
        )
        self._engine = EngineEndpoint.from_address(engine)
        self._owns_engine = not isinstance(engine, EngineEndpoint)
        self.tree = recorder.store.sessions[session_id].tree
        self._chat_template_type = chat_template_type
        self._answers: dict[str, Any] = {}
        self._is_discounted = False
        transport = _make_asgi_transport(
            self._engine, model, recorder, serve_python, request_timeout_s
        )
        super().__init__(
            api_key=key,
            base_url=PLACEHOLDER_BASE_URL,
            max_retries=0,
            timeout=request_timeout_s,
            http_client=DefaultAsyncHttpxClient(transport=transport),
        )

    async def post(self, *args: Any, **kwargs: Any) -> Any:
        """Send a request for a resource of the SDK, and keep its answer for export."""
        answer = await super().post(*args, **kwargs)
        if isinstance(answer, ChatCompletion | Response):
            self._answers[answer.id] = answer
        return answer

    async def close(self) -> None:
        """Close the client, and its connections unless an `EngineEndpoint` was passed."""
        await super().close()
        if self._owns_engine:
            await self._engine.close()

    # Rewards ------------------------------------------------------------------------------

    def set_reward(self, interaction_id: str, reward: float | Reward) -> None:
        """Reward one interaction; a second reward replaces the first."""
        interaction = find_interaction_to_reward(self.tree, interaction_id)
        give_reward(interaction, parse_reward(reward), is_named=True)

    def set_last_reward(self, reward: float | Reward) -> None:
        """Reward the last completed interaction."""
        if not len(self.tree):
            raise RuntimeError("there is no completed interaction to reward")
        give_reward(self.tree.last_completed, parse_reward(reward), is_named=False)

    def set_final_reward(self, reward: float | Reward) -> None:
        """Reward the last completed interaction: the older name of `set_last_reward`."""
        self.set_last_reward(reward)

    def apply_reward_discount(
        self, turn_discount: float = 1.0, credit: CreditRule = "tree"
    ) -> dict[str, float | None]:
        """Pass rewards back to the turns that led to them (`session.credit`).

        Returns:
            Reward of each interaction by id; None if no reward reaches it.
        """
        return self._overwrite_rewards_with_earned(turn_discount, credit, frozenset())

    def _overwrite_rewards_with_earned(
        self, turn_discount: float, credit: CreditRule, orphans: frozenset[str]
    ) -> dict[str, float | None]:
        if self._is_discounted:
            raise RuntimeError("apply_reward_discount should only be called once.")
        earned = compute_credited_rewards(self.tree, turn_discount, credit, orphans)
        self._is_discounted = True
        for interaction_id, reward in earned.items():
            self.tree[interaction_id].reward = reward.total
        return {interaction_id: reward.total for interaction_id, reward in earned.items()}

    # Export -------------------------------------------------------------------------------

    def get_interaction(self, interaction_id: str) -> RecordedInteraction | None:
        """Return one interaction; None if this client did not record it."""
        if interaction_id not in self.tree:
            return None
        reward = self.tree[interaction_id].reward
        (plan,) = plan_rows_with_unrewarded(self.tree, "individual", {interaction_id: reward})
        return self._build_recorded_interaction(plan)

    def export_interactions(
        self,
        style: ExportStyle = "individual",
        reward_discount: float | None = None,
        drop_retry_orphans: bool = False,
    ) -> dict[str, RecordedInteraction]:
        """Return training rows by the id of the interaction that ends them.

        Args:
            style: `individual`: a row per interaction, which trains its reply alone. `concat`: a
                row per leaf of the tree; replies that leaves share are trained in the first.
            reward_discount: Discount to pass rewards back with, unless that is done already.
            drop_retry_orphans: Leave out unused replies to a request that was sent again.
        """
        if style not in ("individual", "concat"):
            raise ValueError(f"Invalid export interactions style {style}")
        if style == "concat" and self._chat_template_type != "concat":
            raise ValueError(
                "Cannot export interactions in 'concat' style from a client with "
                f"chat_template_type={self._chat_template_type!r}"
            )
        orphans = find_retry_orphans(self.tree) if drop_retry_orphans else frozenset()
        if reward_discount is not None and not self._is_discounted:
            self._overwrite_rewards_with_earned(reward_discount, "tree", orphans)
        kept = [call for call in self.tree if call.interaction_id not in orphans]
        rewards = {call.interaction_id: call.reward for call in kept}
        interactions = [
            self._build_recorded_interaction(plan)
            for plan in plan_rows_with_unrewarded(self.tree, style, rewards)
        ]
        return {interaction.interaction_id: interaction for interaction in interactions}

    def _build_recorded_interaction(self, plan: RowPlan) -> RecordedInteraction:
        last = plan.path[-1]
        answer = self._answers.get(last.interaction_id)
        return RecordedInteraction(plan, answer, last.reward, last.reward)


def _make_asgi_transport(
    engine: EngineEndpoint,
    model: ServedModel,
    recorder: MemoryRecorder,
    serve_python: str,
    request_timeout_s: float,
) -> Any:
    """Return the proxy's application as a transport of the HTTP library that the SDK uses.

    The first request creates the application, because that needs a running event loop.
    """
    app: ProxyApp | None = None

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal app
        if app is None:
            router, upstream = SingleServerRouter(engine), engine.get_client()
            limits = ProxyLimits(
                request_timeout_s=request_timeout_s,
                max_sessions=1,
                max_request_bytes=MAX_REQUEST_BYTES,
            )
            parsers = get_shared_parsers(
                model.tool_call_parser, model.reasoning_parser, serve_python
            )
            app = ProxyApp(
                admin_key=generate_key(),
                limits=limits,
                model=model,
                store=recorder.store,
                completions=CompletionService(model, router, upstream, recorder, limits, parsers),
                driver_api=DriverApi(recorder, router, None, limits),
            )
        await app(scope, receive, send)

    http = importlib.import_module("httpx2" if int(sdk_version.split(".")[0]) >= 3 else "httpx")
    return http.ASGITransport(app=answer)


def _get_max_sequence_tokens(tokenizer: Any) -> int:
    limit = getattr(tokenizer, "model_max_length", None)
    # transformers sets 10**30 if it does not know the limit.
    return limit if isinstance(limit, int) and limit < 10**9 else DEFAULT_CONTEXT_TOKENS
