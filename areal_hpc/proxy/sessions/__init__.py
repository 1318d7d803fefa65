"""Sessions of agents: their state, the journal of its events, and sealing into shards."""
