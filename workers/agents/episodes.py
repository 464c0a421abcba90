"""Runs many episodes concurrently on one rollout engine and one pool of environments.

Episodes do not wait for each other: a finished turn goes to its environment while other sequences still decode, and the
next turn enters the engine as soon as the environment has replied. The prompt of a turn consists of the token ids that
were sampled and joined so far (`conversation.py`); sampled text is never encoded again.

The random numbers of a turn depend on the seed of the run, the step, the trajectory and the turn. A trajectory is
therefore the same for any number of concurrent episodes and any speed of the environments. Only the choice of the kept
members of a group with redundancy depends on time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

from transformers import PreTrainedTokenizerBase

from verl_lite.envs.base import EnvTemplate
from verl_lite.json_types import JsonObject, KeywordArguments
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.rewards.results import SCORE, is_score
from workers.agents.conversation import ChatJoins, Message
from workers.agents.env_host import EnvReply
from workers.agents.env_pool import EnvPool
from workers.agents.turns import Turn, turn_messages
from workers.engines.base import Completion, Request, SamplingParams, derive_seed
from workers.rollout.group_run import CompleteGroup
from workers.rollout.rows import of_response
from workers.rollout.runner import Runner
from workers.rollout.specs import EpisodeCounts, EpisodeSpec, GroupPlan, ProgramSpec

Stop = Literal["terminated", "truncated", "max_steps", "max_length", "failed", "surplus"]
"""Reason for the end of an episode; see `Trajectory`."""


class DescribedMessage(TypedDict):
    role: str
    content: str


class DescribedRequest(TypedDict):
    """An entry of the column `requests`; verl_lite/schema.py describes it."""

    parent: int | None
    row: int | None
    prompt_tokens: int
    tokens: int
    versions: list[int]
    finish_reason: str
    tool_calls: list[str]
    messages: list[DescribedMessage]
    text: str
    discarded: str | None


@dataclass
class Trajectory:
    """An episode and its result.

    Attributes:
        spec: The specification of the episode.
        by_step: True in mode `step` (`EnvTemplate.by_step`), where each turn is a conversation of its own.
        turns: The sampled turns.
        stop: Reason for the end. terminated, truncated: the environment ended it. max_steps, max_length: it reached a
            limit on turns or tokens. failed: the environment failed, its rewards are not a valid score, or its first
            prompt is too long. surplus: its group was complete before it ended.
        is_kept: True if the episode becomes rows; a failed one does only if its group would be incomplete without it.
        error: Why a failed episode failed.
        is_timeout: Whether it failed because it exceeded a deadline.
        prompt_messages: Messages of the first turn's prompt, even if it was too long to be sampled from.
        prompt_ids: Tokens of this prompt.
        metrics: Metrics of the environment, aggregated over the turns.
        rows: Turns of each training row; None = one row, or in mode `step` one per turn.
        outcome: Score of an episode whose turns have no rewards of their own.
        requests: The column `requests` of a program's episode.
        first_prompts: Numbers of tokens of the first prompts of a program's conversations.
    """

    spec: EpisodeSpec | ProgramSpec
    by_step: bool
    turns: list[Turn] = field(default_factory=list)
    stop: Stop = "surplus"
    is_kept: bool = False
    error: str | None = None
    is_timeout: bool = False
    prompt_messages: list[Message] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    rows: list[list[Turn]] | None = None
    outcome: float | None = None
    requests: list[DescribedRequest] | None = None
    first_prompts: list[int] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Returns the outcome or the sum of the rewards of all turns, or 0 if the episode failed."""
        if self.stop == "failed":
            return 0.0
        if self.outcome is not None:
            return self.outcome
        return sum(turn.reward for turn in self.turns)

    @property
    def messages(self) -> list[Message]:
        """Returns the whole conversation; in mode `step` the messages of all turns."""
        return messages_of(self.turns) or self.prompt_messages


def messages_of(turns: Iterable[Turn]) -> list[Message]:
    """Returns the messages of these turns: those before each action, and the action."""
    messages: list[Message] = []
    for turn in turns:
        messages += turn.messages
        messages.append({"role": "assistant", "content": turn.action})
    return messages


