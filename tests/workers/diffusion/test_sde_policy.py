"""A flow network as a policy: what it samples, what it says of stored paths, and how it learns from them."""

from __future__ import annotations

import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.diffusion.sde_cases import (
    LEVEL,
    STEPS,
    TinyField,
    config_of,
    engine_of,
    inferred,
    network_weights,
    paths_of,
    planned,
    seeds_of,
    train,
    update,
    write_field,
)
from tests.workers.ranks import Ranks
from verl_lite.diffusion.flow_match import flow_sigmas
from verl_lite.diffusion.flow_sde import step_kl, step_mean, step_std
from verl_lite.errors import UserError
from workers.diffusion.lora import add_adapter
from workers.diffusion.sde_policy import load_network

ROWS = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_field(tmp_path_factory.mktemp("field"))


def test_a_path_by_hand(path: str) -> None:
    """The path of one row, step by step, and its log-probabilities by torch.distributions."""
    found = inferred(engine_of(config_of(path)), seeds_of(1), steps=STEPS, noise_level=LEVEL)
    network = TinyField.from_pretrained(path)
    x = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(0))[None]
    noise = torch.randn(STEPS, 2, 2, 2, generator=torch.Generator().manual_seed(100))
    for step, (sigma, sigma_next) in enumerate(pairwise(flow_sigmas(STEPS, 1.0))):
        torch.testing.assert_close(found["latents"][:, step], x)
        with torch.no_grad():
            velocity = network(x, torch.tensor([sigma]), torch.tensor([[3.0]]))
        mean, std = step_mean(x, velocity, sigma, sigma_next, LEVEL), step_std(sigma, sigma_next, LEVEL)
        x = mean + std * noise[step]
        expected = torch.distributions.Normal(mean, std).log_prob(x).mean()
        assert float(found["log_probs"][0, step]) == pytest.approx(float(expected), abs=1e-5)
    torch.testing.assert_close(found["latents"][:, -1], x)
    torch.testing.assert_close(found["frames"], network.decode(x))


def test_a_sample_depends_on_its_seeds_alone(path: str) -> None:
    engine = engine_of(config_of(path))
    together = inferred(engine, seeds_of(5), steps=STEPS, noise_level=LEVEL)
    cut = inferred(engine, seeds_of(5), 2, steps=STEPS, noise_level=LEVEL)
    for name, values in together.items():
        torch.testing.assert_close(cut[name], values)
    assert not torch.equal(together["frames"][0], together["frames"][3])  # of one prompt


def test_without_noise_it_is_the_ode_and_has_no_probability(path: str) -> None:
    engine = engine_of(config_of(path))
    assert set(inferred(engine, seeds_of(2), steps=STEPS, noise_level=0.0)) == {"frames"}
    others = seeds_of(2)
    others.batch["path_seed"] += 1
    first, second = (inferred(engine, data, steps=4, noise_level=0.0) for data in (seeds_of(2), others))
    assert torch.equal(first["frames"], second["frames"])


def test_on_policy_every_ratio_is_exactly_one(path: str) -> None:
    config, data = config_of(path), paths_of(path, ROWS)
    data.batch.pop("old_log_probs")
    metrics = train(engine_of(config), config, planned(data))
    assert metrics["ratio_max"].value == metrics["ratio_min"].value == 1.0
    assert metrics["ppo_kl"].value == 0.0


