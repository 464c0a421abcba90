"""Checks options that name code of the user: the code can be imported, and the trainer's call fits its signature."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Self

from verl_lite.algos.policy_loss_registry import LOSS_COLUMNS
from verl_lite.config.fields import Problems, unknown_value
from verl_lite.errors import UserError
from verl_lite.registry import accepts, is_own, object_at, require_call


@dataclass(frozen=True)
class UserCall:
    """How the trainer calls a function or class of the user.

    Attributes:
        words: the call in words.
        positional: number of positional arguments.
        named: keywords that are always passed.
        offered: keywords that are passed if the signature accepts them.
        otherwise: the call of a function that does not fit.
    """

    words: str
    positional: int = 0
    named: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    otherwise: Self | None = None

    def require(self, function: Callable[..., object]) -> None:
        """Raises UserError if the call would fail."""
        try:
            inspect.signature(function)
        except (TypeError, ValueError):
            raise UserError(f"{function} has no signature that Python can read. Expected {self.words}") from None
        offered = [name for name in self.offered if accepts(function, name)]
        keywords = dict.fromkeys([*self.named, *offered])
        # the values do not matter: only the signature is compared
        try:
            require_call(function, self.words, *range(self.positional), **keywords)
        except UserError:
            if self.otherwise is None:
                raise
            self.otherwise.require(function)


_ESTIMATOR_ARGUMENTS = (
    "token_level_rewards response_mask gamma lam config norm_adv_by_std_in_grpo index values reward_baselines "
    "old_log_probs sum_pi_squared rollout_is_weights traj_id step state_hash batch non_tensor_batch"
)
ESTIMATOR_CALL = UserCall(
    "f(token_level_rewards, response_mask, index, config, ...) -> (advantages, returns)",
    offered=tuple(_ESTIMATOR_ARGUMENTS.split()),
)
LOSS_CALL = UserCall(
    "f(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, weights) -> (loss, metrics)",
    positional=7,
    offered=("batch_num_tokens", "global_batch_size", *LOSS_COLUMNS),
    otherwise=UserCall(
        "f(inputs: LossInputs) -> (loss, metrics), or with verl's arguments f(old_log_prob, log_prob, advantages, "
        "response_mask, loss_agg_mode, config, weights)",
        positional=1,
    ),
)
ENGINE_CALL = UserCall(
    "Class(model_path, config, *, max_model_len, device, dtype, seed, override_config, trust_remote_code)",
    positional=2,
    named=("max_model_len", "device", "dtype", "seed", "override_config", "trust_remote_code"),
)
FILTER_CALL = UserCall("Class(config, env_manager_config, mode)", positional=3)
TRACKER_CALL = UserCall("f(run: TrackedRun) -> Tracker", positional=1)


def registered_problems(key: str, value: str, registered: Collection[str], kind: str, call: UserCall) -> Problems:
    """Yields a problem if `value` is neither registered nor the path of a callable that fits.

    Args:
        key, value: the option.
        registered: the registered names; as a mapping, with the registered objects.
        kind: what a path leads to, "function" or "Class".
        call: how the trainer calls it.
    """
    if ":" not in value and value not in registered:
        yield f"{unknown_value(key, value, registered)}; or pkg.module:{kind}"
        return
    try:
        if value not in registered:
            call.require(object_at(value))
        elif isinstance(registered, Mapping) and not is_own(registered[value]):
            # the user's own module has registered it
            call.require(registered[value])
    except UserError as error:
        yield f"{key}={value}: {error}. Set {key} to pkg.module:{kind}, or to a registered name"
