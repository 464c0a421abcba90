"""The conditions under which an option has no effect, from which the rows of the table are built."""

from collections.abc import Callable, Mapping
from typing import Any

from verl_lite.config.idle_options.table import Condition, Situation
from verl_lite.config.micro_batches import MICRO_BATCHES
from verl_lite.config.ppo import PPOConfig
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl_lite.registry import is_own


def if_config(test: Callable[[Any], bool]) -> Condition:
    """Returns a condition on the configuration alone. The row's keys are options of the command that `test` expects."""
    return lambda situation, key: test(situation.config)


def unless(name: str) -> Condition:
    """Returns a condition that holds while the option `name` is false, null, 0 or empty."""
    return lambda situation, key: not situation.value(name)


def beside_is_not(name: str, *values: object) -> Condition:
    """Returns a condition that holds while the option `name` in the key's section has none of these values."""
    return lambda situation, key: situation.beside(key, name) not in values


def is_unused(name: str) -> Condition:
    """Returns a condition that holds if the run does not need the pass `name`; see `Situation.unused_passes`."""
    return lambda situation, key: name in situation.unused_passes


def loss_is_not(*losses: str) -> Condition:
    """Returns a condition that holds if this project has the run's policy loss, and it is none of `losses`.

    It does not hold for the clip range of a run with distillation on sampled tokens, whose loss clips, too.
    """

    def is_idle(situation: Situation, key: str) -> bool:
        config = situation.config
        mode = config.actor.policy_loss.loss_mode
        loss = POLICY_LOSS_REGISTRY.get(mode)
        # a loss of the user may read any option
        if loss is None or not is_own(loss):
            return False
        has_clipped_distillation = config.distillation.is_active and not config.distillation.takes_topk
        if ".clip_ratio" in key and has_clipped_distillation:
            return False
        return mode not in losses

    return is_idle


def estimator_is_not(*estimators: str) -> Condition:
    """Returns a condition that holds if this project has the run's estimator, and it is none of `estimators`."""

    def is_idle(situation: Situation, key: str) -> bool:
        chosen = situation.config.algorithm.adv_estimator
        estimator = ADV_ESTIMATOR_REGISTRY.get(chosen)
        # an estimator of the user may read any option
        if estimator is None or not is_own(estimator):
            return False
        return chosen not in estimators

    return is_idle


def sizes_by(*, tokens: bool) -> Condition:
    """Returns a condition that holds if all passes that read the key size their micro-batches in this way.

    Args:
        tokens: True for micro-batches by tokens, False by rows.
    """

    def is_idle(situation: Situation, key: str) -> bool:
        # a key of the actor is the fallback of all passes
        for options in MICRO_BATCHES.values():
            if options.reads(key) and options.uses_tokens(situation.config) is not tokens:
                return False
        return True

    return is_idle


def has_no_scores_of_functions(config: PPOConfig) -> bool:
    # environments return the rewards of their episodes
    return not config.reads_prompts or config.reward.function_weight == 0


def scores_one_by_one(config: PPOConfig) -> bool:
    """True if no part of the reward takes lists of samples."""
    own_function = config.reward.custom_reward_function
    if own_function.path is not None and own_function.style != "sample":
        return False
    for entry in config.reward.functions.values():
        if isinstance(entry, Mapping) and entry.get("style", "sample") != "sample":
            return False
    return True


def has_single_teacher(config: PPOConfig) -> bool:
    """True if all rows have the same teacher, so that no column selects it."""
    teachers = config.distillation.valid_teachers()
    if len(teachers) != 1:
        return False
    [teacher] = teachers
    return teacher.key is None


def engine_is_hf(situation: Situation, key: str) -> bool:
    return bool(situation.config.rollout.name == "hf")


def engine_is_hf_or_on_cpu(situation: Situation, key: str) -> bool:
    return engine_is_hf(situation, key) or situation.on_cpu


def is_on_cpu(situation: Situation, key: str) -> bool:
    return situation.on_cpu


def is_on_gpu(situation: Situation, key: str) -> bool:
    return not situation.on_cpu


def is_on_one_device(situation: Situation, key: str) -> bool:
    return situation.devices == 1


def freezes_vision_anyway(situation: Situation, key: str) -> bool:
    # an adapter belongs to the language model
    return bool(situation.config.model.lora_rank) or situation.reads_images is False


def batch_exceeds_rows(situation: Situation, key: str) -> bool:
    batch_size = situation.value(key)
    # the number of rows is not known before the data are read
    if situation.rows is None or not isinstance(batch_size, int):
        return False
    return batch_size > situation.rows


def sets_warmup_steps(situation: Situation, key: str) -> bool:
    """Returns True if the section of the key gives the warm-up as a number of steps; -1 leaves it to the ratio."""
    num_steps = situation.beside(key, "lr_warmup_steps")
    assert isinstance(num_steps, int)
    return num_steps >= 0
