"""Agents on the OpenAI SDK."""
