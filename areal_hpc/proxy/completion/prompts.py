"""Preparation of a model call: prompt ids with token reuse, sampling parameters, limits."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from areal_hpc.errors import ChatTemplateError, PromptTooLongError, ProxyRequestError
from areal_hpc.proxy.config import ProxyLimits
from areal_hpc.proxy.engine.generation import Generation, SamplingParams
from areal_hpc.proxy.engine.limits import (
    GrammarChecks,
    refuse_call_beyond_limits,
    refuse_costly_sampling,
    reserve_reply_tokens_per_choice,
)
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel, make_random_id
from areal_hpc.proxy.engine.sglang_client import GenerateRequest
from areal_hpc.proxy.engine.tool_parsers import ParserProcessClient
from areal_hpc.proxy.metrics import ProxyMetrics
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.call_records import decode_sampling_params_json
from areal_hpc.session.message_matching import list_unpaired
from areal_hpc.session.open_turn import (
    OpenTurn,
    build_open_turn,
    match_ids_prompt,
    match_text_prompt,
)
from areal_hpc.session.tree import (
    Interaction,
    format_ids_as_json_inside,
    pack_ids,
)
from areal_hpc.wire.proxy import MAX_MASK_TOKENS_PER_POSITION, StartSessionRequest
from areal_hpc.wire.trajectory import (
    GREEDY_TEMPERATURE_BOUND,
    CallFacts,
    MixtureShape,
    RecordedRoutes,
    record_engine_routes,
)

log = logging.getLogger(__name__)

_SGLANG_TRUNCATION_DEFAULTS = {"top_p": 1.0, "top_k": -1}


def enforce_sampling(
    call: ModelCall,
    session: StartSessionRequest,
    unknown_params: Sequence[str],
    facts: CallFacts,
) -> ModelCall:
    """Replace a call's sampling parameters by the run's, if its session is bound to them.

    `ignored` of the result names the replaced parameters of the request, `unknown_params`, and
    results of tools that belong to no call.
    """
    sampling, replaced = apply_enforced_sampling(call.sampling, session)
    ignored = [*call.ignored, *unknown_params, *replaced, *list_unpaired(call.messages)]
    return msgspec.structs.replace(call, sampling=sampling, ignored=ignored, facts=facts)


def apply_enforced_sampling(
    sampling: SamplingParams, session: StartSessionRequest
) -> tuple[SamplingParams, list[str]]:
    enforced = _get_enforced_sampling(session)
    replaced = [name for name, value in enforced.items() if getattr(sampling, name) != value]
    return (msgspec.structs.replace(sampling, **enforced) if replaced else sampling), replaced


def correct_recorded_sampling(call: Interaction, session: StartSessionRequest) -> Interaction:
    """Replace the requested parameters, which a client recorded with a call, by those in effect."""
    enforced = _get_enforced_sampling(session)
    recorded = decode_sampling_params_json(call.sampling)
    requested = {**_SGLANG_TRUNCATION_DEFAULTS, **recorded, "temperature": call.temperature}
    replaced = [name for name, value in enforced.items() if requested[name] != value]
    temperature = enforced["temperature"] if replaced else call.temperature
    if is_greedy := 0 < temperature < GREEDY_TEMPERATURE_BOUND:
        temperature = 0.0
    if not replaced and not is_greedy:
        return call
    return msgspec.structs.replace(
        call,
        temperature=temperature,
        sampling=msgspec.json.encode(recorded | enforced | {"temperature": temperature}),
        ignored=[*call.ignored, *(name for name in replaced if name not in call.ignored)],
    )


def zero_tiny_temperature(sampling: SamplingParams) -> SamplingParams:
    """Set a tiny temperature to 0, because the engine does not divide logits by it.

    Rows must state the temperature that the engine used.
    """
    if 0 < sampling.temperature < GREEDY_TEMPERATURE_BOUND:
        return msgspec.structs.replace(sampling, temperature=0.0)
    return sampling


def bound_top_k(
    sampling: SamplingParams, session: StartSessionRequest, vocab_size: int
) -> tuple[SamplingParams, bool]:
    """Bound `top_k`, as SGLang requires for sampling masks; return whether the mask is recorded."""
    if not (session.records_sampling_mask and sampling.has_recordable_sampling_mask):
        return sampling, False
    if 0 < sampling.top_k <= MAX_MASK_TOKENS_PER_POSITION:
        return sampling, True
    bound = min(vocab_size, MAX_MASK_TOKENS_PER_POSITION)
    return msgspec.structs.replace(sampling, top_k=bound), True


def _get_enforced_sampling(session: StartSessionRequest) -> dict[str, Any]:
    if session.sampling_from == "agent":
        return {}
    params = session.sampling
    return {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k or -1}


MAX_MEAN_CHARS_PER_TOKEN = 32
"""Upper bound: a text too long even at this mean is refused untokenized. Real text has 3 to 6."""
MAX_UNHASHED_SAMPLING_BYTES = 1000
"""Limit beyond which a grammar is recorded by its hash: each call may carry all tools' schemas."""


