"""The routers of a mixture of experts: which experts each token goes to, and how evenly the load is spread.

Families differ in how a router scores its experts (softmax, sigmoid, biases, groups) and weighs the chosen ones, but
all choose by one `torch.topk` over the experts. That call is watched from outside while its own code runs, so
that nothing of a family is written down here a second time. Families that choose otherwise are refused by name.

Routing replay gives that call another result: the experts that the rollout chose, with the scores that they have now.
Router and experts learn as ever, and a token is trained by the experts that it was sampled with.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError
from workers.engine.packing import ModelInputs
from workers.policy.loading import empty_network

ROUTERS = ("TopKRouter", "TopkRouter", "TokenChoiceRouter", "HunYuanMoEV1Gate")  # how names of their classes end
OTHERWISE = ("PhimoeTopKRouter", "DeepseekV4TopKRouter", "InklingTopkRouter")  # not as the others do


@dataclass(frozen=True)
class Routes:
    """What one router gave T tokens. scores: (T, E), probabilities or other positive weights of the experts; logits
    where is_logits. experts: (T, k), those that were chosen. changed: (T,) bool, where they were given and the router
    would have chosen others."""

    scores: torch.Tensor
    is_logits: bool
    experts: torch.Tensor
    changed: torch.Tensor | None = None


class Routers:
    """The routers of a network, in the order of its layers. Raises UserError as `find_routers`."""

    def __init__(self, network: nn.Module) -> None:
        self._seen: list[Routes] | None = None
        self._given: torch.Tensor | None = None
        self.count = 0
        self.layers = router_layers(network)
        for layer, router in enumerate(find_routers(network)):
            matrix = next(parameter for parameter in router.parameters() if parameter.ndim == 2)
            top_k: Any = router.top_k
            vars(router)["forward"] = partial(self._route, router.forward, layer, top_k, matrix.shape[0])
            self.count, self.top_k = layer + 1, top_k

    @contextmanager
    def watched(self, given: torch.Tensor | None = None) -> Iterator[list[Routes]]:
        """The routes of the forward that runs inside, one entry for each router. given: (T, layers, k), experts to
        take, where they are not -1; its backward pass, which may compute parts of it again, takes them too, and is
        not seen."""
        seen: list[Routes] = []
        self._seen, self._given = seen, given
        try:
            yield seen
        finally:
            self._seen = None

    def _route(
        self, forward: Callable[..., Any], layer: int, top_k: int, num_experts: int, *args: Any, **kwargs: Any
    ) -> Any:
        """In place of a router's forward."""
        watch = _Watch(top_k, num_experts, None if self._given is None else self._given[:, layer])
        with watch:
            result = forward(*args, **kwargs)
        if self._seen is not None:
            self._seen.append(watch.routes())
        return result


class _Watch(TorchFunctionMode):
    """Sees how a router scores `num_experts` experts and chooses `top_k` of them. Of several choices the last counts:
    families with groups of experts choose among those first. given: (T, k) to choose instead, where it is not -1."""

    def __init__(self, top_k: int, num_experts: int, given: torch.Tensor | None) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.given = top_k, num_experts, given
        self.scores: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self.experts: torch.Tensor | None = None
        self.changed: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name in ("softmax", "sigmoid") and self.experts is None and result.shape[-1] == self.num_experts:
            self.scores = result
        elif name == "topk" and (args[0].shape[-1], result.indices.shape[-1]) == (self.num_experts, self.top_k):
            self.logits, self.experts = args[0], result.indices
            if self.given is not None:
                given = self.given.view(self.experts.shape)
                chosen = torch.where(given >= 0, given, self.experts)
                self.changed = (chosen.sort(-1).values != self.experts.sort(-1).values).any(-1).flatten()
                scores = args[0] if self.scores is None else self.scores.view(args[0].shape)  # whole, if groups are cut
                self.experts = chosen
                return torch.return_types.topk((scores.gather(-1, chosen).to(result.values.dtype), chosen))
        return result

    def routes(self) -> Routes:
        """What was seen."""
        scores = self.logits if self.scores is None else self.scores
        assert scores is not None and self.experts is not None, "a router of another form: add it to OTHERWISE"
        experts = self.experts.view(-1, self.top_k)
        return Routes(scores.view(-1, self.num_experts), self.scores is None, experts, self.changed)


