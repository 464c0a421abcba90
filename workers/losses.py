"""The actor's loss on one micro-batch: policy loss, entropy bonus, KL to the reference model.

Takes the columns of the batch and the log-probs just computed, gives the loss and its metrics. It owns no
normalisation: the denominators in `meta_info` were counted over the whole mini-batch before it was split, so the sum
of these losses over all micro-batches and ranks is the loss of the mini-batch.
"""

from __future__ import annotations

import torch

from verl_lite.config import ActorConfig
from verl_lite.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.rollout_diff import rollout_probs_diff


def actor_loss(
    data: DataProto, outputs: dict[str, torch.Tensor], config: ActorConfig
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Loss of one micro-batch, to be summed over micro-batches and ranks.

    data: response_mask, advantages (b, R); old_log_probs and ref_log_prob (b, R) where the step needs them. Without
        old_log_probs the update is strictly on-policy and the ratio is 1 by construction.
    outputs: log_probs (b, R) with gradient; entropys (b, R) where asked for.
    data.meta_info: num_tokens, num_sequences of the whole mini-batch (valid tokens; sequences that have any).
    Metrics that are parts of the loss are weighted so that their mean over a step is the mini-batches' mean.
    """
    log_probs, mask = outputs["log_probs"], data.batch["response_mask"]
    old_log_probs = data.batch["old_log_probs"] if "old_log_probs" in data.batch.keys() else log_probs.detach()
    tokens, sequences = data.meta_info["num_tokens"], data.meta_info["num_sequences"]
    share = float(mask.sum()) / max(1, tokens)

    def aggregate(values: torch.Tensor) -> torch.Tensor:
        return agg_loss(
            values,
            mask,
            config.loss_agg_mode,
            batch_num_tokens=tokens,
            global_batch_size=sequences,
            loss_scale_factor=config.loss_scale_factor,
        )

    loss, metrics = get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_probs,
        log_probs,
        data.batch["advantages"],
        mask,
        config.loss_agg_mode,
        config,
        None,
        batch_num_tokens=tokens,
        global_batch_size=sequences,
    )
    metrics["pg_loss"] = Metric.mean(float(loss.detach()), share)
    if "entropys" in outputs:
        entropy = aggregate(outputs["entropys"])
        metrics["entropy_loss"] = Metric.mean(float(entropy.detach()), share)
        metrics["entropy"] = Metric.mean(float((outputs["entropys"].detach() * mask).sum()), float(mask.sum()))
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * entropy
    if config.use_kl_loss:
        kl = aggregate(kl_penalty(log_probs, data.batch["ref_log_prob"], config.kl_loss_type, mask))
        metrics["kl_loss"] = Metric.mean(float(kl.detach()), share)
        metrics["kl_coef"] = Metric.last(config.kl_loss_coef)
        loss = loss + config.kl_loss_coef * kl
    metrics["loss"] = Metric.mean(float(loss.detach()), share)
    if "rollout_log_probs" in data.batch.keys():
        metrics |= rollout_probs_diff(log_probs.detach(), data.batch["rollout_log_probs"], mask)
    return loss, metrics
