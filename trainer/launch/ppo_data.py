"""Reads the data of a PPO run, and tries its rewards, environments and teachers, before any worker starts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from trainer.agentic.agent_trainer import try_environments, try_program
from trainer.data.images import image_processor
from trainer.data.order import build_order
from trainer.data.prompts import PromptDataset
from trainer.launch.engine_checks import check_images
from trainer.planner.batch import check_context
from trainer.ppo.requirements import (
    needs_critic,
    needs_reference_model,
    needs_reward_function,
)
from trainer.ppo.teachers import check_teachers
from trainer.rewards.groups import ACCURACY, SCORE
from trainer.rewards.model_inputs import RewardInputs, reward_inputs
from trainer.rewards.scores import OVERLONG
from verl_lite.config import NetworkConfig, PPOConfig
from verl_lite.errors import UserError
from verl_lite.machine.device import compute_dtype, device_type
from verl_lite.registry import did_you_mean
from verl_lite.rewards import asks_by_source, reward_modules
from workers.agents.conversation import end_of_turn
from workers.policy.loading import check_sequence_parallel, load_model_config
from workers.policy.tokenizer import load_tokenizer, stop_token_ids
from workers.rewards.reward_pool import RewardPool
from workers.roles.critic import critic_network
from workers.roles.frozen_models import teacher_network


@dataclass(frozen=True)
class RunData:
    """The tokenizer and the datasets of a run.

    Attributes:
        tokenizer: the policy's.
        train: the training prompts; None for episodes in environments.
        val: the validation prompts; None without data.val_files.
        epoch_prompts: number of training prompts per epoch.
        reward_inputs: input converter of the reward model, if any.
    """

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset | None
    val: PromptDataset | None
    epoch_prompts: int | None = None
    reward_inputs: RewardInputs | None = None


def load_data(config: PPOConfig, *, trains: bool = True, scores: bool = True) -> RunData:
    """Reads, checks and tokenizes the data, before any worker starts.

    Also tries the reward function on a few rows, or the environments.

    Args:
        config: the options of the run.
        trains, scores: see `RayPPOTrainer`.
    """
    tokenizer = load_tokenizer(config.model, config.data.chat_template)
    if not config.reads_prompts:
        try_environments(config, tokenizer)
        check_teachers(config, tokenizer)
        return RunData(tokenizer, None, None)

    check_context(config)
    tries_rewards = scores and needs_reward_function(config)
    if config.is_agentic:
        try_program(config, tokenizer)
        # the program may return the scores
        if asks_by_source(config.reward):
            tries_rewards = False
        if config.trainer.val_only:
            trains = False

    train, val = read_prompts(config, tokenizer, trains=trains, needs_ground_truth=tries_rewards)
    datasets = [data for data in (train, val) if data is not None]
    # the validation prompts if the run does not train
    epoch_prompts = build_order(datasets[0], config).rows
    check_vocabulary(config, datasets)
    if any(data.has_images for data in datasets):
        check_images(config)

    option_of_name: dict[str, str] = {}
    if trains and scores:
        option_of_name = named_by_options(config)
    extras: list[dict[str, float | str]] = []
    if tries_rewards:
        extras = try_rewards(config, datasets, has_named=bool(option_of_name))
    check_named(config, option_of_name, extras)
    if trains:
        # only the training prompts: validations need no teacher
        check_teachers(config, tokenizer, datasets[:1])
    inputs = None
    if scores and config.reward_model.enable:
        inputs = reward_inputs(config, tokenizer)
    return RunData(tokenizer, datasets[0], val, epoch_prompts, inputs)


def read_prompts(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, *, trains: bool, needs_ground_truth: bool
) -> tuple[PromptDataset | None, PromptDataset | None]:
    """Reads the prompts of the training (None if the run does not train) and of the validation (None without files)."""
    files = config.data
    device = torch.device(device_type(config.trainer.device))
    dtype = compute_dtype(config.actor.fsdp_config.mixed_precision.param_dtype, device)
    images = image_processor(config.model, files, dtype)
    train = val = None
    if trains:
        train = PromptDataset(
            files.train_files,
            tokenizer,
            files,
            split="train",
            needs_ground_truth=needs_ground_truth,
            images=images,
            answers=config.rollout.n,
        )
    if files.val_files:
        val = PromptDataset(
            files.val_files, tokenizer, files, split="val", needs_ground_truth=needs_ground_truth, images=images
        )
    return train, val


def try_rewards(config: PPOConfig, datasets: Sequence[PromptDataset], has_named: bool) -> list[dict[str, float | str]]:
    """Calls the reward function on two rows of each dataset, with the ground truth as the answer.

    Args:
        config: the options of the run.
        datasets: the datasets of the run.
        has_named: True if options name values of the reward; then also tries one row of each data source.

    Returns:
        The values that the reward returned besides the score, for each row of the first dataset.
    """
    extras = []
    pool = RewardPool(config.reward, config.reward.num_workers, modules=reward_modules())
    try:
        for data in datasets:
            positions = set(range(min(2, len(data))))
            if has_named:
                # each data source may have a reward of its own, which returns other values
                for positions_of_source in data.positions_by_source().values():
                    positions.add(int(positions_of_source[0]))
            rows = [data.row(position) for position in sorted(positions)]
            extras_of_rows = pool.dry_run(rows, data.data_sources())
            extras.append(extras_of_rows)
    finally:
        pool.close()
    return extras[0]


def named_by_options(config: PPOConfig) -> dict[str, str]:
    """Returns the values that the reward must return besides the score, each with the option that names it."""
    algorithm = config.algorithm
    option_of_name: dict[str, str] = {}
    if algorithm.adv_estimator == "gdpo":
        for key in algorithm.gdpo_reward_keys:
            option_of_name[key.removeprefix("reward/")] = "algorithm.gdpo_reward_keys"

    metric = algorithm.filter_groups.metric
    if not algorithm.filter_groups.enable or metric is None:
        return option_of_name
    # acc defaults to the score
    if metric not in (SCORE, ACCURACY):
        option_of_name[metric] = "algorithm.filter_groups.metric"
    return option_of_name


def check_named(config: PPOConfig, named: Mapping[str, str], extras: Sequence[Mapping[str, float | str]]) -> None:
    """Raises UserError for a named value that the reward did not return as a number for any row that was tried.

    Args:
        config: the options of the run.
        named: result of `named_by_options`.
        extras: the values that the reward returned besides the score, by row.
    """
    numbers: set[str] = set()
    for extra in extras:
        for name, value in extra.items():
            if not isinstance(value, str):
                numbers.add(name)
    # the trainer adds these to the values of the reward function
    if config.reward_model.enable:
        numbers |= {"model", "function"}
    if config.reward.overlong_buffer.enable and config.reward.overlong_buffer.log:
        numbers |= set(OVERLONG)

    for name, option in named.items():
        if name in numbers:
            continue
        returned = f"the numbers {', '.join(sorted(numbers))}" if numbers else "no number"
        raise UserError(
            f"{option} names {name!r}, which the reward did not return for any row that was tried with the ground "
            f"truth as the answer. Besides the score it returned {returned}{did_you_mean(name, numbers)}. Name one of "
            f"its numbers, or let it return {name!r} for every answer"
        )


def check_shared_sequences(config: PPOConfig) -> None:
    """Raises UserError if a network cannot be trained with its `ulysses_sequence_parallel_size`."""
    networks: list[tuple[str, NetworkConfig]] = [("actor", config.model)]
    if needs_critic(config):
        networks.append(("critic", critic_network(config)))
    # the reference is the policy's initial model
    if needs_reference_model(config):
        networks.append(("ref", config.model))
    for teacher in config.distillation.named_teachers():
        if teacher.path:
            networks.append(("ref", teacher_network(config, teacher)))
    if config.reward_model.enable:
        networks.append(("reward_model", config.reward_model.model))
    for role, network in networks:
        check_sequence_parallel(network, f"{role}.", config.sequence_parallel_size(role))


def ending_note(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a sentence if sampled answers do not stop where the chat template ends an answer, else an empty string.

    This is right for a base model, which ends texts with another token. A model that was trained on chats and kept the
    generation config of its base model writes to the length limit.
    """
    # agents and programs stop there
    if config.is_agentic or tokenizer.chat_template is None:
        return ""
    end = end_of_turn(tokenizer, config.data.apply_chat_template_kwargs)
    if end is None or end in stop_token_ids(config.model, tokenizer):
        return ""
    return (
        f"the chat template ends an answer with {tokenizer.convert_ids_to_tokens(end)!r}, at which sampling does not "
        "stop: if the model has learnt to end its answers so, add the token "
        f"{end} to eos_token_id in {config.model.path}/generation_config.json"
    )


def check_vocabulary(config: PPOConfig, datasets: Iterable[PromptDataset]) -> None:
    """Raises UserError for a prompt token without an embedding in the model, a sign of another model's tokenizer."""
    size = load_model_config(config.model).get_text_config().vocab_size
    for data in datasets:
        largest = data.largest_token()
        if largest >= size:
            raise UserError(
                f"data.{data.split}_files: a prompt has the token {largest}, and model.path={config.model.path!r} "
                f"knows the tokens 0 to {size - 1}: give the tokenizer that belongs to it in model.tokenizer_path"
            )
