"""The wire format: what arrives is bit for bit what was sent, and padding is not sent."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_lite.batch import wire
from verl_lite.protocol import DataProto, chunk_bounds

PAD = 151_643


def rollout(prompt_lengths: list[int], response_lengths: list[int], width: int, response_width: int) -> DataProto:
    """A batch as a rollout makes it, by a plain loop."""
    rng = np.random.default_rng(0)
    rows = len(prompt_lengths)
    prompts = torch.full((rows, width), PAD)
    responses = torch.full((rows, response_width), PAD)
    attention = torch.zeros(rows, width + response_width, dtype=torch.long)
    for i, (p, r) in enumerate(zip(prompt_lengths, response_lengths, strict=True)):
        prompts[i, width - p :] = torch.from_numpy(rng.integers(0, 151_000, p))
        responses[i, :r] = torch.from_numpy(rng.integers(0, 151_000, r))
        attention[i, width - p : width + r] = 1
    mask = attention[:, width:].clone()
    columns = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clip(min=0),
        "old_log_probs": -torch.from_numpy(rng.random((rows, response_width), dtype=np.float32)) * mask,
        "advantages": torch.from_numpy(rng.standard_normal((rows, response_width), dtype=np.float32)) * mask,
    }
    return DataProto.from_dict(columns)


def assert_bits_equal(a: DataProto, b: DataProto) -> None:
    assert set(a.batch.keys()) == set(b.batch.keys())
    for name in a.batch.keys():
        x, y = a.batch[name], b.batch[name]
        assert x.dtype == y.dtype and x.shape == y.shape, name
        same = x.flatten().view(torch.uint8).equal(y.flatten().view(torch.uint8)) if x.numel() else True
        assert same, name


def through_the_wire(data: DataProto, parts: int = 1) -> DataProto:
    packed = data.pack()
    received = []
    for start, stop in chunk_bounds(len(data), parts):
        buffers: list[pickle.PickleBuffer] = []
        message = pickle.dumps(packed.slice(start, stop), protocol=5, buffer_callback=buffers.append)
        received.append(pickle.loads(message, buffers=[bytes(buffer) for buffer in buffers]))  # read-only, as with Ray
    return DataProto.from_parts(received)


lengths = st.integers(min_value=0, max_value=12)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(lengths, lengths), min_size=1, max_size=9),
    parts=st.integers(1, 4),
    spoil=st.lists(st.tuples(st.sampled_from(range(8)), st.integers(0, 10**6), st.integers(0, 4)), max_size=3),
)
def test_round_trip_is_exact_whatever_is_outside_the_masks(
    rows: list[tuple[int, int]], parts: int, spoil: list[tuple[int, int, int]]
) -> None:
    data = rollout([p for p, _ in rows], [r for _, r in rows], 12, 12)
    names = sorted(data.batch.keys())
    for which, where, what in spoil:  # values that no layout expects
        column = data.batch[names[which]].view(-1)
        odd = [-0.0, float("nan"), float("inf"), 1e-42, -1.0] if column.is_floating_point() else [7, -1, 2**40, 2, 0]
        column[where % len(column)] = odd[what]
    assert_bits_equal(through_the_wire(data, parts), data)


dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
dtypes += [torch.int64, torch.int32, torch.uint8, torch.bool]


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([*dtypes, torch.complex64, torch.complex128]),
    shape=st.sampled_from([(3,), (3, 0), (3, 4), (3, 16), (3, 40), (3, 16, 2), (0, 16), (1, 9)]),
    seed=st.integers(0, 1000),
    sparse=st.booleans(),
)
def test_any_column_survives(dtype: torch.dtype, shape: tuple[int, ...], seed: int, sparse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    column = (torch.randn(shape, generator=generator) * 1000).to(dtype)
    if sparse and column.ndim > 1:
        column[:, shape[1] // 3 :] = 0
    data = DataProto.from_dict({"c": column, "id": torch.arange(shape[0])})
    received = through_the_wire(data, 2)
    assert_bits_equal(received, data)
    assert_bits_equal(pickle.loads(pickle.dumps(data)), data)
    assert_bits_equal(pickle.loads(pickle.dumps(data, protocol=4)), data)
    received.batch["id"].add_(1)  # what arrives owns its memory
    assert data.batch["id"].tolist() == list(range(shape[0]))


def test_padding_rows_multi_turn_masks_and_results_stay_packed() -> None:
    rng = np.random.default_rng(0)
    prompt, response = rng.integers(5, 60, 64).tolist(), rng.integers(5, 60, 64).tolist()
    data = rollout(prompt, response, 256, 256)
    data.batch["response_mask"][:, 3:5] = 0  # tokens of an environment between the policy's
    data.batch["advantages"] *= data.batch["response_mask"]
    padded = data[list(range(63))].pad(64)
    assert_bits_equal(through_the_wire(padded, 8), padded)
    columns = {column.name: column for column in padded.pack().columns}
    assert [name for name, column in columns.items() if column.span < 0 and not column.source] == ["is_padding"]
    assert columns["prompts"].source == columns["responses"].source == "input_ids"
    assert columns["position_ids"].values == columns["attention_mask"].values == -1  # nothing but their spans
    odd = data.select(deepcopy=True)
    odd.batch["input_ids"][1, 0] = 0  # a zero among the padding is no -0.0
    assert_bits_equal(through_the_wire(odd), odd)
    # what a worker returns has no masks beside it
    log_probs = data.batch["old_log_probs"]
    result = DataProto.from_dict({"old_log_probs": log_probs, "entropys": -log_probs})
    assert_bits_equal(through_the_wire(result, 4), result)
    assert len(pickle.dumps(result)) < 1.2 * 8 * sum(response)


@pytest.mark.parametrize("workers", [1, 8, 64])
def test_bytes_are_near_the_minimum(workers: int) -> None:
    rng = np.random.default_rng(0)
    prompt, response = rng.integers(50, 400, 256).tolist(), rng.integers(50, 400, 256).tolist()
    data = rollout(prompt, response, 1024, 1024)
    minimum = 4 * (sum(prompt) + sum(response)) + 2 * 4 * sum(response)
    packed = data.pack()
    sent = sum(len(pickle.dumps(packed.slice(a, b), protocol=5)) for a, b in chunk_bounds(256, workers))
    assert sent <= 1.15 * minimum
    assert sum(value.nbytes for value in data.batch.values()) > 8 * sent
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1 and len(message) < 2000  # the rest travels out of band


def test_parts_with_different_encodings_are_joined() -> None:
    regular, odd = rollout([3, 4], [5, 6], 16, 16), rollout([3, 4], [5, 6], 16, 16)
    odd.batch["old_log_probs"] += 1.0
    assert wire.concat([regular.pack(), odd.pack()]) is None
    joined = DataProto.from_parts([regular.pack(), odd.pack()])
    assert_bits_equal(joined, DataProto.concat([regular, odd]))


def test_objects_and_batches_without_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    data = DataProto.from_dict(non_tensors={"uid": ["a", "b", "c"], "score": np.array([1.0, np.nan, 2.0])})
    back = through_the_wire(data, 2)
    assert back.batch is None and back.non_tensor_batch["uid"].tolist() == ["a", "b", "c"]
    assert np.array_equal(back.non_tensor_batch["score"], data.non_tensor_batch["score"], equal_nan=True)
    assert pickle.loads(pickle.dumps(DataProto(meta_info={"a": 1}))).meta_info == {"a": 1}
    assert not wire.can_pack(nested)
