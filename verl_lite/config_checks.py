"""Checks between options, before anything heavy starts."""

from __future__ import annotations

from verl_lite.config import PPOConfig


def validate(config: PPOConfig) -> None:
    """Placeholder until the checks land."""
