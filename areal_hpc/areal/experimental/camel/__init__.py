"""AReaL's path of the model for CAMEL."""
