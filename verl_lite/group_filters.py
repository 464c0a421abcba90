"""Filters that select groups of episodes to replace (dynamic sampling): `agentic.*.group_filter_cls`.

A filter is a class with ROLL's method `filter`. It is registered with `@register_group_filter(name)` or named as
pkg.module:Class.
"""

from collections.abc import Callable
from typing import Protocol

from verl_lite.config import AgenticConfig, EnvManagerConfig
from verl_lite.protocol import DataProto
from verl_lite.registry import Registry


class EpisodeGroupFilter(Protocol):
    """Interface of a filter. The constructor takes (config, env_manager_config, mode); mode is "train".

    The driver calls the filter as soon as a group is complete, in an order that depends on time. The verdict must
    therefore depend on the group alone.
    """

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        """Returns True to drop the group.

        Args:
            group_id, episode_id: number of the group of environments, and of its run.
            group: the rows of each episode, with the columns episode_scores, token_level_scores, reward_failed,
                env_metrics and further columns of verl_lite/schema.py.
        """
        ...


GROUP_FILTERS: Registry[Callable[[AgenticConfig, EnvManagerConfig, str], EpisodeGroupFilter]] = Registry("group filter")
register_group_filter = GROUP_FILTERS.register


@register_group_filter("equal_scores")
class EqualScores:
    """Drops groups whose episodes all have the same score, because their advantages are 0 (DAPO's dynamic sampling).

    Failed episodes are ignored. A group with fewer than two other episodes is dropped.
    """

    def __init__(self, config: AgenticConfig, env_manager_config: EnvManagerConfig, mode: str) -> None:
        pass

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        scores = set()
        for episode in group:
            if not any(episode.non_tensor_batch["reward_failed"]):
                # every row of an episode has the score of the whole episode
                scores.add(float(episode.batch["episode_scores"][0]))
        # 0 as well: without a valid episode there is nothing to train on
        return len(scores) < 2


def make_group_filter(config: AgenticConfig, manager: EnvManagerConfig, mode: str) -> EpisodeGroupFilter | None:
    """Constructs the filter named by the options, or returns None. Raises ValueError for an unknown name."""
    if manager.group_filter_cls is None:
        return None
    filter_class = GROUP_FILTERS.get_fn(manager.group_filter_cls)
    return filter_class(config, manager, mode)
