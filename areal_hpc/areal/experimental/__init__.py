"""AReaL's older paths of the client and the trainer; each name lives elsewhere."""
