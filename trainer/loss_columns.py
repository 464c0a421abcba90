"""What some policy losses read of the whole batch: chosen tokens, scores of answers. Made just before the update.

A choice among all tokens cannot be left to ranks, which see parts of the batch; so the driver makes it, once, and sends
it as a column. Which losses read it says their signature (`trainer.requirements`).
"""

from __future__ import annotations

import numpy as np
import torch

from trainer.requirements import needs_scores, needs_selected
from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS
from verl_lite.config import PPOConfig
from verl_lite.core_algos import outcome_scores
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto


def loss_columns(batch: DataProto, config: PPOConfig, step: int) -> dict[str, torch.Tensor]:
    """selected (B, R) bool and scores (B,), where the policy loss names them.

    Reads response_mask; for selected also old_log_probs and advantages; for scores token_level_scores. A random choice
    follows from trainer.seed and the step.
    """
    tensors: dict[str, torch.Tensor] = {}
    if needs_selected(config):
        tensors["selected"] = _selected(batch, config, step)
    if needs_scores(config):
        tensors["scores"] = outcome_scores(batch.batch["token_level_scores"], batch.batch["response_mask"])
    return tensors


def _selected(batch: DataProto, config: PPOConfig, step: int) -> torch.Tensor:
    """Tokens chosen over the whole batch, by the policy of before the update; the same ones in each epoch."""
    loss_mode = config.actor.policy_loss.loss_mode
    if loss_mode not in TOKEN_SELECTIONS:
        raise UserError(
            f"actor.policy_loss.loss_mode={loss_mode} takes `selected`, and nothing says how its tokens are chosen: "
            "add a function to verl_lite.algos.covariance_losses.TOKEN_SELECTIONS under its name"
        )
    seed = int(np.random.SeedSequence([config.trainer.seed, step]).generate_state(1)[0])
    return TOKEN_SELECTIONS[loss_mode](
        *(batch.batch[name] for name in ("old_log_probs", "advantages", "response_mask")),
        config.actor,
        generator=torch.Generator().manual_seed(seed),
    )
