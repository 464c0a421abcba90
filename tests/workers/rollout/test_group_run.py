"""Groups on engines, with the real runner over a scripted engine and scripted environments: the same trajectories on
any number of engines, replacement of dropped groups, counts of failures, limits of time.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from tests.workers.rollout.scripted import END, TOKENIZER, ScriptedEngine, ScriptedPool, make_runner, rows, template
from trainer.agentic.agent_trainer import EpisodeFilter
from trainer.ppo.roles import ActorRole
from trainer.rollout.group_sources import EnvSource
from trainer.rollout.scheduler import RolloutScheduler
from verl_lite.config import PPOConfig
from verl_lite.metrics import values
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Mesh, PerRank
from workers.agents.episodes import TokenLimits
from workers.engines.base import Request, SamplingParams
from workers.rollout.group_run import GroupRun
from workers.rollout.specs import EpisodeCounts, EpisodeSpec, GroupPlan, GroupResults

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
    options: dict[str, Any] = {"limits": (limits := TokenLimits(64, 256, 320)), "max_live": max_live}
    engine = engine or ScriptedEngine(digits)
    return GroupRun(make_runner(engine, pool, [TEMPLATE], rows=lambda found: rows(found, limits), **options))


class Ranks:
    """The worker group of the policy, with an engine on each rank of this process."""

    def __init__(self, count: int, latency: tuple[int, int] = (0, 0), max_live: int = 100) -> None:
        pools = [ScriptedPool(world, latency=latency, rng_seed=rank) for rank in range(count)]
        self.ranks = [group_run(pool, max_live=max_live) for pool in pools]

    def mesh(self, name: str) -> Mesh:
        return Mesh(len(self.ranks), tuple(range(len(self.ranks))), (True,) * len(self.ranks))

    def begin_groups(self, plans: PerRank, sampling: SamplingParams) -> None:
        for rank, groups in zip(self.ranks, plans, strict=True):
            rank.begin(groups, sampling)

    def run_groups(self, keys: list[str], seconds: float | None) -> list[GroupResults]:
        return [rank.run(keys, seconds) for rank in self.ranks]


def configured(num_env_groups: int, group_filter: str | None, episodes: int) -> PPOConfig:
    config = PPOConfig()
    manager, config.agentic.rollout_batch_size = config.agentic.train_env_manager, episodes
    manager.tags, manager.num_env_groups, manager.group_size = ["world"], num_env_groups, 2
    manager.group_filter_cls = group_filter
    return config


def scheduled(config: PPOConfig, ranks: Any, last_step: int = 0) -> RolloutScheduler:
    agentic, sampling = config.agentic, SamplingParams(max_tokens=8)
    source = EnvSource(agentic.train_env_manager, seed=1, batch_size=agentic.rollout_batch_size)
    return RolloutScheduler(config, source, ActorRole(ranks, config), sampling, EpisodeFilter(config), last_step)


def batches(count: int, latency: tuple[int, int], *, filtered: bool, max_live: int = 100, steps: int = 3) -> list[Any]:
    config = configured(5, "equal_scores" if filtered else None, episodes=12)
    config.async_training.max_off_policy_threshold = 1
    ranks = Ranks(count, latency, max_live)
    scheduler, result = scheduled(config, ranks, steps), []
    for step in range(1, steps + 1):
        result.append(scheduler.get_batch(step))
        scheduler.version = step - 1
        scheduler.begin_ahead(step)
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


def members(seed: int, size: int = 2, redundancy: int = 0) -> tuple[EpisodeSpec, ...]:
    group = f"world_{seed}"
    return tuple(
        EpisodeSpec(f"{group}_{n}", group, "world", n, seed, 0, seed, size, 1) for n in range(size + redundancy)
    )


class DropSome:
    """Drops three groups."""

    seen: list[tuple[int, int, int]]

    def __init__(self, *given: Any) -> None: ...

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        assert all(len(set(episode.non_tensor_batch["traj_id"])) == 1 for episode in group)
        self.seen.append((group_id, episode_id, len(group)))
        return (group_id, episode_id) in ((0, 0), (1, 0), (1, 1))


@pytest.mark.parametrize(("most", "kept"), [(-1, [(0, 1), (0, 2)]), (2, [(0, 0), (0, 1)])])
def test_a_dropped_group_is_replaced_and_the_last_are_kept_with_their_mark(
    most: int, kept: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DropSome, "seen", [], raising=False)
    config = configured(2, f"{__name__}:DropSome", episodes=4)
    config.agentic.train_env_manager.max_replaced_groups = most
    batch = scheduled(config, Ranks(2)).get_batch(1)
    numbers = [tuple(map(int, name.split("_")[1:3])) for name in batch.non_tensor_batch["uid"]]
    assert numbers == [group for group in kept for _ in range(2)]
    drawn = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)][: 5 if most < 0 else 4]
    assert sorted(DropSome.seen) == sorted((*group, 2) for group in drawn)
    assert batch.meta_info["episodes"].episodes == 2 * len(drawn)
    metrics = values(batch.meta_info["metrics"])
    assert metrics["scheduler/group_filter_count"] == 3
    assert metrics["scheduler/groups_kept_though_dropped"] == (most > 0)


def test_failures_are_counted_with_the_first_as_text() -> None:
    """13 fails, and so does 5, which has no episode; the surplus member of the third group did not end."""

    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        return {"observation": None} if seed == 5 else world(seed, actions)

    groups = group_run(ScriptedPool(script))
    plans = [GroupPlan(group[0].traj_group_id, group) for group in (members(13), members(5), members(1, redundancy=1))]
    groups.begin(plans, SamplingParams(max_tokens=8))
    result = groups.run([plan.key for plan in plans])
    reports = {report.key: report for report in result.reports}
    assert [reports[plan.key].num_rows for plan in plans] == [2, 2, 2] and result.rows is not None
    failed = dict(
        zip(result.rows.non_tensor_batch["traj_id"], result.rows.non_tensor_batch["reward_failed"], strict=True)
    )
    assert [failed.pop(spec.traj_id) for plan in plans[:2] for spec in plan.samples] == [True] * 4
    assert list(failed.values()) == [False] * 2
    counts = sum((reports[plan.key].counts for plan in plans), start=EpisodeCounts())
    assert (counts.episodes, counts.failed, counts.timeouts) == (6, 4, 2)
    assert counts.first_failure == "episode world_13_0 of the environment 'world':\nTraceback: seed 13"


def test_each_call_returns_the_groups_that_are_complete() -> None:
    """Three turns of at most 5 tokens, against three of 40."""
    engine = ScriptedEngine(
        lambda traj_id, *turn: [5] * 40 if traj_id.startswith("world_2") else digits(traj_id, *turn)
    )
    groups = group_run(ScriptedPool(world), engine)
    groups.begin([GroupPlan("long", members(2)), GroupPlan("short", members(1))], SamplingParams(max_tokens=40))
    first = groups.run(["short"])
    assert [report.key for report in first.reports] == ["short"] and not groups.is_idle
    assert "rollout/engine_busy_frac" in first.metrics
    assert groups.run(["long"], seconds=0.0) == GroupResults([], None, {})
    last = groups.run(["long"])
    assert [report.key for report in last.reports] == ["long"] and groups.is_idle
    assert last.rows is not None and set(last.rows.non_tensor_batch["uid"]) == {"world_2"}


def test_an_aborted_group_of_episodes_leaves_no_request_and_no_environment() -> None:
    engine, pool = ScriptedEngine(digits), ScriptedPool(world)
    groups = group_run(pool, engine)
    groups.begin([GroupPlan("a", members(1)), GroupPlan("b", members(2))], SamplingParams(max_tokens=40))
    while not engine.running:
        groups.advance()
    assert groups.snapshot() == [], "a running environment cannot be copied"
    groups.abort(["a", "b"])
    assert groups.is_idle and not engine.running and not pool.seeds
    assert groups.run(["a", "b"]).reports == []


class SlowEngine(ScriptedEngine):
    """A step takes 2 ms."""

    def step(self) -> list[Any]:
        time.sleep(0.002)
        return super().step()


def test_a_slice_beside_training_ends_in_time_and_the_episodes_go_on() -> None:
    """Endless answers: a slice takes about as long as the work before it. With nothing to decode it takes no time."""
    engine = SlowEngine(lambda traj_id, turn, request: [5] * 100_000)
    groups = group_run(ScriptedPool(world), engine)
    plans = [GroupPlan("k", members(1))]
    groups.begin(plans, SamplingParams(max_tokens=100_000))
    groups.run_slice()
    time.sleep(0.05)
    started, before = time.perf_counter(), dict(engine.progress)
    groups.run_slice()
    assert 0.03 < time.perf_counter() - started < 2
    assert all(engine.progress[name] > steps for name, steps in before.items()) and not groups.is_idle

    waiting = group_run(ScriptedPool(world, latency=(10**9, 10**9)))
    waiting.begin(plans, SamplingParams())
    polls = itertools.count()
    waiting._runner.advance = lambda *given: next(polls)  # type: ignore[method-assign,assignment]
    time.sleep(0.05)
    waiting.run_slice()
    assert next(polls) == 1
