"""The losses of one micro-batch: the actor's (policy loss, entropy bonus, KL to the reference model) and the critic's.

Each loss takes the columns of the batch and the outputs of the forward, and returns the loss and its metrics. The
denominators in `meta_info` are counted over the whole mini-batch before it is split, so the sum of the losses over all
micro-batches and ranks is the loss of the mini-batch. Metrics that are parts of a loss are weighted so that their mean
over a step is the mean over its mini-batches.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from verl_lite import core_algos
from verl_lite.algos.distillation import divergence, sampled_reverse_kl
from verl_lite.config import ActorConfig, CriticConfig, RolloutCorrectionConfig
from verl_lite.config.distillation import SAMPLED, DistillationLossConfig
from verl_lite.core_algos import Aggregation, LossInputs, LossResult, PolicyLoss, ValueLossInputs, clip_range
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.registry import is_own
from verl_lite.rollout_correction import correct_rollout, mismatch_metrics, rollout_probs_diff
from verl_lite.schema import check

REINFORCE = "gpg"
"""The policy loss -A log pi, which rollout_correction.loss_type=reinforce multiplies by its weights."""
POLICY_LOSS_REMEDY = (
    "divide by batch_num_tokens or global_batch_size, as LossInputs.aggregate and agg_loss do, not by counts of its "
    "own arguments"
)
Outputs = dict[str, torch.Tensor]
LossFunc = Callable[[DataProto, Outputs], LossResult]
_additive_losses: set[Callable[..., object]] = set()
"""Users' policy losses that passed `check_loss_is_additive` in this process."""


# ---------------------------------------------------------------------------------------------------- the actor's loss


def actor_loss(
    data: DataProto,
    outputs: Outputs,
    config: ActorConfig,
    correction: RolloutCorrectionConfig | None = None,
    distillation: DistillationLossConfig | None = None,
) -> LossResult:
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
    inputs = _policy_loss_inputs(data, outputs["log_probs"], config)
    loss, metrics = _policy_loss(inputs, config, correction)
    parts = {"pg_loss": loss}
    token_values = {}

    if distillation is not None:
        distilled, distillation_metrics = distillation_loss(data, outputs, inputs.old_log_prob, config, distillation)
        # use_task_rewards=false leaves the teachers as the only signal; entropy and KL below remain
        loss = loss * distillation.use_task_rewards + distillation.distillation_loss_coef * distilled
        parts["distillation_loss"] = distilled
        metrics |= distillation_metrics

    if config.router_aux_loss_coef:
        parts["router_aux_loss"] = _router_aux_loss(data, outputs)
        loss = loss + config.router_aux_loss_coef * parts["router_aux_loss"]
    if "router_replay" in outputs:
        changed, pairs = outputs["router_replay"].sum(0)
        metrics["router_replay_changed"] = Metric.mean(changed, pairs)

    # the entropy is also a metric (actor.calculate_entropy) when it is no part of the loss
    if "entropys" in outputs:
        token_values["entropy"] = outputs["entropys"]
        parts["entropy_loss"] = inputs.aggregation(outputs["entropys"], inputs.response_mask)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * parts["entropy_loss"]

    kl = _kl_to_reference(data, outputs, config)
    if kl is not None:
        parts["kl_loss"] = inputs.aggregation(kl, inputs.response_mask)
    if config.use_kl_loss:
        loss = loss + config.kl_loss_coef * parts["kl_loss"]
        metrics["kl_coef"] = Metric.last(config.kl_loss_coef)

    parts |= {"loss": loss, "total_loss": loss}
    metrics |= loss_metrics(parts, token_values, inputs)
    # how far the engine that sampled is from the policy that learns
    if "rollout_log_probs" in data.batch.keys():
        log_probs = outputs["log_probs"].detach()
        rollout_log_probs = data.batch["rollout_log_probs"]
        metrics |= rollout_probs_diff(log_probs, rollout_log_probs, inputs.response_mask)
        metrics |= mismatch_metrics(log_probs, rollout_log_probs, inputs.response_mask)
    return loss, metrics


