"""The seed on the agentic `ActorWorker.loss_func`: its example as it stands, and its contract against plain loops."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from verl_lite.config import ActorConfig, AlgorithmConfig, DataConfig, PPOConfig, RolloutCorrectionConfig
from verl_lite.errors import UserError
from verl_lite.metrics import combine, to_host, values
from verl_lite.protocol import DataProto
from workers.roles.actor_rollout import ActorRolloutWorker, ActorWorker

ROWS, PROMPT, WIDTH, VOCAB = 4, 3, 6, 7
SHIFTED = ("ref_log_probs", "advantages", "old_log_probs", "infer_logprobs")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
OFF = {"clip_ratio_c": None}


def batch() -> tuple[DataProto, torch.Tensor]:
    """The seed's columns over prompt and answer: the mask (B, S), what belongs to predictions (B, S - 1); logits.

    Two turns of the agent in the first row; the last row's rollout failed.
    """
    generator = torch.Generator().manual_seed(5)
    turns = [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    mask = torch.nn.functional.pad(torch.tensor(turns), (PROMPT, 0))
    normal = {name: torch.randn(ROWS, PROMPT + WIDTH - 1, generator=generator).double() for name in SHIFTED}
    normal["infer_logprobs"] = normal["old_log_probs"] + 0.3 * normal["infer_logprobs"]
    ids = torch.randint(VOCAB, mask.shape, generator=generator)
    logits = torch.randn(*mask.shape, VOCAB, generator=generator).double().requires_grad_()
    columns = {"response_mask": mask, "input_ids": ids, "attention_mask": torch.ones_like(mask), **normal}
    columns |= {name: columns[name] - 1.5 for name in SHIFTED if name != "advantages"}
    return DataProto.from_dict(columns), logits


def narrow(data: DataProto) -> DataProto:
    """The same in our layout: the columns of the answer's tokens alone, under our names."""
    columns = {name: data.batch[name][:, -WIDTH:] for name in ("response_mask", "advantages", "old_log_probs")}
    ours = {"ref_log_prob": "ref_log_probs", "rollout_log_probs": "infer_logprobs"}
    columns |= {name: data.batch[theirs][:, -WIDTH:] for name, theirs in ours.items()}
    return DataProto.from_dict(columns | {"input_ids": data.batch["input_ids"]})


def worker_of(correction: dict[str, Any] | None = None, **options: Any) -> ActorWorker:
    config = PPOConfig(actor=ActorConfig(**options), data=DataConfig(max_response_length=WIDTH))
    config.algorithm = AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(**correction or {}))
    return ActorWorker(config, 10, None)


def runs(mask: list[int]) -> Iterator[list[int]]:
    """The positions of each run of consecutive ones."""
    run: list[int] = []
    for t, one in enumerate([*mask, 0]):
        if one:
            run.append(t)
        elif run:
            yield run
            run = []


def by_hand(
    data: DataProto, logits: torch.Tensor, o: ActorConfig, bounds: tuple[float, float] | None
) -> dict[str, Any]:
    """ROLL's loss and metrics, token by token. bounds: largest weight, and largest ratio of trainer to rollout."""
    low, high = (o.clip_ratio if one is None else one for one in (o.clip_ratio_low, o.clip_ratio_high))
    rows: list[list[dict[str, float]]] = []
    probabilities = torch.softmax(logits.detach(), dim=-1)
    for row in range(ROWS):
        column = {name: data.batch[name][row].tolist() for name in SHIFTED}
        mask, ids = data.batch["response_mask"][row, 1:].tolist(), data.batch["input_ids"][row, 1:].tolist()
        trust = [math.exp(a - b) for a, b in zip(column["old_log_probs"], column["infer_logprobs"], strict=True)]
        mask = [
            int(m and (bounds is None or 1 / bounds[1] <= x <= bounds[1])) for m, x in zip(mask, trust, strict=True)
        ]
        new = [math.log(p[i]) for p, i in zip(probabilities[row].tolist(), ids, strict=False)]
        change = [a - b for a, b in zip(new, column["old_log_probs"], strict=True)]
        tokens = []
        for run in runs(mask):
            mean = sum(change[t] for t in run) / len(run)
            for t in run:
                ratio, a = math.exp(mean if o.ratio_type == "segment" else change[t]), column["advantages"][t]
                plain, cut = -ratio * a, -min(max(ratio, 1 - low), 1 + high) * a
                worse = max(plain, cut)
                loss = min(worse, -a * o.clip_ratio_c) if a < 0 and o.clip_ratio_c else worse
                d = column["ref_log_probs"][t] - new[t]
                p = probabilities[row, t].tolist()
                token = {"pg_loss": loss * (1 if bounds is None else min(trust[t], bounds[0])), "clipfrac": cut > plain}
                token |= {"kl_loss": math.exp(d) - d - 1, "entropy_loss": -sum(x * math.log(x) for x in p)}
                token |= {"approxkl": change[t] ** 2 / 2, "policykl": change[t], "ratio": ratio}
                tokens.append(token | {"high": ratio > 1 + high, "low": ratio < 1 - low})
        rows += [tokens] if tokens else []

    def total(name: str, mode: str) -> float:
        sums = [sum(token[name] for token in tokens) for tokens in rows]
        if mode == "token-mean":
            return sum(sums) / sum(len(tokens) for tokens in rows)
        parts = {"seq-mean-token-mean": [len(tokens) for tokens in rows], "seq-mean-token-sum": [1] * len(rows)}
        return sum(s / n for s, n in zip(sums, parts.get(mode, [WIDTH] * len(rows)), strict=True)) / len(rows)

    names = ("pg_loss", "kl_loss", "entropy_loss", "clipfrac", "approxkl", "policykl")
    found = {name: total(name, o.loss_agg_mode) for name in names}
    found["total_loss"] = found["pg_loss"] - o.entropy_coeff * found["entropy_loss"]
    found["total_loss"] += o.kl_loss_coef * found["kl_loss"] if o.use_kl_loss else 0.0
    ratios = [token["ratio"] for tokens in rows for token in tokens]
    found |= {"ratio_mean": total("ratio", "seq-mean-token-mean"), "ratio_max": max(ratios), "ratio_min": min(ratios)}
    sides = {f"ppo_ratio_{side}_clipfrac": total(side, "token-mean") for side in ("high", "low")}
    return found | sides | {"ppo_ratio_clipfrac": sum(sides.values())}


