"""The ready agent with a tool, made to call it first: a random model would not."""

from __future__ import annotations

from forced_langchain import CallFirst  # type: ignore[import-not-found]  # it lies beside this one

from areal_hpc.agents.langchain_agent import LangGraphMathAgent


class Forced(LangGraphMathAgent):
    """Its model must call the calculator before it answers."""

    def __init__(self) -> None:
        super().__init__([CallFirst()])
