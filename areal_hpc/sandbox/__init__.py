"""Sandbox: programs that a model wrote, run apart."""