def test_the_example_of_the_seed_runs_as_it_stands() -> None:
    actor_worker = worker_of()
    training_batch, model_logits = batch()
    del training_batch.batch["infer_logprobs"]  # optional

    loss, metrics = actor_worker.loss_func(
        data=training_batch,
        output_tensor=model_logits
    )  # fmt: skip

    names = ("pg_loss", "kl_loss", "ppo_ratio_clipfrac", "ratio_mean", "ratio_max", "ratio_min", "approxkl", "policykl")
    assert {f"actor/{name}" for name in names} <= metrics.keys()
    assert type(metrics) is dict and {type(one) for one in metrics.values()} == {float}
    assert loss.shape == () and loss.item() == metrics["actor/pg_loss"], "the KL is only reported"
    loss.backward()
    is_trained = torch.nn.functional.pad(training_batch.batch["response_mask"][:, 1:], (0, 1)).bool()
    assert model_logits.grad is not None and not model_logits.grad[~is_trained].any()
    assert model_logits.grad[is_trained].any()


def test_the_worker_has_the_name_of_roll_and_yesterdays_name_still_works() -> None:
    assert ActorRolloutWorker is ActorWorker
    assert list(inspect.signature(ActorWorker.loss_func).parameters) == ["self", "data", "output_tensor"]
    assert list(inspect.signature(ActorWorker).parameters)[:3] == ["config", "total_training_steps", "rewards"]


TOKEN_BY_TOKEN = {"rollout_is": "token", "rollout_rs": "token_ratio"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        (OFF, None),
        (OFF | {"ratio_type": "segment", "clip_ratio_low": 0.1, "clip_ratio_high": 0.6}, None),
        ({"clip_ratio": 0.3, "clip_ratio_c": 1.6}, None),
        (OFF | {"use_kl_loss": True, "kl_loss_coef": 0.4, "entropy_coeff": 0.3}, None),
        (OFF | {"ratio_type": "segment", "clip_ratio_c": 1.4}, (1.1, 1.4)),
    ],
    ids=["plain", "segment, asymmetric", "dual clip", "KL and entropy", "correction"],
)
def test_both_layouts_give_the_loss_and_the_metrics_of_a_plain_loop(options: Any, bounds: Any, mode: str) -> None:
    data, logits = batch()
    thresholds = (
        {} if bounds is None else dict(zip(("rollout_is_threshold", "rollout_rs_threshold"), bounds, strict=True))
    )
    correction = {} if bounds is None else TOKEN_BY_TOKEN | {name: str(bound) for name, bound in thresholds.items()}
    worker = worker_of(correction, loss_agg_mode=mode, calculate_entropy=True, **options)
    expected = by_hand(data, logits, worker.config.actor, bounds)
    gradients = []
    for layout in (data, narrow(data)):
        loss, metrics = worker.loss_func(layout, logits)
        found = {name: metrics[f"actor/{name}"] for name in expected}
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9) and loss.item() == metrics["actor/total_loss"]
        gradients += torch.autograd.grad(loss, logits)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
    assert ("actor/train_infer_final_mask_mean" in metrics) is (bounds is not None)
    assert {*data.batch.keys()} == {*SHIFTED, "response_mask", "input_ids", "attention_mask"}, "the batch is as it was"


