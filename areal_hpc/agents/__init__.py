"""Agents ready to use, under AReaL's names: mathematics, once with each framework."""
