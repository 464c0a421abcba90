"""Loss and worker of Direct Preference Optimization, `trainer.main_sft loss=dpo`.

Both answers of a pair are in one micro-batch, where they share the prompt's tokens. The loss is divided by the number
of pairs in the whole optimizer step. The reference is the initial policy, also in a resumed run: the model at
model.path, with the adapter at model.lora_adapter_path if there is one (as in TRL). Each step computes its log-probs in
the same micro-batches as the policy's, so the first loss is exactly log 2.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from verl_lite.algos.masked import masked_sum
from verl_lite.algos.preference_losses import dpo_loss
from verl_lite.config import SFTConfig
from verl_lite.config.supervised import LOG_PROB_CHUNK_TOKENS
from verl_lite.core_algos import LossResult
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, register
from workers.policy.adapter import has_adapter
from workers.policy.causal_lm import causal_lm
from workers.supervised.pairs import means_over_pairs, texts_of, valid_pairs
from workers.supervised.worker import SupervisedWorker, learnt_ends


def dpo_step_loss(
    data: DataProto,
    outputs: dict[str, torch.Tensor],
    beta: float,
    label_smoothing: float,
) -> LossResult:
    """Returns the loss of a micro-batch and its metrics under TRL's names, which are means over pairs.

    Args:
        data: response_mask and ref_log_prob (2n, R), whose rows alternate between chosen and rejected answers, and
            meta_info["num_tokens"], the number of pairs in the optimizer step.
        outputs: log_probs (2n, R).
        beta, label_smoothing: See `dpo_loss`.
    """
    mask = data.batch["response_mask"]
    is_valid = valid_pairs(data)  # (n,)
    # sums over the tokens, not means: log p of the whole answer, as in the paper
    answer_logps = masked_sum(outputs["log_probs"], mask, axis=1)  # (2n,)
    answer_ref_logps = masked_sum(data.batch["ref_log_prob"], mask, axis=1)
    # (n, 2), the chosen answer first
    logps = answer_logps.view(-1, 2)[is_valid]
    ref_logps = answer_ref_logps.view(-1, 2)[is_valid]
    losses, rewards = dpo_loss(logps, ref_logps, beta, label_smoothing)  # (n,), (n, 2)

    margins = rewards[:, 0] - rewards[:, 1]
    values_by_name = {
        "loss": losses,
        "rewards/accuracies": margins > 0,
        "rewards/margins": margins,
        "rewards/chosen": rewards[:, 0],
        "logps/chosen": logps[:, 0],
        "rewards/rejected": rewards[:, 1],
        "logps/rejected": logps[:, 1],
    }
    metrics = means_over_pairs(values_by_name)
    # a sum over the micro-batch, because the divisor counts the pairs of the whole optimizer step
    return losses.sum() / data.meta_info["num_tokens"], metrics


class DPOWorker(SupervisedWorker):
    """One rank of DPO.

    Attributes:
        reference: The engine of the reference model. With LoRA it is the trained engine; otherwise it has a frozen copy
            of the weights at model.path.
        initial_adapter: This rank's shards of the adapter at model.lora_adapter_path; None if the adapter starts as
            zero, and is disabled for the reference.
    """

    config: SFTConfig

    def __init__(self, config: SFTConfig, total_training_steps: int) -> None:
        dpo = config.dpo
        super().__init__(
            config,
            total_training_steps,
            causal_lm(LOG_PROB_CHUNK_TOKENS),
            partial(dpo_step_loss, beta=dpo.beta, label_smoothing=dpo.label_smoothing),
            temperature=1.0,
            calculate_entropy=False,
        )

    def answer_ends(self) -> Collection[int]:
        return learnt_ends(self.config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engines."""
        super().init_model()
        model = self.config.model
        # an adapter leaves the base weights unchanged, so the trained engine can also be the reference
        self.reference = self.engine
        self.initial_adapter: dict[str, torch.Tensor] | None = None
        if not has_adapter(model):
            network = self.network()
            self.reference = self.new_engine(network, self.config.fsdp_config)
        elif model.lora_adapter_path is not None:
            # here, because a resumed run later loads the adapter of its checkpoint
            self.initial_adapter = self.engine.copy_trained()

    def rows(self, data: DataProto) -> DataProto:
        """Returns the texts of the pairs, one per row, with ref_log_prob (2n, R)."""
        texts = texts_of(data)
        # Computed in each step, so that a checkpoint holds nothing of the reference and a resume is exact. `train` and
        # `measure` then enter the trained engine, so that only one of the two is on the device.
        self.phases.enter(self.reference)
        with self._as_reference():
            outputs = self.reference.infer(texts, **self.options)
        texts.batch["ref_log_prob"] = outputs["log_probs"]
        return texts

    def _as_reference(self) -> AbstractContextManager[None]:
        """Context manager in which `reference` computes the outputs of the reference model."""
        if self.reference is not self.engine:
            return nullcontext()
        if self.initial_adapter is None:
            return self.engine.adapter_off()
        return self.engine.trained_replaced(self.initial_adapter)
