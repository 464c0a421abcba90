"""What a validation may claim: the unbiased pass@k, and the 95% interval of a mean over prompts.

Pure functions of numbers. A prompt is the unit that is drawn: answers to one prompt resemble each other, so an interval
over answers would be too narrow. Each prompt gives one value (its mean over answers, its pass@k ...), and the interval
is that of the mean of these values (Miller, Adding Error Bars to Evals, 2024: errors clustered by prompt, which for
equal numbers of answers is this).
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVEL = 0.95


def pass_at_k(right: int, count: int, k: int) -> float:
    """Probability that at least one of k answers, drawn without replacement from `count`, is right.

    1 - C(n-c, k) / C(n, k), exact in whole numbers before the one division.

    Args:
        right: right answers c of a prompt.
        k: 1 to count.
    Source: Chen et al. 2021 (Evaluating Large Language Models Trained on Code), equation 1.
    """
    if not 1 <= k <= count:
        raise ValueError(f"pass@{k} of {count} answers: k has to be 1 to {count}")
    whole = math.comb(count, k)
    return (whole - math.comb(count - right, k)) / whole


def half_width(per_prompt: Floats, is_share: bool) -> float | None:
    """Half the width of the 95% interval of the mean of `per_prompt` (P,); None for one prompt, which shows no spread.

    Student's t with P - 1 degrees of freedom times the standard error. is_share: the values are of 0/1 outcomes; where
    all prompts then agree on 0 or on 1, the spread says nothing, and the width is that of the exact one-sided bound,
    1 - 0.05^(1/P), about 3/P.
    """
    prompts = len(per_prompt)
    if prompts < 2:
        return None
    ordered = np.sort(per_prompt)  # sums of floats depend on their order, which must not
    if is_share and ordered[0] == ordered[-1] and ordered[0] in (0.0, 1.0):
        return 1 - (1 - LEVEL) ** (1 / prompts)
    return student_t(prompts - 1) * float(ordered.std(ddof=1)) / math.sqrt(prompts)


def student_t(degrees: int) -> float:
    """The two-sided 95% quantile of Student's t: Hill's expansion about the normal one (Abramowitz and Stegun 26.7.5),
    exact for 1 and 2 degrees of freedom, within 0.3% from 3 on."""
    if degrees == 1:
        return math.tan(math.pi * LEVEL / 2)
    if degrees == 2:
        return LEVEL * math.sqrt(2 / (1 - LEVEL**2))
    x, n = NormalDist().inv_cdf((1 + LEVEL) / 2), degrees
    return (
        x
        + (x**3 + x) / (4 * n)
        + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * n**2)
        + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (384 * n**3)
        + (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / (92160 * n**4)
    )