def test_the_gradient_is_that_of_advantage_times_log_prob(path: str) -> None:
    """Plain torch: minus the mean over steps of A log pi, at ratio 1; one SGD-like look at the first update."""
    data = paths_of(path, ROWS)
    network = TinyField.from_pretrained(path)
    total = torch.zeros(())
    for row in (0, 2, 3, 4, 5):  # row 1 failed
        latents, length = data.batch["latents"][row], float(len(data.non_tensor_batch["prompt"][row]))
        for step, (sigma, sigma_next) in enumerate(pairwise(flow_sigmas(STEPS, 1.0))):
            velocity = network(latents[step][None], torch.tensor([sigma]), torch.tensor([[length]]))
            mean = step_mean(latents[step][None], velocity, sigma, sigma_next, LEVEL)
            normal = torch.distributions.Normal(mean, step_std(sigma, sigma_next, LEVEL))
            total = total + data.batch["advantages"][row, step] * normal.log_prob(latents[step + 1][None]).mean()
    (-total / (5 * STEPS)).backward()
    config = config_of(path)
    engine = engine_of(config)
    found: dict[str, torch.Tensor] = {}

    def capture(lr: float) -> dict[str, Any]:
        found.update({name: value.grad.full_tensor() for name, value in engine.parameters.items()})  # type: ignore
        return {}

    assert engine.optimizer is not None
    engine.optimizer.step = capture  # type: ignore[method-assign]
    train(engine, config, planned(data, micro_batch_size=2))
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_kl_to_where_training_began(path: str, lora_rank: int) -> None:
    """0 in the first update; after it that of the steps' Gaussians under the old and the new weights."""
    options = {"lora_rank": lora_rank, "use_kl_loss": True, "kl_loss_coef": 0.0, "ppo_epochs": 1}
    assert update(path, ROWS, None, steps=1, **options)["metrics"]["kl_loss"] >= 0.0
    config, data = config_of(path, lora_rank=lora_rank), paths_of(path, ROWS)
    config.actor.use_kl_loss = True
    engine = engine_of(config)
    assert not inferred(engine, data, steps=STEPS, noise_level=LEVEL, with_kl=True)["kl"].any()
    train(engine, config, planned(data))
    found = inferred(engine, data, steps=STEPS, noise_level=LEVEL, with_kl=True)["kl"]
    before, after = TinyField.from_pretrained(path), TinyField()
    after.load_state_dict(network_weights(engine))
    sigma, sigma_next = flow_sigmas(STEPS, 1.0)[1:3]
    latents, lengths = data.batch["latents"][:, 1], before.encode(list(data.non_tensor_batch["prompt"]))
    with torch.no_grad():
        own, other = (
            step_mean(latents, network(latents, torch.full((ROWS,), sigma), lengths), sigma, sigma_next, LEVEL)
            for network in (after, before)
        )
    torch.testing.assert_close(found[:, 1], step_kl(own, other, step_std(sigma, sigma_next, LEVEL)))
    assert (found > 0).all()


def test_with_an_adapter_only_it_learns(path: str) -> None:
    config = config_of(path, lora_rank=2, target_modules=["inner", "block.linear"])
    engine = engine_of(config)
    assert all("lora" in name for name in engine.trained) and len(engine.trained) == 4
    before = network_weights(engine)
    train(engine, config, planned(paths_of(path, ROWS)))
    changed = {name for name, value in network_weights(engine).items() if not torch.equal(value, before[name])}
    assert changed == {"inner.weight", "block.linear.weight"}


# ------------------------------------------------------------------------------------------- the cut does not matter


@pytest.mark.parametrize("options", [{}, {"loss_agg_mode": "seq-mean-token-mean", "lora_rank": 2}])
def test_the_update_does_not_depend_on_the_cut(path: str, options: dict[str, Any]) -> None:
    whole = update(path, ROWS, None, **options)
    same(update(path, ROWS, 1, **options), whole)


@pytest.mark.slow
def test_one_rank_equals_two(path: str, ranks: Ranks) -> None:
    with_kl = functools.partial(update, use_kl_loss=True, kl_loss_coef=0.1)
    whole = with_kl(path, ROWS, None)
    for found in ranks.run(with_kl, path, ROWS, 1, size=2):
        same(found, whole)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], values, atol=2e-5, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------- bad input


def test_wrong_networks_are_one_sentence(path: str, tmp_path: Path) -> None:
    def options(**changes: Any) -> Any:
        return config_of(path, **changes).model

    with pytest.raises(UserError, match=r"model\.network='no\.such:thing'"):
        load_network(options(network="no.such:thing"))
    with pytest.raises(UserError, match=r"missing: \['from_pretrained', 'latent_shape', 'encode', 'decode'\]"):
        load_network(options(network="torch.nn:Linear"))
    with pytest.raises(UserError, match=r"missing: the folder"):
        load_network(config_of(str(tmp_path / "missing")).model)
    with pytest.raises(
        UserError, match=r"model\.target_modules=\['to_q'\]: to_q matches no linear layer .* block.linear, inner, outer"
    ):
        add_adapter(TinyField(), options(lora_rank=2, target_modules=["to_q"]))
