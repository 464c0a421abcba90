"""Every family of models gives the same log-probs and gradients in each form of a micro-batch as one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, CodeGenConfig, PreTrainedModel

from tests.workers.engine_cases import TEMPERATURE, Batch, ragged_batch
from tests.workers.engines.test_engines import ask, expect_plain, make_engine, run
from tests.workers.family_table import family_table, further_families
from tests.workers.invariance import POLICY, single_rows
from tests.workers.model_families import (
    CONVOLUTION,
    DELTA_RULE,
    FAMILIES,
    FURTHER,
    KERNELS,
    VOCAB,
    WITH_WINDOWS,
    Kernels,
    give_kernels,
    tiny_config,
    tiny_network,
)
from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError
from workers.engine.packed_attention import PACKED_ATTENTION, by_sequences
from workers.engine.packing import align, pack
from workers.engines import lean_decoder
from workers.engines.slot_cache import check_layers
from workers.policy import families, token_mixing
from workers.policy.causal_lm import CausalLMPolicy
from workers.policy.loading import packing_note
from workers.policy.token_mixing import arrangement_of, mixing_layers
from workers.policy.vision import VISION_FAMILIES


def gradients(network: PreTrainedModel, statistics: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a sum in which every log-prob and entropy has a weight of its own."""
    network.zero_grad()
    weights = torch.randn(2, *statistics[0].shape, generator=torch.Generator().manual_seed(0))
    sum((weight * values).sum() for weight, values in zip(weights, statistics, strict=True)).backward()
    return {
        name: parameter.grad.clone() for name, parameter in network.named_parameters() if parameter.grad is not None
    }


def marks_of(family: str) -> list[pytest.MarkDecorator]:
    """Marks most families as slow: `make fast` runs one of each kind of layer."""
    return [] if family in ("llama", "qwen2", "qwen3_moe", "gemma3_text", "mamba2", "lfm2") else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("family", "kernels", "late", "keeps"),
    [
        *[pytest.param(family, {}, 0, False, id=family, marks=marks_of(family)) for family in FAMILIES],
        *[
            pytest.param(family, kernels, 0, True, id=f"{family}, kernels", marks=marks_of(family))
            for family, kernels in KERNELS.items()
        ],
        pytest.param("qwen3_next", DELTA_RULE, 1, False, id="qwen3_next, borders too late"),
        pytest.param("lfm2", CONVOLUTION, -1, False, id="lfm2, borders too early"),
        pytest.param("qwen3_next", CONVOLUTION, 0, False, id="qwen3_next, one of two kernels"),
        pytest.param("jamba", CONVOLUTION, 0, False, id="jamba, one of two kernels"),
    ],
)
def test_every_form_equals_one_row_at_a_time(
    family: str, kernels: Kernels, late: int, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """keeps: what the layers with a state are found to do; then each is told of the borders, but for the trial."""
    give_kernels(family, kernels, monkeypatch, late)
    told: list[bool] = []

    def watched(*given: Any) -> Any:
        told.append(bool(given[4]))
        return by_sequences(*given)

    monkeypatch.setattr(token_mixing, "by_sequences", watched)
    expect_equal_to_single_rows(family)
    states = len(token_mixing._state_layers(tiny_network(family)))
    assert told.count(not keeps) == states * (2 if keeps else 1)


def expect_equal_to_single_rows(family: str, forms: Sequence[bool] = (True, False), **more: Any) -> None:
    """Compares log-probs, entropies and every gradient. forms: values of model.use_remove_padding. more: see
    `tiny_config`."""
    network = tiny_network(family, **more)
    data = ragged_batch(Batch(rows=6, shared_prompts=3))
    columns, expected = dict(data.batch), tuple(single_rows(network, POLICY, data).values())
    expected_gradients = gradients(network, expected)
    for use_remove_padding in forms:
        network = tiny_network(family, **more)
        if network.supports_gradient_checkpointing:
            network.gradient_checkpointing_enable({"use_reentrant": False})
            for module in network.modules():
                module.training = hasattr(module, "gradient_checkpointing")
        policy = CausalLMPolicy(network, chunk_tokens=7)
        arrange = arrangement_of(network, NetworkConfig(use_remove_padding=use_remove_padding))
        outputs = policy(arrange(columns), TEMPERATURE, True)
        actual = outputs["log_probs"], outputs["entropys"]
        for values, expected_values in zip(actual, expected, strict=True):
            torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)
        actual_gradients = gradients(network, actual)
        assert actual_gradients.keys() == expected_gradients.keys()
        for name, gradient in actual_gradients.items():
            scale = float(expected_gradients[name].abs().max())
            torch.testing.assert_close(
                gradient, expected_gradients[name], rtol=0, atol=2e-5 * max(scale, 1.0), msg=f"gradient of {name}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("family", FURTHER)
def test_a_further_family_is_packed_with_the_gradients_of_single_rows(family: str) -> None:
    network = tiny_network(family)
    assert mixing_layers(network) == []
    expect_equal_to_single_rows(family, forms=(True,))


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_WINDOWS)
def test_windows_of_a_packed_family_are_those_of_single_rows(family: str) -> None:
    assert mixing_layers(tiny_network(family, **WITH_WINDOWS[family])) == []
    expect_equal_to_single_rows(family, forms=(True,), **WITH_WINDOWS[family])