def _policy_loss_inputs(data: DataProto, log_probs: torch.Tensor, config: ActorConfig) -> LossInputs:
    """Returns the inputs of the policy loss of a micro-batch, before the correction of bypass_mode."""
    batch = data.batch
    # The counts are those of the mini-batch over all micro-batches and ranks. They are None for a batch that the driver
    # did not plan, which is then a mini-batch of its own.
    aggregation = Aggregation(
        config.loss_agg_mode,
        batch_num_tokens=data.meta_info.get("num_tokens"),
        global_batch_size=data.meta_info.get("num_sequences"),
        loss_scale_factor=config.loss_scale_factor,
    )
    return LossInputs(
        log_prob=log_probs,
        # on-policy, the ratio is 1 and its gradient that of the log-prob
        old_log_prob=batch.get("old_log_probs", log_probs.detach()),
        advantages=batch["advantages"],
        response_mask=batch["response_mask"],
        config=config,
        aggregation=aggregation,
        rollout_is_weights=batch.get("rollout_is_weights", None),
        selected=batch.get("selected", None),
        scores=batch.get("scores", None),
        staleness=batch.get("staleness", None),
    )


def _policy_loss(inputs: LossInputs, config: ActorConfig, correction: RolloutCorrectionConfig | None) -> LossResult:
    """Computes the registered policy loss. With bypass_mode also applies the rollout correction."""
    loss_mode = config.policy_loss.loss_mode
    correction_metrics: dict[str, Metric] = {}
    if correction is not None and correction.bypass_mode:
        inputs, correction_metrics = _corrected(inputs, correction)
        if correction.loss_type == "reinforce":
            loss_mode = REINFORCE

    policy_loss = core_algos.get_policy_loss(loss_mode)
    _require_additive(policy_loss, inputs, f"actor.policy_loss.loss_mode={loss_mode}")
    loss, metrics = policy_loss(inputs)
    return loss, metrics | correction_metrics


def _corrected(inputs: LossInputs, correction: RolloutCorrectionConfig) -> tuple[LossInputs, dict[str, Metric]]:
    """Applies the rollout correction to inputs whose old_log_prob is the rollout's.

    Returns:
        The inputs with the correction's weights and without rejected tokens, and its metrics.
    """
    mask = inputs.response_mask
    log_prob = inputs.log_prob.detach()
    weights, kept_mask, metrics = correct_rollout(log_prob, inputs.old_log_prob, mask, correction)

    # The denominators are counted before rejection, because no rank has the rejections of the others. A rejected
    # answer (with token-mean: token) counts with loss 0, and the gradient does not depend on the split.
    lengths = (mask != 0).sum(dim=-1)
    aggregation = inputs.aggregation
    if aggregation.batch_num_tokens is None:
        num_tokens = int(lengths.sum())
        aggregation = replace(aggregation, batch_num_tokens=num_tokens)
    if aggregation.global_batch_size is None:
        num_sequences = int((lengths > 0).sum())
        aggregation = replace(aggregation, global_batch_size=num_sequences)
    corrected = replace(inputs, response_mask=kept_mask, rollout_is_weights=weights, aggregation=aggregation)

    # metrics with reduction "last", such as standard deviations, need the whole batch
    additive_metrics = {name: metric for name, metric in metrics.items() if metric.reduction != "last"}
    additive_metrics |= rollout_probs_diff(log_prob, inputs.old_log_prob, mask)
    return corrected, additive_metrics


def _require_additive(policy_loss: PolicyLoss, inputs: LossInputs, name: str) -> None:
    """Raises UserError if a user's policy loss depends on how a mini-batch is split.

    Checks a function once in each process, as soon as its gradient is not zero.
    """
    function = policy_loss.function
    is_checked = is_own(function) or function in _additive_losses
    # a batch without the mini-batch's counts is not split, and a loss may divide by its own counts
    is_whole = inputs.aggregation.batch_num_tokens is None
    if is_checked or is_whole or not inputs.log_prob.requires_grad:
        return

    # config and aggregation stay those of the micro-batch, so that all parts are divided by the same counts
    def loss_of_part(part: DataProto, outputs: Outputs) -> LossResult:
        part_columns = {str(column): part.batch[column] for column in part.batch.keys()}
        part_inputs = replace(inputs, log_prob=outputs["log_probs"], **part_columns)
        return policy_loss(part_inputs)

    columns = {
        "old_log_prob": inputs.old_log_prob,
        "advantages": inputs.advantages,
        "response_mask": inputs.response_mask,
        "rollout_is_weights": inputs.rollout_is_weights,
        "selected": inputs.selected,
        "scores": inputs.scores,
        "staleness": inputs.staleness,
    }
    existing_columns = {column: values for column, values in columns.items() if values is not None}
    data = DataProto.from_dict(existing_columns)
    if check_loss_is_additive(loss_of_part, data, {"log_probs": inputs.log_prob}, name, POLICY_LOSS_REMEDY):
        _additive_losses.add(function)


