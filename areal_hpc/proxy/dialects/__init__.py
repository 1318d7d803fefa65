"""HTTP APIs of OpenAI, Anthropic, Google and SGLang. `dialect.py` has the interface of a dialect.

A parameter of a request is honored, accepted without effect as a hint, or refused by name
(`parameters.py`). `model` may be any name: a cell serves one model.
"""