def test_every_entry_of_the_table_of_families_is_tested() -> None:
    """Those of `VISION_FAMILIES` in test_vision.py."""
    assert families.FAMILIES.keys() == FAMILIES.keys() | FURTHER.keys() | {f"{name}_text" for name in VISION_FAMILIES}
    with_window = {
        family for family, config in (FAMILIES | FURTHER).items() if config.get("sliding_window") is not None
    }
    passing = {family for family, entry in families.FAMILIES.items() if entry.passes_window}
    assert passing == with_window | WITH_WINDOWS.keys()


def test_a_window_that_a_family_does_not_pass_to_attention_prevents_packing() -> None:
    """transformers' OLMoE ignores the window in its mask, and a packed row would have it."""
    assert mixing_layers(tiny_network("olmoe")) == []
    assert mixing_layers(tiny_network("olmoe", sliding_window=3)) == ["sliding_attention"]


def test_an_unknown_family_has_rows_of_its_own_and_one_line_says_what_to_do(tmp_path: Path) -> None:
    config = CodeGenConfig(vocab_size=VOCAB, n_embd=32, n_head=4, n_layer=2, n_positions=64, rotary_dim=8)
    config.save_pretrained(tmp_path)
    note = packing_note(NetworkConfig(path=str(tmp_path)))
    assert "a CodeGenForCausalLM is not packed, because its family codegen is not among the tested ones" in note
    assert "workers/policy/families.py" in note and "\n" not in note
    network = AutoModelForCausalLM.from_config(config)
    assert arrangement_of(network, NetworkConfig()) is align and mixing_layers(network) == ["CodeGenModel"]
    with pytest.raises(
        ValueError, match=r"CodeGenForCausalLM \(family codegen\) is not among .* set rollout.name=vllm"
    ):
        check_layers(network)


def test_code_of_another_author_with_the_name_of_a_family_is_not_packed() -> None:
    network: Any = tiny_network("llama")
    network.model.__class__ = type("LlamaModel", (type(network.model),), {"__module__": "transformers_modules.other"})
    assert mixing_layers(network) == ["LlamaModel"]


def test_attention_that_sees_the_future_is_refused() -> None:
    with pytest.raises(UserError, match="BertSelfAttention"):
        mixing_layers(AutoModelForCausalLM.from_config(BertConfig(num_hidden_layers=1, hidden_size=24, vocab_size=8)))