def test_rolls_counts_of_a_mini_batch_are_the_denominators() -> None:
    """Losses of the rows, each by itself, add up to that of the whole."""
    data, logits = batch()
    worker = worker_of(loss_agg_mode="seq-mean-token-mean")
    whole, _ = worker.loss_func(data, logits)
    counts = {"batch_num_tokens": {"response_mask": 9}, "global_valid_samples": {"response_mask": 3}}
    parts = [DataProto.from_dict(dict(data[row : row + 1].batch.items()), meta_info=counts) for row in range(ROWS)]
    losses = [worker.loss_func(part, logits[row : row + 1])[0].item() for row, part in enumerate(parts)]
    assert sum(losses) == pytest.approx(whole.item(), rel=1e-9) and losses[3] == 0.0


def test_what_a_batch_cannot_give_is_named() -> None:
    data, logits = batch()
    del data.batch["ref_log_probs"]
    assert "actor/kl_loss" not in worker_of().loss_func(data, logits)[1]
    with pytest.raises(ValueError, match="actor.use_kl_loss=true: column 'ref_log_prob' is missing"):
        worker_of(use_kl_loss=True).loss_func(data, logits)
    with pytest.raises(ValueError, match="actor.router_aux_loss_coef needs outputs by name; logits do not"):
        worker_of(router_aux_loss_coef=0.1).loss_func(data, logits)


class Own(ActorWorker):
    """A loss of a user's own, by the counts of the mini-batch under ROLL's names or, wrongly, by its own rows."""

    divides_by_own_rows = False

    def loss_func(self, data: DataProto, output_tensor: Any) -> tuple[torch.Tensor, dict[str, float]]:
        loss, metrics = super().loss_func(data, output_tensor)
        count = data.meta_info["batch_num_tokens"]["response_mask"]
        if self.divides_by_own_rows:
            count = int(data.batch["response_mask"].sum())
        more = (output_tensor["log_probs"].square() * data.batch["response_mask"]).sum() / count
        return loss + more, metrics | {"actor/more@sum": more.item()}


def micro_batches(size: int) -> tuple[list[DataProto], list[torch.Tensor]]:
    """A mini-batch as training cuts it, without the row that failed, and the log-probs of the forward."""
    counts = {"num_tokens": 9, "num_sequences": 3}
    columns = {name: column[:3] for name, column in narrow(batch()[0]).batch.items() if name != "input_ids"}
    data = DataProto.from_dict(columns, meta_info=counts)
    outputs = (columns["old_log_probs"] + 0.1).requires_grad_()
    cuts = [slice(start, start + size) for start in range(0, 3, size)]
    return [data[cut] for cut in cuts], [outputs, *(outputs[cut] for cut in cuts)]


@pytest.mark.parametrize("options", [{}, {"rollout_is": "token", "rollout_rs": "seq_mean_ratio"}])
def test_the_loss_of_a_subclass_trains_however_the_batch_is_cut(options: dict[str, str]) -> None:
    """Its gradient is that of the default loss and of what it adds; metrics are those of a mini-batch."""
    thresholds = {"rollout_is_threshold": "2.0", "rollout_rs_threshold": "0.999_1.001"} if options else {}
    plain, own = worker_of(options | thresholds, use_kl_loss=True), Own(worker_of().config, 10, None)
    own.config = plain.config
    found = []
    for worker, size in ((plain, 3), (own, 1), (own, 2), (own, 3)):
        parts, (leaf, *outputs) = micro_batches(size)
        results = [worker._loss(part, {"log_probs": out}) for part, out in zip(parts, outputs, strict=True)]
        [gradient] = torch.autograd.grad(sum(loss for loss, _ in results), leaf)
        found.append((gradient, values(combine(to_host([metrics for _, metrics in results])))))
    (gradient, metrics), *rest = found
    mask = parts[0].batch["response_mask"]
    for own_gradient, own_metrics in rest:
        torch.testing.assert_close(own_gradient, gradient + 2 * leaf.detach() * mask / 9)
        more = (leaf.detach().square() * mask).sum().item() / 9
        parted = {name: metrics[name] for name in metrics if not name.startswith("rollout_corr/")}
        assert {name: own_metrics[name] for name in (*parted, "actor/more")} == pytest.approx(
            parted | {"actor/more": more}, rel=1e-6
        )


@pytest.mark.parametrize("size", [1, 3])
def test_a_loss_that_divides_by_its_own_micro_batch_is_refused(size: int) -> None:
    worker = Own(worker_of().config, 10, None)
    worker.divides_by_own_rows = True
    parts, (_, *outputs) = micro_batches(size)
    with pytest.raises(UserError, match="num_tokens.*actor.policy_loss.loss_mode=module:function"):
        worker._loss(parts[0], {"log_probs": outputs[0]})
