"""Auxiliary conversations of a session: those that serve its episode and are not learned from."""

from collections.abc import Collection

from areal_hpc.session.call_records import decode_rendering_context
from areal_hpc.session.tree import Interaction, InteractionTree
from areal_hpc.wire.proxy import RecordedConversationSummary


def list_conversations(tree: InteractionTree) -> list[RecordedConversationSummary]:
    """What each conversation of a session began with, in order of completion."""
    root_of = _map_replies_to_roots(tree)
    replies: dict[str, int] = {}
    for root in root_of.values():
        replies[root] = replies.get(root, 0) + 1
    return [_describe_conversation(tree[root], count) for root, count in replies.items()]


def find_auxiliary_reply_reasons(tree: InteractionTree) -> dict[str, str]:
    """Ids of the replies of auxiliary conversations, with the reason why they are."""
    if not tree.auxiliary:
        return {}
    return {
        name: tree.auxiliary[root]
        for name, root in _map_replies_to_roots(tree).items()
        if root in tree.auxiliary
    }


def find_conversation_replies(tree: InteractionTree, roots: Collection[str]) -> list[Interaction]:
    return [tree[name] for name, root in _map_replies_to_roots(tree).items() if root in roots]


def _map_replies_to_roots(tree: InteractionTree) -> dict[str, str]:
    roots: dict[str, str] = {}
    for one in tree:  # parents come first
        roots[one.interaction_id] = roots[one.parent_id] if one.parent_id else one.interaction_id
    return roots


def _describe_conversation(
    first_interaction: Interaction, replies: int
) -> RecordedConversationSummary:
    return RecordedConversationSummary(
        first_interaction.interaction_id,
        first_interaction.new_messages,
        first_interaction.reply,
        _list_offered_tool_names(first_interaction),
        replies,
    )


def _list_offered_tool_names(call: Interaction) -> list[str]:
    from_context = decode_rendering_context(call.context).tools
    tools = from_context if isinstance(from_context, list) else []
    functions = [one.get("function", one) for one in tools if isinstance(one, dict)]
    return [str(one.get("name", "")) for one in functions if isinstance(one, dict)]
