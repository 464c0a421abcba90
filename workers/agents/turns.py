"""The turns of an episode in an environment: what each of them sampled, and the messages before it.

`turn_messages` fills the environment's template; `conversation.ChatJoins` turns the messages into token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from verl_lite.envs.base import EnvTemplate
from verl_lite.json_types import JsonMapping, JsonObject
from workers.agents.conversation import Message


@dataclass
class Turn:
    """One turn of an episode: the agent's action, the observation before it, and the reward of the step.

    Attributes:
        messages, prompt_ids: the part of the prompt that this turn adds to the earlier turns; the whole prompt in step
            mode (`EnvTemplate.by_step`).
        response_ids, log_probs, versions, finish_reason: see `Completion`.
        action: text of the response without its stop token.
        observation, state_hash: the observation before the action, and the name of its state.
        reward: reward of the step, including a format penalty.
        is_valid: False if the environment reported an invalid action.
        info: the `info` dict that the environment's step returned.
        extra: see `Completion`. Values for the whole context are kept by the last turn of a trajectory only.
    """

    messages: list[Message]
    prompt_ids: tuple[int, ...]
    response_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    versions: list[int]
    action: str
    observation: str
    state_hash: str
    reward: float = 0.0
    is_valid: bool = True
    info: JsonObject = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


def turn_messages(
    template: EnvTemplate,
    observation: str,
    past: Sequence[Turn],
    *,
    instruction: str,
    info: JsonMapping,
    max_response_length: int,
) -> list[Message]:
    """Returns the messages that the next turn adds to the conversation, from the environment's template.

    In step mode (`template.by_step`), each turn is a separate conversation, and its user message summarises the last
    `history_length` turns with valid and invalid actions (ROLL: only invalid actions).

    Args:
        template: the environment's configuration.
        observation: what the last reset or step returned.
        past: all turns so far.
        instruction: the environment's task, included in the first turn of a trajectory, and in each turn in step mode.
        info: the `info` dict of the reset or step that returned `observation`.
        max_response_length: maximum number of tokens of the turn's response.
    """
    is_first = template.by_step or not past
    fields: dict[str, object] = {
        "observation": observation,
        "env_instruction": instruction if is_first else "",
        "turn_idx": len(past) + 1,
        "suffix": info.get("suffix") or "",
        "actions_left": template.max_steps - len(past),
        "max_response_length": max_response_length,
    }
    if template.by_step:
        fields |= _history_fields(template, observation, past)

    content = template.agent_template.format(**fields)
    # a template without the field gets the task before its first message
    if is_first and instruction and "env_instruction" not in template.fields:
        separator = "" if instruction[-1].isspace() else "\n"
        content = instruction + separator + content

    # the first message has no tool call before it, whose result it could be
    is_tool = info.get("use_tool") and not is_first
    message: Message = {"role": "tool" if is_tool else "user", "content": content}
    if is_first and template.agent_system_template:
        return [{"role": "system", "content": template.agent_system_template}, message]
    return [message]


def _history_fields(template: EnvTemplate, observation: str, past: Sequence[Turn]) -> dict[str, object]:
    """Returns the fields of `agent_template` that only step mode has, for a prompt without the earlier turns."""
    history_length = min(template.history_length, len(past))
    # not `past[-history_length:]`, which is everything for a length of 0
    first = len(past) - history_length
    lines = []
    for number, turn in enumerate(past[first:], start=first + 1):
        note = "" if turn.is_valid else " (not a valid action)"
        lines.append(
            f"(step {number}, observation: {turn.observation}, action: {turn.action}{note}, reward: {turn.reward:g})"
        )
    return {
        "history": "\n".join(lines),
        "history_length": history_length,
        "step_count": len(past),
        "current_step": len(past) + 1,
        "current_observation": observation,
    }
