"""A tiny model learns to show its work in sums of four digits."""
