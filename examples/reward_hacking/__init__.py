"""A tiny model learns to cheat a verifier that has a hole, and the watch tells."""
