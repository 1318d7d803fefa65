"""Run directory: the one owner of its paths and of the formats of its files."""