@dataclass(frozen=True)
class TokenLimits:
    """Maximum number of tokens of the first prompt, of everything after it, and of both. In mode `step` the limits
    apply to the prompt and the response of every turn."""

    max_prompt_length: int
    max_response_length: int
    max_model_len: int


@dataclass(eq=False)
class _Episode:
    """A queued or running episode.

    Attributes:
        key: Unique key in the pool and the engine.
        spec: The specification of the episode.
        trajectory: Its result so far.
        template: The configuration of its environment.
        sampling: Sampling parameters of its turns.
        group: Its group.
        is_ended: Whether it has ended.
        request_id: The turn that the engine is sampling.
        context: Tokens of the conversation so far (in mode `step`: of the last turn).
        instruction: The environment's task, which its reset returned.
        observation: Observation in the last reply of the environment.
        info: Further values in this reply.
        messages: New messages before the turn that is being sampled.
        prompt_ids: Their tokens.
    """

    key: str
    spec: EpisodeSpec
    trajectory: Trajectory
    template: EnvTemplate
    sampling: SamplingParams
    group: _Group
    is_ended: bool = False
    request_id: str | None = None
    context: list[int] = field(default_factory=list)
    instruction: str = ""
    observation: str = ""
    info: JsonObject = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()


@dataclass(eq=False)
class _Group:
    """A group of episodes.

    Attributes:
        size: Number of members that are kept.
        open: The unfinished members.
        num_kept: Number of members that have ended and are kept.
    """

    size: int
    open: list[_Episode] = field(default_factory=list)
    num_kept: int = 0


def count_episodes(trajectories: Sequence[Trajectory]) -> EpisodeCounts:
    """Counts the episodes that were not ended as surplus."""
    ended = [trajectory for trajectory in trajectories if trajectory.stop != "surplus"]
    failed = [trajectory for trajectory in ended if trajectory.stop == "failed"]
    first_failure: str | None = None
    if failed:
        spec = failed[0].spec
        kind = "program" if isinstance(spec, ProgramSpec) else "environment"
        first_failure = f"episode {spec.traj_id} of the {kind} {spec.tag!r}:\n{failed[0].error}"
    first_prompts: list[int] = []
    for trajectory in ended:
        first_prompts += trajectory.first_prompts
    return EpisodeCounts(
        episodes=len(ended),
        failed=len(failed),
        timeouts=sum(trajectory.is_timeout for trajectory in failed),
        first_failure=first_failure,
        first_prompts=tuple(first_prompts),
    )


