"""A normalizer of messages that a proxy imports: nothing else is here, for it to start soon."""

from areal_hpc.session.chat_template import Message


def without_clock(message: Message) -> Message:
    """A normalizer for a client that writes the time into its system prompt."""
    return {**message, "content": message["content"].split(" It is ")[0]}