def find_routers(network: nn.Module) -> list[nn.Module]:
    """The routers of a network, one for each mixture of experts. Raises UserError if it has none, or others."""
    names = [(type(module).__name__, module) for module in network.modules()]
    mixtures = sum(name.endswith("Experts") for name, _ in names)
    routers = [module for name, module in names if name.endswith(ROUTERS) and not name.endswith(OTHERWISE)]
    family = type(network).__name__
    if not mixtures:
        raise UserError(f"{family} has no experts, among which a router would choose")
    if len(routers) != mixtures:
        raise UserError(f"{family}: its routers do not choose by torch.topk over all experts, as is needed here")
    return routers


def router_layers(network: nn.Module) -> list[int]:
    """The number of the decoder layer that each of `find_routers` stands in; others have no experts."""
    names = {module: name for name, module in network.named_modules()}
    found = [names[router].split(".") for router in find_routers(network)]
    return [next(int(part) for part in parts if part.isdigit()) for parts in found]


def check_routers(model: NetworkConfig, options: Iterable[str]) -> None:
    """Raises UserError, which names the options, where they need routers and the model has none that fit, and for
    entries of transformers' own loss. Reads the config alone."""
    for name in ("output_router_logits", "router_aux_loss_coef"):
        if name in model.override_config:
            raise UserError(
                f"model.override_config.{name}={model.override_config[name]}: the loss of transformers is not computed "
                "here; leave it out, and set actor.router_aux_loss_coef"
            )
    for option in options:
        try:
            find_routers(empty_network(model))
        except UserError as error:
            raise UserError(f"{option} with model.path={model.path!r}: {error}; leave the option out") from error


def with_recorded_routes(inputs: ModelInputs, routed_experts: torch.Tensor) -> ModelInputs:
    """The inputs with the experts of each token, from routed_experts (b, P+R, layers, k). Of a shared prompt those
    of its first row. Raises ValueError where a token that counts has none."""
    places = inputs.token_index.flatten()
    rows = (places >= 0).nonzero().squeeze(1)
    if (routed_experts.flatten(0, 1)[rows] < 0).any():
        raise ValueError("rollout.router_replay: the batch has tokens without experts; its column is routed_experts")
    first = torch.full((inputs.input_ids.numel(),), len(places)).scatter_reduce(0, places[rows], rows, "amin")
    known = first < len(places)
    routes = torch.full((len(first), *routed_experts.shape[2:]), -1)
    routes[known] = routed_experts.flatten(0, 1)[first[known]].long()
    return replace(inputs, routed_experts=routes)


def replay_counts(routes: Sequence[Routes], token_index: torch.Tensor) -> torch.Tensor:
    """(b, 2) of each sequence: pairs of token and layer whose router would have chosen other experts, and all."""
    found = token_index >= 0
    counts = torch.zeros(*token_index.shape, 2, device=token_index.device)
    for layer in routes:
        assert layer.changed is not None
        counts[..., 0] += layer.changed[token_index.clamp(min=0)] & found
        counts[..., 1] += found
    return counts.sum(1)


def load_balancing_loss(routes: Sequence[Routes], token_index: torch.Tensor) -> torch.Tensor:
    """How unevenly each sequence uses the experts, (b,): 1 if evenly, up to E / k; mean over layers. 0 without tokens.

    Of one layer it is sum_e f_e P_e: f_e is E / k times the share of the sequence's tokens that went to expert e, P_e
    the mean of their scores, each token's scores normalised to sum to 1. A sum over sequences, it does not depend on
    how a batch was cut, as the usual product of two means over a batch does. token_index: as in `ModelInputs`; other
    tokens do not count.
    Source: the sequence-wise balance loss of DeepSeek-V3 (arXiv 2412.19437, eq. 17 to 20), without its factor.
    """
    rows, columns = (token_index >= 0).nonzero(as_tuple=True)
    places = token_index[rows, columns]
    total: torch.Tensor = torch.zeros((), device=token_index.device)
    for layer in routes:
        scores = layer.scores.to(torch.promote_types(layer.scores.dtype, torch.float32))
        scores = scores.softmax(-1) if layer.is_logits else scores / scores.sum(-1, keepdim=True)
        chosen = torch.zeros_like(scores).scatter_(1, layer.experts, 1.0)
        shape = len(token_index), scores.shape[1]
        load = scores.new_zeros(shape).index_add(0, rows, chosen[places])
        probability = scores.new_zeros(shape).index_add(0, rows, scores[places])
        total = total + (load * probability).sum(-1) * shape[1] / layer.experts.shape[1]
    lengths = (token_index >= 0).sum(-1).clamp(min=1)
    return total / lengths.square() / len(routes)
