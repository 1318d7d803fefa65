"""The table of frameworks in docs/agents.md; `tests.support.generated_tables` renews it.

Its versions are those of the locks, which the environments of the tests are made from;
`tests/integration/agents/test_versions.py` looks at what is installed there.
"""

import re
from dataclasses import dataclass

from tests.support.environments import CHECKOUT
from tests.support.tables import markdown

DOCUMENT = CHECKOUT / "docs" / "agents.md"


@dataclass(frozen=True)
class Framework:
    """One row: what is proven, by which test, with which packages of which environment."""

    name: str
    packages: tuple[str, ...]
    environment: str
    proven: str
    test: str


FRAMEWORKS = (
    Framework(
        "OpenAI SDK",
        ("openai",),
        "agents",
        "awaited, streamed, blocking in a process; tools",
        "test_openai_sdk.py",
    ),
    Framework(
        "OpenAI Agents SDK",
        ("openai-agents", "openai"),
        "frameworks",
        "chat completions and responses: tools, a team of three with hand-offs",
        "test_openai_agents.py",
    ),
    Framework(
        "LangChain, LangGraph",
        ("langchain", "langchain-openai", "langgraph"),
        "frameworks",
        "agent with tools",
        "test_langchain.py",
    ),
    Framework(
        "Anthropic SDK",
        ("anthropic",),
        "frameworks",
        "tools; streamed text",
        "test_anthropic_sdk.py",
    ),
    Framework(
        "CAMEL",
        ("camel-ai", "openai"),
        "camel",
        "ChatAgent with a tool; ChatAgent on `ArealOpenAI`",
        "test_camel.py",
    ),
)


def normal(name: str) -> str:
    """One spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(environment: str) -> dict[str, str]:
    """Package -> version of an environment's lock."""
    lines = (CHECKOUT / "requirements" / f"{environment}.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    return {normal(name): version for name, version in pins}


def table() -> str:
    """The table as it must stand in the document."""
    rows = []
    for one in FRAMEWORKS:
        pins = locked(one.environment)
        packages = ", ".join(f"{name} {pins[name]}" for name in one.packages)
        test = f"`tests/integration/agents/{one.test}`"
        rows.append((one.name, packages, one.proven, test))
    return markdown(("framework", "packages", "proven", "test"), rows)
