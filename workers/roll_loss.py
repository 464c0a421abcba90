"""ROLL's loss function: its layout of a batch, losses of logits, and losses that users write with ROLL's signature.

ROLL's names and shapes are converted here, once; `workers.losses` computes the loss itself. Users call and override
`ActorWorker.loss_func(data, output_tensor)`, which ends here.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from verl_lite import core_algos
from verl_lite.config import ActorConfig, PPOConfig
from verl_lite.core_algos import LossResult
from verl_lite.metrics import Metric, declared
from verl_lite.protocol import DataProto
from verl_lite.rollout_correction import correct_rollout
from verl_lite.schema import SAMPLING_CANDIDATES
from workers.losses import Outputs, actor_loss

COLUMNS = {"ref_log_probs": "ref_log_prob", "infer_logprobs": "rollout_log_probs"}
"""ROLL's name of a column -> ours."""
COUNTS = {"batch_num_tokens": "num_tokens", "global_valid_samples": "num_sequences"}
"""ROLL's name of a count of the mini-batch -> ours. ROLL's value is a dict with one count for each mask."""
_PREDICTED = ("advantages", "token_level_rewards", "old_log_probs", "token_level_scores")
"""Columns with one entry per predicted token, from which the width of a batch is read."""
UserLoss = Callable[[DataProto, Outputs], tuple[torch.Tensor, Mapping[str, float | Metric]]]


def batch_of_roll(data: DataProto) -> DataProto:
    """Returns a copy with our names and shapes. Entries that are already in our layout stay as they are.

    ROLL's response_mask covers prompt and response, (b, S), while columns of predictions are (b, S - 1): no token
    predicts the first one.
    """
    # a new batch, because the caller keeps the other one in ROLL's layout
    columns: dict[str, torch.Tensor] = {str(name): data.batch[name] for name in data.batch.keys()}
    for roll_name, name in COLUMNS.items():
        if roll_name in columns:
            columns[name] = columns.pop(roll_name)

    # only ROLL's mask is wider than the predictions by one token
    mask = columns.get("response_mask")
    prediction_widths = [columns[name].shape[-1] for name in _PREDICTED if name in columns]
    if mask is not None and prediction_widths and mask.shape[-1] == prediction_widths[0] + 1:
        columns["response_mask"] = mask[:, 1:]

    meta_info = dict(data.meta_info)
    for roll_name, name in COUNTS.items():
        if roll_name in meta_info:
            # ROLL counts for several masks, of which the loss needs this one
            meta_info[name] = meta_info[roll_name]["response_mask"]
    return DataProto.from_dict(columns, data.non_tensor_batch, meta_info)


def loss_of_batch(data: DataProto, output_tensor: Outputs | torch.Tensor, config: PPOConfig) -> LossResult:
    """Computes `actor_loss` and the rollout correction of a batch that the driver did not plan, in ROLL's layout or
    ours.

    Args:
        data: as in `actor_loss`, or with ROLL's names: ref_log_probs, infer_logprobs, meta_info batch_num_tokens and
            global_valid_samples. With a response_mask (b, S), the other columns are (b, S - 1), one entry per predicted
            token. If algorithm.rollout_correction needs weights or rejection and data has no weights, they are computed
            from old_log_probs and the rollout's log-probs.
        output_tensor: the policy's outputs (b, R) by name, or logits (b, S, V).
    """
    # the driver planned this batch, and has already applied the correction to it
    is_planned = "num_tokens" in data.meta_info
    data = batch_of_roll(data)
    correction = config.algorithm.rollout_correction
    actor = config.actor
    batch = data.batch

    if isinstance(output_tensor, torch.Tensor):
        outputs = _outputs_of_logits(data, output_tensor, actor)
    else:
        outputs = output_tensor

    correction_metrics: dict[str, Metric] = {}
    # with bypass_mode `actor_loss` corrects
    needs_correction = (correction.rollout_is or correction.rollout_rs) and not correction.bypass_mode
    can_be_corrected = "rollout_log_probs" in batch.keys() and "rollout_is_weights" not in batch.keys()
    if needs_correction and can_be_corrected and not is_planned:
        old_log_probs = batch.get("old_log_probs", outputs["log_probs"].detach())
        weights, kept_mask, correction_metrics = correct_rollout(
            old_log_probs, batch["rollout_log_probs"], batch["response_mask"], correction
        )
        batch["response_mask"] = kept_mask
        if weights is not None:
            batch["rollout_is_weights"] = weights

    # the default is the width of the mask, which covers prompt and response in ROLL's layout
    if actor.loss_scale_factor is None:
        actor = replace(actor, loss_scale_factor=float(config.data.max_response_length))
    loss, metrics = actor_loss(data, outputs, actor, correction, config.distillation.active_loss)
    return loss, metrics | correction_metrics


def _outputs_of_logits(data: DataProto, logits: torch.Tensor, actor: ActorConfig) -> Outputs:
    """Computes log_probs and, if the loss needs them, entropys (b, R), as the policy's forward does.

    Args:
        data: input_ids (b, S), whose last R tokens are the response; response_mask (b, R); meta_info temperature,
            default 1.
        logits: (b, S, V) of a padded forward.

    Raises:
        ValueError: the loss needs outputs that logits do not contain, or the shape does not match input_ids.
    """
    if actor.router_aux_loss_coef:
        raise ValueError("loss_func: actor.router_aux_loss_coef needs outputs by name; logits do not have routes")
    if SAMPLING_CANDIDATES in data.batch.keys():
        raise ValueError("loss_func: rollout.top_k needs outputs by name; logits are those of the whole vocabulary")
    input_ids = data.batch["input_ids"]
    if logits.shape[:2] != input_ids.shape:
        raise ValueError(
            f"loss_func: output_tensor has shape {tuple(logits.shape)}, expected logits (b, S, V) with (b, S) = "
            f"{tuple(input_ids.shape)}, the shape of input_ids."
        )

    # the logits at a position predict the next token
    width = data.batch["response_mask"].shape[1]
    temperature = data.meta_info.get("temperature", 1.0)
    predicting_logits = logits[:, -width - 1 : -1] / temperature
    predicted_ids = input_ids[:, -width:]
    outputs = {"log_probs": core_algos.logprobs_from_logits(predicting_logits, predicted_ids)}
    if actor.calculate_entropy or actor.entropy_coeff != 0:
        outputs["entropys"] = core_algos.entropy_from_logits(predicting_logits)
    return outputs


def user_loss(loss_func: UserLoss, data: DataProto, outputs: Outputs) -> LossResult:
    """Calls a user's `loss_func` on a micro-batch, and converts its metrics with `declared`.

    The meta_info of the micro-batch has the mini-batch's counts under our names and ROLL's.
    """
    meta_info = dict(data.meta_info)
    for roll_name, name in COUNTS.items():
        meta_info[roll_name] = {"response_mask": data.meta_info[name]}
    roll_data = DataProto(data.batch, data.non_tensor_batch, meta_info)

    loss, metrics = loss_func(roll_data, outputs)
    is_valid = data.batch["response_mask"].bool()
    tokens = is_valid.sum().double()
    return loss, declared(metrics, tokens, data.meta_info["num_tokens"])
