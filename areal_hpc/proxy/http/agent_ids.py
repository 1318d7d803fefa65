"""Ids by which programs name the agents of one session, in headers or parameters."""

from collections.abc import Iterator, Mapping

import msgspec

from areal_hpc.wire.trajectory import CallFacts

PARENT_HEADER_BY_AGENT_HEADER = {
    b"x-agent-id": b"x-parent-agent-id",  # for any program
    b"x-claude-code-agent-id": b"x-claude-code-parent-agent-id",
    b"thread-id": b"x-codex-parent-thread-id",  # Codex
    b"x-session-id": b"x-parent-session-id",  # OpenCode
}
AGENT_KEY, PARENT_KEY = "agent_id", "parent_agent_id"
"""Keys of the parameter `metadata`."""
AGENT_PARAMETERS = ("prompt_cache_key", "user")
"""Parameters of OpenAI that many programs set to the id of a conversation, and some to another
value in each request. So they label a call, and do not keep conversations apart."""
MAX_AGENT_ID_CHARS = 128


def build_call_facts(headers: Mapping[bytes, bytes], request: msgspec.Struct) -> CallFacts:
    """Build the facts of a request; headers name its agent, else `metadata` or a parameter."""
    for agent_id, parent_id in _list_separate_agents(headers, request):
        if agent_id:
            return CallFacts(
                agent_id=agent_id[:MAX_AGENT_ID_CHARS],
                parent_agent_id=parent_id[:MAX_AGENT_ID_CHARS],
                is_agent_separate=True,
            )
    labels = (str(getattr(request, name, None) or "") for name in AGENT_PARAMETERS)
    return CallFacts(agent_id=next(filter(None, labels), "")[:MAX_AGENT_ID_CHARS])


def _list_separate_agents(
    headers: Mapping[bytes, bytes], request: msgspec.Struct
) -> Iterator[tuple[str, str]]:
    for agent_header, parent_header in PARENT_HEADER_BY_AGENT_HEADER.items():
        yield (
            headers.get(agent_header, b"").decode("latin-1"),
            headers.get(parent_header, b"").decode("latin-1"),
        )
    metadata = getattr(request, "metadata", None)
    if isinstance(metadata, dict):
        yield str(metadata.get(AGENT_KEY) or ""), str(metadata.get(PARENT_KEY) or "")
