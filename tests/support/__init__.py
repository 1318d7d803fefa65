"""Shared support of the tests of several tiers."""
