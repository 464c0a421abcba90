"""Which groups of episodes teach nothing and are replaced (dynamic sampling): `agentic.*.group_filter_cls`.

A filter is a class with ROLL's method `filter`; `@register_group_filter(name)`, or name it as pkg.module:Class.
"""

from collections.abc import Callable
from typing import Protocol

from verl_lite.config import AgenticConfig, EnvManagerConfig
from verl_lite.protocol import DataProto
from verl_lite.registry import Registry


class GroupFilter(Protocol):
    """Constructor: (config, env_manager_config, mode), mode being "train".

    It is asked on the rank that ran the group, as soon as the group has ended. It must not keep anything from one call
    to the next: copies of it are used on each rank.
    """

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        """Whether to drop the group. group: the rows of each of its episodes, with columns episode_scores,
        token_level_scores, reward_failed, env_metrics and the others that verl_lite/schema.py names."""
        ...


GROUP_FILTERS: Registry[Callable[[AgenticConfig, EnvManagerConfig, str], GroupFilter]] = Registry("group filter")
register_group_filter = GROUP_FILTERS.register


@register_group_filter("equal_scores")
class EqualScores:
    """Drops groups whose episodes all have the same score: their advantages would be 0 (DAPO's dynamic sampling).

    Episodes that failed do not count; a group in which fewer than two are left is dropped.
    """

    def __init__(self, config: AgenticConfig, env_manager_config: EnvManagerConfig, mode: str) -> None:
        pass

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        scores = {
            float(episode.batch["episode_scores"][0])
            for episode in group
            if not any(episode.non_tensor_batch["reward_failed"])
        }
        return len(scores) < 2


def make_group_filter(config: AgenticConfig, manager: EnvManagerConfig, mode: str) -> GroupFilter | None:
    """The filter that the options name, None for none. Raises ValueError for an unknown name."""
    if manager.group_filter_cls is None:
        return None
    return GROUP_FILTERS.get_fn(manager.group_filter_cls)(config, manager, mode)
