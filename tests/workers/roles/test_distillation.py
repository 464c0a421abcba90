"""Distillation in the workers: the gradient against plain transformers on single rows, for other cuts of the batch and
two ranks; the top tokens; a teacher with a larger vocabulary."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from tests.workers.engine_cases import (
    PROMPT,
    TEMPERATURE,
    Batch,
    Case,
    build_engine,
    engine_of,
    gradient_of,
    planned,
    ragged_batch,
    relative_error,
)
from tests.workers.invariance import ONE_GROUP, with_empty_rows
from tests.workers.ranks import Ranks
from verl_lite.algos.distillation import divergence, sampled_reverse_kl
from verl_lite.config import ActorConfig
from verl_lite.config.distillation import DistillationLossConfig
from verl_lite.protocol import DataProto
from workers.losses import actor_loss
from workers.policy import output_layer
from workers.policy.logit_transform import PLAIN_LOGITS
from workers.policy.output_layer import token_log_probs, top_log_probs
from workers.roles.frozen_models import teacher_log_probs

BATCH = Batch(rows=9, seed=3, shared_prompts=3, failed_rows=(4,))
TOPK = 5
CUTS = {
    "whole": ONE_GROUP,
    "micro-batch 1": replace(ONE_GROUP, micro_batch_size=1),
    "20 tokens": replace(ONE_GROUP, max_token_len=20, row_order_seed=1),
    "padded": replace(ONE_GROUP, packed=False, micro_batch_size=2),
    "empty rows": replace(ONE_GROUP, micro_batch_size=3, row_order_seed=2, empty_rows=5),
    "tiles": replace(ONE_GROUP, max_token_len=33, chunk_tokens=3),
}
MODES = {
    "k1": DistillationLossConfig(loss_max_clamp=1.0, distillation_loss_coef=0.7),
    "k1, teachers only": DistillationLossConfig(use_task_rewards=False),
    **{
        f"{kind}, {topk}": DistillationLossConfig(f"{kind}_topk", topk, distillation_loss_coef=0.7)
        for kind, topk in (("forward_kl", TOPK), ("reverse_kl", TOPK), ("jsd", TOPK), ("reverse_kl", -1))
    },
}
ACTOR = ActorConfig(clip_ratio=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    tiny_qwen2(path / "student", hidden=32, heads=4, kv_heads=2, layers=1)
    tiny_qwen2(path / "teacher", hidden=64, heads=4, kv_heads=2, layers=2, seed=5)
    return path


def distributions(path: Path, data: DataProto) -> list[torch.Tensor]:
    """Log-probs (n, V) at the responses of each row, by plain transformers without padding, in fp64; over the
    candidates if the batch has some."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    rows = []
    for row in range(len(data)):
        real = data.batch["attention_mask"][row].bool()
        start, end = int(real[:PROMPT].sum()) - 1, int(real.sum()) - 1
        logits = model(data.batch["input_ids"][row][real].unsqueeze(0)).logits[0, start:end]
        if "sampling_candidates" in data:
            candidates = data.batch["sampling_candidates"][row, : end - start].long()
            logits = torch.full_like(logits, -1e9).scatter(1, candidates, logits.gather(1, candidates))
        rows.append((logits / TEMPERATURE).log_softmax(-1))
    return rows, dict(model.named_parameters())


def batch_of(folder: Path, options: DistillationLossConfig, is_truncated: bool = False) -> DataProto:
    """A batch with the teacher's columns, of which rows 1 and 8 have no teacher. is_truncated: each token was sampled
    from four candidates, fewer than the compared tokens."""
    data = ragged_batch(BATCH)
    if is_truncated:
        tokens = data.batch["responses"].int().unsqueeze(2)
        data.batch["sampling_candidates"] = torch.cat(
            [tokens, (tokens + 1) % 64, (tokens + 7) % 64, (tokens + 9) % 64], 2
        )
    students, teachers = (distributions(folder / name, data)[0] for name in ("student", "teacher"))
    width, vocab = data.batch["responses"].shape[1], students[0].shape[1]
    count = 0 if options.loss_mode == "k1" else vocab if options.topk == -1 else options.topk
    noise = torch.randn(len(data), width, generator=torch.Generator().manual_seed(4))
    old, sampled = torch.zeros(len(data), width), torch.zeros(len(data), width)
    ids, top = torch.zeros(len(data), width, count, dtype=torch.int32), torch.zeros(len(data), width, count)
    for row, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
        tokens = data.batch["responses"][row, : len(student)].unsqueeze(1)
        old[row, : len(student)] = student.gather(1, tokens).squeeze(1) + 0.2 * noise[row, : len(student)]
        sampled[row, : len(student)] = teacher.gather(1, tokens).squeeze(1)
        ids[row, : len(student)] = teacher.topk(count).indices.int() if count else 0
        top[row, : len(student)] = teacher.topk(count).values if count else 0
    has_teacher = torch.ones(len(data), dtype=torch.bool)
    has_teacher[[1, 8]] = False
    columns = {"teacher_ids": ids, "teacher_topk_log_probs": top} if count else {"teacher_log_probs": sampled}
    data.batch.update(columns | {"old_log_probs": old, "has_teacher": has_teacher})
    return data


