"""A sound call of every route of a light run's services, as of now."""

import struct
from typing import Any

import msgspec

from areal_hpc.proxy.http.agent_api import GOOGLE_PREFIXES
from areal_hpc.session.tree import Interaction, VersionSpan
from areal_hpc.wire import ledger as ledger_wire
from areal_hpc.wire import proxy as proxy_wire
from areal_hpc.wire import replicas as control_wire
from areal_hpc.wire.ledger import SealedTicket, TicketRef
from tests.support.light_run import CELL, LightRun
from tests.support.mutated_calls import Call

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
RESPONSE_ID, MODEL = "resp_1", "tiny"
CONTENTS = [{"role": "user", "parts": [{"text": "hello"}]}]
FUNCTION = {
    "name": "add",
    "parameters": {"type": "OBJECT", "properties": {"a": {"type": "NUMBER"}}},
}
ASKED_OF_GOOGLE: dict[str, Any] = {
    "contents": CONTENTS,
    "systemInstruction": {"parts": [{"text": "be brief"}]},
    "generationConfig": {"temperature": 0.5, "maxOutputTokens": 20, "stopSequences": ["x"]},
}
GOOGLE: dict[str, dict[str, Any]] = {
    "generateContent": {**ASKED_OF_GOOGLE, "tools": [{"functionDeclarations": [FUNCTION]}]},
    "streamGenerateContent": ASKED_OF_GOOGLE,
    "countTokens": {"contents": CONTENTS},
}
DIALECTS: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "messages": ASKED,
        "model": "tiny",
        "temperature": 0.5,
        "max_tokens": 20,
        "stop": ["x"],
        "tools": [TOOL],
        "stream": True,
        "logprobs": True,
    },
    "/completions": {"prompt": "hello", "max_tokens": 5, "logprobs": 2},
    "/messages": {"messages": ASKED[1:], "system": "be brief", "max_tokens": 20, "stream": True},
    "/messages/count_tokens": {"messages": ASKED[1:], "model": "tiny"},
    "/responses": {"input": ASKED, "max_output_tokens": 20, "instructions": "be brief"},
    "/responses/input_tokens": {"input": ASKED, "instructions": "be brief"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/generate": {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 8, "temperature": 1.0, "stop": ["x"]},
        "stream": False,
    },
}


def list_sound_calls(run: LightRun) -> tuple[list[Call], list[Any]]:
    """The calls, and values of this run that they were made of."""
    ref = TicketRef(run.step * 3, 1)
    opened, closed = run.open_session(ref), run.open_session()
    for one in (opened, closed):
        run.ask(one.api_key, "/chat/completions", {"messages": ASKED})
    run.ask(closed.api_key, "/rl/end_session", {})
    calls = [
        *_list_agent_calls(run, opened.api_key),
        *_list_driver_calls(run, ref, opened, closed),
        *_list_ledger_calls(run, ref),
        *_list_control_calls(run),
    ]
    known = [
        *(opened.session_id, closed.session_id, opened.api_key, CELL, str(run.version)),
        *(run.step, run.version.generation, msgspec.to_builtins(ref)),
    ]
    return calls, known


def _list_agent_calls(run: LightRun, key: str) -> list[Call]:
    calls = [Call("proxy", "POST", path, body, key) for path, body in DIALECTS.items()]
    calls += [
        Call("proxy", "POST", f"/v1{path}", body, key)
        for path, body in DIALECTS.items()
        if path != "/generate"
    ]
    for prefix in ("", "/v1"):
        response = f"{prefix}/responses/{RESPONSE_ID}"
        calls += [
            Call("proxy", "GET", f"{prefix}/models", None, key),
            Call("proxy", "GET", f"{prefix}/models/{MODEL}", None, key),
            *(Call("proxy", method, response, None, key) for method in ("GET", "DELETE")),
            Call("proxy", "GET", f"{response}/input_items", None, key),
            Call("proxy", "POST", f"{response}/cancel", {}, key),
            Call("proxy", "POST", f"{prefix}/responses/compact", {"input": []}, key),
        ]
    for prefix in GOOGLE_PREFIXES:
        calls += [
            Call("proxy", "POST", f"{prefix}/models/{MODEL}:{verb}", body, key)
            for verb, body in GOOGLE.items()
        ]
        if prefix != "/v1":
            paths = (f"{prefix}/models", f"{prefix}/models/{MODEL}")
            calls += [Call("proxy", "GET", path, None, key) for path in paths]
    calls += [Call("proxy", "GET", path) for path in ("/healthz", "/metrics", "/openapi.json")]
    return calls


