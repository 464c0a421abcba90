"""The losses of one micro-batch: the actor's (policy loss, entropy bonus, KL to the reference model) and the critic's.

Each loss takes the columns of the batch and the outputs of the forward, and returns the loss and its metrics. The
denominators in `meta_info` are counted over the whole mini-batch before it is split, so the sum of the losses over all
micro-batches and ranks is the loss of the mini-batch. Metrics that are parts of a loss are weighted so that their mean
over a step is the mean over its mini-batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from verl_lite import core_algos
from verl_lite.algos.distillation import divergence, sampled_reverse_kl
from verl_lite.algos.policy_losses import call_policy_loss, clip_range, importance_log_ratio
from verl_lite.config import ActorConfig, CriticConfig, PPOConfig, RolloutCorrectionConfig
from verl_lite.config.distillation import SAMPLED, DistillationLossConfig
from verl_lite.errors import UserError
from verl_lite.metrics import Metric, declared
from verl_lite.protocol import DataProto
from verl_lite.registry import is_own
from verl_lite.rollout_correction import correct_rollout, mismatch_metrics, rollout_probs_diff
from verl_lite.schema import SAMPLING_CANDIDATES, check

REINFORCE = "gpg"
"""The policy loss -A log pi, which rollout_correction.loss_type=reinforce multiplies by its weights."""
ROLL_COLUMNS = {"ref_log_probs": "ref_log_prob", "infer_logprobs": "rollout_log_probs"}
ROLL_COUNTS = {"batch_num_tokens": "num_tokens", "global_valid_samples": "num_sequences"}
LossFunc = Callable[[DataProto, dict[str, torch.Tensor]], tuple[torch.Tensor, Mapping[str, Any]]]
LossAndMetrics = tuple[torch.Tensor, dict[str, Metric]]
_additive_losses: set[Any] = set()
"""Users' policy losses that passed `check_loss_is_additive` in this process."""
LOSS_COLUMNS = ("selected", "scores", "staleness")
"""Columns that the driver sends if the policy loss has parameters of these names: see `trainer.requirements`."""


