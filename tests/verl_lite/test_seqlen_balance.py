"""The planner, by properties over random ragged batches: what every plan must satisfy, whatever was asked."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import ATTENTION_PARITY_LENGTH, MiniBatch, compute_seqlen_metrics, plan_batch


@st.composite
def requests(draw):
    """(lengths, num_tokens, keyword arguments) of a plan: few rows and many, some without any valid token."""
    num_rows = draw(st.integers(1, 40))
    lengths = np.array(draw(st.lists(st.integers(1, 60), min_size=num_rows, max_size=num_rows)))
    shares = np.array(draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=num_rows, max_size=num_rows)))
    longest = int(lengths.max())
    by_tokens = draw(st.booleans())
    arguments = {
        "mini_batch_size": draw(st.none() | st.integers(1, 45)),
        "max_token_len": draw(st.integers(longest, 4 * longest)) if by_tokens else None,
        "micro_batch_size": None if by_tokens else draw(st.none() | st.integers(1, 6)),
        "epochs": draw(st.integers(1, 3)),
        "shuffle_seed": draw(st.none() | st.integers(0, 99)),
        "balance": draw(st.booleans()),
    }
    return lengths, (lengths * shares).astype(int), arguments


def compositions(plan):
    """By epoch and mini-batch: the sorted rows that take part."""
    return [
        [sorted(plan.order[(plan.mini_batch[:, e] == b) & ~plan.is_padding]) for b in range(len(steps))]
        for e, steps in enumerate(plan.schedule)
    ]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(requests(), st.integers(1, 7))
def test_every_plan_keeps_its_promises(request, world_size):
    lengths, num_tokens, arguments = request
    plan = plan_batch(lengths, num_tokens=num_tokens, world_size=world_size, **arguments)
    places = len(plan.order)
    rank = np.arange(places) // (places // world_size)
    assert places % world_size == 0
    # every row stands at exactly one place, and takes part exactly once in each epoch
    assert sorted(plan.order[~plan.is_padding]) == list(range(len(lengths)))
    assert (plan.mini_batch[~plan.is_padding] >= 0).all() and (plan.micro_batch[~plan.is_padding] >= 0).all()
    assert ((plan.mini_batch < 0) == (plan.micro_batch < 0)).all()
    if arguments["epochs"] == 1 or arguments["shuffle_seed"] is None:
        assert (plan.mini_batch >= 0).all()
    size = arguments["mini_batch_size"] or len(lengths)
    for epoch, steps in enumerate(plan.schedule):
        assert len(steps) == -(-len(lengths) // size)
        for b, step in enumerate(steps):
            in_step = plan.mini_batch[:, epoch] == b
            rows = plan.order[in_step & ~plan.is_padding]
            assert len(rows) == min(size, len(lengths) - b * size)
            # denominators, by a naive count
            assert step.num_tokens == sum(int(num_tokens[row]) for row in rows)
            assert step.num_sequences == sum(1 for row in rows if num_tokens[row] > 0)
            for r in range(world_size):
                own = in_step & (rank == r)
                # the same number of forward passes on each rank, none without a row, all within the bounds
                assert sorted(set(plan.micro_batch[own, epoch])) == list(range(step.num_micro_batches))
                for m in range(step.num_micro_batches):
                    members = plan.order[own & (plan.micro_batch[:, epoch] == m)]
                    assert arguments["max_token_len"] is None or lengths[members].sum() <= arguments["max_token_len"]
                    assert arguments["micro_batch_size"] is None or len(members) <= arguments["micro_batch_size"]
            if epoch == 0:
                counts = [int((in_step & ~plan.is_padding & (rank == r)).sum()) for r in range(world_size)]
                assert max(counts) - min(counts) <= 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(requests())
def test_mini_batches_and_denominators_do_not_depend_on_ranks_or_cuts(request):
    lengths, num_tokens, arguments = request
    plans = [plan_batch(lengths, num_tokens=num_tokens, world_size=w, **arguments) for w in (1, 2, 4)]
    uncut = arguments | {"max_token_len": None, "micro_batch_size": None, "balance": False}
    plans.append(plan_batch(lengths, num_tokens=num_tokens, world_size=3, **uncut))
    for other in plans[1:]:
        assert compositions(other) == compositions(plans[0])
        assert [[(s.num_tokens, s.num_sequences) for s in steps] for steps in other.schedule] == [
            [(s.num_tokens, s.num_sequences) for s in steps] for steps in plans[0].schedule
        ]


@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_mini_batches_of_given_sizes(shuffle_seed):
    ones = np.ones(9, dtype=int)
    plan = plan_batch(
        ones, num_tokens=ones, world_size=2, mini_batch_size=[2, 4, 3], epochs=2, shuffle_seed=shuffle_seed
    )
    for epoch in compositions(plan):
        assert [len(rows) for rows in epoch] == [2, 4, 3] and sorted(sum(epoch, [])) == list(range(9))
        assert shuffle_seed is not None or epoch == [[0, 1], [2, 3, 4, 5], [6, 7, 8]]
    assert [step.num_sequences for step in plan.schedule[1]] == [2, 4, 3]
    with pytest.raises(ValueError, match="has 5 rows, 9 were planned"):
        plan.apply(batch(5))
    with pytest.raises(ValueError, match="has 3 rows, 10 were planned"):
        plan.restore(batch(3))


def test_shuffle_draws_each_epoch_anew_and_repeats_with_the_seed():
    ones = np.ones(32, dtype=int)
    arguments = {"num_tokens": ones, "world_size": 2, "mini_batch_size": 8, "epochs": 2}
    first, again, other = (compositions(plan_batch(ones, shuffle_seed=seed, **arguments)) for seed in (5, 5, 6))
    assert first == again != other and first[0] != first[1]


def test_a_tight_budget_that_an_even_spread_would_break():
    lengths = np.array([5, 4, 3, 3, 3])  # 9 + 9 fits only as 5+4 and 3+3+3
    plan = plan_batch(lengths, num_tokens=lengths, world_size=1, mini_batch_size=None, max_token_len=9)
    assert plan.schedule[0][0].num_micro_batches == 2


def test_fewer_rows_than_ranks():
    plan = plan_batch([3, 5], num_tokens=[3, 0], world_size=4, mini_batch_size=None)
    assert len(plan.order) == 4 and plan.is_padding.sum() == 2
    assert set(plan.order[plan.is_padding]) == {0}  # copies of the shortest row
    assert plan.schedule == [[MiniBatch(1, 3, 1)]]


def batch(num_rows: int) -> DataProto:
    generator = torch.Generator().manual_seed(num_rows)
    lengths = torch.randint(0, 6, (num_rows,), generator=generator)
    return DataProto.from_dict(
        tensors={
            "responses": torch.randint(0, 99, (num_rows, 6), generator=generator),
            "response_mask": (torch.arange(6) < lengths[:, None]).long(),
        },
        non_tensors={"uid": [f"u{i}" for i in range(num_rows)]},
        meta_info={"temperature": 1.0},
    )


@pytest.mark.parametrize(("num_rows", "world_size"), [(1, 4), (5, 2), (8, 4), (13, 3)])
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_restore_undoes_apply(num_rows, world_size, shuffle_seed):
    data = batch(num_rows)
    lengths = data.batch["response_mask"].sum(1).numpy() + 2
    plan = plan_batch(
        lengths,
        num_tokens=lengths - 2,
        world_size=world_size,
        mini_batch_size=4,
        max_token_len=12,
        epochs=2,
        shuffle_seed=shuffle_seed,
    )
    applied = plan.apply(data)
    assert len(applied) == len(plan.order) and "is_padding" not in data and "schedule" not in data.meta_info
    assert applied.meta_info["schedule"] == plan.schedule
    assert applied.batch["is_padding"].tolist() == plan.is_padding.tolist()
    assert applied.batch["response_mask"][plan.is_padding].sum() == 0
    assert applied.batch["mini_batch"].shape == applied.batch["micro_batch"].shape == (len(plan.order), 2)
    assert applied.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in plan.order]
    restored = plan.restore(pickle.loads(pickle.dumps(applied)))
    assert set(restored.batch.keys()) == set(data.batch.keys())
    for name in data.batch.keys():
        assert torch.equal(restored.batch[name], data.batch[name])
    assert restored.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
    assert restored.meta_info == data.meta_info


def test_apply_keeps_earlier_padding_marks_and_restore_keeps_them():
    data = batch(3).pad(4)
    plan = plan_batch([4, 3, 2, 4], num_tokens=[1, 1, 1, 0], world_size=3, mini_batch_size=None)
    applied = plan.apply(data)
    assert applied.batch["is_padding"].sum() == plan.is_padding.sum() + 1
    assert plan.restore(applied).batch["is_padding"].tolist() == [False, False, False, True]


@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_ranks_get_equal_work(world_size):
    for seed, sigma, extra in itertools.product(range(3), (0.5, 1.0), (0, 1)):
        lengths = np.random.default_rng(seed).lognormal(6.5, sigma, 16 * world_size + extra).clip(10, 8192).astype(int)
        plan = plan_batch(lengths, num_tokens=lengths, world_size=world_size, mini_batch_size=None)
        costs = lengths + lengths.astype(float) ** 2 / ATTENTION_PARITY_LENGTH
        per_rank = np.where(plan.is_padding, 0.0, costs[plan.order]).reshape(world_size, -1).sum(1)
        assert per_rank.max() / per_rank.mean() <= 1.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [3, 9]}, r"actor.ppo_max_token_len_per_gpu=8: row 1 alone has 9 tokens. Set it .* at least 9"),
        ({"lengths": [], "num_tokens": []}, "B > 0"),
        ({"num_tokens": [1]}, r"lengths \(2,\) and num_tokens \(1,\)"),
        ({"mini_batch_size": 0}, "mini_batch_size=0; expected at least 1"),
        ({"mini_batch_size": [1, 2]}, "contain 3 sequences; the batch has 2"),
        ({"mini_batch_size": [2, 0]}, r"mini_batch_size=\[2, 0\]; expected at least 1"),
        ({"world_size": 0}, "world_size=0"),
        ({"micro_batch_size": -1}, "micro_batch_size=-1"),
        ({"epochs": 0}, "epochs=0"),
    ],
)
def test_impossible_requests_say_what_to_change(arguments, message):
    valid = {"lengths": [3, 2], "num_tokens": [1, 1], "world_size": 2, "mini_batch_size": None, "max_token_len": 8}
    with pytest.raises(ValueError, match=message):
        plan_batch(**(valid | arguments))


def test_tokens_of_ranks_by_hand():
    lengths = np.array([9, 9, 1, 1])
    plan = plan_batch(lengths, num_tokens=lengths, world_size=2, mini_batch_size=None)
    assert compute_seqlen_metrics(plan, lengths) == {
        "global_seqlen/min": 2.0,
        "global_seqlen/max": 18.0,
        "global_seqlen/minmax_diff": 16.0,
        "global_seqlen/mean": 10.0,
        "global_seqlen/balanced_min": 10.0,
        "global_seqlen/balanced_max": 10.0,
    }
