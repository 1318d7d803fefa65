"""Small agents that run as they are."""
