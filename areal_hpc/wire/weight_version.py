"""Which weights sampled a token: `generation.step`, and how old that is. Pure, no torch.

A generation is one start of the trainer. A restarted trainer resumes from a saved step, so
the same step number can name two different sets of weights; the generation tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_STEP_BITS = 32
_STEP_MASK = (1 << _STEP_BITS) - 1


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """The weights after `step` training steps, as held by `generation` of the trainer."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Read the form SGLang carries as `weight_version`.

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
    """Generation `generation` began from the saved step `base_step`."""

    generation: int
    base_step: int


def compute_staleness_steps(
    current_version: WeightVersion,
    sampled_version: WeightVersion,
    generation_forks: Sequence[GenerationFork],
) -> int:
    """Training steps between the weights that sampled a token and the current ones.

    Steps of an abandoned generation that were never saved do not count: they are measured from
    the last ancestor both generations share. `generation_forks` has every generation of the run.
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
