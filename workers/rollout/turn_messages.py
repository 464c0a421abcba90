"""A turn of an agent, and what an environment says as chat messages: the user (or tool) message of a turn, in the words
of `EnvTemplate`.

In a trajectory a turn adds one message to the conversation. By steps, each turn is a conversation of its own, whose one
message tells the last turns; all of them, valid actions and invalid ones (ROLL tells the invalid only).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_lite.envs.base import EnvTemplate
from workers.rollout.conversation import Message


@dataclass
class Turn:
    """One action of the agent.

    messages, prompt_ids: what the turn's prompt adds to the turns before it; by steps, the whole prompt.
    response_ids, log_probs, finish_reason, policy_version: see `Completion`. action: the response as text, without its
    stop token. observation, state_hash: what the agent acted upon. reward: of the step, a format penalty included.
    is_valid: as far as the environment said. info: that the step gave.
    """

    messages: list[Message]
    prompt_ids: tuple[int, ...]
    response_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    policy_version: int
    action: str
    observation: str
    state_hash: str
    reward: float = 0.0
    is_valid: bool = True
    info: dict[str, Any] = field(default_factory=dict)


def turn_messages(
    template: EnvTemplate,
    observation: str,
    past: Sequence[Turn],
    *,
    instruction: str,
    info: Mapping[str, Any],
    max_response_length: int,
) -> list[Message]:
    """The messages that the turn after `past` (all turns so far) adds; by steps, its whole prompt.

    instruction: of the environment, told in a trajectory's first turn and in each step. info: of the reset or step that
    gave the observation. max_response_length: tokens that the turn may take.
    """
    is_first = template.by_step or not past
    fields: dict[str, Any] = {
        "observation": observation,
        "env_instruction": instruction if is_first else "",
        "turn_idx": len(past) + 1,
        "suffix": info.get("suffix") or "",
        "actions_left": template.max_steps - len(past),
        "max_response_length": max_response_length,
    }
    if template.by_step:
        told = past[len(past) - min(template.history_length, len(past)) :]
        first = len(past) - len(told) + 1
        fields |= {
            "history": "\n".join(_told(number, turn) for number, turn in enumerate(told, start=first)),
            "history_length": len(told),
            "step_count": len(past),
            "current_step": len(past) + 1,
            "current_observation": observation,
        }
    content = template.agent_template.format(**fields)
    if is_first and instruction and "env_instruction" not in template.fields:  # it stands before the rest
        content = instruction + ("" if instruction[-1].isspace() else "\n") + content
    is_tool = info.get("use_tool") and not is_first
    system = template.agent_system_template if is_first else None
    own: Message = {"role": "tool" if is_tool else "user", "content": content}
    return [{"role": "system", "content": system}, own] if system else [own]


def _told(number: int, turn: Turn) -> str:
    action = turn.action if turn.is_valid else f"{turn.action} (not a valid action)"
    return f"(step {number}, observation: {turn.observation}, action: {action}, reward: {turn.reward:g})"