class PreparedCall(msgspec.Struct, frozen=True):
    call: ModelCall
    session: Session
    turn: OpenTurn
    new_ids: bytes
    prompt_tokens: int
    prompt_ids_json_inside: bytes
    sampling: SamplingParams
    answer_id: str
    give_up_at: float
    asked_at: float
    parseable_tools: Sequence[dict[str, Any]] | None
    """Tools whose calls the reply may contain; None if it can only be text."""
    reasons_before_grammar: bool
    """Whether the reply begins inside its reasoning; a grammar starts after that."""
    records_sampling_mask: bool
    mixture: MixtureShape | None
    """Experts of the model; None if the experts that tokens visit are not recorded."""
    routes_from: int
    """First token whose experts are recorded: the parent's last one, which no pass has read."""
    reserved_tokens_per_choice: int

    def build_request(self, choice_index: int) -> GenerateRequest:
        return GenerateRequest(
            make_random_id(16),
            self.prompt_ids_json_inside,
            self.get_choice_sampling(choice_index),
            self.call.top_logprobs,
            self.reasons_before_grammar,
            self.records_sampling_mask,
            self.routes_from if self.mixture else -1,
        )

    def record_routes(self, generation: Generation) -> RecordedRoutes | None:
        if self.mixture is None:
            return None
        tokens = self.prompt_tokens + len(generation.output_ids) - 1 - self.routes_from
        routes = record_engine_routes(self.mixture, generation.routes, tokens)
        if routes is None:
            log.warning("a reply came without sound routes of its %d tokens", tokens)
        return routes

    def get_choice_sampling(self, choice_index: int) -> SamplingParams:
        if not choice_index:
            return self.sampling
        seed = (self.sampling.sampling_seed or 0) + choice_index
        return msgspec.structs.replace(self.sampling, sampling_seed=seed)


def encode_recorded_sampling(sampling: SamplingParams) -> bytes:
    """Encode sampling parameters for the record: as JSON, with a long grammar by its hash."""
    encoded = msgspec.json.encode(sampling)
    if len(encoded) <= MAX_UNHASHED_SAMPLING_BYTES:
        return encoded
    for name in sampling.active_grammar_names:
        digest = hashlib.blake2b(getattr(sampling, name).encode(), digest_size=8).hexdigest()
        sampling = msgspec.structs.replace(sampling, **{name: f"blake2b:{digest}"})
    return msgspec.json.encode(sampling)


