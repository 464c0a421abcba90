"""Sampling with gradient: which weights have one, that it is the plain one, and how the divergence begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.workers.diffusion.actor_cases import CPU, policy_of
from tests.workers.diffusion.tiny_wan import clips, planned
from verl_lite.diffusion.flow_match import flow_sigmas
from verl_lite.protocol import DataProto
from workers.diffusion.reward_policy import RewardFlowPolicy

pytest.importorskip("diffusers")


def moved(policy: RewardFlowPolicy, scale: float = 0.2) -> RewardFlowPolicy:
    """The adapter away from its start, where B = 0 and A has no gradient."""
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return policy


def outputs_of(policy: RewardFlowPolicy, data: DataProto) -> dict[str, torch.Tensor]:
    outputs: dict[str, torch.Tensor] = policy(policy.prepare_inputs(data, CPU)[0])
    return outputs


def gradients(policy: RewardFlowPolicy, data: DataProto) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    outputs_of(policy, data)["loss"].sum().backward()
    return {name: value.grad for name, value in policy.named_parameters() if value.grad is not None}


def batch(rows: int = 2, without_face: tuple[int, ...] = ()) -> DataProto:
    return planned(clips(rows, without_face), world=1, micro_batch_size=rows)[0]


def test_the_divergence_is_exactly_zero_at_the_start_and_positive_after(path: str) -> None:
    policy = policy_of(path)
    assert outputs_of(policy, batch())["kl_loss"].tolist() == [0.0, 0.0]
    assert (outputs_of(moved(policy), batch())["kl_loss"] > 0).all()


def test_loss_divergence_and_frames_by_a_naive_loop(path: str) -> None:
    """Step by step with two plain experts: one with the adapter in its weights, one without."""
    policy, data = moved(policy_of(path)), batch(2)
    found = outputs_of(policy, data)
    inputs, _ = policy.prepare_inputs(data, CPU)
    base = policy_of(path).model
    base.disable_adapters()
    high, sigmas, kl = policy._high_noise[0], flow_sigmas(4, 5.0), torch.zeros(2)
    x = inputs.noise

    @torch.no_grad()
    def ask(expert: Any, sigma: float) -> torch.Tensor:
        return expert(
            torch.cat([x, inputs.condition], 1), torch.full((2,), 1000 * sigma), inputs.prompts, return_dict=False
        )[0]

    for step in range(4):
        v = ask(high if step < 2 else policy.model, sigmas[step])
        if step >= 2:
            kl += ((v - ask(base, sigmas[step])) ** 2).mean((1, 2, 3, 4)) / (2 * sigmas[step] ** 2) / 2
        x = x + (sigmas[step + 1] - sigmas[step]) * v
    frames = policy.codec.decode(x)
    score = frames[:, 1:, 0].mean((1, 2, 3)) - frames[:, 1:, 2].mean((1, 2, 3))
    torch.testing.assert_close(found["kl_loss"], kl, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found["face_score"], score, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["loss"], -(score - 0.54) / 0.16 * 0.1 + kl, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["frames"], (frames + 1) / 2)


def test_the_gradient_is_the_slope_of_the_loss(path: str) -> None:
    """By central differences along the gradient itself, where every step of the expert that learns has one. Without the
    divergence, whose base velocity has no gradient towards the latents that it is asked about."""
    policy, data = moved(policy_of(path, kl_loss_coef=0.0)), batch()
    found = gradients(policy, data)
    norm = sum(float(value.square().sum()) for value in found.values()) ** 0.5

    def loss_at(distance: float) -> float:
        with torch.no_grad():
            for name, value in found.items():
                policy.get_parameter(name).add_(value, alpha=distance / norm)
            loss = outputs_of(policy, data)["loss"].double().sum()
            for name, value in found.items():
                policy.get_parameter(name).sub_(value, alpha=distance / norm)
        return float(loss)

    slope = (loss_at(2e-2) - loss_at(-2e-2)) / 4e-2
    assert slope == pytest.approx(norm, rel=2e-2)


def test_frozen_parts_on_the_host_change_nothing(path: str) -> None:
    data = batch()
    expected, found = (gradients(moved(policy_of(path, offload_frozen=o)), data) for o in (False, True))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_sample_without_a_face_has_no_part_in_the_gradient(path: str) -> None:
    policy = moved(policy_of(path))
    outputs = outputs_of(policy, batch(3, without_face=(1,)))
    assert outputs["counted"].tolist() == [1, 0, 1] and outputs["loss"][1] == 0 and outputs["face_score"][1] == 0
    found = gradients(policy, batch(3, without_face=(1,)))
    policy.zero_grad()
    for row in (0, 2):
        outputs_of(policy, batch(3)[[row]])["loss"].sum().backward()
    for name, value in found.items():
        torch.testing.assert_close(value, policy.get_parameter(name).grad, rtol=1e-4, atol=1e-7)
    nothing = gradients(moved(policy_of(path)), batch(1, without_face=(0,)))
    assert nothing and all(value.abs().max() == 0 for value in nothing.values())


def test_padding_is_not_sampled_and_a_micro_batch_of_padding_gives_zero_gradients(path: str) -> None:
    policy, data = moved(policy_of(path)), batch(3)
    expected = outputs_of(policy, data)
    data.batch["is_padding"] = torch.tensor([False, True, False])
    found = outputs_of(policy, data)
    assert found["loss"][1] == 0 and found["frames"][1].abs().max() == 0
    torch.testing.assert_close(found["loss"][2], expected["loss"][2], rtol=1e-5, atol=1e-7)
    data.batch["is_padding"] = torch.tensor([True, True, True])
    inputs, is_counting = policy.prepare_inputs(data, CPU)
    assert not is_counting and len(inputs.noise) == 1
    nothing = gradients(policy, data)
    assert nothing and all(value.abs().max() == 0 for value in nothing.values())
