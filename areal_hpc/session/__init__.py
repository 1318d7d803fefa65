"""RECORD: the interaction tree and exact token splicing. Pure; shared by proxy and client."""
