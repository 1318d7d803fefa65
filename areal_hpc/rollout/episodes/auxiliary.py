"""Auxiliary conversations of an episode: the recipe's rule, and their marks at the proxy."""

from collections.abc import Callable
from typing import Any

import msgspec

from areal_hpc.errors import AgentError, HttpStatusError
from areal_hpc.recipe.user_functions import describe_user_error, load_user_function
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.wire.proxy import (
    MAX_AUXILIARY_REASON_CHARS,
    ListConversationsReply,
    ListConversationsRequest,
    MarkAuxiliaryReply,
    MarkAuxiliaryRequest,
    RecordedConversationSummary,
)

AuxiliaryRule = Callable[[RecordedConversationSummary], str]
"""Function that returns the reason why a conversation is auxiliary, or an empty string."""
AUXILIARY_RULE_KEY = "rollout.agent.auxiliary"


KNOWN_AUXILIARY_CALLS = {"You are a title generator": "OpenCode: title of the session"}
"""Descriptions of conversations without tools that harnesses hold beside the task, by a text in
their system message."""


def load_auxiliary_rule(rule_name: str) -> AuxiliaryRule | None:
    """Load the rule that a recipe names; None for `keep`, by which no conversation is auxiliary.

    Raises:
        RecipeError: The user's function cannot be imported.
    """
    if rule_name == "keep":
        return None
    if rule_name == "drop":
        return describe_known_auxiliary_call
    function = load_user_function(rule_name, AUXILIARY_RULE_KEY)

    def call_user_rule(conversation: RecordedConversationSummary) -> str:
        try:
            answer = function(msgspec.to_builtins(conversation))
        except Exception as error:  # boundary: the function is the user's code
            raise AgentError(
                f"{rule_name} raised {describe_user_error(error)}", key=AUXILIARY_RULE_KEY
            ) from error
        if answer is not None and not isinstance(answer, str):
            raise AgentError(
                f"{rule_name} returned {answer!r:.200} ({type(answer).__name__}), expected why the "
                "conversation is auxiliary, or None",
                key=AUXILIARY_RULE_KEY,
                hint="return a str or None",
            )
        return (answer or "")[:MAX_AUXILIARY_REASON_CHARS]

    return call_user_rule


def describe_known_auxiliary_call(conversation: RecordedConversationSummary) -> str:
    """Return the description in `KNOWN_AUXILIARY_CALLS` that fits, else an empty string."""
    if conversation.tools:
        return ""
    instructions = " ".join(
        _join_text(message.get("content"))
        for message in conversation.messages
        if message.get("role") in ("system", "developer")
    )
    return next((call for sign, call in KNOWN_AUXILIARY_CALLS.items() if sign in instructions), "")


def _join_text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


async def mark_auxiliary_conversations(
    rule: AuxiliaryRule, session_id: str, proxy: AsyncServiceClient
) -> None:
    """Have the proxy leave a session's auxiliary conversations out of training."""
    try:
        reply = await proxy.call_repeatedly(
            "/rl/list_conversations", ListConversationsRequest(session_id), ListConversationsReply
        )
        reasons = {call.interaction_id: why for call in reply.conversations if (why := rule(call))}
        if reasons:
            request = MarkAuxiliaryRequest(session_id, reasons)
            await proxy.call_repeatedly("/rl/mark_auxiliary", request, MarkAuxiliaryReply)
    except HttpStatusError as refusal:
        raise AgentError(
            f"the proxy refused to mark auxiliary conversations: {refusal.peer_message}"
        ) from refusal