def expected(folder: Path, data: DataProto, options: DistillationLossConfig) -> dict[str, np.ndarray]:
    """The gradient of the mean over tokens with a teacher, plus PPO's mean over all tokens."""
    rows, parameters = distributions(folder / "student", data)
    taught = task = torch.zeros((), dtype=torch.float64)
    counts = [0, 0]
    for row, log_probs in enumerate(rows):
        columns = {name: value[row, : len(log_probs)] for name, value in data.batch.items() if value.ndim > 1}
        mask = columns["response_mask"].bool()
        picked = log_probs.gather(1, columns["responses"].unsqueeze(1)).squeeze(1)
        ratio = (picked - columns["old_log_probs"]).exp()
        losses = torch.maximum(-ratio * columns["advantages"], -ratio.clamp(0.9, 1.1) * columns["advantages"])
        losses = torch.where(columns["advantages"] < 0, torch.minimum(losses, -3 * columns["advantages"]), losses)
        task, counts[0] = task + losses[mask].sum(), counts[0] + int(mask.sum())
        if not data.batch["has_teacher"][row]:
            continue
        if options.loss_mode == "k1":
            given = columns["old_log_probs"], columns["teacher_log_probs"]
            bound = options.loss_max_clamp
            values = sampled_reverse_kl(picked, *given, max_advantage=bound, clip_low=0.1, clip_high=0.1)
        else:
            at_ids = log_probs.gather(1, columns["teacher_ids"].long())
            kind = options.loss_mode.removesuffix("_topk")
            values = divergence(at_ids, columns["teacher_topk_log_probs"].double(), kind, options.topk != -1)
        taught, counts[1] = taught + values[mask].sum(), counts[1] + int(mask.sum())
    loss = options.use_task_rewards * task / counts[0] + options.distillation_loss_coef * taught / counts[1]
    assert 0 < counts[1] < counts[0]
    found = torch.autograd.grad(loss, list(parameters.values()))
    return {name: gradient.numpy() for name, gradient in zip(parameters, found, strict=True)}


def errors(folder: str, file: str, options: DistillationLossConfig, cuts: list[Case]) -> list[float]:
    """Relative errors of the gradients of the training engine; runs on each rank."""
    data, known = torch.load(file, weights_only=False)
    loss = partial(actor_loss, config=ACTOR, distillation=options)
    arguments = {"temperature": TEMPERATURE, "calculate_entropy": False}
    return [
        relative_error(
            gradient_of(
                engine_of(f"{folder}/student", cut), with_empty_rows(data, cut.empty_rows), cut, loss, **arguments
            ),
            known,
        )
        for cut in cuts
    ]


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_equals_plain_transformers_for_every_cut(folder: Path, tmp_path: Path, mode: str) -> None:
    options, file = MODES[mode], str(tmp_path / "known.pt")
    data = batch_of(folder, options)
    torch.save((data, expected(folder, data, options)), file)
    found = dict(zip(CUTS, errors(str(folder), file, options, list(CUTS.values())), strict=True))
    assert max(found.values()) < 2e-5, found


@pytest.mark.parametrize("mode", ["k1", "forward_kl, 5", "reverse_kl, 5"])
def test_the_gradient_over_the_candidates_of_truncated_sampling(folder: Path, tmp_path: Path, mode: str) -> None:
    options, file = MODES[mode], str(tmp_path / "known.pt")
    data = batch_of(folder, options, is_truncated=True)
    torch.save((data, expected(folder, data, options)), file)
    assert max(errors(str(folder), file, options, [CUTS["20 tokens"], CUTS["padded"], CUTS["tiles"]])) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["k1", "jsd, 5"])