def actor_loss(
    data: DataProto,
    outputs: dict[str, torch.Tensor],
    config: ActorConfig,
    correction: RolloutCorrectionConfig | None = None,
    distillation: DistillationLossConfig | None = None,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Computes the actor's loss of one micro-batch, to be summed over micro-batches and ranks.

    Args:
        data: response_mask, advantages (b, R); old_log_probs, ref_log_prob, rollout_is_weights, selected, staleness
            (b, R) and scores (b,) if the step needs them. Without old_log_probs the update is strictly on-policy and
            the ratio is 1. meta_info: num_tokens and num_sequences of the whole mini-batch (valid tokens; sequences
            with valid tokens); without them data is treated as the whole mini-batch.
        outputs: log_probs (b, R) with gradient; optionally entropys (b, R); kl (b, R) with gradient if the policy
            computes its KL to the reference in closed form, which replaces the estimate from ref_log_prob;
            router_aux_loss (b,) with gradient if its coefficient is set, averaged over sequences; router_replay (b, 2)
            for metrics.
        correction: with bypass_mode, old_log_probs are the rollout's, and the policy loss is corrected here.
        distillation: adds the loss against the teachers; see `distillation_loss`.

    Returns:
        The loss, and metrics: those of `loss_metrics` and of the policy loss; entropy, entropy_loss and
        router_aux_loss if computed; kl_loss if there is a reference, even if it is not part of the loss.
    """
    batch = data.batch
    log_probs = outputs["log_probs"]
    mask = data.batch["response_mask"]
    old_log_probs = batch["old_log_probs"] if "old_log_probs" in batch.keys() else log_probs.detach()
    tokens = data.meta_info.get("num_tokens")
    sequences = data.meta_info.get("num_sequences")
    counts: dict[str, Any] = {"batch_num_tokens": tokens, "global_batch_size": sequences}

    def aggregate(values: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"loss_scale_factor": config.loss_scale_factor, **counts}
        return core_algos.agg_loss(values, mask, config.loss_agg_mode, **options)

    loss, metrics = _policy_loss(data, log_probs, old_log_probs, config, counts, correction)
    parts, token_values = {"pg_loss": loss}, {}
    if distillation is not None:
        parts["distillation_loss"], more = distillation_loss(data, outputs, old_log_probs, config, distillation)
        metrics |= more
        loss = loss * distillation.use_task_rewards + distillation.distillation_loss_coef * parts["distillation_loss"]
    if config.router_aux_loss_coef:
        count = int(mask.any(-1).sum()) if sequences is None else sequences
        parts["router_aux_loss"] = outputs["router_aux_loss"].sum() / max(1, count)
        loss = loss + config.router_aux_loss_coef * parts["router_aux_loss"]
    if "router_replay" in outputs:
        changed, pairs = outputs["router_replay"].sum(0)
        metrics["router_replay_changed"] = Metric.mean(changed, pairs)
    if "entropys" in outputs:
        token_values["entropy"] = outputs["entropys"]
        parts["entropy_loss"] = aggregate(outputs["entropys"])
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * parts["entropy_loss"]
    kl = outputs.get("kl")
    if kl is None and (config.use_kl_loss or "ref_log_prob" in batch.keys()):
        check(data, ["ref_log_prob"], "actor.use_kl_loss=true")
        kl = core_algos.kl_penalty(log_probs, batch["ref_log_prob"], config.kl_loss_type, mask)
    if kl is not None:
        parts["kl_loss"] = aggregate(kl)
    if config.use_kl_loss:
        loss = loss + config.kl_loss_coef * parts["kl_loss"]
        metrics["kl_coef"] = Metric.last(config.kl_loss_coef)
    parts |= {"loss": loss, "total_loss": loss}
    moved = log_probs, old_log_probs, batch["advantages"], mask
    metrics |= loss_metrics(parts, token_values, *moved, config, tokens, aggregate)
    if "rollout_log_probs" in batch.keys():
        metrics |= rollout_probs_diff(log_probs.detach(), batch["rollout_log_probs"], mask)
        metrics |= mismatch_metrics(log_probs.detach(), batch["rollout_log_probs"], mask)
    return loss, metrics


def distillation_loss(
    data: DataProto,
    outputs: dict[str, torch.Tensor],
    old_log_probs: torch.Tensor,
    config: ActorConfig,
    options: DistillationLossConfig,
) -> LossAndMetrics:
    """Computes the mean loss against the teachers over all tokens that have a teacher.

    data: teacher_log_probs (b, R), or teacher_topk_log_probs (b, R, K) for a divergence; has_teacher (b,); meta_info
    num_distilled, the tokens with a teacher in the whole mini-batch. outputs: log_probs (b, R), and log_probs_at_ids
    (b, R, K) for a divergence. Also returns distillation/teacher_mass and distillation/student_mass, the means of the
    probability of the K tokens.
    """
    name = "teacher_log_probs" if options.loss_mode == SAMPLED else "teacher_topk_log_probs"
    check(data, [name, "has_teacher"], f"distillation.distillation_loss.loss_mode={options.loss_mode}")
    teacher = data.batch[name]
    mask = data.batch["response_mask"] * data.batch["has_teacher"].unsqueeze(1)
    found = mask.sum()
    metrics = {}
    if options.loss_mode == SAMPLED:
        low, high = clip_range(config)
        log_probs, bound = outputs["log_probs"], options.loss_max_clamp
        values = sampled_reverse_kl(
            log_probs, old_log_probs, teacher, max_advantage=bound, clip_low=low, clip_high=high
        )
    else:
        student = outputs["log_probs_at_ids"]
        values = divergence(student, teacher, options.loss_mode.removesuffix("_topk"), with_rest=options.topk != -1)
        for name, log_probs in (("teacher", teacher), ("student", student.detach())):
            mass = core_algos.masked_sum(log_probs.exp().sum(-1), mask)
            metrics[f"distillation/{name}_mass"] = Metric.mean(mass, found)
    return core_algos.masked_sum(values, mask) / max(1, data.meta_info.get("num_distilled", int(found))), metrics


def _policy_loss(
    data: DataProto,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    config: ActorConfig,
    counts: dict[str, Any],
    correction: RolloutCorrectionConfig | None,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Computes the registered policy loss with the columns that it takes and the global denominators. With bypass_mode
    also applies the rollout correction."""
    batch, loss_mode = data.batch, config.policy_loss.loss_mode
    mask, weights = batch["response_mask"], batch.get("rollout_is_weights", None)
    correction_metrics: dict[str, Metric] = {}
    if correction is not None and correction.bypass_mode:  # old_log_probs come from the rollout
        # The denominators are counted before rejection, because no rank has the rejections of the others. A rejected
        # answer (with token-mean: token) counts with loss 0, and the gradient does not depend on the split.
        lengths, current = (mask != 0).sum(dim=-1), log_probs.detach()
        whole = {"batch_num_tokens": int(lengths.sum()), "global_batch_size": int((lengths > 0).sum())}
        counts = {name: whole[name] if count is None else count for name, count in counts.items()}
        weights, kept, metrics = correct_rollout(current, old_log_probs, mask, correction)
        # metrics with reduction "last", such as standard deviations, need the whole batch
        correction_metrics = {name: metric for name, metric in metrics.items() if metric.reduction != "last"}
        correction_metrics |= rollout_probs_diff(current, old_log_probs, mask)
        mask = kept
        loss_mode = REINFORCE if correction.loss_type == "reinforce" else loss_mode
    function = core_algos.get_policy_loss_fn(loss_mode)
    given = {"old_log_probs": old_log_probs, "advantages": batch["advantages"], "response_mask": mask}
    given |= {} if weights is None else {"rollout_is_weights": weights}
    given |= {name: batch[name] for name in LOSS_COLUMNS if name in batch.keys()}

    def loss_of(part: Mapping[str, torch.Tensor], log_probs: torch.Tensor) -> LossAndMetrics:
        return call_policy_loss(
            function,
            part["old_log_probs"],
            log_probs,
            part["advantages"],
            part["response_mask"],
            config.loss_agg_mode,
            config,
            part.get("rollout_is_weights"),
            counts=counts,
            columns={name: part[name] for name in LOSS_COLUMNS if name in part},
        )

    is_checked = is_own(function) or function in _additive_losses
    if counts["batch_num_tokens"] is not None and log_probs.requires_grad and not is_checked:
        name = f"actor.policy_loss.loss_mode={loss_mode}"
        remedy = "divide by batch_num_tokens or global_batch_size, as agg_loss does, not by counts of its own arguments"
        data, outputs = DataProto.from_dict(given), {"log_probs": log_probs}

        def part_loss(part: DataProto, of: dict[str, torch.Tensor]) -> LossAndMetrics:
            return loss_of(dict(part.batch), of["log_probs"])

        if check_loss_is_additive(part_loss, data, outputs, name, remedy):
            _additive_losses.add(function)
    loss, metrics = loss_of(given, log_probs)
    return loss, metrics | correction_metrics


@torch.no_grad()
def loss_metrics(
    parts: dict[str, torch.Tensor],
    token_values: dict[str, torch.Tensor],
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    num_tokens: int | None,
    aggregate: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, Metric]:
    """Metrics of the actor's update on one micro-batch: parts of the loss, and distances between the current policy and
    the policy that sampled. They stay on the device (`verl_lite.metrics.to_host`); names as in ROLL's agentic actor.

    Args:
        parts: scalars whose sum over micro-batches and ranks is the value of a mini-batch, reported as the mean over
            the mini-batches of a step. Their weight is the micro-batch's share of num_tokens.
        token_values: (b, R) values, reported as means over valid tokens.
        num_tokens: valid tokens of the mini-batch; None = this is the whole mini-batch.
        aggregate: aggregation of (b, R) values to a scalar, the same as for the loss.

    Returns:
        All parts and token_values, and these metrics:
          clipfrac   aggregated share of tokens for which PPO's clip lowers the objective, independent of the loss
          approxkl   aggregated d^2 / 2, where d = log pi - log pi_old
          policykl   aggregated d
        The ratio pi / pi_old is the token's, or with ratio_type=segment that of its run of tokens: ratio_mean (mean
        over sequences of the sequence's mean), ratio_max, ratio_min, and the shares of tokens outside of the clip
        range: ppo_ratio_high_clipfrac, ppo_ratio_low_clipfrac, ppo_ratio_clipfrac.
    """
    low, high = clip_range(config)
    ratio = importance_log_ratio(log_probs, old_log_probs, response_mask, config).exp()
    is_clipped = ratio.clamp(1 - low, 1 + high) * advantages < ratio * advantages
    is_valid = response_mask != 0
    difference = torch.where(is_valid, log_probs - old_log_probs, 0)
    parts = parts | {
        "clipfrac": aggregate(is_clipped.to(ratio.dtype)),
        "approxkl": aggregate(0.5 * difference.square()),
        "policykl": aggregate(difference),
    }
    is_high, is_low = ratio > 1 + high, ratio < 1 - low
    token_values = token_values | {
        "ppo_ratio_high_clipfrac": is_high,
        "ppo_ratio_low_clipfrac": is_low,
        "ppo_ratio_clipfrac": is_high | is_low,
    }
    lengths = is_valid.sum(dim=-1)
    tokens = lengths.sum()
    share = tokens.double() / (tokens.clamp(min=1) if num_tokens is None else max(1, num_tokens))
    by_sequence = core_algos.masked_sum(ratio, response_mask, axis=-1) / lengths.clamp(min=1)
    return {
        "ratio_mean": Metric.mean(by_sequence.sum(), (lengths > 0).sum()),
        "ratio_max": Metric.max(torch.where(is_valid, ratio, -torch.inf).amax(), tokens),
        "ratio_min": Metric.min(torch.where(is_valid, ratio, torch.inf).amin(), tokens),
        **{
            name: Metric.mean(core_algos.masked_sum(values.to(ratio.dtype), response_mask), tokens)
            for name, values in token_values.items()
        },
        **{name: Metric.mean(value, share) for name, value in parts.items()},
    }


def loss_of_batch(
    data: DataProto, output_tensor: dict[str, torch.Tensor] | torch.Tensor, config: PPOConfig
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Computes `actor_loss` and the rollout correction of a batch that the driver did not plan, in ROLL's layout or
    ours.

    Args:
        data: as in `actor_loss`, or with ROLL's names: ref_log_probs, infer_logprobs, meta_info batch_num_tokens and
            global_valid_samples. With a response_mask (b, S), the other columns are (b, S - 1), one entry per predicted
            token. If algorithm.rollout_correction needs weights or rejection and data has no weights, they are computed
            from old_log_probs and the rollout's log-probs.
        output_tensor: the policy's outputs (b, R) by name, or logits (b, S, V).
    """
    is_planned = "num_tokens" in data.meta_info  # by the driver, which has applied the correction
    data, correction, actor = _convert_roll_batch(data), config.algorithm.rollout_correction, config.actor
    batch, outputs = data.batch, output_tensor
    correction_metrics: dict[str, Metric] = {}
    if isinstance(outputs, torch.Tensor):
        if actor.router_aux_loss_coef:
            raise ValueError("loss_func: actor.router_aux_loss_coef needs outputs by name; logits do not have routes")
        if SAMPLING_CANDIDATES in batch.keys():
            raise ValueError("loss_func: rollout.top_k needs outputs by name; logits are those of the whole vocabulary")
        outputs = outputs_of_logits(data, outputs, actor.calculate_entropy or actor.entropy_coeff != 0)
    corrects = (correction.rollout_is or correction.rollout_rs) and not correction.bypass_mode and not is_planned
    if corrects and "rollout_log_probs" in batch.keys() and "rollout_is_weights" not in batch.keys():
        log_probs = batch.get("old_log_probs", outputs["log_probs"].detach()), batch["rollout_log_probs"]
        weights, kept, correction_metrics = correct_rollout(*log_probs, batch["response_mask"], correction)
        batch.update({"response_mask": kept} | ({} if weights is None else {"rollout_is_weights": weights}))
    if actor.loss_scale_factor is None:  # the mask may be wider than a response
        actor = replace(actor, loss_scale_factor=float(config.data.max_response_length))
    loss, metrics = actor_loss(data, outputs, actor, correction, config.distillation.active_loss)
    return loss, metrics | correction_metrics


def user_loss(loss_func: LossFunc, data: DataProto, outputs: dict[str, torch.Tensor]) -> LossAndMetrics:
    """Calls a user's `loss_func` on a micro-batch. meta_info has the mini-batch's counts under our names and ROLL's;
    `declared` converts the metrics."""
    counts = {theirs: {"response_mask": data.meta_info[ours]} for theirs, ours in ROLL_COUNTS.items()}
    loss, metrics = loss_func(DataProto(data.batch, data.non_tensor_batch, data.meta_info | counts), outputs)
    tokens = data.batch["response_mask"].bool().sum().double()
    return loss, declared(metrics, tokens, data.meta_info["num_tokens"])


def check_loss_is_additive(
    loss: LossFunc, data: DataProto, outputs: dict[str, torch.Tensor], name: str, remedy: str
) -> bool:
    """Raises UserError if splitting a micro-batch in two changes the gradient of the summed losses with respect to the
    outputs. A single row is used twice. Returns False if the gradients are zero, which proves nothing. name, remedy:
    texts for the message."""
    rows = data.batch["response_mask"].any(-1).nonzero().flatten().tolist()
    parts = [slice(rows[1]), slice(rows[1], None)] if len(rows) > 1 else [slice(None)] * 2
    leaves = [{name: each[part].detach() for name, each in outputs.items()} for part in parts]
    whole = {
        name: torch.cat([leaf[name] for leaf in leaves]).requires_grad_(outputs[name].requires_grad) for name in outputs
    }
    trained = [leaf for leaf in whole.values() if leaf.requires_grad]
    cut, pieces = len(leaves[0]["log_probs"]), [data[part] for part in parts]
    together = loss(DataProto.concat(pieces), whole)[0]
    apart = [{name: leaf[part] for name, leaf in whole.items()} for part in (slice(cut), slice(cut, None))]
    added = torch.stack([loss(*part)[0] for part in zip(pieces, apart, strict=True)]).sum()
    found = (torch.autograd.grad(each, trained, materialize_grads=True) for each in (together, added))
    one, other = (torch.cat([gradient.flatten() for gradient in gradients]) for gradients in found)
    if not torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max())):
        raise UserError(f"the gradient of {name} depends on how the batch is split into micro-batches: {remedy}")
    return bool(one.any())


def _convert_roll_batch(data: DataProto) -> DataProto:
    """Converts ROLL's names and shapes to ours; entries in our layout are unchanged."""
    columns = {ROLL_COLUMNS.get(name, name): data.batch[name] for name in map(str, data.batch.keys())}
    mask, meta_info = columns["response_mask"], dict(data.meta_info)
    if mask.shape[1] == columns["advantages"].shape[1] + 1:
        columns["response_mask"] = mask[:, 1:]
    counts = {ours: meta_info[theirs]["response_mask"] for theirs, ours in ROLL_COUNTS.items() if theirs in meta_info}
    return DataProto.from_dict(columns, meta_info=meta_info | counts)


def outputs_of_logits(data: DataProto, logits: torch.Tensor, calculate_entropy: bool) -> dict[str, torch.Tensor]:
    """Computes log_probs and entropys (b, R), as the policy's forward does, from the logits (b, S, V) of a padded
    forward.

    data: input_ids (b, S), whose last R tokens are the response; response_mask (b, R); meta_info temperature, default
    1. Raises ValueError if the shape of the logits does not match input_ids.
    """
    input_ids, width = data.batch["input_ids"], data.batch["response_mask"].shape[1]
    if logits.shape[:2] != input_ids.shape:
        raise ValueError(
            f"loss_func: output_tensor has shape {tuple(logits.shape)}, expected logits (b, S, V) with (b, S) = "
            f"{tuple(input_ids.shape)}, the shape of input_ids."
        )
    predicting = logits[:, -width - 1 : -1] / data.meta_info.get("temperature", 1.0)
    outputs = {"log_probs": core_algos.logprobs_from_logits(predicting, input_ids[:, -width:])}
    if calculate_entropy:
        outputs["entropys"] = core_algos.entropy_from_logits(predicting)
    return outputs


def critic_loss(
    data: DataProto, outputs: dict[str, torch.Tensor], critic: CriticConfig, actor: ActorConfig
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Computes the clipped value loss of one micro-batch, to be summed over micro-batches and ranks.

    data: response_mask, returns (b, R) and values (b, R) from before the update; meta_info as in `actor_loss`. outputs:
    values (b, R) with gradient. actor: provides loss_scale_factor, and loss_agg_mode if the critic has none.
    """
    new_values, mask = outputs["values"], data.batch["response_mask"]
    tokens, valid = data.meta_info["num_tokens"], mask.sum().double()
    loss, clipped_share = core_algos.compute_value_loss(
        new_values,
        data.batch["returns"],
        data.batch["values"],
        mask,
        critic.cliprange_value,
        critic.loss_agg_mode or actor.loss_agg_mode,
        batch_num_tokens=tokens,
        global_batch_size=data.meta_info["num_sequences"],
        loss_scale_factor=actor.loss_scale_factor,
    )
    value = Metric.mean(loss, valid / max(1, tokens))
    return loss, {
        "vf_loss": value,
        "vf_clipfrac": Metric.mean(clipped_share * valid, valid),
        "vpred_mean": Metric.mean(core_algos.masked_sum(new_values.detach(), mask), valid),
        "loss": value,
    }
