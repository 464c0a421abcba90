"""An engine and a pool of environments that do what a test wrote down, after as long as it wrote down."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from tests.tiny_model import tiny_tokenizer
from verl_lite.envs.base import EnvTemplate
from verl_lite.protocol import DataProto
from workers.agents.env_host import EnvReply
from workers.agents.episodes import EpisodeRunner, TokenLimits, Trajectory
from workers.agents.trajectories import trajectory_rows
from workers.engines.base import Completion, Request, SamplingParams
from workers.rollout.answers import AnswerRunner, answer_plans
from workers.rollout.group_run import GroupRun
from workers.rollout.runner import Runner
from workers.rollout.specs import EpisodeSpec, GroupPlan

START, END = 1, 2  # <|im_start|> and <|im_end|> of the tiny tokenizer; "0" is 3, "a" is 28, one character a token
COMPACT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>{% if m.role == 'tool' %}#{% elif m.role == 'system' %}%{% endif %}"
    "{{ m.content }}<|im_start|>{% endif %}{% endfor %}"
)
"""A message is its characters between two <|im_start|>, an answer its characters and <|im_end|>: short enough to write
by hand."""
TOKENIZER = tiny_tokenizer(96)
TOKENIZER.chat_template = COMPACT_TEMPLATE


Script = Callable[[int, list[str]], dict[str, Any]]
"""(seed, actions so far) -> what the environment answers: observation, reward, ...; no actions: the reset."""


class ScriptedPool:
    """latency: polls until an answer comes, drawn by `rng`."""

    processes_replaced = 0

    def __init__(self, script: Script, *, latency: tuple[int, int] = (0, 0), rng_seed: int = 0) -> None:
        self.script, self.latency, self.rng = script, latency, random.Random(rng_seed)
        self.seeds: dict[Hashable, int] = {}
        self.actions: dict[Hashable, list[str]] = {}
        self.coming: list[tuple[int, EnvReply]] = []
        self.discarded: list[Hashable] = []
        self.waits: list[float] = []
        self.most_live = 0

    def reset(self, key: Hashable, tag: str, seed: int) -> None:
        assert key not in self.seeds
        self.seeds[key], self.actions[key] = seed, []
        self.most_live = max(self.most_live, len(self.seeds))
        self._answer(key)

    def step(self, key: Hashable, action: str) -> None:
        assert all(reply.key != key for _, reply in self.coming), "it is busy"
        self.actions[key].append(action)
        self._answer(key)

    def discard(self, key: Hashable) -> None:
        del self.seeds[key]
        self.discarded.append(key)

    def poll(self, timeout_s: float = 0.0) -> list[EnvReply]:
        self.waits.append(timeout_s)
        self.coming = [(polls - 1, reply) for polls, reply in self.coming]
        ready = [reply for polls, reply in self.coming if polls < 0]
        self.coming = [entry for entry in self.coming if entry[0] >= 0]
        return ready

    def _answer(self, key: Hashable) -> None:
        reply = EnvReply(key, **self.script(self.seeds[key], list(self.actions[key])))
        self.coming.append((self.rng.randint(*self.latency), reply))


LIMITS = TokenLimits(max_prompt_length=6, max_response_length=16, max_model_len=22)
SAMPLING = SamplingParams(max_tokens=16)

Answers = Callable[[str, int, Request], Sequence[int]]
"""(traj_id, turn, request) -> token ids of the response, cut at max_tokens by the engine."""


def log_prob(token: int) -> float:
    """Of every token, by the scripted engine."""
    return -token / 64


class ScriptedEngine:
    """One token of each running request a step."""

    def __init__(self, answers: Answers, *, version: int = 1) -> None:
        self.answers, self.version = answers, version
        self.running: dict[str, tuple[Request, list[int], int]] = {}
        self.requests: list[Request] = []
        self.progress: dict[str, int] = {}
        self.aborted: list[str] = []

    def submit(self, request: Request) -> None:
        assert request.request_id not in self.running
        self.requests.append(request)
        _, traj_id, turn = request.request_id.split("/")
        ids = list(self.answers(traj_id, int(turn), request))[: request.sampling.max_tokens]
        self.running[request.request_id] = (request, ids, self.version)
        self.progress[request.request_id] = 0

    @property
    def unfinished(self) -> int:
        return len(self.running)

    def step(self) -> list[Completion]:
        done = []
        for name, (request, ids, version) in list(self.running.items()):
            self.progress[name] += 1
            if self.progress[name] >= len(ids):
                del self.running[name]
                reason = "stop" if ids[-1] in request.sampling.stop_token_ids else "length"
                done.append(Completion(name, ids, [log_prob(token) for token in ids], reason, [version] * len(ids)))
        return done

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for name in request_ids:
            self.running.pop(name, None)


def ids_of(text: str) -> list[int]:
    """Token ids of text, with its special tokens."""
    return TOKENIZER.encode(text, add_special_tokens=False)


def template(tag: str = "t", **options: Any) -> EnvTemplate:
    """An entry of agentic.custom_envs; the environment it names is never made."""
    return EnvTemplate(tag=tag, env_type="tests.workers.rollout.scripted:NoEnv", **options)


def spec(traj_id: str = "g_0", **options: Any) -> EpisodeSpec:
    """Of the group that is named before the underscore, which keeps one member."""
    group, _, member = traj_id.partition("_")
    given = {"tag": "t", "env_id": int(member), "group_id": 0, "episode_id": 0, "seed": 7, "group_size": 1}
    return EpisodeSpec(traj_id=traj_id, traj_group_id=group, **{"start_step": 3, **given, **options})


def make_runner(engine: Any, pool: Any, templates: Sequence[EnvTemplate] = (), **options: Any) -> Any:
    """Returns an EpisodeRunner for these entries. Its `take` returns trajectories instead of rows."""
    given = {"limits": LIMITS, "seed": 5, "stop_token_ids": (0, END), "max_live": 100, "rows": list, **options}
    entries = {entry.tag: entry for entry in templates or [template()]}
    runner = engine if isinstance(engine, Runner) else Runner(engine)
    return EpisodeRunner(runner, pool, TOKENIZER, entries, **given)


def run_groups(runner: Any, specs: Sequence[EpisodeSpec], sampling: SamplingParams) -> list[Trajectory]:
    """Runs the groups of these episodes until they are complete. runner: the result of `make_runner`."""
    groups = {name: tuple(group) for name, group in itertools.groupby(specs, key=lambda one: one.traj_group_id)}
    for name, members in groups.items():
        runner.begin(GroupPlan(name, members), sampling)
    while not all(map(runner.is_finished, groups)):
        runner.advance(wait_s=9.0)
    return [one for name in groups for one in runner.take(name).rows]


def answer(
    engine: Any,
    prompts: DataProto,
    sampling: SamplingParams,
    response_length: int,
    sizes: Sequence[int] = (),
    *,
    step: int = 0,
    **options: Any,
) -> DataProto:
    """Answers each row, as `ActorWorker.generate_sequences` does. sizes: number of rows of each group; default 1."""
    given = {"stop_token_ids": sampling.stop_token_ids, "on_finished": lambda finished: None, **options}
    groups = GroupRun(AnswerRunner(Runner(engine), response_length=response_length, pad_token_id=0, **given))
    sizes = sizes or [1] * len(prompts)
    keys = [f"group {number}" for number in range(len(sizes))]
    groups.begin(list(answer_plans(prompts, sizes, keys, seed=3, step=step)), sampling)
    results = groups.run(keys)
    assert results.rows is not None and groups.is_idle
    parts, start = dict[str, DataProto](), 0
    for report in results.reports:
        parts[report.key] = results.rows.select_idxs(np.arange(start, start := start + report.num_rows))
    return DataProto.concat([parts[key] for key in keys])


def play(
    script: Script,
    answers: Answers,
    specs: Sequence[EpisodeSpec] | None = None,
    *,
    limits: TokenLimits = LIMITS,
    sampling: SamplingParams = SAMPLING,
    latency: tuple[int, int] = (0, 0),
    max_live: int = 100,
    rng_seed: int = 0,
    format_penalty: float = 0.0,
    **template_options: Any,
) -> tuple[list[Trajectory], ScriptedPool, ScriptedEngine]:
    """Runs episodes of one entry to their end."""
    pool, engine = ScriptedPool(script, latency=latency, rng_seed=rng_seed), ScriptedEngine(answers)
    entries, penalty = [template(**template_options)], {"train": format_penalty}
    runner = make_runner(engine, pool, entries, limits=limits, format_penalty=penalty, max_live=max_live)
    trajectories = run_groups(runner, specs or [spec()], sampling)
    assert not pool.seeds and not engine.running
    return trajectories, pool, engine


def rows(trajectories: Sequence[Trajectory], limits: TokenLimits = LIMITS) -> DataProto:
    return trajectory_rows(
        trajectories, pad_token_id=0, prompt_length=limits.max_prompt_length,
        response_length=limits.max_response_length, extra_outputs={},
    )  # fmt: skip


class NoEnv:
    """Stands in an EnvTemplate."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        raise NotImplementedError

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise NotImplementedError
