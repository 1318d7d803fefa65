"""Ledger: which ticket is where, who may start an episode, and what forms a batch."""
