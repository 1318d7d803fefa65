"""A coding harness learns to look a number up before it writes it down."""
