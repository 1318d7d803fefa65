"""What a restarted trainer needs, put on disk whole, and what can be read from it."""
