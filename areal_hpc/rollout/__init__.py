"""Rollout driver: runs the user's agent against the proxy and reports its rewards."""