def _router_aux_loss(data: DataProto, outputs: Outputs) -> torch.Tensor:
    """Returns the mean of the load balancing loss over the sequences of the mini-batch."""
    num_sequences = data.meta_info.get("num_sequences")
    # a batch that the driver did not plan is a mini-batch of its own
    if num_sequences is None:
        has_tokens = data.batch["response_mask"].any(-1)
        num_sequences = int(has_tokens.sum())
    return outputs["router_aux_loss"].sum() / max(1, num_sequences)


def _kl_to_reference(data: DataProto, outputs: Outputs, config: ActorConfig) -> torch.Tensor | None:
    """Returns the KL to the reference (b, R): the policy's, else an estimate; None without a reference."""
    # a policy of normal distributions (diffusion) knows it in closed form, without the noise of an estimate
    if "kl" in outputs:
        return outputs["kl"]
    if not config.use_kl_loss and "ref_log_prob" not in data.batch.keys():
        return None
    check(data, ["ref_log_prob"], "actor.use_kl_loss=true")
    reference = data.batch["ref_log_prob"]
    return core_algos.kl_penalty(outputs["log_probs"], reference, config.kl_loss_type, data.batch["response_mask"])


def distillation_loss(
    data: DataProto,
    outputs: Outputs,
    old_log_probs: torch.Tensor,
    config: ActorConfig,
    options: DistillationLossConfig,
) -> LossResult:
    """Computes the mean loss against the teachers over all tokens that have a teacher.

    Args:
        data: teacher_log_probs (b, R), or teacher_topk_log_probs (b, R, K) for a divergence; has_teacher (b,);
            meta_info num_distilled, the tokens with a teacher in the whole mini-batch.
        outputs: log_probs (b, R), and log_probs_at_ids (b, R, K) for a divergence.
        old_log_probs: (b, R) before the update.

    Returns:
        The loss, and for a divergence the metrics distillation/teacher_mass and distillation/student_mass, the means
        of the probability of the K tokens.
    """
    column = "teacher_log_probs" if options.loss_mode == SAMPLED else "teacher_topk_log_probs"
    check(data, [column, "has_teacher"], f"distillation.distillation_loss.loss_mode={options.loss_mode}")
    teacher = data.batch[column]
    # rows without a teacher learn from their rewards alone
    mask = data.batch["response_mask"] * data.batch["has_teacher"].unsqueeze(1)
    tokens = mask.sum()
    metrics = {}

    if options.loss_mode == SAMPLED:
        low, high = clip_range(config)
        values = sampled_reverse_kl(
            outputs["log_probs"],
            old_log_probs,
            teacher,
            max_advantage=options.loss_max_clamp,
            clip_low=low,
            clip_high=high,
        )
    else:
        student = outputs["log_probs_at_ids"]
        kind = options.loss_mode.removesuffix("_topk")
        # topk=-1 compares the whole vocabulary, so that no probability remains for a further bin
        values = divergence(student, teacher, kind, with_rest=options.topk != -1)
        for role, log_probs in (("teacher", teacher), ("student", student.detach())):
            mass = core_algos.masked_sum(log_probs.exp().sum(-1), mask)
            metrics[f"distillation/{role}_mass"] = Metric.mean(mass, tokens)

    distilled_tokens = data.meta_info.get("num_distilled", int(tokens))
    loss = core_algos.masked_sum(values, mask) / max(1, distilled_tokens)
    return loss, metrics


