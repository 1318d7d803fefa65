"""Agents of CAMEL."""
