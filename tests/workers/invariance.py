"""The promise of the update, for every loss: its gradient does not depend on how a batch was cut or run.

`all_cases()` are the registered policy losses and the value loss with every aggregation mode they admit, `CUTS` the
ways to cut. The reference is plain transformers in fp64 on the whole mini-batch: one row at a time, full logits,
autograd. Against it stand the update loop in fp64 in this process, ranks one after the other (`summed_difference`), and
the training engine in fp32 over gloo (`differences`). The batch is off-policy, so that ratios matter and clips are
active; it has rows without any valid token. Also used by `python -m tests.bench invariance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from tests.tiny_model import tiny_qwen2
from tests.verl_lite.naive_losses import RATIO_LOSSES, SEQUENCE_MEANS
from tests.workers.critic_cases import CLIP, write_critic
from tests.workers.engine_cases import (
    CPU,
    PROMPT,
    RESPONSE,
    TEMPERATURE,
    Batch,
    Case,
    engine_of,
    gradient_of,
    parts_of,
    planned,
    ragged_batch,
    relative_error,
)
from tests.workers.ranks import Ranks
from verl_lite.config import ActorConfig, CriticConfig, ModelConfig, PolicyLossConfig
from verl_lite.core_algos import LOSS_AGG_MODES, POLICY_LOSS_REGISTRY, get_policy_loss, masked_whiten
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.schema import SAMPLING_CANDIDATES
from workers import losses
from workers.engine.packed_attention import PACKED_ATTENTION
from workers.engine.packing import ModelInputs, pack, pad
from workers.engine.sequence_parallel import SequenceGroup, sequence_group
from workers.engine.update import train_epochs
from workers.losses import actor_loss, critic_loss
from workers.policy.causal_lm import causal_lm
from workers.policy.loading import NetworkSpec, Policy, PolicyBuilder, load_model_config
from workers.policy.value_head import value_head

LossResult = tuple[torch.Tensor, dict[str, Metric]]
Outputs = dict[str, torch.Tensor]

# ---------------------------------------------------------------------------------------------------- the networks


@dataclass(frozen=True, eq=False)
class Network:
    """A network that learns. outputs: what its policy gives, from transformers' logits of one row's answer (n, ...)
    and the answer's tokens (n,)."""

    folder: str
    auto_class: Any
    build: PolicyBuilder
    outputs: Callable[[torch.Tensor, torch.Tensor], Outputs]
    forward_arguments: dict[str, Any] = field(default_factory=dict)


def _log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> Outputs:
    distribution = (logits / TEMPERATURE).log_softmax(-1)
    entropys = -(distribution.exp() * distribution).sum(-1)
    return {"log_probs": distribution.gather(1, tokens.unsqueeze(1)).squeeze(1), "entropys": entropys}


def _values(logits: torch.Tensor, tokens: torch.Tensor) -> Outputs:
    return {"values": logits[:, 0]}


POLICY = Network(
    "policy",
    AutoModelForCausalLM,
    causal_lm(chunk_tokens=5),
    _log_probs,
    {"temperature": TEMPERATURE, "calculate_entropy": True},
)


def candidates_of(tokens: torch.Tensor) -> torch.Tensor:
    """Made-up candidates (..., 4) of tokens: 2 to 4, with the token itself; none for tokens that are divided by 5."""
    others = torch.stack([(factor * tokens + 1) % 64 for factor in (3, 5, 7)], dim=-1)
    others[..., :2] = others[..., :2].masked_fill((tokens % 3 == 0).unsqueeze(-1), -1)
    chosen = torch.cat([others, tokens.unsqueeze(-1)], dim=-1)
    return chosen.masked_fill((tokens % 5 == 0).unsqueeze(-1), -1).int()


def _truncated_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> Outputs:
    rows = []
    for row, token, chosen in zip(logits, tokens, candidates_of(tokens).tolist(), strict=True):
        kept = sorted(set(chosen) - {-1}) or list(range(64))
        rows.append(_log_probs(row[None, kept], torch.tensor([kept.index(token)])))
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


TRUNCATED = replace(POLICY, outputs=_truncated_log_probs)
CRITIC = Network("critic", AutoModelForTokenClassification, value_head, _values)


def write_networks(folder: str | Path) -> str:
    """A tiny policy and a tiny critic below `folder`, whose path is returned."""
    policy = tiny_qwen2(Path(folder) / POLICY.folder, hidden=32, heads=4, kv_heads=2, layers=1)
    write_critic(policy, Path(folder) / CRITIC.folder)
    return str(folder)