@torch.no_grad()
def loss_metrics(
    parts: dict[str, torch.Tensor], token_values: dict[str, torch.Tensor], inputs: LossInputs
) -> dict[str, Metric]:
    """Metrics of the actor's update on one micro-batch: parts of the loss, and distances between the current policy and
    the policy that sampled. They stay on the device (`verl_lite.metrics.to_host`); names as in ROLL's agentic actor.

    Args:
        parts: scalars whose sum over micro-batches and ranks is the value of a mini-batch, reported as the mean over
            the mini-batches of a step. Their weight is the micro-batch's share of the mini-batch's tokens.
        token_values: (b, R) values, reported as means over valid tokens.
        inputs: those of the policy loss.

    Returns:
        All parts and token_values, and these metrics:
          clipfrac   aggregated share of tokens for which PPO's clip lowers the objective, independent of the loss
          approxkl   aggregated d^2 / 2, where d = log pi - log pi_old
          policykl   aggregated d
        The ratio pi / pi_old is the token's, or with ratio_type=segment that of its run of tokens: ratio_mean (mean
        over sequences of the sequence's mean), ratio_max, ratio_min, and the shares of tokens outside of the clip
        range: ppo_ratio_high_clipfrac, ppo_ratio_low_clipfrac, ppo_ratio_clipfrac.
    """
    low, high = clip_range(inputs.config)
    mask = inputs.response_mask
    aggregate = inputs.aggregation
    ratio = inputs.importance_log_ratio.exp()
    objective = ratio * inputs.advantages
    clipped_objective = ratio.clamp(1 - low, 1 + high) * inputs.advantages
    is_clipped = clipped_objective < objective
    difference = inputs.log_prob - inputs.old_log_prob
    parts = parts | {
        "clipfrac": aggregate(is_clipped.to(ratio.dtype), mask),
        "approxkl": aggregate(0.5 * difference.square(), mask),
        "policykl": aggregate(difference, mask),
    }

    is_high = ratio > 1 + high
    is_low = ratio < 1 - low
    token_values = token_values | {
        "ppo_ratio_high_clipfrac": is_high,
        "ppo_ratio_low_clipfrac": is_low,
        "ppo_ratio_clipfrac": is_high | is_low,
    }

    metrics = _ratio_metrics(ratio, mask)
    tokens = (mask != 0).sum()
    for name, values in token_values.items():
        total = core_algos.masked_sum(values.to(ratio.dtype), mask)
        metrics[name] = Metric.mean(total, tokens)

    # The shares of a mini-batch's micro-batches add up to 1, so that the sum of the parts over a step, divided by the
    # sum of the shares, is the mean over its mini-batches.
    num_tokens = inputs.aggregation.batch_num_tokens
    if num_tokens is None:
        share = tokens.double() / tokens.clamp(min=1)
    else:
        share = tokens.double() / max(1, num_tokens)
    for name, value in parts.items():
        metrics[name] = Metric.mean(value, share)
    return metrics


def _ratio_metrics(ratio: torch.Tensor, mask: torch.Tensor) -> dict[str, Metric]:
    """Returns ratio_mean, ratio_max and ratio_min; see `loss_metrics`."""
    is_valid = mask != 0
    lengths = is_valid.sum(dim=-1)
    num_tokens = lengths.sum()
    num_sequences = (lengths > 0).sum()
    sequence_means = core_algos.masked_sum(ratio, mask, axis=-1) / lengths.clamp(min=1)
    # without a valid token these are infinite, and the count of 0 leaves them out
    largest = torch.where(is_valid, ratio, -torch.inf).amax()
    smallest = torch.where(is_valid, ratio, torch.inf).amin()
    return {
        "ratio_mean": Metric.mean(sequence_means.sum(), num_sequences),
        "ratio_max": Metric.max(largest, num_tokens),
        "ratio_min": Metric.min(smallest, num_tokens),
    }


# ------------------------------------------------------------------------------------------------ losses of users


