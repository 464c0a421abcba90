"""The routers of a mixture of experts: records and replays the experts of each token, and measures the load balance.

Families differ in how a router scores the experts (softmax, sigmoid, biases, groups) and weighs the selected experts,
but all of them select with one `torch.topk` over the experts. This module intercepts that call while the family's own
code runs, so it needs no code per family. Families that select experts in another way raise an error.

Routing replay replaces the result of that call by the experts that the rollout selected, with their current scores.
Each token is then trained with the experts that sampled it, and gradients reach router and experts as usual.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError
from workers.engine.packing import ModelInputs
from workers.policy.loading import empty_network

ROUTED_EXPERTS = "routed_experts"  # the column of the experts that the rollout selected
ROUTERS = ("TopKRouter", "TopkRouter", "TokenChoiceRouter", "HunYuanMoEV1Gate")  # suffixes of supported class names
UNSUPPORTED = ("PhimoeTopKRouter", "DeepseekV4TopKRouter", "InklingTopkRouter")  # no single torch.topk

T = TypeVar("T")


@dataclass(frozen=True)
class Routes:
    """The output of one router for T tokens.

    Attributes:
        scores: (T, E) probabilities or other positive weights of the experts; logits if is_logits.
        is_logits: whether the scores are logits.
        experts: (T, k) selected experts.
        changed: (T,) bool, True if the router would have selected other experts than the replayed ones; None without
            replay.
    """

    scores: torch.Tensor
    is_logits: bool
    experts: torch.Tensor
    changed: torch.Tensor | None = None


class Routers:
    """The routers of a network in layer order, patched to record and replay.

    Attributes:
        layers: the layer of each router, see `router_layers`.
        top_k: number of experts that a router selects.
        extra_outputs: the column that a rollout engine fills with their routes (`RolloutEngine.extra_outputs`).

    Raises:
        UserError: see `find_routers`.
    """

    def __init__(self, network: nn.Module) -> None:
        self._routes: list[Routes] | None = None
        self._replayed: torch.Tensor | None = None
        self.layers = router_layers(network)
        routers = find_routers(network)
        for layer, router in enumerate(routers):
            # a router's matrix maps hidden states to the scores of the experts
            matrix = next(parameter for parameter in router.parameters() if parameter.ndim == 2)
            num_experts = matrix.shape[0]
            top_k: Any = router.top_k
            vars(router)["forward"] = partial(self._route, router.forward, layer, top_k, num_experts)
            self.top_k = top_k
        self.extra_outputs = {ROUTED_EXPERTS: (len(routers), self.top_k)}

    @contextmanager
    def watched(self, replayed: torch.Tensor | None = None) -> Iterator[list[Routes]]:
        """Records the routes of the forward inside the context, one entry per router.

        A backward pass after the context, which may recompute parts of the forward, also replays, and is not recorded.

        Args:
            replayed: (T, layers, k) experts to replay where they are not -1; None = no replay.
        """
        routes: list[Routes] = []
        self._routes = routes
        self._replayed = None if replayed is None else replayed.long()
        try:
            yield routes
        finally:
            # `_replayed` stays: activation checkpointing repeats the forward in the backward pass
            self._routes = None

    def _route(
        self, forward: Callable[..., T], layer: int, top_k: int, num_experts: int, *args: object, **kwargs: object
    ) -> T:
        """Replaces the forward of one router: calls the original forward and records its routes."""
        replayed = None if self._replayed is None else self._replayed[:, layer]
        watch = _Watch(top_k, num_experts, replayed)
        with watch:
            result = forward(*args, **kwargs)
        if self._routes is not None:
            self._routes.append(watch.routes())
        return result


class _Watch(TorchFunctionMode):
    """Torch function mode that intercepts how a router scores `num_experts` experts and selects `top_k` of them.

    If the router selects several times, the last selection counts: families with groups of experts first select groups.

    Args:
        top_k: number of experts that the router selects.
        num_experts: number of experts.
        replayed: (T, k) experts to select instead where they are not -1; None = no replay.
    """

    def __init__(self, top_k: int, num_experts: int, replayed: torch.Tensor | None) -> None:
        super().__init__()
        self.top_k = top_k
        self.num_experts = num_experts
        self.replayed = replayed
        self.scores: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self.experts: torch.Tensor | None = None
        self.changed: torch.Tensor | None = None

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "topk":
            logits = args[0]
            return self._selection(logits, result)
        # only before the selection: afterwards, some families normalise the weights of the selected experts
        is_score = name in ("softmax", "sigmoid") and self.experts is None
        if is_score and result.shape[-1] == self.num_experts:
            self.scores = result
        return result

    def _selection(self, logits: torch.Tensor, selection: torch.return_types.topk) -> torch.return_types.topk:
        """Records a selection of experts. Returns it, or with replay the replayed one."""
        own_experts = selection.indices
        num_scores = logits.shape[-1]
        num_selected = own_experts.shape[-1]
        # of groups of experts
        if num_scores != self.num_experts or num_selected != self.top_k:
            return selection
        self.logits = logits
        self.experts = own_experts
        if self.replayed is None:
            return selection

        replayed = self.replayed.view(own_experts.shape)
        experts = torch.where(replayed >= 0, replayed, own_experts)
        # sorted: the order of the experts does not change the output
        is_other = experts.sort(-1).values != own_experts.sort(-1).values
        self.changed = is_other.any(-1).flatten()
        self.experts = experts

        # self.scores has the scores of all experts; the argument of topk may exclude groups of experts
        scores = logits if self.scores is None else self.scores.view(logits.shape)
        replayed_scores = scores.gather(-1, experts)
        values = replayed_scores.to(selection.values.dtype)
        return torch.return_types.topk((values, experts))

    def routes(self) -> Routes:
        """Returns the recorded scores and experts."""
        is_logits = self.scores is None
        scores = self.logits if is_logits else self.scores
        assert scores is not None and self.experts is not None, (
            "the router called no topk: add its class to UNSUPPORTED"
        )
        scores_of_tokens = scores.view(-1, self.num_experts)
        experts_of_tokens = self.experts.view(-1, self.top_k)
        return Routes(scores_of_tokens, is_logits, experts_of_tokens, self.changed)


def find_routers(network: nn.Module) -> list[nn.Module]:
    """Returns the routers of a network, one per mixture of experts.

    Raises:
        UserError: the network has no experts, or not one supported router for each mixture.
    """
    num_mixtures = 0
    routers = []
    for module in network.modules():
        kind = type(module).__name__
        if kind.endswith("Experts"):
            num_mixtures += 1
        if kind.endswith(ROUTERS) and not kind.endswith(UNSUPPORTED):
            routers.append(module)
    family = type(network).__name__
    if not num_mixtures:
        raise UserError(f"{family} has no experts and therefore no routers")
    if len(routers) != num_mixtures:
        raise UserError(f"{family}: its routers do not select with one torch.topk over all experts, which is required")
    return routers


def router_layers(network: nn.Module) -> list[int]:
    """Returns the number of the decoder layer of each router of `find_routers`. Other layers have no experts."""
    names = {module: name for name, module in network.named_modules()}
    layers = []
    for router in find_routers(network):
        # 3 for "model.layers.3.mlp.gate"
        parts = names[router].split(".")
        numbers = [int(part) for part in parts if part.isdigit()]
        layers.append(numbers[0])
    return layers


def check_routers(model: NetworkConfig, options: Iterable[str]) -> None:
    """Raises UserError if the model has no supported routers, or if override_config sets transformers' own router loss.

    Args:
        model: the network, of which only the config is read.
        options: the options that need routers, for the message.
    """
    for name in ("output_router_logits", "router_aux_loss_coef"):
        if name in model.override_config:
            raise UserError(
                f"model.override_config.{name}={model.override_config[name]}: the loss of transformers is not computed "
                "here; remove this entry and set actor.router_aux_loss_coef"
            )
    for option in options:
        try:
            find_routers(empty_network(model))
        except UserError as error:
            raise UserError(f"{option} with model.path={model.path!r}: {error}; remove the option") from error


def replay_counts(routes: Sequence[Routes], inputs: ModelInputs) -> torch.Tensor:
    """Counts the pairs of token and layer of each sequence. Returns (b, 2): pairs whose router would have selected
    other experts than the replayed ones, and all pairs."""
    token_index = inputs.token_index
    is_token = token_index >= 0
    # of an arbitrary token where there is none
    any_index = token_index.clamp(min=0)
    counts = torch.zeros(*token_index.shape, 2, device=token_index.device)
    for layer in routes:
        assert layer.changed is not None
        counts[..., 0] += layer.changed[any_index] & is_token
        counts[..., 1] += is_token
    return inputs.total(counts.sum(1))


def load_balancing_loss(routes: Sequence[Routes], inputs: ModelInputs) -> torch.Tensor:
    """Computes the load-balancing loss (b,) of each sequence, averaged over layers.

    It is 1 if the load is even, at most E / k, and 0 without tokens.

    The loss of one layer is sum_e f_e P_e, where f_e is E / k times the share of the sequence's tokens that selected
    expert e, and P_e is the mean score of expert e over these tokens, with each token's scores normalised to sum 1. It
    is computed per sequence so that it does not depend on the split into micro-batches, unlike the usual product of two
    means over a batch. Only tokens in `inputs.token_index` count.
    Source: the sequence-wise balance loss of DeepSeek-V3 (arXiv 2412.19437, eq. 17 to 20), without its factor.
    """
    token_index = inputs.token_index
    is_token = token_index >= 0
    rows, columns = is_token.nonzero(as_tuple=True)
    tokens = token_index[rows, columns]
    total: torch.Tensor = torch.zeros((), device=token_index.device)
    for layer in routes:
        dtype = torch.promote_types(layer.scores.dtype, torch.float32)
        scores = layer.scores.to(dtype)
        if layer.is_logits:
            scores = scores.softmax(-1)
        else:
            scores = scores / scores.sum(-1, keepdim=True)
        is_selected = torch.zeros_like(scores).scatter_(1, layer.experts, 1.0)

        # (b, E): sums over this rank's tokens of each sequence; only the second one has a gradient
        num_experts = scores.shape[1]
        zeros = scores.new_zeros(len(token_index), num_experts)
        load = zeros.index_add(0, rows, is_selected[tokens])
        probability = zeros.index_add(0, rows, scores[tokens])
        # summed over the ranks that share a sequence before the product, which is not a sum over tokens
        products = inputs.total(load) * inputs.total(probability)
        num_selected = layer.experts.shape[1]
        total = total + products.sum(-1) * num_experts / num_selected
    # divided by the length twice, because both sums become means
    lengths = inputs.total(is_token.sum(-1))
    # a sequence without tokens has the sums 0
    squared_lengths = lengths.clamp(min=1).square()
    return total / squared_lengths / len(routes)