@pytest.mark.parametrize(("family", "layer"), [("deepseek_v32", "Indexer"), ("bloom", "BloomAttention")])
def test_a_network_that_is_not_packed_is_named_with_the_layer(family: str, layer: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    model = NetworkConfig(path=str(tmp_path))
    assert layer in packing_note(model) and "use_remove_padding" in packing_note(model)
    assert packing_note(replace(model, use_remove_padding=False)) == ""


def test_a_network_of_attention_alone_is_packed_without_a_word(tmp_path: Path) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    assert packing_note(NetworkConfig(path=str(tmp_path))) == ""
    network = tiny_network("qwen3_moe")
    assert arrangement_of(network, NetworkConfig()) is pack and network.config._attn_implementation == PACKED_ATTENTION


@pytest.mark.parametrize(
    ("family", "layer"),
    [("qwen3_next", "GatedDeltaNet"), ("mamba2", "Mamba2Mixer"), ("gemma2", "soft-capping"), ("gpt_oss", "sinks")],
)
def test_the_hf_engine_refuses_layers_that_its_cache_does_not_compute(family: str, layer: str) -> None:
    check_layers(tiny_network("qwen3_moe"))
    with pytest.raises(ValueError, match=f"{layer}.* set rollout.name=vllm"):
        check_layers(tiny_network(family))


def test_the_readme_has_the_table_of_what_is_found() -> None:
    readme = Path(token_mixing.__file__).parent / "README.md"
    text = readme.read_text()
    assert family_table() in text, "python -m tests.workers.family_table prints the table"
    assert further_families() in text, "python -m tests.workers.family_table prints the list"


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_hf_engine_samples_with_the_log_probs_of_training(family: str, tmp_path: Path) -> None:
    """Or it refuses the family. Weights are named as in training."""
    network = tiny_network(family)
    network.save_pretrained(tmp_path)
    try:
        engine = make_engine("hf", str(tmp_path), 16, max_num_seqs=4)
    except ValueError as refusal:
        assert "set rollout.name=vllm" in str(refusal)
        return
    engine.load_weights(iter(network.state_dict().items()), 1)
    network.config.use_cache = False
    requests = [ask(length, tuple(range(3, 3 + length)), max_tokens=8) for length in (2, 5, 7)]
    expect_plain(run(engine, requests), network, requests)
    engine.close()


@pytest.mark.parametrize("smallest", [0, lean_decoder.PACKED_ELEMENTS])
@pytest.mark.parametrize("family", sorted(set(lean_decoder.LEAN_FAMILIES) - VISION_FAMILIES.keys()))
def test_lean_decoding_samples_with_the_log_probs_of_training(
    family: str, smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a weight update, with matrices of oneDNN and of torch. For models with images see test_vision.py."""
    monkeypatch.setattr(lean_decoder, "PACKED_ELEMENTS", smallest)
    more = {"mistral": {"sliding_window": None}, "llama": {"attention_bias": True}}.get(family, {})
    network = tiny_network(family, **more)
    assert lean_decoder.lean_decoder(tiny_network(family, **more), 16) is not None
    network.save_pretrained(tmp_path)
    engine = make_engine("hf", str(tmp_path), 16, max_num_seqs=4)
    network.config.use_cache = False
    requests = [ask(length, tuple(range(3, 3 + length)), max_tokens=8) for length in (2, 5, 7)]
    for version in (1, 2):
        engine.load_weights(iter(network.state_dict().items()), version)
        expect_plain(run(engine, requests), network, requests)
        for parameter in network.parameters():
            parameter.data *= -0.9
    engine.close()


def test_a_sleeping_engine_keeps_no_copy_of_its_weights_and_decodes_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies in oneDNN's layout are as large as the weights, and an update needs their memory."""
    monkeypatch.setattr(lean_decoder, "PACKED_ELEMENTS", 0)
    network = tiny_network("llama")
    network.save_pretrained(tmp_path)
    engine: Any = make_engine("hf", str(tmp_path), 16, max_num_seqs=4)
    engine.load_weights(iter(network.state_dict().items()), 1)
    requests = [ask(length, tuple(range(3, 3 + length)), max_tokens=8) for length in (2, 5, 7)]

    awake = run(engine, requests)
    assert engine._lean._head.packed is not None
    engine.sleep()
    assert engine._lean._head.packed is None
    assert engine.has_weights, "on a CPU the weights themselves stay"

    again = run(engine, requests)
    assert {name: one.log_probs for name, one in again.items()} == {name: one.log_probs for name, one in awake.items()}
    engine.close()


def test_only_models_with_the_layers_of_llama_decode_leanly() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    others = [tiny_network("gemma2"), tiny_network("llama").bfloat16(), tiny_network("llama", rope_parameters=dynamic)]
    assert [lean_decoder.lean_decoder(network, 16) for network in others] == [None, None, None]


def test_a_layer_with_a_state_that_is_not_told_of_borders_is_no_silent_leak() -> None:
    network = tiny_network("lfm2")
    arrangement_of(network, NetworkConfig())
    with pytest.raises(ValueError, match="Lfm2ShortConv received no `packed_sequences`"):
        network(torch.tensor([[5, 6, 7]]))


def test_borders_are_believed_where_output_and_gradient_say_so() -> None:
    """Of a layer with a state, for two sequences of two tokens."""

    def apart(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.cumsum(1) for part in hidden.split(2, dim=1)], dim=1)

    def leaks(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.cumsum(1)

    def forward_of(one: Any, backward: Any) -> Any:
        return lambda hidden: one(hidden).detach() + backward(hidden) - backward(hidden).detach()

    hidden = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    cases = [
        (apart, leaks, True),
        (forward_of(apart, backward=leaks), leaks, False),
        (forward_of(leaks, backward=apart), leaks, False),
        (torch.inverse, leaks, False),
        (apart, apart, False),
    ]
    for told, untold, keeps in cases:
        layer = iter((apart, told, untold))
        assert token_mixing._test_borders(lambda hidden, borders: next(layer)(hidden), hidden, {})[0] == keeps  # noqa: B023
