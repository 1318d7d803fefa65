"""Answers about a run: reasons why it is slow, changes at a step, signs of collapse or hacking."""
