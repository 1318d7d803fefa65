"""RECORD: the OpenAI-compatible endpoint that records what the model really saw and said."""
