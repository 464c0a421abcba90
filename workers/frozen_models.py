"""Workers with a frozen network: the reference model, whose log-probs are used by KL terms, and the reward model, a
sequence-classification network that scores prompt and answer in packed batches.

A policy that trains an adapter needs no reference worker: with the adapter disabled, the policy is the reference.
"""

from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, register
from workers.engine.fsdp import FSDPEngine
from workers.policy.causal_lm import causal_lm
from workers.policy.loading import load_model_config, token_network
from workers.policy.sequence_score import scored_rows, sequence_score
from workers.training_worker import COMPUTE_PROTO, ModelWorker


class ReferenceWorker(ModelWorker):
    """Worker of the reference model, the frozen initial policy."""

    config: PPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the forward-only engine."""
        build_policy = causal_lm(self.config.actor.log_prob_chunk_tokens)
        network = token_network(self.config.model, build_policy, self.config.sequence_parallel_size("ref"))
        self.build_engine(network, self.config.ref.fsdp_config)

    @register(dispatch_mode=COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Computes ref_log_prob (n, R) of a planned batch. Reads meta_info temperature."""
        self.phases.enter(self.engine)
        return ref_log_prob(self.engine, data)


def ref_log_prob(engine: FSDPEngine, data: DataProto) -> DataProto:
    """Computes ref_log_prob (n, R) of a planned batch with an engine whose current network is the reference model.

    Reads meta_info temperature.
    """
    outputs = engine.infer(data, temperature=data.meta_info["temperature"], calculate_entropy=False)
    return DataProto.from_dict(tensors={"ref_log_prob": outputs["log_probs"]})


class RewardModelWorker(ModelWorker):
    """Worker of the reward model, which is frozen."""

    config: PPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the forward-only engine."""
        options = self.config.reward_model
        network = token_network(options.model, sequence_score, self.config.sequence_parallel_size("reward_model"))
        self.build_engine(network, options.fsdp_config)
        self.text_config = load_model_config(options.model).get_text_config()

    @register(dispatch_mode=COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Computes rm_scores (n,) of a planned batch of prompts and answers, fp32; 0 for an empty response_mask.

        Raises UserError if a token is not in the model's vocabulary.
        """
        largest, size = int(data.batch["input_ids"].max()), self.text_config.vocab_size
        if largest >= size:
            raise UserError(
                f"reward_model.model.path={self.config.reward_model.model.path!r}: an answer has token {largest}, and "
                f"the model's vocabulary has {size} tokens; set reward_model.retokenize=true"
            )
        self.phases.enter(self.engine)
        rows = data.select()
        rows.batch.update(scored_rows(data.batch, self.text_config.pad_token_id))
        scores = self.engine.infer(rows)["scores"]
        return DataProto.from_dict(tensors={"rm_scores": scores.sum(1)})
