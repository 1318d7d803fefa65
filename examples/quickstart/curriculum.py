"""Curriculum: weights of the sums to practise next."""

from typing import Any

import numpy as np
import numpy.typing as npt


def sometimes_solved(known: dict[str, Any]) -> npt.NDArray[np.float64]:
    """A weight for each task: 1 if it was never tried or is solved sometimes, else 0.05."""
    reward = known["reward"]
    is_informative = np.isnan(reward) | ((reward > 0.1) & (reward < 0.9))
    return np.where(is_informative, 1.0, 0.05)
