"""A tiny model learns when to stop drawing cards, in gymnasium's Blackjack."""
