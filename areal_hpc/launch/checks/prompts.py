"""Check of sampled prompts, rendered and tokenized, against the context length."""

from pathlib import Path
from typing import Any

from areal_hpc.errors import ChatTemplateError, Problem
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rollout.task_set import TaskSet
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from areal_hpc.session.message_matching import normalize_chat_message

MAX_SAMPLED_PROMPTS = 100
MESSAGES_KEY = "messages"
TOOLS_KEY = "tools"
MAX_CHARS_PER_TOKEN = 32
"""A text of more characters than this times the context is too long, and is not tokenized."""


def find_prompt_problems(
    recipe: Recipe, model_dir: Path, tasks_file: Path, key: str, context_tokens: int
) -> tuple[list[Problem], list[str]]:
    """Problems and notes of a data set at `key` whose prompts leave the model little room to reply.

    Tasks without `messages` are left out: only their agent knows what it asks. An agent may put
    more before a prompt, so the lengths found are the least.
    """
    tasks = TaskSet.read_or_empty(tasks_file)
    template = ChatTemplate.from_model_dir(model_dir)
    template.require_messages(with_tools=recipe.inference.tool_call_parser is not None)
    encoder = TokenEncoder.from_model_dir(model_dir)
    lengths: dict[int, int] = {}
    notes: list[str] = []
    has_tools = False
    sampled = min(len(tasks), MAX_SAMPLED_PROMPTS)
    for number in range(sampled):
        index = number * len(tasks) // sampled
        task = tasks[index]
        has_tools = has_tools or bool(task.get(TOOLS_KEY))
        messages = task.get(MESSAGES_KEY)
        if not isinstance(messages, list):
            continue
        try:
            lengths[index] = _count_prompt_tokens(messages, template, encoder, context_tokens)
        except (ChatTemplateError, KeyError, TypeError, AttributeError) as error:
            notes = [f"the chat template does not take the messages of task {index}: {error!r}"]
    if has_tools and recipe.inference.tool_call_parser is None:
        notes.append(
            f"tasks of {key} have {TOOLS_KEY}, and inference.tool_call_parser is not set: requests "
            "with tools will be refused"
        )
    if not lengths:
        return [], notes
    sampling_by_key = {one.dataset_key: one.sampling for one in recipe.evaluation_sets}
    max_new_tokens = sampling_by_key.get(key, recipe.rollout.sampling).max_new_tokens
    longest = max(lengths, key=lambda index: lengths[index])
    too_long = sum(length >= context_tokens for length in lengths.values())
    cut = sum(length + max_new_tokens > context_tokens for length in lengths.values())
    prompts = f"of {len(lengths)} prompts of {key}"
    more = " or more" if lengths[longest] == context_tokens else ""
    worst = f"that of task {longest} has {lengths[longest]}{more} tokens"
    if 2 * too_long >= len(lengths):
        message = (
            f"{too_long} {prompts} leave no room for a reply: {worst}, the context has "
            f"{context_tokens}"
        )
        hint = "raise inference.context_length, or shorten the prompts"
        return [Problem(message, key, hint)], notes
    if too_long:
        notes.append(
            f"{too_long} {prompts} leave no room for a reply in {context_tokens} tokens: {worst}"
        )
    if cut > too_long:
        notes.append(
            f"{cut} {prompts} leave less room in {context_tokens} tokens than "
            f"max_new_tokens={max_new_tokens}: {worst}"
        )
    return [], notes


def _count_prompt_tokens(
    messages: list[Any], template: ChatTemplate, encoder: TokenEncoder, context_tokens: int
) -> int:
    text = template.render_prompt([normalize_chat_message(message) for message in messages])
    if len(text) > context_tokens * MAX_CHARS_PER_TOKEN:
        return context_tokens
    return len(encoder.encode(text))
