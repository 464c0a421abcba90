"""A reward that a server computes: one HTTP POST for each sample, repeated where the failure may pass.

The request is JSON with data_source, solution_str, ground_truth, extra_info, prompt (chat messages) and what
`reward.reward_kwargs` adds; the answer is JSON, a number or an object with "score". How many requests are under way and
how many go out a minute is the pool's part (`reward.max_concurrent`, `reward.max_rpm`), and so is the deadline.
"""

from __future__ import annotations

from typing import Any

from verl_lite.config import RemoteRewardConfig
from verl_lite.rewards.json_post import JsonPost, token_of


class RemoteReward:
    """Asks `config.url`, as often as `JsonPost` says with `config.max_retries`.

    Raises UserError if the variable `config.api_key_env` is not set.
    """

    def __init__(self, config: RemoteRewardConfig) -> None:
        assert config.url is not None
        token = token_of(config.api_key_env, "reward.remote.api_key_env") if config.api_key_env else None
        self._post = JsonPost(config.url, max_retries=config.max_retries, token=token)

    async def __call__(self, **sample: Any) -> Any:
        """What the server answered. Raises RemoteRewardError with the status and the beginning of its answer."""
        return await self._post.post(sample)

    async def close(self) -> None:
        """Closes the connections."""
        await self._post.close()
