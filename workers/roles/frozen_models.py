"""Workers with a frozen network: the reference model, whose log-probs are used by KL terms, the teachers of
distillation, and the reward model, a sequence-classification network that scores prompt and answer in packed batches.

A policy that trains an adapter needs no reference worker: with the adapter disabled, the policy is the reference.
"""

from dataclasses import replace

from verl_lite.config import NetworkConfig, PPOConfig
from verl_lite.config.distillation import Teacher
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, register
from workers.engine.fsdp import FSDPEngine
from workers.policy.causal_lm import TEACHER_IDS, causal_lm
from workers.policy.loading import load_model_config, token_network
from workers.policy.sequence_score import scored_rows, sequence_score
from workers.roles.training_worker import COMPUTE_PROTO, ModelWorker


class ReferenceWorker(ModelWorker):
    """Worker of the reference model, the frozen initial policy."""

    config: PPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the forward-only engine."""
        config = self.config
        build_policy = causal_lm(config.actor.log_prob_chunk_tokens)
        network = token_network(config.model, build_policy, config.sequence_parallel_size("ref"))
        # without options of an optimizer, the parameters stay in the dtype of the computation
        self.build_engine(network, config.ref.fsdp_config)

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


class TeacherWorker(ModelWorker):
    """Worker of a teacher with a model of its own. The options of its engine are those of `ref`."""

    config: PPOConfig

    def __init__(self, config: PPOConfig, teacher: Teacher) -> None:
        super().__init__(config)
        self.teacher = teacher

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the forward-only engine. Tokens that the policy does not have get the probability 0."""
        config = self.config
        # the divergence sums over the student's tokens, so that the teacher's probabilities must sum to 1 over them
        policy_config = load_model_config(config.model).get_text_config()
        build_policy = causal_lm(config.actor.log_prob_chunk_tokens, vocab_size=policy_config.vocab_size)
        model = teacher_network(config, self.teacher)
        network = token_network(model, build_policy, config.sequence_parallel_size("ref"))
        self.build_engine(network, config.ref.fsdp_config)

    @register(dispatch_mode=COMPUTE_PROTO)
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """Computes the columns of `teacher_log_probs`."""
        self.phases.enter(self.engine)
        return teacher_log_probs(self.engine, data)


def teacher_network(config: PPOConfig, teacher: Teacher) -> NetworkConfig:
    """Returns the network of a teacher with a path. It is packed if the policy is."""
    return replace(
        NetworkConfig(),
        path=teacher.path,
        # not the policy's option: trust in the code of the policy's folder is no trust in that of another folder
        trust_remote_code=teacher.trust_remote_code,
        use_remove_padding=config.model.use_remove_padding,
    )


def teacher_log_probs(engine: FSDPEngine, data: DataProto) -> DataProto:
    """Computes a teacher's log-probs of a planned batch. Reads meta_info temperature and topk.

    Returns:
        teacher_log_probs (n, R) of the responses if topk is 0. Otherwise teacher_topk_log_probs (n, R, K) of the tokens
        in the column teacher_ids; without that column, also teacher_ids (n, R, K), the teacher's K most probable
        tokens.
    """
    temperature = data.meta_info["temperature"]
    topk = data.meta_info["topk"]
    # the student (or a first teacher) may have chosen the tokens already; otherwise this teacher chooses
    has_ids = TEACHER_IDS in data
    topk_to_choose = 0 if has_ids else topk
    outputs = engine.infer(data, temperature=temperature, calculate_entropy=False, calculate_topk=topk_to_choose)
    if has_ids:
        return DataProto.from_dict(tensors={"teacher_topk_log_probs": outputs["log_probs_at_ids"]})
    if not topk:
        return DataProto.from_dict(tensors={"teacher_log_probs": outputs["log_probs"]})
    columns = {
        "teacher_topk_log_probs": outputs["topk_log_probs"],
        TEACHER_IDS: outputs["topk_ids"],
    }
    return DataProto.from_dict(tensors=columns)


class RewardModelWorker(ModelWorker):
    """Worker of the reward model, which is frozen."""

    config: PPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the forward-only engine."""
        options = self.config.reward_model
        sequence_parallel_size = self.config.sequence_parallel_size("reward_model")
        network = token_network(options.model, sequence_score, sequence_parallel_size)
        self.build_engine(network, options.fsdp_config)
        self.text_config = load_model_config(options.model).get_text_config()

    @register(dispatch_mode=COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Computes rm_scores (n,) of a planned batch of prompts and answers, fp32; 0 for an empty response_mask.

        Raises:
            UserError: a token is not in the model's vocabulary.
        """
        largest_id = int(data.batch["input_ids"].max())
        vocab_size = self.text_config.vocab_size
        # an index beyond the embedding would end the process, on a GPU without a readable error
        if largest_id >= vocab_size:
            raise UserError(
                f"reward_model.model.path={self.config.reward_model.model.path!r}: an answer has token {largest_id}, "
                f"and the model's vocabulary has {vocab_size} tokens; set reward_model.retokenize=true"
            )
        self.phases.enter(self.engine)
        # a new batch with the same tensors, because the columns of the caller's batch stay as they are
        rows = data.select()
        score_columns = scored_rows(data.batch, self.text_config.pad_token_id)
        rows.batch.update(score_columns)
        outputs = self.engine.infer(rows)
        # each row has one score, and zeros in the other columns
        scores = outputs["scores"].sum(1)
        return DataProto.from_dict(tensors={"rm_scores": scores})
