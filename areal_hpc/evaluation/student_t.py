"""Student's t distribution for integer degrees of freedom: probability and quantile. No SciPy."""

import math
from functools import lru_cache

import numpy as np

MAX_EXACT_DEGREES = 4000
"""With more, the normal distribution is as good to four digits."""
_BISECTIONS = 80


def compute_central_probability(t: float, degrees: int) -> float:
    """P(|T| <= t): finite sums in the angle atan(t / sqrt(degrees)), one for odd, one for even."""
    if degrees > MAX_EXACT_DEGREES:
        return math.erf(abs(t) / math.sqrt(2))
    theta = math.atan(abs(t) / math.sqrt(degrees))
    sine, cosine_squared = math.sin(theta), math.cos(theta) ** 2
    if degrees % 2:
        # 2/pi (theta + sin (cos + 2/3 cos^3 + (2 4)/(3 5) cos^5 + ...))
        upper = np.arange(2, degrees - 1, 2) / np.arange(3, degrees, 2)
        terms = np.cumprod(np.concatenate(([math.cos(theta)], upper * cosine_squared)))
        series = float(terms.sum()) if degrees > 1 else 0.0
        return 2 / math.pi * (theta + sine * series)
    # sin (1 + 1/2 cos^2 + (1 3)/(2 4) cos^4 + ...)
    upper = np.arange(1, degrees - 2, 2) / np.arange(2, degrees - 1, 2)
    terms = np.cumprod(np.concatenate(([1.0], upper * cosine_squared)))
    return sine * float(terms.sum())


@lru_cache(maxsize=256)
def compute_central_quantile(confidence: float, degrees: int) -> float:
    """The t with P(|T| <= t) = confidence.

    Raises:
        ValueError: There is no degree of freedom, or the confidence is not between 0 and 1.
    """
    if degrees < 1 or not 0 < confidence < 1:
        raise ValueError(f"expected degrees >= 1 and 0 < confidence < 1: {degrees}, {confidence}")
    low, high = 0.0, 1.0
    while compute_central_probability(high, degrees) < confidence:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if compute_central_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return high
