"""Runs episodes: agents that act in environments, many at one time, over one rollout engine and one pool of
environments.

Continuous: a turn that is finished goes to its environment while other sequences still decode, and its next turn enters
the engine as soon as the environment has answered. Nothing waits for anything else. Token-in, token-out
(`conversation.py`): a turn's prompt is everything sampled and joined so far, never text encoded again.

A turn's random numbers are named by the run's seed, the step, the trajectory and the turn, so a trajectory is the same
in any company, however many run at one time, however long environments take. (Which members of a group with
redundancy are kept is a race by nature.)
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from verl_lite.envs.base import EnvTemplate
from verl_lite.metrics import Metric
from verl_lite.rewards.scoring import SCORE, is_score
from workers.envs.env_host import EnvReply
from workers.envs.env_pool import EnvPool
from workers.rollout.base import Completion, Request, SamplingParams, derive_seed
from workers.rollout.conversation import ChatJoins, Message, Turn, turn_messages
from workers.rollout.runner import Runner

Stop = Literal["terminated", "truncated", "max_steps", "max_length", "failed", "surplus"]


@dataclass(frozen=True)
class EpisodeSpec:
    """Which episode to run.

    traj_id: unique among the episodes of a runner that are not taken yet. traj_group_id: members of a group share it,
    and the seed. group_size: members of the group that are kept, the first to end. start_step: the step at which the
    episode is begun, batch: the step that it is for.
    """

    traj_id: str
    traj_group_id: str
    tag: str
    env_id: int
    group_id: int
    episode_id: int
    seed: int
    group_size: int
    start_step: int
    batch: int = 0
    purpose: str = "train"


@dataclass
class Trajectory:
    """An episode that ended.

    stop: terminated, truncated: the environment said so. max_steps, max_length: a limit of turns or tokens. failed: the
    environment did not answer, its rewards are no score, or its first prompt is too long (`error` says why,
    `is_timeout` whether it was too slow).
    surplus: its group was full before it ended.
    is_kept: whether it becomes rows; a failed one does only if its group cannot be filled without it.
    prompt_messages, prompt_ids: of the first turn, also where that turn was too long to be taken.
    metrics: of the environment, aggregated over the turns.
    """

    spec: EpisodeSpec
    by_step: bool
    turns: list[Turn] = field(default_factory=list)
    stop: Stop = "surplus"
    is_kept: bool = False
    error: str | None = None
    is_timeout: bool = False
    prompt_messages: list[Message] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Sum of the turns' rewards; 0 of an episode that failed."""
        return 0.0 if self.stop == "failed" else sum(turn.reward for turn in self.turns)

    @property
    def messages(self) -> list[Message]:
        """The whole conversation; by steps, those of all turns."""
        return messages_of(self.turns) or self.prompt_messages


def messages_of(turns: Iterable[Turn]) -> list[Message]:
    """What was said in these turns: what came before each action, and the action."""
    return [m for turn in turns for m in (*turn.messages, {"role": "assistant", "content": turn.action})]


@dataclass(frozen=True)
class TokenLimits:
    """Tokens of a first prompt (by steps: of any), of all that follows it (by steps: of a response), and of both."""

    max_prompt_length: int
    max_response_length: int
    max_model_len: int


@dataclass(eq=False)
class _Episode:
    """An episode on its way. key: names it to pool and engine; one is never used twice.

    context: the tokens of the conversation so far (by steps: of the last turn). observation, info, state_hash: the
    environment's last word. messages, prompt_ids: of the turn that is being sampled.
    """

    key: str
    trajectory: Trajectory
    template: EnvTemplate
    sampling: SamplingParams
    group: _Group
    is_ended: bool = False
    request_id: str | None = None
    context: list[int] = field(default_factory=list)
    instruction: str = ""
    observation: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()


@dataclass(eq=False)
class _Group:
    """Members of a group that did not end yet, and how many are kept already."""

    size: int
    open: list[_Episode] = field(default_factory=list)
    kept: int = 0


