"""Weight versions, written `generation.step`, and the staleness between two of them.

A generation is one start of the trainer. A restarted trainer resumes from a saved step, so
the same step number can name two sets of weights; the generation distinguishes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_STEP_BITS = 32
_STEP_MASK = (1 << _STEP_BITS) - 1


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """Version of the weights after `step` training steps of the trainer's `generation`."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Read the text that SGLang returns as `weight_version`.

        Raises:
            ValueError: The text is not `generation.step`.
        """
        generation, dot, step = text.partition(".")
        if not dot or not generation.isdigit() or not step.isdigit():
            raise ValueError(f"a weight version reads 'generation.step', got {text!r}")
        return cls(int(generation), int(step))

    @property
    def packed(self) -> int:
        return self.generation << _STEP_BITS | self.step

    @classmethod
    def unpack(cls, packed: int) -> WeightVersion:
        return cls(packed >> _STEP_BITS, packed & _STEP_MASK)


@dataclass(frozen=True, slots=True)
class GenerationFork:
    """Start of a generation from the saved step `base_step`."""

    generation: int
    base_step: int


def compute_staleness_steps(
    current_version: WeightVersion,
    sampled_version: WeightVersion,
    generation_forks: Sequence[GenerationFork],
) -> int:
    """Return the training steps between the weights that sampled a token and the current ones.

    Steps of an abandoned generation that were never saved do not count: a token of it has the age
    of the last step that both generations share. `generation_forks` has every generation.
    """
    shared_step = min(
        (
            fork.base_step
            for fork in generation_forks
            if sampled_version.generation < fork.generation <= current_version.generation
        ),
        default=sampled_version.step,
    )
    return current_version.step - min(sampled_version.step, shared_step)
