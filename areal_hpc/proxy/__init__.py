"""Endpoint with the APIs of OpenAI, Anthropic and Google that records tokens; see `service.py`."""
