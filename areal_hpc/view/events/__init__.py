"""What the events of a run tell: failures of the agent, news for the screen, the phase."""
