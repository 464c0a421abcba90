"""Every policy loss and aggregation mode keeps the promise: one gradient, however the batch is cut and run.

fp64 in this process within 1e-10, fp32 over gloo within 1e-5, both against plain transformers on the whole mini-batch;
see `tests.workers.invariance`. Losses that are wrong on purpose must fail the same comparison.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.verl_lite.naive_losses import SEQUENCE_MEANS
from tests.workers.engine_cases import PROMPT, RESPONSE, Batch, Case
from tests.workers.invariance import (
    CUTS,
    RAGGED,
    WRONG,
    LossCase,
    PolicyCase,
    Table,
    all_cases,
    differences,
    fp32_table,
    fp64_table,
    one_mode_each,
    reference,
    summed_difference,
    write_networks,
)
from tests.workers.ranks import Ranks
from verl_lite.core_algos import LOSS_AGG_MODES, POLICY_LOSS_REGISTRY

FP64, FP32 = 1e-10, 1e-5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_networks(tmp_path_factory.mktemp("networks"))


def assert_within(table: Table, bound: float) -> None:
    beyond = {f"{case}, {column}": found for case, row in table.items() for column, found in row.items()}
    assert not {name: found for name, found in beyond.items() if not found < bound}


def test_the_table_has_every_loss_and_mode() -> None:
    names = {str(case) for case in all_cases()}
    for name in (*POLICY_LOSS_REGISTRY, "value loss"):
        modes = ("seq-mean-token-mean",) if name in SEQUENCE_MEANS else LOSS_AGG_MODES
        assert {f"{name} {mode}" for mode in modes} <= names
    assert {case.name for case in one_mode_each()} == {*POLICY_LOSS_REGISTRY, "value loss"}


def test_references_have_gradients_and_active_clips(path: str) -> None:
    """A comparison of zeros would prove nothing, nor one in which every ratio is 1."""
    for batch in CUTS:
        known = reference(path, batch, all_cases())
        assert all(known.says_something(case) for case in all_cases())
    known = reference(path, RAGGED, [])
    mask = known.data.batch["response_mask"]
    assert (mask.sum(1) == 0).sum() == 2 and (mask[0] == 0).any()
    vanilla = PolicyCase("vanilla", "token-mean")
    data = vanilla.batch(known.data)
    log_probs = data.batch["old_log_probs"] + 0.2 * torch.sin(torch.arange(mask.numel())).view(mask.shape)
    data.meta_info = {}
    _, metrics = vanilla.loss_fn(data, {"log_probs": log_probs})
    assert metrics["pg_clipfrac"].value > 0.1 and metrics["pg_clipfrac_lower"].value > 0


@pytest.mark.slow
def test_fp64_in_process(path: str) -> None:
    assert_within(fp64_table(path, one_mode_each(), worlds=(3,)), FP64)


@pytest.mark.slow
def test_fp32_on_two_ranks(path: str, ranks: Ranks, tmp_path: Path) -> None:
    few = {RAGGED: {name: CUTS[RAGGED][name] for name in ("20 tokens", "empty rows")}}
    assert_within(fp32_table(path, str(tmp_path), one_mode_each(), ranks, worlds=(2,), cuts_of=few), FP32)


@pytest.mark.long
def test_the_whole_table_in_fp64(path: str) -> None:
    assert_within(fp64_table(path, all_cases()), FP64)


@pytest.mark.long
def test_fp32_by_every_cut_and_number_of_ranks(path: str, ranks: Ranks, tmp_path: Path) -> None:
    """One mode of each loss; `python -m tests.bench invariance` measures all of them."""
    assert_within(fp32_table(path, str(tmp_path), one_mode_each(), ranks, worlds=(1, 2, 4)), FP32)


BOUNDS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"micro_batch_size": st.integers(1, 4)}),
    st.fixed_dictionaries({"max_token_len": st.integers(PROMPT + RESPONSE, 70)}),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    case=st.sampled_from(all_cases()),
    batch=st.builds(
        Batch,
        rows=st.integers(1, 10),
        seed=st.integers(0, 99),
        shared_prompts=st.integers(1, 3),
        failed_rows=st.sets(st.integers(0, 9), max_size=4).map(tuple),
    ),
    bound=BOUNDS,
    packed=st.booleans(),
    balance=st.booleans(),
    row_order_seed=st.none() | st.integers(0, 9),
    empty_rows=st.integers(0, 4),
    world=st.integers(1, 6),
)
def test_random_batches_and_cuts(path, case, batch, bound, packed, balance, row_order_seed, empty_rows, world):
    batch = Batch(batch.rows, batch.seed, batch.shared_prompts, tuple(r for r in batch.failed_rows if r < batch.rows))
    known = reference(path, batch, [case])
    assume(known.says_something(case))
    cut = Case(packed, balance=balance, row_order_seed=row_order_seed, empty_rows=empty_rows, **bound)
    assert summed_difference(path, known, case, cut, world) < FP64


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_loss_fails_the_same_comparison(path: str, wrong: LossCase, ranks: Ranks, tmp_path: Path) -> None:
    known = reference(path, RAGGED, [wrong])
    torch.save(known, tmp_path / "wrong.pt")
    whole, *cuts = CUTS[RAGGED].values()
    assert all(summed_difference(path, known, wrong, cut, world) > 0.01 for cut in cuts for world in (1, 3))
    assert summed_difference(path, known, wrong, whole, 1) < FP64, "given whole, it is right"
    for results in ranks.run(differences, path, str(tmp_path / "wrong.pt"), [(wrong, cut) for cut in cuts], size=2):
        assert min(results) > 0.01
