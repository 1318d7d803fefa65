"""The table of frameworks in docs/agents.md; `tests.support.generated_tables` renews it.

Its versions are those of the locks, which the environments of the tests are made from;
`tests/integration/agents/test_frameworks.py` looks at what is installed there.
"""

import re
from dataclasses import dataclass
from pathlib import Path

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
    """How its name begins, in `tests/integration/agents/test_frameworks.py`."""


FRAMEWORKS = (
    Framework(
        "OpenAI SDK",
        ("openai",),
        "main",
        "awaited, streamed, blocking in a process; tools",
        "test_the_openai_sdk",
    ),
    Framework(
        "OpenAI Agents SDK",
        ("openai-agents", "openai"),
        "main",
        "chat completions and responses: tools, a team of three with hand-offs",
        "test_tools_and_teams_of_the_agents_sdk",
    ),
    Framework(
        "LangChain, LangGraph",
        ("langchain", "langchain-openai", "langgraph"),
        "main",
        "agent with tools",
        "test_the_graph_of_langchain",
    ),
    Framework(
        "Anthropic SDK",
        ("anthropic",),
        "main",
        "tools; streamed text",
        "test_tools_and_streams_of_the_anthropic_sdk",
    ),
    Framework(
        "CAMEL",
        ("camel-ai", "openai"),
        "camel",
        "ChatAgent with a tool; ChatAgent on `ArealOpenAI`",
        "test_a_chat_agent_of_camel",
    ),
)


def normal(name: str) -> str:
    """One spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(environment: str) -> dict[str, str]:
    """Package -> version of an environment's lock, as `make setup` wrote it out."""
    name = "camel" if environment == "camel" else "main"
    return read_pins(CHECKOUT / ".venvs" / f"{name}.txt")


def read_pins(lock: Path) -> dict[str, str]:
    """Package -> version of a lock of PyPI's packages."""
    pins = re.findall(r"^([^#\s]\S*)==(\S+)", lock.read_text(), re.MULTILINE)
    return {normal(name): version for name, version in pins}


def table() -> str:
    """The table as it must stand in the document."""
    rows = []
    for one in FRAMEWORKS:
        pins = locked(one.environment)
        packages = ", ".join(f"{name} {pins[name]}" for name in one.packages)
        rows.append((one.name, packages, one.proven))
    return markdown(("framework", "packages", "proven"), rows)
