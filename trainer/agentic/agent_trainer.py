"""Trains agents: `RayPPOTrainer` with batches of episodes, in environments or of programs.

`group_sources.EnvSource` or `ProgramSource` chooses the episodes of a batch, and the ranks run them
(`workers.rollout`). All other stages (log-probs, values, advantages, updates, checkpoints) are those of
`RayPPOTrainer`.
"""

import math
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trainer.agentic.agentic_advantage import OF_EPISODES, compute_response_level_rewards
from trainer.agentic.episode_log import readable, rows_by_episode, samples_of
from trainer.agentic.episode_metrics import compute_data_metrics, validation_metrics
from trainer.data.prompts import PromptDataset
from trainer.observe.final_report import FitResult
from trainer.ppo.advantage import ScalarMetrics, compute_token_reward, estimate_advantages
from trainer.ray_trainer import RayPPOTrainer
from trainer.rewards.failures import FailureLog
from trainer.rollout.group_sources import EnvSource, ProgramSource, ProgramValidation
from trainer.rollout.sample_groups import Group, GroupFilter, filter_groups_limit
from trainer.validation.answers import val_samplings
from verl_lite.config import PPOConfig
from verl_lite.envs.base import env_modules, env_templates
from verl_lite.group_filters import make_group_filter
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.agents.conversation import ChatJoins
from workers.agents.endpoint.request_fields import check_ignored_fields
from workers.agents.env_pool import EnvPool
from workers.agents.program_host import is_command, program_of, program_pool
from workers.pool.process_pool import ProcessPool
from workers.rollout.specs import EpisodeCounts

EPISODES_SHOWN = 2
"""Number of training episodes that are shown every agentic.logging_steps steps."""


class EnvironmentFailure(RuntimeError):
    """Too many episodes failed. Carries the first failure of the batch."""


class EpisodeRewards:
    """Counts failed episodes in the reward stage, because the rows of episodes already contain their rewards.

    Args:
        max_error_rate: share of failed episodes above which the run ends.
        run_dir: folder of the file env_failures.jsonl.
        show: receives the text of the first failure of the run, and of the first prompt that is too long.
        max_prompt_length: data.max_prompt_length, with which the first prompts of programs are compared.
    """

    def __init__(
        self,
        max_error_rate: float,
        run_dir: Path,
        show: Callable[[str], None] = print,
        max_prompt_length: float = math.inf,
    ) -> None:
        self._max_prompt_length = max_prompt_length
        self._show = show
        self._has_shown_length = False
        path = run_dir / "env_failures.jsonl"
        option = "agentic.env_pool.max_error_rate"
        self._failures = FailureLog("episode", option, max_error_rate, EnvironmentFailure, path, show)

    def score(self, batch: DataProto) -> DataProto:
        """Returns the metrics env/error_rate and env/timeout_rate of meta_info `episodes`.

        Raises EnvironmentFailure if more than `max_error_rate` of the episodes failed; see `FailureLog.note`.
        """
        counts: EpisodeCounts = batch.meta_info["episodes"]
        # one line of the file for each batch with failures
        row = {
            "failed": counts.failed,
            "timeouts": counts.timeouts,
            "episodes": counts.episodes,
            "first_failure": counts.first_failure,
        }
        self._failures.note(counts.failed, counts.episodes, [row], counts.first_failure)
        metrics = {
            "env/error_rate": Metric.mean(counts.failed, counts.episodes),
            "env/timeout_rate": Metric.mean(counts.timeouts, counts.episodes),
        }
        if counts.first_prompts:
            metrics["program/prompt_length/max"] = Metric.max(float(max(counts.first_prompts)))
            metrics["program/prompt_length/clip_ratio"] = self._share_of_long_prompts(counts.first_prompts)
        return DataProto(meta_info={"metrics": metrics})

    def _share_of_long_prompts(self, lengths: Sequence[int]) -> Metric:
        """Returns the share of first prompts above the limit, and reports the first batch that has some."""
        too_long = [length for length in lengths if length > self._max_prompt_length]
        if too_long and not self._has_shown_length:
            self._has_shown_length = True
            longest = max(too_long)
            self._show(
                f"{len(too_long)} of {len(lengths)} first prompts of programs, tools included, are longer than "
                f"data.max_prompt_length={self._max_prompt_length} tokens, the longest by "
                f"{longest - self._max_prompt_length}. These tokens are taken from data.max_response_length, so "
                f"the answers have less room, down to none. Set data.max_prompt_length={longest} or more"
            )
        return Metric.mean(len(too_long), len(lengths))


