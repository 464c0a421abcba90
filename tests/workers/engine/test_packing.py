"""Packing: which tokens are kept, that they find their way back, and that sequences do not see each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from tests.workers.engine_cases import PROMPT, RESPONSE, Batch, ragged_batch
from tests.workers.peak_memory import PeakMemory
from workers.engine.packed_attention import packed_attention
from workers.engine.packed_sequences import PackedSequences
from workers.engine.packing import ModelInputs, align, pack, pad


def rows_of(*rows: tuple[list[int], list[int]], prompt: int = 4, response: int = 3) -> dict[str, torch.Tensor]:
    """Columns from (prompt, response) token lists."""
    ids = torch.zeros(len(rows), prompt + response, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, (asked, answered) in enumerate(rows):
        ids[row, prompt - len(asked) : prompt + len(answered)] = torch.tensor(asked + answered)
        attention[row, prompt - len(asked) : prompt + len(answered)] = 1
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, prompt:],
        "response_mask": attention[:, prompt:].clone(),
    }


def test_kept_tokens_by_hand() -> None:
    """The last response token predicts nothing and is left out; rows are sorted by length."""
    inputs = pack(rows_of(([1, 2, 3], [4, 5]), ([6], [7])))
    assert inputs.input_ids.tolist() == [[6, 1, 2, 3, 4]]
    assert inputs.position_ids.tolist() == [[0, 0, 1, 2, 3]]
    assert inputs.sequences == PackedSequences(((1, 1), (1, 4)), inputs.sequences.cu_seqlens, 4)
    assert inputs.sequences.cu_seqlens.tolist() == [0, 1, 5]
    assert inputs.predict_index.tolist() == [0, 3, 4]  # after 6; after 3; after 4
    assert inputs.targets.tolist() == [7, 4, 5]
    assert inputs.scatter(torch.tensor([10.0, 20.0, 30.0])).tolist() == [[20, 30, 0], [10, 0, 0]]


def test_aligned_tokens_by_hand() -> None:
    """Every sequence begins in the first column, without what nothing predicts from; padding comes last."""
    columns = rows_of(([1, 2, 3], [4, 5]), ([6], [7]), ([8], [9]))
    columns["response_mask"][2] = 0
    inputs = align(columns)
    assert inputs.input_ids.tolist() == [[1, 2, 3, 4], [6, 0, 0, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert inputs.sequences is None and inputs.attention_mask is None
    assert inputs.predict_index.tolist() == [2, 3, 4]  # after 3; after 4; after 6
    assert inputs.targets.tolist() == [4, 5, 7]
    assert inputs.scatter(torch.tensor([10.0, 20.0, 30.0])).tolist() == [[10, 20, 0], [30, 0, 0], [0, 0, 0]]


def test_a_shared_prompt_is_kept_once() -> None:
    columns = rows_of(([1, 2], [4, 5, 6]), ([3, 2], [4, 5]), ([1, 2], [7, 8]), ([1, 2], [9]))
    inputs = pack(columns)
    assert inputs.input_ids.tolist() == [[1, 2, 3, 2, 4, 7, 4, 5]]
    expanded = inputs.input_ids[0][inputs.sequences.expand]
    assert expanded.tolist() == [1, 2, 3, 2, 4, 1, 2, 7, 1, 2, 4, 5]
    assert inputs.sequences.runs == ((1, 2), (2, 3), (1, 4))
    seq_idx = inputs.sequences.borders["seq_idx"]
    assert seq_idx.dtype == torch.int32 and seq_idx.tolist() == [[0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]]
    assert expanded[inputs.sequences.collapse].tolist() == inputs.input_ids[0].tolist()
    assert dict(
        zip(zip(inputs.rows.tolist(), inputs.columns.tolist(), strict=True), inputs.predict_index.tolist(), strict=True)
    ) == {(3, 0): 1, (1, 0): 3, (1, 1): 4, (2, 0): 1, (2, 1): 5, (0, 0): 1, (0, 1): 6, (0, 2): 7}


def test_equal_tokens_with_other_padding_are_other_prompts() -> None:
    """A pad token may also be a real token: only real tokens are compared."""
    inputs = pack(rows_of(([0, 5], [7, 8]), ([5], [7, 8])))
    assert inputs.sequences.expand is None
    assert sorted(inputs.input_ids[0].tolist()) == [0, 5, 5, 7, 7]


def test_rows_without_weight_contribute_no_tokens() -> None:
    columns = rows_of(([1, 2, 3], [4, 5]), ([6, 7], [8, 9, 3]), ([5], [6, 7]))
    columns["response_mask"][1] = 0
    columns["is_padding"] = torch.tensor([False, False, True])
    inputs = pack(columns)
    assert inputs.input_ids.tolist() == [[1, 2, 3, 4]]
    assert inputs.rows.tolist() == [0, 0]


def test_holes_in_the_response_mask() -> None:
    """Observation tokens are input but not predicted; those at the end are not even input."""
    columns = rows_of(([1], [4, 5, 6]))
    columns["response_mask"] = torch.tensor([[1, 0, 1]])
    inputs = pack(columns)
    assert (inputs.input_ids.tolist(), inputs.targets.tolist()) == ([[1, 4, 5]], [4, 6])
    columns["response_mask"] = torch.tensor([[1, 0, 0]])
    assert pack(columns).input_ids.tolist() == [[1]]


@pytest.mark.parametrize("arrange", [pack, pad, align])
def test_stand_in_for_a_micro_batch_of_padding(arrange: object) -> None:
    for rows in (2, 0):
        columns = {name: value[:rows] for name, value in rows_of(([1, 2], [3]), ([4], [5, 6])).items()}
        columns["response_mask"] = torch.zeros_like(columns["response_mask"])
        inputs: ModelInputs = arrange(columns)  # type: ignore[operator]
        assert inputs.input_ids.shape == (1, 2)
        values = torch.ones(1, requires_grad=True)
        matrix = inputs.scatter(values)
        assert matrix.shape == (rows, 3) and not matrix.any()
        matrix.sum().backward()
        assert values.grad.tolist() == [0.0]


@pytest.mark.parametrize("arrange", [pack, pad, align])
def test_the_model_never_reads_the_padding_token(
    arrange: Callable[[Mapping[str, torch.Tensor]], ModelInputs],
) -> None:
    """A pad token that was added to the tokenizer alone has no embedding."""
    columns = rows_of(([1, 2, 3], [4, 5]), ([6], [7]))
    # a copy, because the input may share the memory of the columns
    expected = arrange(columns).input_ids.clone()
    columns["input_ids"][columns["attention_mask"] == 0] = 10**6
    assert torch.equal(arrange(columns).input_ids, expected)


@pytest.mark.parametrize("arrange", [pack, pad])
def test_token_index_has_every_token_that_counts(arrange: Callable[[Mapping[str, torch.Tensor]], ModelInputs]) -> None:
    """Those of rows with weight, before the last one that is predicted, and no others."""
    columns = ragged_batch(Batch(rows=9, shared_prompts=3, failed_rows=(4,))).batch
    inputs = arrange(columns)
    found = inputs.token_index >= 0
    assert torch.equal(inputs.input_ids.flatten()[inputs.token_index[found]], columns["input_ids"][found])
    last = columns["attention_mask"].sum(1) * columns["response_mask"].any(1) - 1
    assert torch.equal(found.sum(1), last.clamp(min=0)) and not (found & (columns["attention_mask"] == 0)).any()


def test_packed_and_padded_predict_the_same_tokens() -> None:
    columns = ragged_batch(Batch(rows=9, shared_prompts=3)).batch
    packed, padded, aligned = pack(columns), pad(columns), align(columns)
    for inputs in (packed, padded, aligned):
        last = inputs.input_ids.flatten()[inputs.predict_index]
        source = columns["input_ids"][inputs.rows, PROMPT + inputs.columns - 1]
        assert torch.equal(last, source)
        assert torch.equal(inputs.targets, columns["responses"][inputs.rows, inputs.columns])
    grid = torch.zeros(9, RESPONSE)
    grid[packed.rows, packed.columns] = 1
    assert torch.equal(grid.long(), columns["response_mask"])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "softcap", "sinks"),
    [
        (4, 4, None, None, None),
        (4, 2, None, None, None),
        (4, 1, 3, None, None),
        (4, 2, None, 0.5, None),
        (4, 2, 3, 0.5, None),
        (4, 2, None, None, [0.5, -1.0, 2.0, 0.0]),
        (4, 1, 3, None, [0.5, -1.0, 2.0, 0.0]),
    ],
)
def test_attention_equals_each_sequence_alone(
    heads: int, kv_heads: int, window: int | None, softcap: float | None, sinks: list[float] | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 3, 3, 3, 5, 8]
    inputs = pack(rows_of(*[([7] * length, [9]) for length in lengths], prompt=8))
    sequences = inputs.sequences
    total = sum(lengths)
    if sequences.expand is not None:
        total = len(inputs.input_ids[0])

    def draw(count: int) -> torch.Tensor:
        return torch.randn(1, count, total, 16, generator=generator, requires_grad=True)

    query, key, value = draw(heads), draw(kv_heads), draw(kv_heads)
    output, _ = packed_attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        0.3,
        packed_sequences=sequences,
        sliding_window=window,
        softcap=softcap,
        s_aux=None if sinks is None else torch.tensor(sinks),
    )
    places = torch.arange(total) if sequences.expand is None else sequences.expand
    expected = torch.zeros(total, heads, 16)
    for length, part in zip(lengths, places.split(lengths), strict=True):
        mask = torch.ones(length, length).tril()
        if window is not None:
            mask = mask * torch.ones(length, length).triu(1 - window)
        for head in range(heads):
            source = head // (heads // kv_heads)
            scores = 0.3 * query[0, head, part] @ key[0, source, part].T
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            unscaled = scores.masked_fill(mask == 0, -torch.inf).exp()
            total = unscaled.sum(-1, keepdim=True) + (0 if sinks is None else torch.tensor(sinks[head]).exp())
            expected[part, head] = unscaled / total @ value[0, source, part]
    assert torch.allclose(output[0], expected, atol=1e-5)


def test_rows_with_one_prompt_and_all_its_answers_by_hand() -> None:
    """The packed row is 1 2 7 4 5: the shorter answer first, and without the last tokens, which predict nothing."""
    sequences = pack(rows_of(([1, 2], [4, 5, 6]), ([1, 2], [7, 8]))).sequences
    assert sequences.to(torch.device("meta")).trees is None, "another device has attention for runs of sequences"
    trees = sequences.to(torch.device("cpu")).trees
    assert trees.index.tolist() == [[0, 1, 2, 3, 4]]
    assert trees.flat_positions.tolist() == [0, 1, 2, 3, 4]
    assert trees.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_long_answers_get_rows_of_their_own() -> None:
    """Two sequences of 4 tokens have 2 x 16 scores, a row of the prompt and both answers 49."""
    answers = [[4, 5, 6, 7], [7, 6, 5, 4]]
    columns = rows_of(*[([1], answer) for answer in answers], prompt=1, response=4)
    sequences = pack(columns).sequences
    assert sequences.expand is not None
    assert sequences.trees is None


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_with_one_row_per_prompt_equals_each_sequence_alone(kv_heads: int) -> None:
    """Output and gradients, for prompts of different lengths with three, one and two answers."""
    prompts = ([1, 2, 3, 4] * 2, [5, 6, 7, 5, 6, 7, 5], [8, 9] * 4)
    answers = ([[1, 2, 3], [4], [5, 6]], [[7, 8]], [[9, 1, 2], [3, 4, 5]])
    rows = []
    for prompt, of_prompt in zip(prompts, answers, strict=True):
        rows += [(prompt, answer) for answer in of_prompt]
    inputs = pack(rows_of(*rows, prompt=8))
    sequences = inputs.sequences
    assert sequences.trees is not None

    generator = torch.Generator().manual_seed(0)
    total = inputs.input_ids.shape[1]
    heads = [torch.randn(1, count, total, 16, generator=generator) for count in (4, kv_heads, kv_heads)]
    gradient = torch.randn(1, total, 4, 16, generator=generator)

    def results(form: PackedSequences) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in heads]
        output, _ = packed_attention(torch.nn.Identity(), *leaves, None, 0.3, packed_sequences=form)
        return [output, *torch.autograd.grad(output, leaves, gradient)]

    for found, expected in zip(results(sequences), results(replace(sequences, trees=None)), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_attention_refuses_what_it_does_not_compute() -> None:
    tensor = torch.zeros(1, 2, 4, 8)
    sequences = pack(rows_of(([1, 2, 3], [4, 5]))).sequences
    with pytest.raises(ValueError, match="use_remove_padding=false"):
        packed_attention(torch.nn.Identity(), tensor, tensor, tensor, None)
    both = {"softcap": 50.0, "s_aux": torch.zeros(2)}
    with pytest.raises(ValueError, match="soft-capping"):
        packed_attention(torch.nn.Identity(), tensor, tensor, tensor, None, packed_sequences=sequences, **both)
    with pytest.raises(ValueError, match="its own attention mask"):
        packed_attention(torch.nn.Identity(), tensor, tensor, tensor, tensor, packed_sequences=sequences)


def test_attention_with_a_soft_cap_holds_few_tensors_of_the_size_of_the_scores() -> None:
    heads, length, size = 4, 128, 16
    query, key, value = torch.randn(3, 1, heads, length, size)
    sequences = PackedSequences(((1, length),), torch.tensor([0, length], dtype=torch.int32), length)
    scores_nbytes = heads * length * length * 4
    with PeakMemory() as memory:
        packed_attention(torch.nn.Module(), query, key, value, None, softcap=50.0, packed_sequences=sequences)
    # no more than three of them at once, and smaller tensors
    assert memory.peak / scores_nbytes < 3.9
