"""Sessions: events, journal, sealing, limits."""