def test_the_gradient_on_two_ranks(folder: Path, tmp_path: Path, ranks: Ranks, mode: str) -> None:
    """Also with both ranks on the tokens of each sequence."""
    options, file = MODES[mode], str(tmp_path / "known.pt")
    data = batch_of(folder, options)
    torch.save((data, expected(folder, data, options)), file)
    cuts = [CUTS["micro-batch 1"], CUTS["empty rows"], replace(ONE_GROUP, max_token_len=40, sequence_parallel=2)]
    for found in ranks.run(errors, str(folder), file, options, cuts, size=2):
        assert max(found) < 2e-5, found


@pytest.mark.parametrize("topk", [0, TOPK, 10_000])
def test_a_teacher_scores_as_plain_transformers(folder: Path, topk: int) -> None:
    """Sampled tokens, its top tokens, and given tokens; a vocabulary smaller than K is used whole."""
    data = ragged_batch(BATCH)
    rows, _ = distributions(folder / "teacher", data)
    data.meta_info |= {"temperature": TEMPERATURE, "topk": min(topk, rows[0].shape[1])}
    engine = build_engine(str(folder / "teacher"), ONE_GROUP)
    part, plan = planned(data, replace(ONE_GROUP, max_token_len=40))
    part.meta_info |= data.meta_info
    found = {name: plan.restore(DataProto.from_dict({name: value})).batch[name]
             for name, value in teacher_log_probs(engine, part).batch.items()}  # fmt: skip
    mask = data.batch["response_mask"].bool()
    for row, log_probs in enumerate(rows):
        kept = mask[row, : len(log_probs)]
        if not topk:
            known = log_probs.gather(1, data.batch["responses"][row, : len(log_probs)].unsqueeze(1)).squeeze(1)
            assert torch.allclose(
                found["teacher_log_probs"][row, : len(log_probs)][kept].double(), known[kept], atol=1e-5
            )
            continue
        top = log_probs.topk(data.meta_info["topk"])
        values, ids = (found[name][row, : len(log_probs)][kept] for name in ("teacher_topk_log_probs", "teacher_ids"))
        assert torch.allclose(values.double(), top.values[kept], atol=1e-5)
        assert torch.allclose(log_probs[kept].gather(1, ids.long()), top.values[kept], atol=1e-5)
    if topk == TOPK:  # the same tokens, given: the same values
        part.batch["teacher_ids"] = teacher_log_probs(engine, part).batch["teacher_ids"]
        again = teacher_log_probs(engine, part).batch
        assert set(again.keys()) == {"teacher_topk_log_probs"}
        shown = plan.restore(DataProto.from_dict(dict(again.items()))).batch["teacher_topk_log_probs"]
        assert torch.allclose(shown, found["teacher_topk_log_probs"], atol=1e-5)


@pytest.mark.parametrize(("kept_bytes", "tile_bytes"), [(1 << 20, 1 << 20), (0, 4 * 8 * 8)])
def test_top_tokens_in_tiles(monkeypatch: pytest.MonkeyPatch, kept_bytes: int, tile_bytes: int) -> None:
    monkeypatch.setitem(output_layer.TILE_BYTES, "cpu", tile_bytes)
    monkeypatch.setattr(output_layer, "KEPT_LOGITS_BYTES", kept_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((11, 5), (37, 5)))
    bias = torch.randn(37, generator=generator, dtype=torch.float64).index_fill(0, torch.arange(30, 37), -torch.inf)
    found = top_log_probs(hidden, weight, bias, 20, PLAIN_LOGITS.divided_by(0.7), 4)
    values, ids = ((hidden @ weight.T + bias) / 0.7).log_softmax(-1).topk(20)
    assert torch.equal(found["ids"].long(), ids) and torch.allclose(found["log_probs"], values, atol=1e-12)
    none = top_log_probs(hidden[:0], weight, bias, 20, PLAIN_LOGITS, 4)  # a rank without a prediction
    assert none["ids"].shape == none["log_probs"].shape == (0, 20)
    several = token_log_probs(
        hidden[:0], weight, bias, ids[:0], temperature=1.0, chunk_tokens=4, calculate_entropy=True
    )
    assert several.log_probs.shape == (0, 20)