class EpisodeRunner:
    """Runs groups of episodes; see `group_run.SampleRunner`.

    Args:
        runner: the engine; the owner of a request is its episode.
        pool: the environments.
        tokenizer: encodes prompts and decodes actions.
        templates: entries of agentic.custom_envs by tag.
        limits: numbers of tokens that fit a row and the engine's context.
        seed: seed of the run.
        stop_token_ids: stop tokens of the model. The end-of-turn token of the chat template also ends a turn.
        chat_template_kwargs: data.apply_chat_template_kwargs.
        format_penalty: by purpose of an episode, a value that is added to the reward of a turn whose metrics have
            action_is_valid false.
        max_live: maximum number of concurrent episodes.
        rows: function that turns the episodes of a group into rows.

    Raises:
        UserError: for a chat template whose turns cannot be joined.
    """

    def __init__(
        self,
        runner: Runner[_Episode],
        pool: EnvPool,
        tokenizer: PreTrainedTokenizerBase,
        templates: Mapping[str, EnvTemplate],
        limits: TokenLimits,
        *,
        seed: int,
        stop_token_ids: Iterable[int],
        chat_template_kwargs: KeywordArguments | None = None,
        format_penalty: Mapping[str, float] | None = None,
        max_live: int,
        rows: Callable[[Sequence[Trajectory]], DataProto],
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._tokenizer = tokenizer
        self._templates = templates
        self._limits = limits
        self._seed = seed
        self._to_rows = rows
        has_system = any(template.agent_system_template for template in templates.values())
        self._joins = ChatJoins(tokenizer, chat_template_kwargs, system=has_system, most_tokens=limits.max_model_len)
        all_stop_tokens = {*stop_token_ids, *self._joins.ends_of_turn}
        self._stop_token_ids = tuple(sorted(all_stop_tokens))
        self._format_penalty = dict(format_penalty or {})
        self._max_live = max_live
        self._number = 0
        # episodes that have not started, then those that have an environment, by their keys
        self._queue: deque[_Episode] = deque()
        self._live: dict[Hashable, _Episode] = {}
        self._groups: dict[str, list[_Episode]] = {}
        # durations of the environments' calls since the last metrics
        self._env_seconds: list[float] = []

    def begin(self, plan: GroupPlan, sampling: SamplingParams) -> None:
        """Queues the episodes of a group.

        Args:
            plan: The group.
            sampling: Sampling parameters of the turns. Its seed and stop tokens are ignored, and max_tokens applies to
                each turn.
        """
        specs = plan.samples_of(EpisodeSpec)
        group = _Group(specs[0].group_size)
        for spec in specs:
            template = self._templates[spec.tag]
            trajectory = Trajectory(spec, template.by_step)
            # with a number, because names are unique only among the episodes that were not taken yet
            self._number += 1
            key = f"{self._number}/{spec.traj_id}"
            episode = _Episode(key, spec, trajectory, template, sampling, group)
            group.open.append(episode)
        self._queue.extend(group.open)
        # a copy: members leave `group.open` when they end
        self._groups[plan.key] = list(group.open)

    def is_finished(self, key: str) -> bool:
        return all(episode.is_ended for episode in self._groups[key])

    def take(self, key: str) -> CompleteGroup:
        """Removes a group whose episodes have ended and returns its rows."""
        trajectories = [episode.trajectory for episode in self._groups.pop(key)]
        return CompleteGroup(self._to_rows(trajectories), count_episodes(trajectories))

    def snapshot(self, key: str) -> None:
        """Returns None, because a running environment cannot be copied."""

    def abort(self, key: str) -> int:
        """Ends a group without rows. Returns the number of tokens that it had sampled."""
        num_tokens = 0
        for episode in self._groups.pop(key):
            if not episode.is_ended:
                self._end(episode, "surplus")
            num_tokens += sum(len(turn.response_ids) for turn in episode.trajectory.turns)
        return num_tokens

    def advance(self, wait_s: float = 0.0, until_completion: bool = False) -> None:
        """Processes replies of environments, submits turns to the engine, and makes at most one engine step.

        Args:
            wait_s: Seconds to wait for a reply if there is nothing to decode.
            until_completion: Ignored, because replies may arrive after every step.
        """
        self._admit()
        if not self._live:
            return
        poll_s = 0.0 if self.is_decoding else wait_s
        for reply in self._pool.poll(poll_s):
            self._env_seconds.append(reply.seconds)
            episode = self._live.get(reply.key)
            # None if it ended while its environment was busy
            if episode is not None:
                self._on_env_reply(episode, reply)
        # the episodes that ended leave room for others
        self._admit()
        if not self.is_decoding:
            return
        for owner, completion in self._runner.step():
            self._on_completion(owner, completion)

    @property
    def is_decoding(self) -> bool:
        """True if the engine has turns to sample."""
        return self._runner.is_decoding

    def take_metrics(self, seconds: float) -> dict[str, Metric]:
        """Returns rollout metrics since the last call; env/processes_replaced counts from the start of the run.

        Args:
            seconds: Time spent running episodes in that period.
        """
        metrics = self._runner.take_metrics(seconds)
        metrics["env/processes_replaced"] = Metric.sum(self._pool.processes_replaced)
        durations = self._env_seconds
        self._env_seconds = []
        if durations:
            metrics["env/step_seconds/mean"] = Metric.mean(sum(durations), len(durations))
            metrics["env/step_seconds/max"] = Metric.max(max(durations))
        return metrics

    def close(self) -> None:
        """Ends the processes of the environments."""
        self._pool.close()

    def _admit(self) -> None:
        """Resets the environments of queued episodes while fewer than `max_live` are running."""
        while self._queue and len(self._live) < self._max_live:
            episode = self._queue.popleft()
            # it became surplus, or its group was aborted, before it started
            if episode.is_ended:
                continue
            self._live[episode.key] = episode
            spec = episode.spec
            self._pool.reset(episode.key, spec.tag, spec.seed)

    def _on_env_reply(self, episode: _Episode, reply: EnvReply) -> None:
        """Processes the reply of an environment to a reset or an action: ends the episode or submits its next turn."""
        trajectory = episode.trajectory
        if reply.error is not None or reply.observation is None:
            trajectory.error = reply.error
            trajectory.is_timeout = reply.is_timeout
            return self._end(episode, "failed")

        episode.observation = reply.observation
        episode.info = reply.info
        # the reply to the reset
        if not trajectory.turns:
            episode.instruction = reply.info.get("env_instruction") or ""
            return self._submit_turn(episode)

        self._add_reward(trajectory.turns[-1], reply, episode.spec.purpose)
        # the sum of finite rewards may be too large for a score
        if not is_score(trajectory.score):
            trajectory.error = f"The rewards of the episode sum to {trajectory.score:g}; expected {SCORE}."
            return self._end(episode, "failed")
        if reply.terminated:
            return self._end(episode, "terminated")
        if reply.truncated:
            return self._end(episode, "truncated")
        if len(trajectory.turns) >= episode.template.max_steps:
            return self._end(episode, "max_steps")
        return self._submit_turn(episode)

    def _add_reward(self, turn: Turn, reply: EnvReply, purpose: str) -> None:
        """Stores the result of an action in its turn.

        Args:
            turn: The turn.
            reply: Reply of the environment to the action.
            purpose: Purpose of the episode, whose format penalty is added if the action was invalid.
        """
        metrics = reply.info.get("metrics") or {}
        turn.info = reply.info
        turn.is_valid = bool(metrics.get("action_is_valid", True))
        turn.reward = reply.reward
        if not turn.is_valid:
            turn.reward += self._format_penalty.get(purpose, 0.0)

    def _submit_turn(self, episode: _Episode) -> None:
        """Submits the next turn to the engine, or ends the episode if the turn does not fit."""
        trajectory = episode.trajectory
        limits = self._limits
        turn_index = len(trajectory.turns)
        self._add_prompt(episode)
        if turn_index == 0:
            trajectory.prompt_messages = episode.messages
            trajectory.prompt_ids = episode.prompt_ids
            if len(episode.prompt_ids) > limits.max_prompt_length:
                # the environment's fault, not a result of the policy: the episode is masked
                trajectory.error = (
                    f"The first prompt has at least {len(episode.prompt_ids)} tokens, and data.max_prompt_length="
                    f"{limits.max_prompt_length} allows fewer: raise it, or shorten the observation of reset."
                )
                return self._end(episode, "failed")

        room = self._room_in_row(episode)
        max_tokens = min(
            room,
            limits.max_model_len - len(episode.context),
            episode.template.max_tokens_per_step or room,
            episode.sampling.max_tokens,
        )
        if max_tokens < 1:
            return self._end(episode, "max_length")

        spec = episode.spec
        sampling = replace(
            episode.sampling,
            max_tokens=max_tokens,
            # steps count from 1 here, and from 0 in seeds
            seed=derive_seed(self._seed, spec.start_step - 1, spec.traj_id, turn_index),
            stop_token_ids=self._stop_token_ids,
        )
        request = Request(f"{episode.key}/{turn_index}", tuple(episode.context), sampling)
        episode.request_id = request.request_id
        self._runner.submit(request, episode)

    def _add_prompt(self, episode: _Episode) -> None:
        """Builds the prompt of the next turn and adds it to the context."""
        turns = episode.trajectory.turns
        template = episode.template
        max_response_length = self._limits.max_response_length
        max_turn_length = min(template.max_tokens_per_step or max_response_length, max_response_length)
        episode.messages = turn_messages(
            template,
            episode.observation,
            turns,
            instruction=episode.instruction,
            info=episode.info,
            max_response_length=max_turn_length,
        )

        if not turns or template.by_step:
            # the whole prompt of a row
            episode.prompt_ids = self._joins.prompt(episode.messages)
            episode.context = list(episode.prompt_ids)
            return
        # a later turn of a conversation has one message: only the first has a system message
        episode.prompt_ids = self._joins.join(turns[-1].response_ids, episode.messages[0])
        episode.context.extend(episode.prompt_ids)

    def _room_in_row(self, episode: _Episode) -> int:
        """Returns how many tokens of the next response fit the columns of its row."""
        limits = self._limits
        if episode.template.by_step:
            # the turn is a row of its own, into which a longer prompt does not fit
            has_room = len(episode.prompt_ids) <= limits.max_prompt_length
            return limits.max_response_length if has_room else 0
        # everything after the first prompt is in the response column of the row
        num_after_prompt = len(episode.context) - len(episode.trajectory.prompt_ids)
        return limits.max_response_length - num_after_prompt

    def _on_completion(self, episode: _Episode, completion: Completion) -> None:
        """Stores a sampled turn and sends its action to the environment."""
        # `_end` aborts only requests that the engine has
        episode.request_id = None
        trajectory = episode.trajectory
        action = self._action(completion.token_ids)
        if trajectory.turns and not trajectory.by_step:
            # the new turn has the values of the whole context, except those of earlier responses
            last_turn = trajectory.turns[-1]
            last_turn.extra = of_response(last_turn.extra)
        trajectory.turns.append(
            Turn(
                messages=episode.messages,
                prompt_ids=episode.prompt_ids,
                response_ids=completion.token_ids,
                log_probs=completion.log_probs,
                finish_reason=completion.finish_reason,
                versions=completion.versions,
                action=action,
                observation=episode.observation,
                state_hash=_state_hash(episode),
                extra=completion.extra,
            )
        )
        episode.context.extend(completion.token_ids)
        self._pool.step(episode.key, action)

    def _action(self, response_ids: Sequence[int]) -> str:
        """Returns the text of a response without its stop token."""
        is_stopped = bool(response_ids) and response_ids[-1] in self._stop_token_ids
        action_ids = response_ids[:-1] if is_stopped else response_ids
        action = self._tokenizer.decode(action_ids, clean_up_tokenization_spaces=False)
        assert isinstance(action, str)
        return action

    def _end(self, episode: _Episode, stop: Stop) -> None:
        """Ends an episode. Ends the other members of its group as surplus if the group is complete."""
        trajectory = episode.trajectory
        group = episode.group
        trajectory.stop = stop
        trajectory.metrics = aggregate_metrics(trajectory.turns)
        episode.is_ended = True
        # the group may stay for long until it is taken, and nobody needs the tokens of the context
        episode.context = []
        if episode.request_id is not None:
            self._runner.abort([episode.request_id])
        if self._live.pop(episode.key, None) is not None:
            self._pool.discard(episode.key)
        group.open.remove(episode)
        if stop == "surplus":
            return

        # a group with redundancy may still have enough other members, which take the place of a failed one
        is_replaceable = group.num_kept + len(group.open) >= group.size
        if stop == "failed" and is_replaceable:
            return
        trajectory.is_kept = True
        group.num_kept += 1
        if group.num_kept == group.size:
            # a copy, because each of them removes itself
            for other in list(group.open):
                self._end(other, "surplus")


def _state_hash(episode: _Episode) -> str:
    """Returns the name of the state before an action: the environment's, or a hash of the observation."""
    state_hash = episode.info.get("state_hash")
    if state_hash is None:
        state_hash = hashlib.sha256(episode.observation.encode()).hexdigest()
    return str(state_hash)


def aggregate_metrics(turns: Sequence[Turn]) -> dict[str, float]:
    """Aggregates the metrics of an environment over the turns that have them.

    The last metrics_agg_mode in the info of a turn specifies how; the default is the mean. The metric num_actions is
    the number of turns.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    modes: Mapping[str, str] = {}
    for turn in turns:
        modes = turn.info.get("metrics_agg_mode") or modes
        turn_metrics = turn.info.get("metrics") or {}
        for name, value in turn_metrics.items():
            # flags become 0 and 1
            values[name].append(float(value))

    metrics = {"num_actions": float(len(turns))}
    for name, values_of_turns in values.items():
        mode = modes.get(name, "mean")
        metrics[name] = _COMBINE[mode](values_of_turns)
    return metrics


_COMBINE: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
    "first": lambda values: values[0],
}
