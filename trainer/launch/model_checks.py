"""Checks all models of a PPO run before its data are read: what a worker would refuse, and what an export would."""

from collections.abc import Iterator

from trainer.ppo.requirements import needs_critic, needs_reference
from verl_lite.config import PPOConfig
from workers.policy.adapter import base_note
from workers.policy.causal_lm import causal_lm
from workers.policy.loading import check_network, load_model_config, output_layer_note, packing_note
from workers.policy.sequence_score import sequence_score
from workers.policy.value_head import value_head
from workers.roles.critic import critic_network
from workers.roles.frozen_models import teacher_network


def check_models(config: PPOConfig, *, trains: bool, scores: bool) -> None:
    """Raises UserError if a model of the run cannot be used, trained or exported.

    The reference model is the policy's initial model, which is checked once.

    Args:
        trains: the run trains its policy, with a critic and teachers if the options ask for them.
        scores: the run computes rewards, with a reward model if there is one.
    """
    chunk_tokens = config.actor.log_prob_chunk_tokens
    chat_template = config.data.chat_template
    check_network(config.model, causal_lm(chunk_tokens), trains=trains, chat_template=chat_template)
    if trains and needs_critic(config):
        check_network(critic_network(config), value_head, trains=True, chat_template=chat_template)
    if trains:
        vocabulary = load_model_config(config.model).get_text_config().vocab_size
        for teacher in config.distillation.named_teachers():
            if teacher.path:
                build_policy = causal_lm(chunk_tokens, vocab_size=vocabulary)
                check_network(teacher_network(config, teacher), build_policy, trains=False)
    if scores and config.reward_model.enable:
        check_network(config.reward_model.model, sequence_score, trains=False)


def model_notes(config: PPOConfig) -> Iterator[str]:
    """Yields sentences on what the run does differently from what its models or options may suggest."""
    notes = (packing_note(config.model), base_note(config.model), output_layer_note(config.model))
    yield from filter(None, notes)
    if config.model.lora_adapter_path is not None and needs_reference(config):
        yield (
            "model.lora_adapter_path with a KL term: the reference is the base model without an adapter, as in verl. "
            "To keep the policy near the initial adapter, merge it into model.path and train a new one"
        )