def _list_driver_calls(
    run: LightRun,
    ref: TicketRef,
    opened: proxy_wire.StartSessionReply,
    closed: proxy_wire.StartSessionReply,
) -> list[Call]:
    start = proxy_wire.StartSessionRequest("try", ref)
    requests: dict[str, msgspec.Struct] = {
        "/rl/start_session": start,
        "/rl/offer_episode": proxy_wire.OfferEpisodeRequest(start, {"a": 1}, wait_s=0.01),
        "/rl/await_session": proxy_wire.AwaitSessionEndRequest(opened.session_id, wait_s=0.01),
        "/rl/finish_ticket": proxy_wire.FinishTicketRequest(ref, [opened.session_id]),
        "/rl/keep_failed": proxy_wire.KeepFailedSessionRequest(
            closed.session_id, "KeyError at agent.py:3", "the agent raised KeyError"
        ),
        "/rl/list_conversations": proxy_wire.ListConversationsRequest(opened.session_id),
        "/rl/mark_auxiliary": proxy_wire.MarkAuxiliaryRequest(opened.session_id, {}),
        "/rl/seal": ledger_wire.Empty(),
        "/export_trajectories": proxy_wire.ExportRequest(closed.session_id),
        "/grant_capacity": ledger_wire.Empty(),
    }
    own: dict[str, Any] = {
        "/rl/set_reward": {"reward": 1.0, "interaction_id": None},
        "/rl/record": {"interactions": [_sound_interaction(run)]},
        "/rl/end_session": {},
    }
    return [
        *(_admin("proxy", run, path, request) for path, request in requests.items()),
        *(Call("proxy", "POST", path, body, opened.api_key) for path, body in own.items()),
    ]


def _sound_interaction(run: LightRun) -> Any:
    interaction = Interaction(
        interaction_id="chatcmpl-1",
        parent_id=None,
        reuse="none",
        context=b"{}",
        new_messages=[{"role": "user", "content": "hello"}],
        reply={"role": "assistant", "content": "hi"},
        prompt_tokens=2,
        new_ids=struct.pack("<2i", 5, 6),
        output_ids=struct.pack("<2i", 7, 8),
        logprobs=struct.pack("<2f", -0.5, -0.25),
        spans=[VersionSpan(run.version.packed, 0, 2)],
        finish_reason="stop",
        closed=False,
        temperature=1.0,
    )
    return msgspec.to_builtins(interaction)


def _list_ledger_calls(run: LightRun, ref: TicketRef) -> list[Call]:
    generation, step = run.version.generation, run.step
    sealed = SealedTicket(ref, f"{CELL}-000000.h5", [0, 1], [0.0, 1.0], run.version.packed)
    requests: dict[str, msgspec.Struct] = {
        "/lease": ledger_wire.LeaseRequest("cell-7", 2, [ref], [ref], wait_s=0.01),
        "/settle": ledger_wire.SettleTicketsRequest(CELL, [sealed]),
        "/drop": ledger_wire.DropTicketRequest(CELL, ref, "it failed", "filtered", [0.0, 1.0]),
        "/report_evaluation": ledger_wire.EvaluationResultRequest(CELL, TicketRef(0, 1, 5), [1.0]),
        "/open_generation": ledger_wire.OpenTrainerGenerationRequest(generation, step),
        "/batch": ledger_wire.BatchRequest(generation, step + 1, wait_s=0.01),
        "/publish": ledger_wire.WeightsPublishedRequest(generation, step),
        "/evaluate": ledger_wire.EvaluateRequest(generation, step, {"valid": 2}, wait_s=0.01),
        "/finish": ledger_wire.FinishRunRequest(generation),
        "/status": ledger_wire.Empty(),
    }
    return [_admin("ledger", run, path, request) for path, request in requests.items()]


def _list_control_calls(run: LightRun) -> list[Call]:
    headers = (
        ("x-areal-incarnation", str(run.replica().incarnation)),
        ("x-areal-generation", str(run.version.generation)),
        ("x-areal-deadline-s", "5"),
    )
    version = str(run.version)
    orders: dict[str, Any] = {
        "fence": msgspec.to_builtins(control_wire.FenceReplicaRequest()),
        "serve": msgspec.to_builtins(control_wire.ReopenReplicaRequest(version)),
        "load": msgspec.to_builtins(control_wire.LoadWeightsRequest("1.1.1", version)),
        **{route: {"weight_version": version} for route in control_wire.FORWARDED_ROUTES},
    }
    key = run.key("inference")
    return [
        Call("inference", "GET", "/replicas", None, key, is_internal=True),
        _admin("inference", run, "/follow", control_wire.FollowerPollRequest(0, 1)),
        *(
            Call("inference", "POST", f"/replicas/0/{route}", body, key, True, headers)
            for route, body in orders.items()
        ),
    ]


def _admin(service: str, run: LightRun, path: str, request: msgspec.Struct) -> Call:
    return Call(service, "POST", path, msgspec.to_builtins(request), run.key(service), True)
