"""One agent per framework; docs/agents.md shows them, tests/integration/agents runs them."""
