"""Interaction tree of a session, and exact token reuse. Pure; shared by proxy and client."""