# ---------------------------------------------------------------------------------------------------- the losses

OPTIONS = PolicyLossConfig(dro_beta=0.5, tis_upper_bound=1.2, cispo_unified_mask=True)
COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
TERMS = ("ref_log_prob", "rollout_is_weights")


@dataclass(frozen=True)
class PolicyCase:
    """A policy loss and how it is aggregated. with_terms: also entropy bonus, KL to the reference, rollout weights.
    truncated: over a part of the vocabulary."""

    name: str
    mode: str
    ratio_type: str = "token"
    with_terms: bool = False
    truncated: bool = False

    @property
    def network(self) -> Network:
        return TRUNCATED if self.truncated else POLICY

    def __str__(self) -> str:
        extras = [self.ratio_type] * (self.ratio_type != "token") + ["entropy, KL, weights"] * self.with_terms
        extras += ["truncated"] * self.truncated
        return " ".join([self.name.rpartition(":")[2], self.mode, *(f"({extra})" for extra in extras)])

    def loss_fn(self, data: DataProto, outputs: Outputs) -> LossResult:
        """The actor's loss."""
        config = ActorConfig(
            clip_ratio_low=0.1,
            clip_ratio_high=0.15,
            clip_ratio_c=1.2,
            ratio_type=self.ratio_type,
            loss_agg_mode=self.mode,
            entropy_coeff=0.1 if self.with_terms else 0.0,
            use_kl_loss=self.with_terms,
            kl_loss_coef=0.3,
            policy_loss=replace(OPTIONS, loss_mode=self.name),
        )
        return actor_loss(data, outputs, config)

    def batch(self, data: DataProto) -> DataProto:
        """The columns that the driver would send for it."""
        extras = [*get_policy_loss(self.name).columns, *(TERMS if self.with_terms else ())]
        extras += [SAMPLING_CANDIDATES] * self.truncated
        return data.select(batch_keys=[*COLUMNS, "advantages", "old_log_probs", *extras])


@dataclass(frozen=True)
class ValueCase:
    """The clipped value loss and how it is aggregated."""

    mode: str
    name = "value loss"
    network = CRITIC

    def __str__(self) -> str:
        return f"{self.name} {self.mode}"

    def loss_fn(self, data: DataProto, outputs: Outputs) -> LossResult:
        """The critic's loss."""
        return critic_loss(data, outputs, CriticConfig(cliprange_value=CLIP, loss_agg_mode=self.mode), ActorConfig())

    def batch(self, data: DataProto) -> DataProto:
        """The columns that the driver would send for it."""
        return data.select(batch_keys=[*COLUMNS, "values", "returns"])


LossCase = PolicyCase | ValueCase


def all_cases() -> list[LossCase]:
    """Every registered loss in every mode that it admits, with ratios of segments where it reads them."""
    cases: list[LossCase] = []
    for name in sorted(POLICY_LOSS_REGISTRY):
        modes = ("seq-mean-token-mean",) if name in SEQUENCE_MEANS else LOSS_AGG_MODES
        cases += [PolicyCase(name, mode) for mode in modes]
        cases += [PolicyCase(name, mode, ratio_type="segment") for mode in modes if name in RATIO_LOSSES]
        cases += [PolicyCase(name, mode, with_terms=True) for mode in modes if name in ("vanilla", "geo_mean")]
    cases.append(PolicyCase("vanilla", "token-mean", with_terms=True, truncated=True))
    return cases + [ValueCase(mode) for mode in LOSS_AGG_MODES]


def one_mode_each() -> list[LossCase]:
    """A part of them for a quick run: each kind of loss once, in one mode or another."""
    kinds: dict[Any, list[LossCase]] = {}
    for case in all_cases():
        kinds.setdefault(str(case).replace(case.mode, ""), []).append(case)
    return [cases[number % len(cases)] for number, cases in enumerate(kinds.values())]