class PromptBuilder:
    def __init__(
        self,
        model: ServedModel,
        parsers: ParserProcessClient | None,
        grammars: GrammarChecks,
        limits: ProxyLimits,
        metrics: ProxyMetrics,
    ) -> None:
        self._model = model
        self._parsers = parsers
        self._grammars = grammars
        self._limits = limits
        self._metrics = metrics

    async def prepare_call(self, session: Session, call: ModelCall, answer_id: str) -> PreparedCall:
        """Find the interaction that the call continues, and prepare the call for an engine.

        The caller must release `reserved_tokens_per_choice`.
        """
        give_up_at = time.monotonic() + self._limits.request_timeout_s
        asked_at = time.time()
        refuse_call_beyond_limits(session, call.n)
        _refuse_prefill_with_grammar(call)
        turn, new_ids, prompt_tokens = await self._tokenize_call(session, call)
        self._metrics.prompts_by_reuse[turn.reuse].inc()
        if turn.differing_field is not None:
            self._metrics.rewritten_histories.labels(turn.differing_field).inc()
        sampling = zero_tiny_temperature(self._complete_sampling(session, call, prompt_tokens))
        tools, reasons_first = self._model.list_parseable_tools(call), False
        if self._parsers is not None and tools is not None:
            sampling, reasons_first = await self._prepare_sampling_for_parsers(
                self._parsers, call, tools, turn, sampling
            )
        refuse_costly_sampling(sampling)
        await self._grammars.refuse_costly_grammar(session, sampling)
        sampling, records_sampling_mask = bound_top_k(
            sampling, session.request, self._model.encoder.vocab_size
        )
        sampling, reserved_tokens = await reserve_reply_tokens_per_choice(
            session, sampling, call.n, give_up_at
        )
        return PreparedCall(
            call=call,
            session=session,
            turn=turn,
            new_ids=pack_ids(new_ids),
            prompt_tokens=prompt_tokens,
            prompt_ids_json_inside=session.tree.build_sequence_ids_json_inside(
                turn.parent, format_ids_as_json_inside(new_ids)
            ),
            sampling=sampling,
            answer_id=answer_id,
            asked_at=asked_at,
            give_up_at=give_up_at,
            parseable_tools=tools,
            reasons_before_grammar=reasons_first,
            records_sampling_mask=records_sampling_mask,
            mixture=self._model.mixture if session.is_trained else None,
            routes_from=max(0, prompt_tokens - len(new_ids) - 1),
            reserved_tokens_per_choice=reserved_tokens,
        )

    async def _prepare_sampling_for_parsers(
        self,
        parsers: ParserProcessClient,
        call: ModelCall,
        tools: list[dict[str, Any]],
        turn: OpenTurn,
        sampling: SamplingParams,
    ) -> tuple[SamplingParams, bool]:
        # The parsers need the special tokens that delimit calls and reasoning.
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        choice = call.tool_choice
        strict = any(tool["function"].get("strict") for tool in tools)
        if sampling.active_grammar_names:
            tools = []  # a reply under another grammar cannot call tools
        elif not (tools and (choice.must_call or not choice.parallel or strict)):
            return sampling, False
        reply = await parsers.fetch_grammar(tools, turn.text_after_messages, choice)
        if reply.grammar:
            grammar = {reply.grammar: reply.grammar_value}
            sampling = msgspec.structs.replace(sampling, **grammar)
        return sampling, reply.reasons_first and bool(sampling.active_grammar_names)

    async def _tokenize_call(
        self, session: Session, call: ModelCall
    ) -> tuple[OpenTurn, list[int], int]:
        encoder, key = self._model.encoder, call.prompt_param_name
        agent_id = call.facts.separate_agent_id
        if call.raw_prompt is None:
            turn = self._render_turn(session, call)
            encoded = await self.encode(turn.new_text, key)
            new_ids = turn.drop_repeated_turn_end(encoded)
        elif isinstance(call.raw_prompt, str):
            turn = match_text_prompt(session.tree, call.raw_prompt, encoder, agent_id)
            new_ids = await self.encode(turn.new_text, key, add_special_tokens=turn.parent is None)
        else:
            turn, new_ids = match_ids_prompt(session.tree, call.raw_prompt, encoder, agent_id)
        if turn.parent is None and not new_ids:
            raise ProxyRequestError(400, "the prompt is empty", key=key)
        if new_ids and max(new_ids) >= encoder.vocab_size:  # such an id would kill the engine
            problem = f"the prompt holds token id {max(new_ids)}, which is outside the model's"
            raise ProxyRequestError(400, f"{problem} vocabulary of {encoder.vocab_size}", key=key)
        prior = turn.parent.num_sequence_tokens if turn.parent is not None else 0
        return turn, new_ids, prior + len(new_ids)

    def _render_turn(self, session: Session, call: ModelCall) -> OpenTurn:
        messages, normalize, most = call.messages, self._model.normalize, self._limits.max_messages
        if len(messages) > most:
            problem = f"too many messages: {len(messages)} (limit {most})"
            raise ProxyRequestError(400, problem, key=call.prompt_param_name)
        if normalize is not None:
            messages = [normalize(message) for message in messages]
        try:
            return build_open_turn(
                session.tree,
                messages,
                self._model.template,
                self._model.encoder,
                tools=call.tools,
                variables=call.template_variables,
                prefill=call.prefill,
                separate_agent_id=call.facts.separate_agent_id,
            )
        except ChatTemplateError as error:
            problem = f"the chat template rejects these messages: {error}"
            raise ProxyRequestError(400, problem, key=call.prompt_param_name) from error

    async def encode(self, text: str, key: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text; a thread encodes a long one."""
        least_tokens = len(text) // MAX_MEAN_CHARS_PER_TOKEN
        if least_tokens > self._model.context_tokens:
            raise PromptTooLongError(least_tokens, self._model.context_tokens, key)
        encoder = self._model.encoder
        encode = partial(encoder.encode, text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(encode) if encoder.is_slow_to_encode(text) else encode()

    async def build_prompt(self, session: Session, call: ModelCall) -> tuple[bytes, int]:
        """Build a prompt without a call: the inside of a JSON array of its ids, and its length."""
        turn, new_ids, prompt_tokens = await self._tokenize_call(session, call)
        return session.tree.build_sequence_ids_json_inside(
            turn.parent, format_ids_as_json_inside(new_ids)
        ), prompt_tokens

    def _complete_sampling(
        self, session: Session, call: ModelCall, prompt_tokens: int
    ) -> SamplingParams:
        """Return the sampling parameters with a seed, and a reply limit that fits the context.

        A limit beyond the context is cut, as in AReaL: agents request as many tokens as a whole
        context has, whatever the length of their prompt.
        """
        context_tokens = self._model.context_tokens
        room = context_tokens - prompt_tokens
        if room < 1:
            raise PromptTooLongError(prompt_tokens, context_tokens, call.prompt_param_name)
        requested, opened = call.sampling, session.request
        limit = min(requested.max_new_tokens or opened.sampling.max_new_tokens, room)
        least = min(requested.min_new_tokens, limit)
        stops, seed = requested.stop_token_ids, requested.sampling_seed
        if least:  # SGLang forbids these tokens until then: the trainer reads them here
            stops = sorted({*(stops or ()), *self._model.end_token_ids})
        number, session.calls = session.calls, session.calls + 1
        if seed is None:
            # It differs between calls, episodes and tickets, and repeats with the run's seed.
            text = f"{opened.seed}/{opened.task_id}/{opened.episode}/{number}"
            digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
            seed = int.from_bytes(digest) & 0x3FFFFFFF
        return msgspec.structs.replace(
            requested,
            max_new_tokens=limit,
            min_new_tokens=least,
            stop_token_ids=stops,
            sampling_seed=seed,
        )


def _refuse_prefill_with_grammar(call: ModelCall) -> None:
    if call.prefill is None:
        return
    for key in (*call.sampling.active_grammar_names, *["tool_choice"] * call.tool_choice.must_call):
        problem = f"a reply that goes on from a message cannot be held to {key}"
        raise ProxyRequestError(
            400, problem, key=call.prompt_param_name, hint="give one of the two"
        )
