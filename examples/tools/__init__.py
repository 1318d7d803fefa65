"""An agent with a tool."""
