"""Calls of HTTP services: a valid one of every route, and mutations of them by a seed."""

import contextlib
import http.client
import json
import random
import socket
import struct
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

from areal_hpc.proxy.http.agent_api import GOOGLE_PREFIXES
from areal_hpc.rundir.rendezvous import make_client_tls
from areal_hpc.session.tree import Interaction, VersionSpan
from areal_hpc.wire import ledger as ledger_wire
from areal_hpc.wire import proxy as proxy_wire
from areal_hpc.wire import replicas as control_wire
from areal_hpc.wire.ledger import TicketRef
from tests.support.deadlines import scaled
from tests.support.light_run import CELL, LightRun
from tests.support.service_keys import DEFECTS, KeyDefect, spoil_authorization

HANG_S = 20.0
"""Time limit of a call that was not to wait: it takes milliseconds, or it hangs."""
LEFT_AFTER_S = 0.3
"""Time limit for an answer to a call that may rightly wait: its caller then hangs up."""
NEVER_ANSWERED = "left"
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**70),
    *(-(2**63), -(2**63) - 1, 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan")),
    *("", " ", "\0", "\ud800", "\U0001f989", "é" * 50, "x" * 5000, "../../etc/passwd", "%s%n{0}"),
    *("9.9", "1.1", "cell-0", "cell-0-000000.h5", "eyJhIjoxfQ==", "/dev/zero"),
    *([], {}, [[]], [None], [0] * 300, {"": ""}, {"a": {"b": [1, 2, {"c": None}]}}),
)
MAX_SWOLLEN_BYTES = 32 * 2**20 - 1024
PLACE, CLOSING = "@place@", (b"]", b"}")
SWOLLEN: tuple[tuple[bytes, bytes, bytes], ...] = (
    *((b"[", b"{},", b"{}]"), (b"[", b"[],", b"[]]"), (b"[", b'"",', b'""]'), (b"[", b"1,", b"1]")),
    *((b"{", b'"%07d":0,', b'"":0}'), (b"{", b'"%07d":null,', b'"":0}'), (b'{"', b"n", b'":1}')),
    *((b"", b"[", b"]"), (b"", b'{"a":[', b"]"), (b"", b"1", b""), (b" ", b" ", b"1")),
    *(
        (b'"', b"word ", b'"'),
        (b'"', b"\\\\", b'"'),
        (b'"', b"\\ud83d", b'"'),
        (b'"', b"{[:,", b'"'),
    ),
    *(
        (b'"', b"\\ud83d\\ude00", b'"'),
        (b'"', b"<|im_end|>", b'"'),
        (b'"', b"\xf0\x9f\x98\x80", b'"'),
    ),
    (b"[", b'{"role":"user","content":""},', b"{}]"),
    (b"[", b'{"type":"text","text":"","sparkle":1},', b"{}]"),
)
"""Beginning of a swollen value, the part to repeat, and its end."""
DEEP = "[" * 3000 + "]" * 3000
ODD_BODIES: tuple[bytes, ...] = (
    *(b"", b" ", b"null", b"[]", b"{}", b'"', b"{", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"\0" * 64),
    *(DEEP.encode(), b'{"a":' * 2000 + b"1" + b"}" * 2000, b"1" * 5000, b'"\\ud800"'),
)
ODD_PATHS = ("/", "//", "{}/", "{}%00", "{}/..", "/{}", "{}?a=b&a=c", "{}#x", "{}/0/1", "/%2e%2e{}")
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW")
ODD_KEYS = ("", "wrong", "x" * 3000, "é", "Bearer", "\t")
ODD_HEADERS = (
    *(("content-length", "-1"), ("content-length", "5, 6"), ("content-length", "99999999999999")),
    *(("content-length", "x"), ("transfer-encoding", "chunked"), ("transfer-encoding", "gzip")),
    *(("upgrade", "websocket"), ("expect", "100-continue"), ("content-type", "text/plain")),
    *(("content-encoding", "gzip"), ("host", ""), ("connection", "close"), ("x-big", "y" * 9000)),
    ("content-type", "application/json; charset=utf-16"),
)
ODD_NUMBERS = ("", "-1", "0", "1", "2", "nan", "inf", "1e308", "9" * 30, "0x1", "1.5", "é")


