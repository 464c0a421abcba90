"""What an environment says, as chat messages: the user (or tool) message of a turn, in the words of `EnvTemplate`.

In a trajectory a turn adds one message to the conversation. By steps, each turn is a conversation of its own, whose one
message tells the last turns; all of them, valid actions and invalid ones (ROLL tells the invalid only).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_lite.envs.base import EnvTemplate
from workers.rollout.conversation import Message


@dataclass(frozen=True)
class PastTurn:
    """What a later prompt may tell of a turn. is_valid: as far as the environment said."""

    observation: str
    action: str
    reward: float
    is_valid: bool


def trajectory_messages(
    template: EnvTemplate,
    observation: str,
    *,
    turn: int,
    instruction: str,
    info: dict[str, Any],
    max_response_length: int,
) -> list[Message]:
    """The messages that turn `turn` (from 0) adds: in the first one the system message and the instruction too.

    info: of the reset or step that gave the observation. max_response_length: tokens that the turn may take.
    """
    is_first = turn == 0
    fields = _fields(template, observation, turn, info, max_response_length)
    fields["env_instruction"] = instruction if is_first else ""
    content = template.agent_template.format(**fields)
    if is_first:
        content = _with_instruction(template, instruction, content)
    role = "tool" if info.get("use_tool") and not is_first else "user"
    return [*_system(template, is_first), {"role": role, "content": content}]


def step_messages(
    template: EnvTemplate,
    observation: str,
    *,
    past: Sequence[PastTurn],
    instruction: str,
    info: dict[str, Any],
    max_response_length: int,
) -> list[Message]:
    """The whole prompt of the turn that comes after `past` (all turns so far)."""
    told = past[len(past) - min(template.history_length, len(past)) :]
    first = len(past) - len(told) + 1
    history = "\n".join(_told(number, turn) for number, turn in enumerate(told, start=first))
    fields = _fields(template, observation, len(past), info, max_response_length) | {
        "env_instruction": instruction,
        "history": history,
        "history_length": len(told),
        "step_count": len(past),
        "current_step": len(past) + 1,
        "current_observation": observation,
    }
    content = _with_instruction(template, instruction, template.agent_template.format(**fields))
    return [*_system(template, True), {"role": "user", "content": content}]


def _fields(
    template: EnvTemplate, observation: str, turn: int, info: dict[str, Any], max_response_length: int
) -> dict[str, Any]:
    return {
        "observation": observation,
        "turn_idx": turn + 1,
        "suffix": info.get("suffix") or "",
        "actions_left": template.max_steps - turn,
        "max_response_length": max_response_length,
    }


def _with_instruction(template: EnvTemplate, instruction: str, content: str) -> str:
    """The instruction stands before the rest, unless the template has a place for it."""
    if not instruction or "env_instruction" in template.fields:
        return content
    return instruction + ("" if instruction[-1].isspace() else "\n") + content


def _system(template: EnvTemplate, is_first: bool) -> list[Message]:
    text = template.agent_system_template
    return [{"role": "system", "content": text}] if text and is_first else []


def _told(number: int, turn: PastTurn) -> str:
    action = turn.action if turn.is_valid else f"{turn.action} (not a valid action)"
    return f"(step {number}, observation: {turn.observation}, action: {action}, reward: {turn.reward:g})"
