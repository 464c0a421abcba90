"""Normalisation of response scores by mean and standard deviation of the batch, the group, or all previous batches.

Pure functions of scores (B,) and labels. The state for "running" is one `RunningMoments` per domain, which the caller
owns, updates with `update_running` and saves. Invalid rows (padding, a failed reward) are excluded from all statistics
and get 0.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from verl_lite.algos.masked import Labels, RunningMoments, group_ids, group_mean_std, group_sum, label_list

NORM_TYPES = ("batch", "group", "running")
_EPSILON = 1e-6


@torch.no_grad()
def normalise_scores(
    scores: Tensor,
    valid: Tensor,
    norm_mean_type: str | None = None,
    norm_std_type: str | None = None,
    *,
    groups: Labels | None = None,
    domains: Labels | None = None,
    running: Mapping[Any, RunningMoments] | None = None,
) -> Tensor:
    """Returns (scores - mean) / (std + 1e-6), (B,) -> (B,); a type of None omits the mean or the std.

    Types: "batch" uses all valid rows, "group" the valid rows with the same label in `groups`, "running" the moments of
    the row's domain in `running`. std has Bessel's correction. If a std is undefined (a single row) or at most 1e-6
    (equal scores), the result is 0, because such rows carry no signal. ROLL returns NaN for a group of one, numbers of
    order 1e6 for equal scores without a mean, and a wrong shape for a group's std without a group's mean.
    valid: (B,) bool. Raises ValueError for an unknown type, or for a type whose labels are missing.
    """
    for name, kind in (("norm_mean_type", norm_mean_type), ("norm_std_type", norm_std_type)):
        if kind is not None and kind not in NORM_TYPES:
            raise ValueError(f"{name}={kind!r}: expected one of {', '.join(NORM_TYPES)}, or null.")
        if (kind == "group" and groups is None) or (kind == "running" and (running is None or domains is None)):
            needed = "groups" if kind == "group" else "running and domains"
            raise ValueError(f"{name}={kind!r} needs {needed}, found None.")
    values = torch.where(valid, scores.double(), 0)
    result = values
    if norm_mean_type is not None:
        means, _ = _moments(norm_mean_type, values, valid, groups, domains, running)
        result = result - means
    if norm_std_type is not None:
        _, stds = _moments(norm_std_type, values, valid, groups, domains, running)
        result = torch.where(stds > _EPSILON, result / (stds + _EPSILON), 0)
    return torch.where(valid, result, 0).to(scores.dtype)


def _moments(
    kind: str,
    values: Tensor,
    valid: Tensor,
    groups: Labels | None,
    domains: Labels | None,
    running: Mapping[Any, RunningMoments] | None,
) -> tuple[Tensor, Tensor]:
    """Returns mean and std of the set that each row belongs to, (B,) fp64; std is 0 for fewer than two valid rows."""
    if kind == "running":
        assert running is not None and domains is not None
        seen = [running[domain] for domain in label_list(domains)]
        means, stds = ([float(getattr(one, name)) for one in seen] for name in ("mean", "std"))
        return values.new_tensor(means), values.new_tensor(stds)
    labels = groups if kind == "group" and groups is not None else [0] * len(values)
    ids, number = group_ids(labels, values.device)
    counts = group_sum(valid.double(), ids, number)
    group_means = group_sum(values, ids, number) / counts.clamp(min=1)
    _, group_stds, _ = group_mean_std(values, ids, number, valid)
    return group_means[ids], torch.where(counts > 1, group_stds, 0)[ids]


def update_running(
    running: MutableMapping[Any, RunningMoments], scores: Tensor, valid: Tensor, domains: Labels
) -> None:
    """Updates the running moments of each domain with its valid scores, and creates moments for new domains."""
    labels = label_list(domains)
    for domain in dict.fromkeys(labels):
        rows = torch.tensor([label == domain for label in labels], device=valid.device) & valid
        running.setdefault(domain, RunningMoments()).update(scores[rows])
