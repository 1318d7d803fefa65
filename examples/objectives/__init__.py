"""Custom losses: `trainer.objective.custom=examples.objectives.sapo:compute_terms`."""
