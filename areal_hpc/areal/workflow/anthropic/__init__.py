"""Agents on the Anthropic SDK."""
