"""verl's own functions for `python -m tests.bench algos`, where verl is importable. Nothing here is verl's code."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.bench.algos_cases import CLIPRANGE_VALUE, LOSS_CONFIG, MODE, Case, Columns, Numbers
from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS


class VerlConfig(SimpleNamespace):
    """Options with verl's way of asking for them."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class VerlPeer:
    """verl's functions of the same names on the same columns; each gives the numbers that `Case.ours` gives."""

    def __init__(self, core_algos: ModuleType, config_class: type) -> None:
        self.core_algos = core_algos
        low, high = LOSS_CONFIG.clip_ratio, LOSS_CONFIG.clip_ratio_high
        self.config = object.__new__(config_class)  # its constructor wants a whole actor; the losses want its type
        vars(self.config).update(
            vars(LOSS_CONFIG)
            | {"policy_loss": VerlConfig(**vars(LOSS_CONFIG.policy_loss)), "global_batch_info": {"dp_size": 1}}
            | {"clip_ratio_low": low, "clip_ratio_high": high}
        )

    def find(self, case: Case, small: Columns) -> Callable[[Columns], Numbers] | str:
        """verl's call for a case, or why there is none ("-": verl has no such entry, or it draws tokens by itself).

        It is tried on a small batch first, since verl's functions change.
        """
        call = self._call(case)
        if call is None:
            return "-"
        try:
            call(small)
        except (AttributeError, TypeError, KeyError, ValueError, AssertionError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        return call

    def _call(self, case: Case) -> Callable[[Columns], Numbers] | None:
        algos, name = self.core_algos, case.name
        match case.kind:
            case "estimator" if name in algos.ADV_ESTIMATOR_REGISTRY:
                return lambda c: self._estimate(name, c)
            case "loss" if name in algos.POLICY_LOSS_REGISTRY and name not in TOKEN_SELECTIONS:
                return lambda c: self._loss(name, c)
            case "value loss":
                return self._value_loss
            case "agg_loss":
                return lambda c: [algos.agg_loss(c["advantages"], c["response_mask"], name)]
            case "kl_penalty":
                return lambda c: self._kl(name, c)
        return None

    def _estimate(self, name: str, columns: Columns) -> Numbers:
        """With the columns that the function names, as verl's trainer does."""
        function = self.core_algos.get_adv_estimator_fn(name)
        named = inspect.signature(function).parameters
        mask = columns["response_mask"]
        prompts = torch.ones(len(mask), 1, dtype=torch.long)
        layout = {"prompts": prompts, "attention_mask": torch.cat([prompts, mask], dim=1)}
        given = columns | {"config": VerlConfig(**vars(columns["config"])), "batch": layout}
        return list(function(**{key: value for key, value in given.items() if key in named}))

    def _loss(self, name: str, columns: Columns) -> Numbers:
        leaf = columns["log_prob"].detach().requires_grad_()
        loss, _metrics = self.core_algos.get_policy_loss_fn(name)(
            old_log_prob=columns["old_log_probs"],
            log_prob=leaf,
            advantages=columns["advantages"],
            response_mask=columns["response_mask"],
            loss_agg_mode=MODE,
            config=self.config,
        )
        loss.backward()
        return [loss]

    def _value_loss(self, columns: Columns) -> Numbers:
        leaf = columns["log_prob"].detach().requires_grad_()
        loss, _clipfrac = self.core_algos.compute_value_loss(
            vpreds=leaf,
            returns=columns["advantages"],
            values=columns["values"],
            response_mask=columns["response_mask"],
            cliprange_value=CLIPRANGE_VALUE,
            loss_agg_mode=MODE,
        )
        loss.backward()
        return [loss]

    def _kl(self, name: str, columns: Columns) -> Numbers:
        leaf, mask = columns["log_prob"].detach().requires_grad_(), columns["response_mask"]
        values = self.core_algos.kl_penalty(leaf, columns["old_log_probs"], name)
        self.core_algos.agg_loss(values, mask, MODE).backward()
        return [values * mask]


def find_verl() -> VerlPeer | None:
    """verl, if it is importable."""
    try:
        core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
        return VerlPeer(core_algos, importlib.import_module("verl.workers.config").ActorConfig)
    except ImportError:
        return None