@dataclass(frozen=True)
class Call:
    service: str
    method: str
    path: str
    body: Any = None
    key: str = ""
    is_internal: bool = False
    """The key belongs to one of the run's own processes, not to a session."""
    headers: tuple[tuple[str, str], ...] = ()
    """Beside that of the key; their values may be made wrong, too."""

    @property
    def route(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class RawCall:
    call: Call
    """Call from which it was made."""
    method: str
    path: str
    content: bytes
    headers: tuple[tuple[str, str], ...]
    may_wait: bool
    """The call asks to be kept, or announces more than it sends."""
    key_defect: KeyDefect = "none"


@dataclass
class Mutator:
    """Mutator of calls; the same seed makes the same mutations of the same calls."""

    chance: random.Random
    keys_of_run: Sequence[str] = ()
    """Keys of all services; each opens its own alone."""
    sound_share: float = 0.1
    """Share of calls that are left as they are."""
    known: list[Any] = field(default_factory=list)
    """Values of this run (ticket references, session ids, names) that odd places may get."""

    def mutate(self, call: Call) -> RawCall:
        if self.chance.random() < self.sound_share:
            return self._encode(call, call.body)
        if call.is_internal and self._is_seldom():
            return self._spoil_key(call)
        how = self.chance.choices(
            (self._spoil_values, self._spoil_bytes, self._spoil_request), (70, 15, 15)
        )[0]
        return how(call)

    def swell(self, call: Call) -> RawCall:
        """Build a call with very many copies of a part in one value, 64 KiB to 32 MiB in all."""
        root = {"": json.loads(json.dumps(call.body))}
        holder: Any = root
        key: Any = ""
        while isinstance(inner := holder[key], dict | list) and inner and not self._is_seldom():
            chosen = self.chance.choice([*inner] if isinstance(inner, dict) else range(len(inner)))
            holder, key = inner, chosen
        holder[key] = PLACE
        content = json.dumps(root[""]).encode()
        begin, unit, end = self.chance.choice(SWOLLEN)
        count = int(MAX_SWOLLEN_BYTES * 2 ** -self.chance.uniform(0, 9)) // (len(unit) + 2)
        members = b'"%07d":' in unit
        swollen = b"".join(unit % i for i in range(count)) if members else unit * count
        end = end * count if end in CLOSING else end
        content = content.replace(b'"' + PLACE.encode() + b'"', begin + swollen + end, 1)
        return replace(self._encode(call, call.body), content=content[:MAX_SWOLLEN_BYTES])

    def _spoil_key(self, call: Call) -> RawCall:
        """Spoil the key of a right call, or of one with wrong values: nobody may look at them."""
        is_right = self.chance.random() < 0.5
        raw = self._encode(call, call.body) if is_right else self._spoil_values(call)
        over_tls = call.service != "proxy"
        defect = self.chance.choice(DEFECTS if over_tls else DEFECTS[:-1])
        key = spoil_authorization(call.key, defect, self.chance, self.keys_of_run)
        headers = [header for header in raw.headers if header[0] != "authorization"]
        headers += [] if key is None else [("authorization", key)]
        return replace(raw, headers=tuple(headers), key_defect=defect)

    def _spoil_values(self, call: Call) -> RawCall:
        body = json.loads(json.dumps(call.body))
        for _ in range(self.chance.choice((1, 1, 1, 2, 4))):
            body = self._spoil_one(body)
        headers = tuple(
            (name, self.chance.choice(ODD_NUMBERS) if self.chance.random() < 0.2 else value)
            for name, value in call.headers
        )
        return self._encode(replace(call, headers=headers), body)

    def _spoil_one(self, value: Any) -> Any:
        """Replace one part of a value by an odd one."""
        inner: Sequence[Any] = ()
        if isinstance(value, dict):
            inner = [*value]
        elif isinstance(value, list):
            inner = range(len(value))
        if inner and self.chance.random() < 0.9:
            key = self.chance.choice(inner)
            match self.chance.randrange(10):
                case 0:
                    del value[key]
                case 1 if isinstance(value, dict):
                    value[self.chance.choice(("extra", "", "\0", str(key) * 50))] = deepcopy(
                        value[key]
                    )
                case 1:
                    value += [deepcopy(value[key])] * self.chance.choice((1, 2, 500))
                case _:
                    value[key] = self._spoil_one(value[key])
            return value
        odd = self.known if self.known and self._is_seldom() else ODD_VALUES
        return deepcopy(self.chance.choice(odd))

    def _spoil_bytes(self, call: Call) -> RawCall:
        content = bytearray(json.dumps(call.body).encode())
        match self.chance.randrange(4):
            case 0:
                content = bytearray(self.chance.choice(ODD_BODIES))
            case 1:
                del content[self.chance.randrange(len(content)) :]
            case 2:
                content[self.chance.randrange(len(content))] = self.chance.randrange(256)
            case _:
                content = bytearray(self.chance.randbytes(self.chance.choice((1, 100, 5000))))
        return replace(self._encode(call, call.body), content=bytes(content))

    def _spoil_request(self, call: Call) -> RawCall:
        raw = self._encode(call, call.body)
        match self.chance.randrange(4):
            case 0:
                return replace(raw, method=self.chance.choice(METHODS))
            case 1:
                return replace(raw, path=self.chance.choice(ODD_PATHS).format(call.path))
            case 2:
                return self._encode(replace(call, key=self.chance.choice(ODD_KEYS)), call.body)
            case _:
                odd = self.chance.choice(ODD_HEADERS)
                return replace(raw, headers=(*raw.headers, odd), may_wait=True)

    def _is_seldom(self) -> bool:
        return self.chance.random() < 0.3

    def _encode(self, call: Call, body: Any) -> RawCall:
        key = (("authorization", f"Bearer {call.key}"),) if call.key else ()
        content = b"" if call.method == "GET" else json.dumps(body).encode()
        headers = (*key, *call.headers)
        waits = isinstance(call.body, dict) and "wait_s" in call.body
        return RawCall(call, call.method, call.path, content, headers, may_wait=waits)


class Sender:
    """Client that sends raw calls to one service, one after another."""

    def __init__(self, url: str, service_key: str) -> None:
        self._address = urlsplit(url)
        self._tls = make_client_tls(service_key) if self._address.scheme == "https" else None

    def send(self, raw: RawCall, before_last_byte: Callable[[], None] = lambda: None) -> str:
        """Send a call; return the status of the answer, or how the call ended without one.

        Raises:
            TimeoutError: The service hangs.
            ConnectionError: It refused the connection: it is dead, or takes no more.
        """
        sent = self._encode(raw)
        host, port = self._address.hostname, self._address.port
        with contextlib.ExitStack() as ends:
            connection: socket.socket = ends.enter_context(
                socket.create_connection((host or "", port or 0), scaled(HANG_S))
            )
            if self._tls is not None and raw.key_defect != "over plain HTTP":
                connection = ends.enter_context(self._tls.wrap_socket(connection))
            connection.settimeout(LEFT_AFTER_S if raw.may_wait else scaled(HANG_S))
            try:
                connection.sendall(sent[:-1])
                before_last_byte()
                connection.sendall(sent[-1:])
                answer = http.client.HTTPResponse(connection, method=raw.method)
                answer.begin()
                answer.read()
            except TimeoutError:
                if raw.may_wait:
                    return NEVER_ANSWERED
                raise
            except (http.client.HTTPException, ConnectionError):
                return "closed"  # what is no HTTP gets no answer
            return str(answer.status)

    def _encode(self, raw: RawCall) -> bytes:
        headers = [("host", self._address.netloc), *raw.headers]
        if not any(name in ("content-length", "transfer-encoding") for name, _ in headers):
            headers.append(("content-length", str(len(raw.content))))
        lines = [
            f"{raw.method} {raw.path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers),
        ]
        return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + raw.content


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
    for session in (opened, closed):
        run.ask(session.api_key, "/chat/completions", {"messages": ASKED})
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
    requests: dict[str, msgspec.Struct] = {
        "/lease": ledger_wire.LeaseRequest("cell-7", 2, [ref], [ref], wait_s=0.01),
        "/settle": ledger_wire.SettleShardsRequest(CELL, [f"{CELL}-000000.h5"]),
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
