"""Events, spans and annotations: files that say how a run went."""