def own_denominator(
    old: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, mode: str, config: Any, *_: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Wrong on purpose: divides by the tokens of the micro-batch at hand."""
    losses = torch.where(mask != 0, -advantages * (new - old).exp(), 0)
    return losses.sum() / (mask != 0).sum(), {}


def whitens_for_itself(
    old: torch.Tensor,
    new: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    config: Any,
    weights: torch.Tensor | None = None,
    *,
    batch_num_tokens: int,
    global_batch_size: int,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Wrong on purpose: the right denominator, but advantages whitened within the micro-batch."""
    if int(mask.sum()) > 1:
        advantages = masked_whiten(advantages, mask)
    losses = torch.where(mask != 0, -advantages * (new - old).exp(), 0)
    return losses.sum() / batch_num_tokens, {}


losses._additive_losses |= {own_denominator, whitens_for_itself}  # a run refuses them in its first update
WRONG: tuple[LossCase, ...] = tuple(
    PolicyCase(f"{__name__}:{loss.__name__}", "token-mean") for loss in (own_denominator, whitens_for_itself)
)

# ---------------------------------------------------------------------------------------------------- the cuts

ONE_GROUP = Case(min_num_params=10**9)  # one of FSDP: fewer collectives; test_update_invariance has the others


RAGGED = Batch(rows=9, seed=1, failed_rows=(2, 7))
SHARED_PROMPTS = Batch(rows=12, seed=2, shared_prompts=4, failed_rows=(5,))
ONE_ROW = Batch(rows=1, seed=6)
CUTS: dict[Batch, dict[str, Case]] = {
    RAGGED: {
        "whole": ONE_GROUP,
        "micro-batch 1": replace(ONE_GROUP, micro_batch_size=1),
        "micro-batch 3": replace(ONE_GROUP, micro_batch_size=3, balance=False),
        "20 tokens": replace(ONE_GROUP, max_token_len=20),
        "padded": replace(ONE_GROUP, packed=False, micro_batch_size=2),
        "row order": replace(ONE_GROUP, max_token_len=33, row_order_seed=1),
        "empty rows": replace(ONE_GROUP, packed=False, micro_batch_size=3, row_order_seed=2, empty_rows=5),
    },
    SHARED_PROMPTS: {
        "shared prompts": replace(ONE_GROUP, max_token_len=40),
        "shared prompts, padded": replace(ONE_GROUP, packed=False),
    },
    ONE_ROW: {"one row": ONE_GROUP, "one row, padded": replace(ONE_GROUP, packed=False, empty_rows=1)},
}
"""Two rows of the first batch have no valid token; the last has fewer rows than ranks."""


# ---------------------------------------------------------------------------------------------------- the reference


@dataclass(frozen=True)
class Reference:
    """A batch (fp32 columns) and, for each loss, the gradient by parameter (fp64)."""

    data: DataProto
    gradients: dict[LossCase, dict[str, np.ndarray]]

    def says_something(self, case: LossCase) -> bool:
        """Whether every parameter has a gradient; where all tokens are clipped there is none."""
        return all(np.abs(value).max() > 1e-6 for value in self.gradients[case].values())

    def difference(self, case: LossCase, found: dict[str, np.ndarray]) -> float:
        """Largest difference from the reference, relative to the largest entry of each parameter's gradient."""
        return relative_error(found, self.gradients[case])


def reference(path: str, batch: Batch, cases: Iterable[LossCase]) -> Reference:
    """By plain transformers on the whole mini-batch. path: as `write_networks` gives it."""
    data = ragged_batch(batch)
    outputs = {network: plain_outputs(_plain(path, network), network, data) for network in (POLICY, TRUNCATED, CRITIC)}
    data.batch.update(_other_columns(batch, outputs[POLICY]["log_probs"].detach(), outputs[CRITIC]["values"].detach()))
    data.batch[SAMPLING_CANDIDATES] = candidates_of(data.batch["responses"])
    lengths = data.batch["response_mask"].sum(1)
    wide = in_fp64(data)
    wide.meta_info |= {"num_tokens": int(lengths.sum()), "num_sequences": int((lengths > 0).sum())}
    gradients = {}
    for case in cases:
        loss, _ = case.loss_fn(case.batch(wide), outputs[case.network])
        named = dict(_plain(path, case.network).named_parameters())
        parts = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        gradients[case] = {name: part.numpy() for name, part in zip(named, parts, strict=True)}
    return Reference(data, gradients)


def in_fp64(data: DataProto) -> DataProto:
    """The same values in fp64."""
    return DataProto.from_dict({name: x.double() if x.is_floating_point() else x for name, x in data.batch.items()})


@cache
def _plain(path: str, network: Network) -> PreTrainedModel:
    return all_fp64(network.auto_class.from_pretrained(f"{path}/{network.folder}", dtype=torch.float64)).eval()


def all_fp64(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its norms in fp64 too; transformers computes them in fp32 whatever the dtype."""

    def norm(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(norm, module)  # type: ignore[method-assign]
    return model


def plain_outputs(model: PreTrainedModel, network: Network, data: DataProto) -> Outputs:
    """The network's outputs (B, R) with gradient: one row at a time, without padding."""
    rows: list[Outputs] = []
    for row in range(len(data)):
        columns = {name: value[row] for name, value in data.batch.items()}
        real = columns["attention_mask"].bool()
        prompt, length = int(real[:PROMPT].sum()), int(real.sum())
        logits = model(columns["input_ids"][real].unsqueeze(0)).logits[0, prompt - 1 : length - 1]
        outputs = network.outputs(logits, columns["responses"][: length - prompt])
        fill = (0, RESPONSE - (length - prompt))
        rows.append({name: torch.nn.functional.pad(value, fill) for name, value in outputs.items()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def single_rows(model: PreTrainedModel, network: Network, data: DataProto) -> Outputs:
    """The same with transformers' plain attention, 0 under mask 0."""
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    mask = data.batch["response_mask"]
    return {name: values * mask for name, values in plain_outputs(model, network, data).items()}


def _other_columns(batch: Batch, log_probs: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Columns of an older policy and critic, of a reference and of a rollout engine, some way off those of now."""
    generator = np.random.default_rng(batch.seed + 1)

    def draw(scale: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(scale * generator.standard_normal(log_probs.shape))

    return {
        "old_log_probs": (log_probs + draw(0.3)).clamp(max=-1e-3).float(),
        "ref_log_prob": (log_probs + draw(0.3)).float(),
        "rollout_is_weights": draw(0.3).exp().float(),
        "selected": draw() > 0.5,
        "scores": draw()[:, 0].float(),
        "values": (values + draw(CLIP)).float(),
        "returns": (values + draw()).float(),
        "staleness": (draw().abs() * 3).int(),
    }


# ---------------------------------------------------------------------------------------------------- fp64, in-process


class PlainEngine:
    """What the update loop needs of an engine, in fp64 in this process: gradients stay in the parameters."""

    def __init__(self, path: str, network: Network, packed: bool, group: SequenceGroup | None = None) -> None:
        model = ModelConfig(path=f"{path}/{network.folder}")
        spec = NetworkSpec(model, load_model_config(model), torch.float64, with_weights=True)
        self.policy: Policy = network.build(spec)
        self.policy.model.set_attn_implementation(PACKED_ATTENTION if packed else "sdpa")
        all_fp64(self.policy.model)
        self.arrange, self.forward_arguments = pack if packed else pad, network.forward_arguments
        self.group = group

    def forward(self, micro_batch: DataProto) -> tuple[Outputs, bool]:
        """As the training engine's."""
        inputs: ModelInputs = self.arrange(micro_batch.batch)
        if SAMPLING_CANDIDATES in micro_batch.batch.keys():
            inputs = inputs.with_column(SAMPLING_CANDIDATES, micro_batch.batch[SAMPLING_CANDIDATES])
        inputs = inputs if self.group is None else inputs.shard(self.group)
        return self.policy(inputs.to(CPU), **self.forward_arguments), inputs.num_active > 0

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Adds gradients; ranks run one after the other, so that they are summed already."""
        loss.backward()

    def optimizer_step(self) -> dict[str, Metric]:
        """Nothing moves."""
        return {}


@cache
def _plain_engine(path: str, network: Network, packed: bool) -> PlainEngine:
    return PlainEngine(path, network, packed)


def summed_difference(path: str, known: Reference, case: LossCase, cut: Case, world: int) -> float:
    """Of the gradient of one optimizer step, summed over `world` ranks one after the other, in fp64."""
    engine = _plain_engine(path, case.network, cut.packed)
    engine.policy.zero_grad()
    data = with_empty_rows(case.batch(in_fp64(known.data)), cut.empty_rows)
    for part in parts_of(data, cut, world)[0]:
        train_epochs(engine, part, case.loss_fn)
    named = engine.policy.model.named_parameters()
    return known.difference(case, {name: value.grad.numpy() for name, value in named if value.grad is not None})


def shared_differences(path: str, file: str, runs: list[tuple[LossCase, Case]]) -> list[float]:
    """Of the gradients of one optimizer step from the reference in `file`, in fp64, with ranks that share sequences;
    runs on each rank."""
    known: Reference = torch.load(file, weights_only=False)
    group, results = sequence_group(runs[0][1].sequence_parallel), []
    for case, cut in runs:
        engine = PlainEngine(path, case.network, True, group)
        part, _ = planned(with_empty_rows(case.batch(in_fp64(known.data)), cut.empty_rows), cut)
        train_epochs(engine, part, case.loss_fn)
        found = {}
        for name, value in engine.policy.model.named_parameters():
            dist.all_reduce(value.grad)
            found[name] = value.grad.numpy()
        results.append(known.difference(case, found))
    return results


def with_empty_rows(data: DataProto, count: int) -> DataProto:
    """The batch and `count` rows of no weight: copies whose response_mask is 0 and whose values are NaN."""
    if not count:
        return data
    rows = data[np.arange(count) % len(data)]
    for name, value in rows.batch.items():
        if value.is_floating_point():
            rows.batch[name] = torch.full_like(value, torch.nan)
    rows.batch["response_mask"] = torch.zeros_like(rows.batch["response_mask"])
    return DataProto.concat([data, rows])


# ---------------------------------------------------------------------------------------------------- fp32, over gloo


def differences(path: str, file: str, runs: list[tuple[LossCase, Case]]) -> list[float]:
    """Of the training engine's gradients from the reference in `file`; runs on each rank."""
    known: Reference = torch.load(file, weights_only=False)
    results = []
    for case, cut in runs:
        engine = engine_of(f"{path}/{case.network.folder}", cut, case.network.build)
        data = with_empty_rows(case.batch(known.data), cut.empty_rows)
        found = gradient_of(engine, data, cut, case.loss_fn, **case.network.forward_arguments)
        results.append(known.difference(case, found))
    return results


# ---------------------------------------------------------------------------------------------------- tables

Table = dict[LossCase, dict[str, float]]
"""For each loss, by column, the largest relative difference."""
CutsOf = dict[Batch, dict[str, Case]]


def fp64_table(
    path: str, cases: list[LossCase], worlds: tuple[int, ...] = (1, 2, 4, 7), cuts_of: CutsOf = CUTS
) -> Table:
    """In-process; a column for each cut, the largest over numbers of ranks."""
    table: Table = {case: {} for case in cases}
    for batch, cuts in cuts_of.items():
        known = reference(path, batch, cases)
        for case in cases:
            for name, cut in cuts.items():
                for world in worlds:
                    _note(table[case], name, summed_difference(path, known, case, cut, world))
    return table


def fp32_table(
    path: str, folder: str, cases: list[LossCase], ranks: Ranks, worlds: tuple[int, ...], cuts_of: CutsOf = CUTS
) -> Table:
    """Over gloo; a column for each number of ranks, the largest over cuts. folder: for the references."""
    table: Table = {case: {} for case in cases}
    for number, (batch, cuts) in enumerate(cuts_of.items()):
        file = f"{folder}/reference{number}.pt"
        torch.save(reference(path, batch, cases), file)
        runs = [(case, cut) for case in cases for cut in cuts.values()]
        for world in worlds:
            for results in ranks.run(differences, path, file, runs, size=world):
                for (case, _), found in zip(runs, results, strict=True):
                    _note(table[case], f"{world} rank{'s' * (world > 1)}", found)
    return table


LAYOUTS = ((2, 1), (4, 1), (2, 2))
"""Sizes (sequence parallel, data parallel)."""


def shared_table(
    path: str,
    folder: str,
    cases: list[LossCase],
    ranks: Ranks,
    layouts: tuple[tuple[int, int], ...] = LAYOUTS,
    cuts_of: CutsOf = CUTS,
) -> dict[str, Table]:
    """With ranks that share sequences, by precision: fp64 by the update loop, fp32 by the training engine. A column for
    each layout, the largest over packed cuts."""
    tables: dict[str, Table] = {kind: {case: {} for case in cases} for kind in ("fp64", "fp32")}
    for number, (batch, cuts) in enumerate(cuts_of.items()):
        file = f"{folder}/shared{number}.pt"
        torch.save(reference(path, batch, cases), file)
        for size, data_parallel in layouts:
            packed = [replace(cut, sequence_parallel=size) for cut in cuts.values() if cut.packed]
            runs = [(case, cut) for case in cases for cut in packed]
            for kind, measure in (("fp64", shared_differences), ("fp32", differences)):
                for results in ranks.run(measure, path, file, runs, size=size * data_parallel):
                    for (case, _), found in zip(runs, results, strict=True):
                        _note(tables[kind][case], f"sp {size} x dp {data_parallel}", found)
    return tables


def _note(row: dict[str, float], column: str, found: float) -> None:
    row[column] = float(np.max([row.get(column, 0.0), found]))  # NaN stays
