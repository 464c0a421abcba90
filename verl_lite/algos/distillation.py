"""Losses of on-policy distillation: divergences of the next-token distributions of teacher and student, per token.

A distribution over K tokens has one more bin for the remaining probability. Without that bin the reverse KL divergence
would be smallest when the student moves its probability away from the K tokens.
"""

import math

import torch

from verl_lite.algos.masked import bounded_log_ratio

MIN_LOG_PROB = -100.0
"""Lower bound of the log-probs of a divergence and of the teacher's in k1, so that a token that only one of the two
excludes has a finite loss."""
MIN_REST = 1e-6
"""Lower bound of the remaining probability; in fp32, 1 minus a sum of probabilities has a rounding error near 1e-7."""


def sampled_reverse_kl(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    *,
    max_advantage: float | None = None,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """Computes the policy gradient loss whose advantage is the log-ratio log q - log p_old of the sampled token.

    Its gradient is an unbiased estimate of the gradient of KL(p | q) at each position (Thinking Machines, "On-Policy
    Distillation", 2025; verl's k1 with use_policy_gradient). Later optimizer steps on the same samples clip the ratio
    p / p_old as PPO does. As in the policy losses, log p - log p_old is clamped to +-20 before.

    Args:
        log_probs: (b, R) of the policy p, with gradient.
        old_log_probs: (b, R) of the policy before the update.
        teacher_log_probs: (b, R) of the teacher q. Values below `MIN_LOG_PROB` count as that bound.
        max_advantage: bound of the absolute advantage; None = no bound.
        clip_low, clip_high: widths of the clip range below and above 1.

    Returns:
        (b, R). While the ratio is 1, the mean is an estimate of KL(p | q).
    """
    # a constant, because the gradient is that of the ratio alone
    advantages = (teacher_log_probs.clamp(min=MIN_LOG_PROB) - old_log_probs).detach()
    if max_advantage is not None:
        advantages = advantages.clamp(-max_advantage, max_advantage)
    ratio = bounded_log_ratio(log_probs, old_log_probs).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    # the pessimistic objective of PPO; a loss is minimised
    plain = ratio * advantages
    clipped = clipped_ratio * advantages
    return -torch.minimum(plain, clipped)


def divergence(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, kind: str, with_rest: bool) -> torch.Tensor:
    """Computes a divergence of teacher q and student p over K tokens at each position.

    Args:
        log_probs, teacher_log_probs: (b, R, K) of the same tokens; the former with gradient.
        kind: forward_kl is KL(q | p), reverse_kl is KL(p | q) (MiniLLM, 2306.08543), and jsd is the Jensen-Shannon
            divergence, half the sum of both against the mean of p and q (GKD, 2306.13649, with beta 0.5).
        with_rest: True adds a bin with the remaining probability. False if the K tokens are the whole vocabulary.

    Returns:
        (b, R) in nats.

    Raises:
        ValueError: the kind is unknown.
    """
    log_q = teacher_log_probs.detach()
    log_p = log_probs
    if with_rest:
        log_q = torch.cat([log_q, _log_rest(log_q)], dim=-1)
        log_p = torch.cat([log_p, _log_rest(log_p)], dim=-1)
    # 0 * -inf is NaN, for a token that one of the two excludes
    log_q = log_q.clamp(min=MIN_LOG_PROB)
    log_p = log_p.clamp(min=MIN_LOG_PROB)
    q = log_q.exp()
    p = log_p.exp()

    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    if kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    if kind == "jsd":
        log_mean = torch.logaddexp(log_p, log_q) - math.log(2)
        of_teacher = q * (log_q - log_mean)
        of_student = p * (log_p - log_mean)
        return 0.5 * (of_teacher + of_student).sum(-1)
    raise ValueError(f"divergence: found kind={kind!r}, expected forward_kl, reverse_kl or jsd")


def _log_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """Returns log(1 - sum of the probabilities) (..., 1). Below MIN_REST it is constant, but keeps its gradient."""
    total = log_probs.exp().sum(-1, keepdim=True)
    rest = 1 - total
    # the bound applies to the value alone: a clamp would stop the gradient of a bin that is nearly empty
    missing = (rest.clamp(min=MIN_REST) - rest).detach()
    return (rest + missing).log()
