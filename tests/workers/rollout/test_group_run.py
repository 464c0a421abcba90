"""Groups on ranks, with the real runner over a scripted engine and scripted environments: the same trajectories on any
number of ranks, replacement of dropped groups, failures that are counted, slices of time beside training.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.workers.rollout.scripted import END, TOKENIZER, ScriptedEngine, ScriptedPool, make_runner, rows, template
from trainer.rollout_scheduler import RolloutScheduler
from verl_lite.config import EnvManagerConfig, PPOConfig
from verl_lite.group_filters import EqualScores, GroupFilter
from verl_lite.metrics import values
from verl_lite.protocol import DataProto
from workers.rollout.base import Request, SamplingParams
from workers.rollout.episodes import EpisodeSpec, TokenLimits
from workers.rollout.group_run import GroupPlan, GroupResults, GroupRun

TURNS = 3
TEMPLATE = template("world", max_steps=TURNS)


def world(seed: int, actions: list[str]) -> dict[str, Any]:
    """Three turns, the reward of each is the first digit of the action; every fifth seed fails in the second turn."""
    if len(actions) == 2 and seed % 5 == 3:
        return {"observation": None, "error": f"Traceback: seed {seed}", "is_timeout": True}
    reward = float(actions[-1][0]) if actions else 0.0
    return {"observation": f"o{seed % 10}", "reward": reward, "terminated": len(actions) == TURNS}


def digits(traj_id: str, turn: int, request: Request) -> list[int]:
    """One to four digits that the request's seed alone decides."""
    number = request.sampling.seed
    text = "".join(str(number // 10**place % 2) for place in range(1 + number % 4))
    return [*TOKENIZER.encode(text, add_special_tokens=False), END]


def group_run(pool: ScriptedPool, engine: ScriptedEngine | None = None, max_live: int = 100) -> GroupRun:
    limits = TokenLimits(64, 256, 320)
    runner = make_runner(engine or ScriptedEngine(digits), pool, [TEMPLATE], limits=limits, max_live=max_live)
    return GroupRun(runner, lambda kept: rows(kept, limits))


class Ranks:
    """What `trainer.roles.AgentRole` is, for ranks in this process."""

    def __init__(self, count: int, latency: tuple[int, int], group_filter: GroupFilter | None, max_live: int) -> None:
        pools = [ScriptedPool(world, latency=latency, rng_seed=rank) for rank in range(count)]
        self.ranks = [group_run(pool, max_live=max_live) for pool in pools]
        self.group_filter = group_filter

    def begin_groups(self, key: str, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        for rank, groups in enumerate(self.ranks):
            groups.begin(key, plans[rank :: len(self.ranks)], sampling, self.group_filter)

    def finish_groups(self, key: str) -> list[GroupResults]:
        return [groups.finish(key) for groups in self.ranks]


def batches(count: int, latency: tuple[int, int], *, filtered: bool, max_live: int = 100, steps: int = 3) -> list[Any]:
    config = PPOConfig()
    config.agentic.async_generation_ratio = 1
    manager = EnvManagerConfig(tags=["world"], num_env_groups=5, group_size=2)
    manager.group_filter_cls = "equal_scores" if filtered else None
    group_filter = EqualScores(config.agentic, manager, "train") if filtered else None
    ranks = Ranks(count, latency, group_filter, max_live)
    scheduler = RolloutScheduler(config, manager, ranks, SamplingParams(max_tokens=8))
    result = []
    for step in range(steps):
        data = DataProto(meta_info={"global_step": step})
        result.append(scheduler.get_batch(data, 12))
        scheduler.begin_ahead(data, 12)
        for groups in ranks.ranks:
            groups.run_slice()
    return result


def contents(batch: DataProto) -> list[Any]:
    tensors = [(name, value.tolist()) for name, value in sorted(batch.batch.items())]
    return [tensors, [(name, column.tolist()) for name, column in sorted(batch.non_tensor_batch.items())]]


@pytest.mark.parametrize("filtered", [False, True])
def test_trajectories_do_not_depend_on_ranks_latencies_or_places(filtered: bool) -> None:
    """Batches in flight together, episodes that fail, groups that are replaced: the same rows in the same order."""
    plain = batches(1, (0, 0), filtered=filtered)
    expected = [contents(batch) for batch in plain]
    assert [contents(batch) for batch in batches(3, (0, 9), filtered=filtered)] == expected
    assert [contents(batch) for batch in batches(2, (0, 3), filtered=filtered, max_live=3)] == expected
    assert any(batch.meta_info["episodes"].failed for batch in plain)
    if filtered:
        dropped = sum(values(batch.meta_info["metrics"])["scheduler/group_filter_count"] for batch in plain)
        assert dropped > 0
        for batch in plain:
            scores: dict[str, set[float]] = {}
            for group, score in zip(batch.non_tensor_batch["uid"], batch.batch["episode_scores"].tolist(), strict=True):
                scores.setdefault(group, set()).add(score)
            kept = values(batch.meta_info["metrics"])["scheduler/groups_kept_though_dropped"]
            assert kept == 0 and all(len(several) == 2 for several in scores.values())


def members(seed: int, *, attempt: int = 0, size: int = 2, redundancy: int = 0) -> tuple[EpisodeSpec, ...]:
    group = f"world_{seed}_{attempt}"
    return tuple(
        EpisodeSpec(f"{group}_{n}", group, "world", n, seed, attempt, seed, size, 0) for n in range(size + redundancy)
    )


class DropFirst:
    """Drops the first `count` attempts of each place."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen: list[tuple[int, int, int]] = []

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        assert all(len(set(episode.non_tensor_batch["traj_id"])) == 1 for episode in group)
        self.seen.append((group_id, episode_id, len(group)))
        return episode_id < self.count


def test_a_dropped_group_is_replaced_at_once_and_the_last_is_given_with_its_mark() -> None:
    groups, judge = group_run(ScriptedPool(world)), DropFirst(2)
    plans = [
        GroupPlan(4, tuple(members(1, attempt=a) for a in range(5))),
        GroupPlan(7, tuple(members(2, attempt=a) for a in range(2))),
    ]
    groups.begin("k", plans, SamplingParams(max_tokens=8), judge)
    result = groups.finish("k")
    assert [(r.slot, r.attempts, r.is_dropped, r.num_rows) for r in result.reports] == [
        (4, 3, False, 2),
        (7, 2, True, 2),
    ]
    assert result.rows is not None
    assert result.rows.non_tensor_batch["uid"].tolist() == ["world_1_2"] * 2 + ["world_2_1"] * 2
    assert sorted(judge.seen) == [(1, 0, 2), (1, 1, 2), (1, 2, 2), (2, 0, 2), (2, 1, 2)]
    assert result.counts.episodes == 10 and groups.is_idle


def test_failures_are_counted_with_the_first_as_text() -> None:
    """13 fails, and so does 5, which has no episode; the surplus member of the third group did not end."""

    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        return {"observation": None} if seed == 5 else world(seed, actions)

    groups = group_run(ScriptedPool(script))
    plans = [GroupPlan(n, (group,)) for n, group in enumerate((members(13), members(5), members(1, redundancy=1)))]
    groups.begin("k", plans, SamplingParams(max_tokens=8), None)
    result = groups.finish("k")
    assert [report.num_rows for report in result.reports] == [2, 2, 2] and result.rows is not None
    assert result.rows.non_tensor_batch["reward_failed"].tolist() == [True] * 4 + [False] * 2
    counts = result.counts
    assert (counts.episodes, counts.failed, counts.timeouts) == (6, 4, 2)
    assert counts.first_failure == "episode world_13_0_0 of the environment 'world':\nTraceback: seed 13"


class SlowEngine(ScriptedEngine):
    """A step takes 2 ms."""

    def step(self) -> list[Any]:
        time.sleep(0.002)
        return super().step()


def test_a_slice_beside_training_ends_in_time_and_the_episodes_go_on() -> None:
    """Endless answers: a slice takes about as long as the work before it. With nothing to decode it takes no time."""
    engine = SlowEngine(lambda traj_id, turn, request: [5] * 100_000)
    groups = group_run(ScriptedPool(world), engine)
    plans = [GroupPlan(0, (members(1),))]
    groups.begin("k", plans, SamplingParams(max_tokens=100_000), None)
    groups.run_slice()
    time.sleep(0.05)
    started, before = time.perf_counter(), dict(engine.progress)
    groups.run_slice()
    assert 0.03 < time.perf_counter() - started < 2
    assert all(engine.progress[name] > steps for name, steps in before.items()) and not groups.is_idle

    waiting = group_run(ScriptedPool(world, latency=(10**9, 10**9)))
    waiting.begin("k", plans, SamplingParams(), None)
    polls = itertools.count()
    waiting._runner.advance = lambda wait_s=0.0: next(polls)  # type: ignore[method-assign,assignment]
    time.sleep(0.05)
    waiting.run_slice()
    assert next(polls) == 1
