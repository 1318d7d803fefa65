"""Auxiliary conversations of an episode: which are, by the recipe's rule, and telling the proxy."""

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
"""Why a conversation is auxiliary; empty if it is not."""
AUXILIARY_RULE_KEY = "rollout.agent.auxiliary"


KNOWN_AUXILIARY_CALLS = {"You are a title generator": "OpenCode: title of the session"}
"""What stands in the system message of a conversation without tools that a harness has beside the
task, and what it is."""


def load_auxiliary_rule(rule_name: str) -> AuxiliaryRule | None:
    """The rule that a recipe names; None for `keep`, by which no conversation is auxiliary.

    Raises:
        RecipeError: The user's function cannot be imported.
    """
    if rule_name == "keep":
        return None
    if rule_name == "drop":
        return describe_known_auxiliary_call
    function = load_user_function(rule_name, AUXILIARY_RULE_KEY)

    def ask_user(conversation: RecordedConversationSummary) -> str:
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

    return ask_user


def describe_known_auxiliary_call(conversation: RecordedConversationSummary) -> str:
    """Which call of `KNOWN_AUXILIARY_CALLS` a conversation is; empty if none."""
    if conversation.tools:
        return ""
    instructions = " ".join(
        _join_text(one.get("content"))
        for one in conversation.messages
        if one.get("role") in ("system", "developer")
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
        told = await proxy.call_repeatedly(
            "/rl/list_conversations", ListConversationsRequest(session_id), ListConversationsReply
        )
        reasons = {one.interaction_id: why for one in told.conversations if (why := rule(one))}
        if reasons:
            request = MarkAuxiliaryRequest(session_id, reasons)
            await proxy.call_repeatedly("/rl/mark_auxiliary", request, MarkAuxiliaryReply)
    except HttpStatusError as refusal:
        raise AgentError(
            f"the proxy refused to mark auxiliary conversations: {refusal.peer_message}"
        ) from refusal
