"""OpenAI-compatible endpoint of agents, which records what the model saw and said."""
