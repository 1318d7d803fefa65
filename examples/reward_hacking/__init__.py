"""A tiny model learns to cheat a verifier that has a hole, and an alert tells."""
