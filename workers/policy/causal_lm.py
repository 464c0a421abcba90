"""A Hugging Face causal language model as a policy: log-probs and entropies of response tokens from hidden states.

The backbone runs once over the (packed) tokens. The output layer (`output_layer.py`) is applied only to positions that
predict a response token, and in tiles, so the logits of the whole batch never exist at once.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl_lite.config import ModelConfig
from verl_lite.schema import SAMPLING_CANDIDATES
from workers.engine.packing import ModelInputs
from workers.policy.adapter import add_adapter
from workers.policy.loading import NetworkSpec, Policy, PolicyBuilder, build_network
from workers.policy.logit_transform import logit_transform
from workers.policy.output_layer import token_log_probs, top_log_probs
from workers.policy.router import ROUTED_EXPERTS, Routers, load_balancing_loss, replay_counts
from workers.policy.tile_functions import TILE_FUNCTIONS
from workers.policy.vision import placeholder_ids

TEACHER_IDS = "teacher_ids"


class CausalLMPolicy(Policy):
    """The policy network.

    Args:
        model: a `...ForCausalLM`. Its parameters have the prefix `model.`, followed by their Hugging Face names.
        chunk_tokens: maximum number of tokens in a tile of logits, if all logits need over KEPT_LOGITS_BYTES.
        routers: the routers of the model, if the forward needs them.
        vocab_size: number of tokens with a probability, for a teacher with more tokens than its student; None = all.

    Raises:
        UserError: the model's transform of its logits is no `LogitTransform`.
    """

    extra_inputs = (*Policy.extra_inputs, ROUTED_EXPERTS, SAMPLING_CANDIDATES, TEACHER_IDS)

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_tokens: int,
        routers: Routers | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.logit_transform = logit_transform(model)
        self.chunk_tokens = chunk_tokens
        self.routers = routers
        self.functions = TILE_FUNCTIONS
        # tokens that stand for images, and tokens that only a teacher has
        size = model.config.get_text_config().vocab_size
        first_excluded = vocab_size or size
        self.excluded_tokens = (*placeholder_ids(model.config), *range(first_excluded, size))

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float,
        calculate_entropy: bool,
        calculate_sum_pi_squared: bool = False,
        calculate_router_aux_loss: bool = False,
        count_router_replay: bool = False,
        calculate_topk: int = 0,
    ) -> dict[str, torch.Tensor]:
        """Computes log_probs (b, R) and the outputs whose option is True, 0 at tokens that are not predicted.

        Args:
            inputs: the micro-batch. With its column sampling_candidates, all statistics are those of the distribution
                over the candidates of each token. With teacher_ids (b, R, K), the outputs include log_probs_at_ids
                (b, R, K), the log-probs of these tokens.
            temperature: divides the logits.
            calculate_entropy: adds entropys (b, R), see `TokenStatistics`.
            calculate_sum_pi_squared: adds sum_pi_squared (b, R), see `TokenStatistics`.
            calculate_router_aux_loss: adds router_aux_loss (b,), see `load_balancing_loss`.
            count_router_replay: adds router_replay (b, 2), see `replay_counts`.
            calculate_topk: K; above 0 adds topk_ids and topk_log_probs (b, R, K), without gradient, of the K most
                probable tokens.
        """
        outputs = {}
        if self.routers is None:
            hidden = self.hidden_states(inputs)
        else:
            # the outputs of routers need the routes, but no part of their forward
            with self.routers.watched(inputs.extra.get(ROUTED_EXPERTS)) as routes:
                hidden = self.hidden_states(inputs)
            if calculate_router_aux_loss:
                outputs["router_aux_loss"] = load_balancing_loss(routes, inputs)
            if count_router_replay:
                outputs["router_replay"] = replay_counts(routes, inputs)

        # the output layer costs more than a decoder layer, so that it runs for predicted tokens only
        hidden = hidden.flatten(0, 1).index_select(0, inputs.predict_index)  # (N, H)
        head = self.model.get_output_embeddings()
        bias = self._output_bias(head)
        candidates = inputs.extra.get(SAMPLING_CANDIDATES)
        if calculate_topk:
            transform = self.logit_transform.divided_by(temperature)
            top = top_log_probs(hidden, head.weight, bias, calculate_topk, transform, self.chunk_tokens, candidates)
            outputs["topk_ids"] = inputs.scatter(top["ids"])
            outputs["topk_log_probs"] = inputs.scatter(top["log_probs"])

        # the tokens of a teacher are further targets, so that their logits need no pass of their own
        targets = inputs.targets
        teacher_ids = inputs.extra.get(TEACHER_IDS)
        if teacher_ids is not None:
            targets = torch.cat([targets.unsqueeze(1), teacher_ids], dim=1)
        statistics = token_log_probs(
            hidden,
            head.weight,
            bias,
            targets,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            calculate_entropy=calculate_entropy,
            calculate_sum_pi_squared=calculate_sum_pi_squared,
            transform=self.logit_transform,
            functions=self.functions,
            candidates=candidates,
        )
        values_by_name = statistics._asdict()
        if teacher_ids is not None:
            values_by_name["log_probs"] = statistics.log_probs[:, 0]
            values_by_name["log_probs_at_ids"] = statistics.log_probs[:, 1:]
        for name, values in values_by_name.items():
            if values is not None:
                outputs[name] = inputs.scatter(values)
        return outputs

    def _output_bias(self, head: nn.Linear) -> torch.Tensor | None:
        """Returns the bias of the output layer: -inf for tokens that the rollout engines never sample."""
        bias: torch.Tensor | None = getattr(head, "bias", None)
        if not self.excluded_tokens:
            return bias
        if bias is None:
            bias = torch.zeros(len(head.weight), device=head.weight.device)
        excluded = torch.tensor(self.excluded_tokens, device=bias.device)
        # a copy, because the bias may be a trained parameter
        return bias.index_fill(0, excluded, -torch.inf)


def causal_lm(chunk_tokens: int, with_routers: bool = False, vocab_size: int | None = None) -> PolicyBuilder:
    """Returns a builder of a `CausalLMPolicy`, which adds an adapter if `model.lora_rank` is above 0.

    Args:
        chunk_tokens: maximum number of tokens in a tile of logits.
        with_routers: whether the forward needs the routers.
        vocab_size: see `CausalLMPolicy`.
    """

    def build(spec: NetworkSpec) -> CausalLMPolicy:
        model = build_network(AutoModelForCausalLM, spec)
        routers = Routers(model) if with_routers else None
        policy = CausalLMPolicy(model, chunk_tokens, routers, vocab_size)
        if isinstance(spec.model, ModelConfig) and spec.model.lora_rank > 0:
            policy.adapter = add_adapter(policy.model, spec.model)
        return policy

    return build
