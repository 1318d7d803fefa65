"""Task sets: where their rows come from, and what an agent gets of them."""