class EpisodeFilter(GroupFilter):
    """Drops groups of episodes with agentic.train_env_manager.group_filter_cls, or with algorithm.filter_groups groups
    of a program whose episodes all have the same score. Without either, keeps all.

    If a batch needs more than the allowed replacements (max_replaced_groups, max_num_gen_batches), dropped groups
    complete it and are counted. verl's filter_groups ends the run in this case, which would end the training of a
    policy that has mastered its environments.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.manager = config.agentic.train_env_manager
        self.warmup = config.trainer.critic_warmup
        self._filter = make_group_filter(config.agentic, self.manager, "train")
        self._options = config.algorithm.filter_groups
        self._drops_equal_scores = self._options.enable
        self.drops = self._filter is not None or self._drops_equal_scores
        self._kept_though_dropped = 0

    def judge(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.kind = "kept"
            if self._is_dropped(group):
                group.kind = "dropped"

    def _is_dropped(self, group: Group) -> bool:
        """Returns True if the group is trained on only if too few others are left."""
        if not self.drops:
            return False
        rows = group.rows
        if self._drops_equal_scores:
            is_scored = ~rows.non_tensor_batch["reward_failed"].astype(bool)
            scores = rows.batch["episode_scores"][torch.from_numpy(is_scored)]
            # of a group whose episodes all failed nothing can be learned
            if not len(scores):
                return True
            return bool(scores.min() == scores.max())

        assert self._filter is not None
        # the key is purpose/tag_group_episode_seed, and a tag may contain the separator
        _, group_id, episode_id, _ = group.plan.key.rsplit("_", 3)
        rows_of_episodes = rows_by_episode(rows, range(len(rows)))
        episodes = [rows.select_idxs(np.array(numbers)) for numbers in rows_of_episodes]
        return bool(self._filter.filter(int(group_id), int(episode_id), episodes))

    def max_groups(self, wanted: int) -> float:
        if self._drops_equal_scores:
            return filter_groups_limit(self._options, wanted)

        num_groups = self.manager.num_env_groups
        max_replaced = self.manager.max_replaced_groups
        if max_replaced < 0:
            # the default that the option documents
            max_replaced = 4 * num_groups
        max_drawn = wanted + max_replaced
        episodes_of_env = self.manager.max_traj_per_env
        if episodes_of_env >= 0:
            # a group has one episode of each of its environments
            max_drawn = max(wanted, min(max_drawn, episodes_of_env * num_groups))
        return max_drawn

    def fill_batch(self, step: int, groups: Sequence[Group], missing: int) -> None:
        """Keeps the oldest dropped groups."""
        dropped = [group for group in groups if group.is_dropped]
        for group in dropped[:missing]:
            group.kind = "kept"
        self._kept_though_dropped += missing

    def metrics(self, step: int, chosen: Sequence[Group], dropped: Sequence[Group]) -> dict[str, Metric]:
        num_kept = self._kept_though_dropped
        self._kept_though_dropped = 0
        # version 0 does not age during the warm-up
        versions = [group.version for group in chosen]
        oldest = max(min(versions), self.warmup)
        return {
            "scheduler/group_filter_count": Metric.last(len(dropped) + num_kept),
            "scheduler/groups_kept_though_dropped": Metric.last(num_kept),
            "scheduler/off_policy_ratio": Metric.last(max(step - 1, self.warmup) - oldest),
        }


class AgentTrainer(RayPPOTrainer):
    """Trains an agent on batches of episodes.

    Args:
        config: the options of the run.
        val_source: draws the episodes of validations; None without validation.
        parts: the other arguments of `RayPPOTrainer`.
    """

    def __init__(self, config: PPOConfig, *, val_source: EnvSource | ProgramValidation | None, **parts: Any) -> None:
        super().__init__(config, val_data=None, **parts)
        self.val_source = val_source

    # -------------------------------------------------------------------------------------------------- the stages

    def group_filter(self) -> GroupFilter:
        """Returns the filter of the groups of episodes."""
        return EpisodeFilter(self.config)

    def normalize_rewards(self, batch: DataProto) -> tuple[DataProto, ScalarMetrics]:
        """Adds response_level_rewards, computed from the rewards of episodes and their steps."""
        estimator = self.config.algorithm.adv_estimator
        batch, episode_metrics = compute_response_level_rewards(batch, self.config.agentic, estimator)
        batch, row_metrics = super().normalize_rewards(batch)
        return batch, episode_metrics | row_metrics

    def estimate_advantages(self, batch: DataProto) -> DataProto:
        """Adds advantages and returns. The episodes of a program have different numbers of rows: each episode counts
        once in the statistics of its group, and its advantage is that of all its rows."""
        if not self.config.agentic.has_program:
            return super().estimate_advantages(batch)
        algorithm = self.config.algorithm
        batch, row_metrics = compute_token_reward(batch, algorithm)
        # before the rows that stand for episodes are chosen, because the correction can reject all tokens of a row
        batch = self.correct_rollout(batch)

        # the estimator compares episodes: one row of each stands for it
        mask = batch.batch["response_mask"] != 0
        episode_names = batch.non_tensor_batch["traj_id"].astype(str)
        _, episode_of_row = np.unique(episode_names, return_inverse=True)
        rows = _representative_rows(episode_of_row, mask.any(-1).numpy())
        episodes = batch.select_idxs(rows)

        episodes, score_metrics = self.normalize_rewards(episodes)
        episodes, token_metrics = compute_token_reward(episodes, algorithm)
        episodes, advantage_metrics = estimate_advantages(episodes, algorithm, self.token_estimator)
        self.add_scalars(row_metrics | score_metrics | token_metrics | advantage_metrics)

        # The advantage is equal on all tokens of a row, so that their mean is the advantage of the episode. All rows of
        # the episode receive it.
        num_tokens = (episodes.batch["response_mask"] != 0).sum(-1).clamp(min=1)
        for name in ("raw_advantages", "advantages", "returns"):
            value_of_episode = episodes.batch[name].sum(-1) / num_tokens
            value_of_row = value_of_episode[episode_of_row]
            batch.batch[name] = torch.where(mask, value_of_row[:, None], 0)
        batch.batch["response_level_rewards"] = episodes.batch["response_level_rewards"][episode_of_row]
        return batch

    @property
    def token_estimator(self) -> str:
        """REINFORCE for GiGPO and step_reinforce, whose part above tokens `normalize_rewards` has already computed."""
        chosen = self.config.algorithm.adv_estimator
        if chosen in OF_EPISODES:
            return "reinforce"
        return chosen

    # -------------------------------------------------------------------------------------------------- validation

    @property
    def validates(self) -> bool:
        """True if there are environments for validation."""
        return self.val_source is not None

    def validate(self, result: FitResult) -> dict[str, float]:
        """Runs the validation episodes with the newest weights, and stores some samples in `result`."""
        assert self.val_source is not None
        self.weight_sync.before_validation()
        step = self.steps.global_step
        metrics: dict[str, float] = {}
        for sampling in val_samplings(self.config):
            prefix = sampling.prefix
            groups = self.val_source.draw_validation(sampling.n)
            batch = self.scheduler.run(groups, sampling.params)
            # raises if too many episodes failed
            self.rewards.score(batch)
            counts: EpisodeCounts = batch.meta_info["episodes"]
            metrics[f"val/{prefix}env/error_rate"] = counts.failed / max(1, counts.episodes)
            metrics |= validation_metrics(batch, prefix)

            episodes = samples_of(batch, step)
            self.samples.write_validation(episodes, step, prefix.strip("/"))
            # the samples of greedy_too are only written to files
            if not prefix:
                result.samples = episodes[: self.config.trainer.log_val_generations]
                self.tracking.log_samples(result.samples, step=step)
        return metrics

    # --------------------------------------------------------------------------------------------- logging, the end

    def data_metrics(self, batch: DataProto) -> dict[str, float]:
        """Returns the metrics of the training batch, by row and by episode."""
        config = self.config
        sampler_metrics = self.steps.update(batch)
        if config.reads_prompts:
            episodes_of_step = config.data.train_batch_size * config.rollout.n
            sampler_metrics["training/epoch"] = float(self.steps.epoch)
        else:
            episodes_of_step = config.agentic.rollout_batch_size
        metrics = compute_data_metrics(batch, use_critic=self.critic is not None) | sampler_metrics
        metrics["system/samples"] = float(self.steps.global_step * episodes_of_step)
        num_tokens = int(batch.batch["attention_mask"].sum())
        metrics["system/tps"] = num_tokens / self.timing["step"]
        return metrics

    def keep_samples(self, batch: DataProto) -> None:
        """Writes the episodes of this step to files and, every logging_steps steps, some of them to the log."""
        step = self.steps.global_step
        every = self.config.agentic.logging_steps
        episodes = samples_of(batch, step)
        self.samples.write_training(episodes, step)
        if every and step % every == 0:
            for episode in episodes[:EPISODES_SHOWN]:
                self.tracking.show(readable(episode))


def _representative_rows(episode_of_row: np.ndarray, is_valid: np.ndarray) -> np.ndarray:
    """Returns one row for each episode: the first one with a valid token, or the first one.

    Args:
        episode_of_row: (B,) number of the row's episode, from 0.
        is_valid: (B,) bool, rows with a valid token.
    """
    rows = []
    for episode in range(episode_of_row.max() + 1):
        rows_of_episode = np.flatnonzero(episode_of_row == episode)
        # argmax returns the first of equal values
        rows.append(rows_of_episode[is_valid[rows_of_episode].argmax()])
    return np.array(rows)


# -------------------------------------------------------------------------------------------------------- construction


def try_environments(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, tell: Callable[[str], None] = print
) -> None:
    """Creates, resets and steps every used environment, and tests the chat template on two turns.

    Args:
        config: the options of the run.
        tokenizer: has the chat template.
        tell: receives a note on environments whose first observation does not follow from the seed.

    Raises:
        UserError: an environment or the template fails. Names the tag, the option and a remedy.
    """
    agentic = config.agentic
    templates = env_templates(agentic.custom_envs)
    has_system = any(template.agent_system_template for template in templates.values())
    # raises if the turns of a chat cannot be joined with this template
    ChatJoins(tokenizer, config.data.apply_chat_template_kwargs, system=has_system)
    tags = dict.fromkeys([*agentic.train_env_manager.tags, *agentic.val_env_manager.tags])
    pool = EnvPool(agentic.env_pool, templates, modules=env_modules())
    try:
        unseeded_tags = pool.dry_run(list(tags))
    finally:
        pool.close()
    if unseeded_tags:
        names = ", ".join(f"agentic.custom_envs.{tag}" for tag in unseeded_tags)
        tell(
            f"{names}: two episodes of seed 0 begin with different observations. The members of a group share a seed, "
            "so that their scores are compared as those of one task: let all randomness of the environment come from "
            "the seed of reset"
        )


def try_program(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Loads the program in a process of its pool, starts each MCP server once, and tests the chat template on two
    turns. Replaces the relative file names in agentic.program and agentic.mcp_servers by absolute ones.

    Raises:
        UserError: one of them fails.
    """
    agentic = config.agentic
    check_ignored_fields(agentic.endpoint.ignored_fields)
    ChatJoins(tokenizer, config.data.apply_chat_template_kwargs)
    if agentic.program is not None and is_command(agentic.program):
        words = []
        for word in shlex.split(agentic.program):
            # because the command runs in a folder of its own
            if os.path.isfile(word):
                word = os.path.abspath(word)
            words.append(word)
        agentic.program = shlex.join(words)
    if agentic.mcp_servers:
        # imports the openai client
        from workers.agents.tool_agent import TIMEOUT_S, check_servers, located

        agentic.mcp_servers = located(agentic.mcp_servers)
        # the arguments of the built-in agent, which uses the servers
        _, kwargs = program_of(agentic)
        timeout_s = kwargs.get("timeout_s", TIMEOUT_S)
        check_servers(kwargs["servers"], kwargs["limits"], kwargs["environment"], timeout_s)

    # a process that has loaded the program reports its style; one that cannot load it raises in `poll`
    pool = ProcessPool(replace(program_pool(agentic), num_workers=1))
    try:
        while pool.style is None:
            pool.poll(1.0)
    finally:
        pool.close()


def program_parts(
    config: PPOConfig, train: PromptDataset, val: PromptDataset | None, run_dir: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the arguments of `AgentTrainer` that define the episodes of a program and count their failures."""
    val_source: ProgramValidation | None = None
    if val is not None:
        val_source = ProgramValidation(val)
    max_error_rate = config.agentic.env_pool.max_error_rate
    return {
        "rewards": EpisodeRewards(max_error_rate, run_dir, tell, config.data.max_prompt_length),
        "source": ProgramSource(config, train),
        "val_source": val_source,
    }


def episode_parts(config: PPOConfig, run_dir: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Returns the arguments of `AgentTrainer` that define the episodes and count their failures."""
    agentic = config.agentic
    seed = config.trainer.seed
    val = None
    if config.validates:
        val = EnvSource(agentic.val_env_manager, seed, agentic.val_batch_size, "val")
    return {
        "rewards": EpisodeRewards(agentic.env_pool.max_error_rate, run_dir, tell),
        "source": EnvSource(agentic.train_env_manager, seed, agentic.rollout_batch_size),
        "val_source": val,
    }
