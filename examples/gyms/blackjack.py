"""Hands of gymnasium's Blackjack-v1, and conversations of a random player.

The demonstrations show the form of actions and observations. They do not show when to stop: the
player follows no rule, and mostly takes another card.
"""

import random
from collections.abc import Iterator
from typing import Any

HOW = "Reply with <action>A</action>, where A is a whole number from 0 to 1."
"""Agent's description of the gym's actions: 0 stops, 1 takes a card."""
SEED_STRIDE = 1_000_000
"""The gym shuffles by the task's seed, so streams must start far apart."""
BEST_SUM = 21


def hands(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Tasks: a seed each, which decides all cards of the hand."""
    for number in range(size):
        yield {"seed": seed * SEED_STRIDE + number}


def demonstrations(size: int, seed: int, p_hit: float = 0.75) -> Iterator[dict[str, Any]]:
    """Conversations up to some decision, which takes a card with probability `p_hit`."""
    rng = random.Random(seed)
    for _ in range(size):
        *prompt, decision = play_randomly(rng, p_hit)
        yield {"prompt": prompt, "completion": [decision]}


def play_randomly(rng: random.Random, p_hit: float) -> list[dict[str, str]]:
    """Play a hand up to any decision of the player's."""
    cards, dealer = [draw(rng), draw(rng)], draw(rng)
    messages = [say("user", f"{describe(cards, dealer)}\n{HOW}")]
    while True:
        hits = rng.random() < p_hit
        messages.append(say("assistant", f"<action>{int(hits)}</action>"))
        cards.append(draw(rng))
        if not hits or sum(cards) > BEST_SUM or rng.random() < 0.3:
            return messages
        messages.append(say("user", describe(cards, dealer)))


def draw(rng: random.Random) -> int:
    """Draw a card of an endless deck: an ace is 1, court cards are 10."""
    return min(rng.randint(1, 13), 10)


def describe(cards: list[int], dealer: int) -> str:
    """Write the gym's observation: the sum, the dealer's card, whether an ace counts as 11."""
    has_soft_ace = 1 in cards and sum(cards) + 10 <= BEST_SUM
    return f"Observation: [{sum(cards) + 10 * has_soft_ace}, {dealer}, {int(has_soft_ace)}]"


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