class EpisodeRunner:
    """Drives episodes; `begin` some, `advance` until none of a batch are `unfinished`, `take` them.

    engine: for these episodes alone. templates: entries of agentic.custom_envs by tag. seed: of the run.
    stop_token_ids: of the model; the chat template's end-of-turn token ends a turn too. chat_template_kwargs:
    data.apply_chat_template_kwargs. format_penalty: by purpose of an episode, added to the reward of a step whose
    metrics have action_is_valid false. max_live: episodes under way at one time at most.
    Raises UserError for a chat template whose turns cannot be joined.
    """

    def __init__(
        self,
        runner: Runner[Any],
        pool: EnvPool,
        tokenizer: PreTrainedTokenizerBase,
        templates: Mapping[str, EnvTemplate],
        limits: TokenLimits,
        *,
        seed: int,
        stop_token_ids: Iterable[int],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        format_penalty: Mapping[str, float] | None = None,
        max_live: int,
    ) -> None:
        self._runner, self._pool, self._tokenizer = runner, pool, tokenizer
        self._templates, self._limits, self._seed = templates, limits, seed
        has_system = any(template.agent_system_template for template in templates.values())
        self._joins = ChatJoins(tokenizer, chat_template_kwargs, system=has_system, most_tokens=limits.max_model_len)
        self._stop_token_ids = tuple(sorted({*stop_token_ids, self._joins.end_of_turn}))
        self._format_penalty = dict(format_penalty or {})
        self._max_live = max_live
        self._number = 0
        self._queue: deque[_Episode] = deque()
        self._live: dict[Hashable, _Episode] = {}
        self._batches: dict[int, list[_Episode]] = {}
        self._env_seconds: list[float] = []

    def begin(self, episodes: Sequence[EpisodeSpec], sampling: SamplingParams) -> None:
        """Queues episodes; members of a group come in one call. sampling: of their turns; its seed and stop tokens are
        not read, its max_tokens holds for each turn."""
        groups: dict[tuple[int, str], _Group] = {}
        for spec in episodes:
            template = self._templates[spec.tag]
            group = groups.setdefault((spec.batch, spec.traj_group_id), _Group(spec.group_size))
            self._number += 1
            episode = _Episode(
                f"{self._number}/{spec.traj_id}", Trajectory(spec, template.by_step), template, sampling, group
            )
            group.open.append(episode)
            self._queue.append(episode)
            self._batches.setdefault(spec.batch, []).append(episode)

    def unfinished(self, batch: int) -> int:
        """Episodes of a batch that did not end yet."""
        return sum(not episode.is_ended for episode in self._batches.get(batch, ()))

    def take(self, batch: int) -> list[Trajectory]:
        """All episodes of a batch that is finished, in the order of `begin`, and forgets them."""
        return [episode.trajectory for episode in self._batches.pop(batch, [])]

    def advance(self, wait_s: float = 0.0) -> None:
        """Takes in what environments answered, hands turns to the engine, and makes at most one engine step.

        wait_s: how long to wait for an environment if there is nothing to decode.
        """
        self._admit()
        if not self._live:
            return
        for reply in self._pool.poll(0.0 if self.is_decoding else wait_s):
            self._env_seconds.append(reply.seconds)
            episode = self._live.get(reply.key)
            if episode is not None:  # else it was discarded while it was busy
                self._on_env_reply(episode, reply)
        self._admit()
        if not self.is_decoding:
            return
        for turn_of, completion in self._runner.step():
            self._on_completion(turn_of, completion)

    @property
    def is_decoding(self) -> bool:
        """Whether the engine has turns to sample."""
        return self._runner.is_decoding

    def take_metrics(self, seconds: float) -> dict[str, Metric]:
        """What a dashboard wants to know since the last call. seconds: that episodes were driven meanwhile;
        env/processes_replaced counts from the start of the run."""
        metrics = self._runner.take_metrics(seconds) | {
            "env/processes_replaced": Metric.sum(self._pool.processes_replaced)
        }
        if self._env_seconds:
            metrics["env/step_seconds/mean"] = Metric.mean(sum(self._env_seconds), len(self._env_seconds))
            metrics["env/step_seconds/max"] = Metric.max(max(self._env_seconds))
        self._env_seconds = []
        return metrics

    def _admit(self) -> None:
        while self._queue and len(self._live) < self._max_live:
            episode = self._queue.popleft()
            if episode.is_ended:
                continue
            spec = episode.trajectory.spec
            self._live[episode.key] = episode
            self._pool.reset(episode.key, spec.tag, spec.seed)

    def _on_env_reply(self, episode: _Episode, reply: EnvReply) -> None:
        """An environment answered a reset or a step: what the episode does next."""
        trajectory = episode.trajectory
        if reply.error is not None or reply.observation is None:
            trajectory.error, trajectory.is_timeout = reply.error, reply.is_timeout
            return self._end(episode, "failed")
        episode.observation, episode.info = reply.observation, reply.info
        if not trajectory.turns:
            episode.instruction = reply.info.get("env_instruction") or ""
            return self._submit_turn(episode)
        turn = trajectory.turns[-1]
        turn.is_valid = bool(reply.info.get("metrics", {}).get("action_is_valid", True))
        penalty = 0.0 if turn.is_valid else self._format_penalty.get(trajectory.spec.purpose, 0.0)
        turn.reward, turn.info = reply.reward + penalty, reply.info
        if not is_score(trajectory.score):
            trajectory.error = f"The rewards of the episode sum to {trajectory.score:g}; expected {SCORE}."
            return self._end(episode, "failed")
        if reply.terminated or reply.truncated:
            return self._end(episode, "terminated" if reply.terminated else "truncated")
        if len(trajectory.turns) >= episode.template.max_steps:
            return self._end(episode, "max_steps")
        return self._submit_turn(episode)

    def _submit_turn(self, episode: _Episode) -> None:
        """Hands the next turn to the engine, or ends the episode where it does not fit."""
        trajectory, template, limits = episode.trajectory, episode.template, self._limits
        spec, turn, most = trajectory.spec, len(trajectory.turns), limits.max_response_length
        messages = turn_messages(
            template,
            episode.observation,
            trajectory.turns,
            instruction=episode.instruction,
            info=episode.info,
            max_response_length=min(
                template.max_tokens_per_step or limits.max_response_length, limits.max_response_length
            ),
        )
        if turn == 0 or template.by_step:
            ids = self._joins.prompt(messages)
            episode.context = list(ids)
            room = most if len(ids) <= limits.max_prompt_length else 0
        else:
            ids = self._joins.join(trajectory.turns[-1].response_ids, messages[0])
            episode.context.extend(ids)
            room = most - (len(episode.context) - len(trajectory.prompt_ids))
        if turn == 0:
            trajectory.prompt_messages, trajectory.prompt_ids = messages, ids
            if len(ids) > limits.max_prompt_length:
                trajectory.error = (
                    f"The first prompt has at least {len(ids)} tokens, and data.max_prompt_length="
                    f"{limits.max_prompt_length} allows fewer: raise it, or shorten the observation of reset."
                )
                return self._end(episode, "failed")
        room = min(
            room,
            limits.max_model_len - len(episode.context),
            template.max_tokens_per_step or room,
            episode.sampling.max_tokens,
        )
        if room < 1:
            return self._end(episode, "max_length")
        episode.messages, episode.prompt_ids = messages, ids
        sampling = replace(
            episode.sampling,
            max_tokens=room,
            seed=derive_seed(self._seed, spec.start_step, spec.traj_id, turn),
            stop_token_ids=self._stop_token_ids,
        )
        episode.request_id = f"{episode.key}/{turn}"
        self._runner.submit(Request(episode.request_id, tuple(episode.context), sampling), episode)

    def _on_completion(self, episode: _Episode, completion: Completion) -> None:
        """A turn is sampled: the environment steps."""
        episode.request_id = None
        trajectory = episode.trajectory
        response_ids = completion.token_ids
        ended_by_token = bool(response_ids) and response_ids[-1] in self._stop_token_ids
        said = response_ids[:-1] if ended_by_token else response_ids
        action = self._tokenizer.decode(said, clean_up_tokenization_spaces=False)
        assert isinstance(action, str)
        state_hash = episode.info.get("state_hash")
        if state_hash is None:
            state_hash = hashlib.sha256(episode.observation.encode()).hexdigest()
        if trajectory.turns and not trajectory.by_step:
            trajectory.turns[-1].extra = {}  # the new turn has the values of the whole context
        trajectory.turns.append(
            Turn(
                messages=episode.messages,
                prompt_ids=episode.prompt_ids,
                response_ids=response_ids,
                log_probs=completion.log_probs,
                finish_reason=completion.finish_reason,
                policy_version=completion.policy_version,
                action=action,
                observation=episode.observation,
                state_hash=str(state_hash),
                extra=completion.extra,
            )
        )
        episode.context.extend(response_ids)
        return self._pool.step(episode.key, action)

    def _end(self, episode: _Episode, stop: Stop) -> None:
        """Ends an episode, and the rest of its group if that is full now."""
        trajectory, group = episode.trajectory, episode.group
        trajectory.stop, episode.is_ended = stop, True
        trajectory.metrics = aggregate_metrics(trajectory.turns)
        episode.context = []
        if episode.request_id is not None:
            self._runner.abort(episode.request_id)
        if self._live.pop(episode.key, None) is not None:
            self._pool.discard(episode.key)
        group.open.remove(episode)
        if stop == "surplus":
            return
        can_do_without = group.kept + len(group.open) >= group.size
        if stop == "failed" and can_do_without:
            return
        trajectory.is_kept = True
        group.kept += 1
        if group.kept == group.size:
            for other in list(group.open):
                self._end(other, "surplus")


def aggregate_metrics(turns: Sequence[Turn]) -> dict[str, float]:
    """What the environment measured, over the turns that measured it, as the last metrics_agg_mode says; mean unless
    named there. num_actions counts the turns.
    """
    values: dict[str, list[float]] = {}
    modes: Mapping[str, str] = {}
    for turn in turns:
        modes = turn.info.get("metrics_agg_mode") or modes
        for name, value in (turn.info.get("metrics") or {}).items():
            values.setdefault(name, []).append(float(value))
    found = {name: _COMBINE[modes.get(name, "mean")](several) for name, several in values.items()}
    return {"num_actions": float(len(turns))} | found


_COMBINE: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda several: sum(several) / len(several),
    "sum": sum,
    "min": min,
    "max": max,
    "last": lambda several: several[-1],
    "first": lambda several: several[0],
}
