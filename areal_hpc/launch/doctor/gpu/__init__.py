"""Examination of GPU nodes (`areal-hpc doctor --gpu`): facts, steps that are run, judgments."""
