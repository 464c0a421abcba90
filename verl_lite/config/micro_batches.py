"""The options that size the micro-batches of each pass over a batch: the switch between tokens and rows, and the sizes.

Driver, planner and checks read the sizes from here, so that a pass has the same fallbacks everywhere.
"""

from dataclasses import dataclass

from verl_lite.config.option_table import value_of
from verl_lite.config.ppo import PPOConfig

_SWITCH = "actor.use_dynamic_bsz"
_TOKENS = "actor.ppo_max_token_len_per_gpu"
_ROWS = "actor.ppo_micro_batch_size_per_gpu"


@dataclass(frozen=True)
class MicroBatchOptions:
    """The dotted keys of one pass. A null option has the value of the next key, and finally of the actor's.

    Args:
        role: the section whose `ulysses_sequence_parallel_size` is the number of ranks that share a sequence.
        switch: True sizes micro-batches by tokens, False by rows.
        tokens: keys of the maximum number of tokens in a micro-batch; the pass's own key comes first.
        rows: keys of the number of rows in a micro-batch.
    """

    role: str
    switch: str
    tokens: tuple[str, ...]
    rows: tuple[str, ...]

    def uses_tokens(self, config: PPOConfig) -> bool:
        """Returns True if the micro-batches of this pass are sized by tokens."""
        return bool(_first_value(config, (self.switch, _SWITCH)))

    def max_token_len(self, config: PPOConfig) -> int | None:
        return _first_value(config, (*self.tokens, _TOKENS))

    def micro_batch_size(self, config: PPOConfig) -> int | None:
        return _first_value(config, (*self.rows, _ROWS))

    def reads(self, key: str) -> bool:
        """Returns True if this pass reads a size from the option `key`."""
        # the actor's sizes are the last fallback of every pass
        return key in (*self.tokens, *self.rows, _TOKENS, _ROWS)


MICRO_BATCHES = {
    "update_actor": MicroBatchOptions("actor", _SWITCH, (_TOKENS,), (_ROWS,)),
    "update_critic": MicroBatchOptions(
        "critic",
        "critic.use_dynamic_bsz",
        ("critic.ppo_max_token_len_per_gpu",),
        ("critic.ppo_micro_batch_size_per_gpu",),
    ),
    "values": MicroBatchOptions(
        "critic",
        "critic.use_dynamic_bsz",
        ("critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"),
        ("critic.forward_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu"),
    ),
    "reward_model": MicroBatchOptions(
        "reward_model",
        "reward_model.use_dynamic_bsz",
        ("reward_model.forward_max_token_len_per_gpu",),
        ("reward_model.micro_batch_size_per_gpu",),
    ),
    "ref": MicroBatchOptions(
        "ref",
        "ref.log_prob_use_dynamic_bsz",
        ("ref.log_prob_max_token_len_per_gpu",),
        ("ref.log_prob_micro_batch_size_per_gpu",),
    ),
    "log_prob": MicroBatchOptions(
        "actor",
        "rollout.log_prob_use_dynamic_bsz",
        ("rollout.log_prob_max_token_len_per_gpu",),
        ("rollout.log_prob_micro_batch_size_per_gpu",),
    ),
}
"""The options of each pass, by the name of the pass."""


def _first_value(config: PPOConfig, keys: tuple[str, ...]) -> int | None:
    """Returns the first value that is not null; null if all are."""
    for key in keys:
        value = value_of(config, key)
        if value is not None:
            assert isinstance(value, int)
            return value
    return None