def check_loss_is_additive(loss_fn: LossFunc, data: DataProto, outputs: Outputs, name: str, remedy: str) -> bool:
    """Compares the gradient of a micro-batch's loss with that of the summed losses of its two parts.

    Args:
        loss_fn: computes the loss and its metrics.
        data: the micro-batch. A single row with a token is used as both parts.
        outputs: the outputs of the forward for the micro-batch.
        name: name of the loss, for the message.
        remedy: advice to the author of the loss, for the message.

    Returns:
        False if the gradients are zero, which proves nothing.

    Raises:
        UserError: if the gradients with respect to the outputs differ.
    """
    first_rows, second_rows = _two_parts_with_tokens(data.batch["response_mask"])
    first = data[first_rows]
    second = data[second_rows]

    # new leaves, so that the check leaves no gradient in the graph of the training step
    leaves = {}
    for output, values in outputs.items():
        joined = torch.cat([values[first_rows], values[second_rows]]).detach()
        leaves[output] = joined.requires_grad_(values.requires_grad)
    first_outputs = {output: leaf[: len(first)] for output, leaf in leaves.items()}
    second_outputs = {output: leaf[len(first) :] for output, leaf in leaves.items()}

    whole = DataProto.concat([first, second])
    whole_loss, _ = loss_fn(whole, leaves)
    first_loss, _ = loss_fn(first, first_outputs)
    second_loss, _ = loss_fn(second, second_outputs)

    expected = _flat_gradient(whole_loss, leaves)
    actual = _flat_gradient(first_loss + second_loss, leaves)
    # sums in another order differ by rounding; a loss with other denominators differs by a factor
    largest = float(expected.abs().max())
    if not torch.allclose(expected, actual, rtol=1e-3, atol=1e-4 * largest):
        raise UserError(f"the gradient of {name} depends on how the batch is split into micro-batches: {remedy}")
    return bool(expected.any())


def _two_parts_with_tokens(response_mask: torch.Tensor) -> tuple[slice, slice]:
    """Returns the rows of two parts that both have a token; both are all rows if only one row has a token."""
    has_tokens = response_mask.any(-1)
    rows_with_tokens = has_tokens.nonzero().flatten().tolist()
    if len(rows_with_tokens) < 2:
        return slice(None), slice(None)
    start_of_second = rows_with_tokens[1]
    return slice(start_of_second), slice(start_of_second, None)


def _flat_gradient(loss: torch.Tensor, leaves: Outputs) -> torch.Tensor:
    """Returns the gradients of all leaves that require one, as one vector."""
    trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
    # zeros for a leaf that the loss does not use, such as the entropy without a bonus
    gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


# ---------------------------------------------------------------------------------------------------- the critic's loss


def critic_loss(data: DataProto, outputs: Outputs, critic: CriticConfig, actor: ActorConfig) -> LossResult:
    """Computes the clipped value loss of one micro-batch, to be summed over micro-batches and ranks.

    Args:
        data: response_mask, returns (b, R) and values (b, R) from before the update; meta_info as in `actor_loss`.
        outputs: values (b, R) with gradient.
        actor: provides loss_scale_factor, and loss_agg_mode if the critic has none.
    """
    mask = data.batch["response_mask"]
    num_tokens = data.meta_info["num_tokens"]
    aggregation = Aggregation(
        critic.loss_agg_mode or actor.loss_agg_mode,
        batch_num_tokens=num_tokens,
        global_batch_size=data.meta_info["num_sequences"],
        loss_scale_factor=actor.loss_scale_factor,
    )
    inputs = ValueLossInputs(
        vpreds=outputs["values"],
        returns=data.batch["returns"],
        values=data.batch["values"],
        response_mask=mask,
        cliprange_value=critic.cliprange_value,
        aggregation=aggregation,
    )
    loss, clipped_share = core_algos.value_loss(inputs)

    # weighted by the micro-batch's share of the mini-batch, as in `loss_metrics`
    tokens = mask.sum().double()
    weighted_loss = Metric.mean(loss, tokens / max(1, num_tokens))
    sum_of_values = core_algos.masked_sum(outputs["values"].detach(), mask)
    return loss, {
        "vf_loss": weighted_loss,
        "vf_clipfrac": Metric.mean(clipped_share * tokens, tokens),
        "vpred_mean": Metric.mean(sum_of_values, tokens),
        "loss": weighted_loss,
    }
