"""Images in the vLLM engine: what reaches vLLM, and with torchvision, that its samples equal those of the hf engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoImageProcessor

from tests.tiny_vision import FAMILIES, IMAGE, VIDEO, image_file, tiny_vision_model
from tests.workers.engine_cases import CPU
from tests.workers.policy.test_vision import network_of, run
from trainer.data.images import ImageProcessor
from verl_lite.config import DataConfig, ModelConfig, RolloutConfig
from workers.engines import base
from workers.engines.base import Request, RolloutEngine, Sampled, SamplingParams, build_rollout_engine, has_torchvision

pytest.importorskip("vllm")
TOKENS = 8


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_vision_model(tmp_path_factory.mktemp(request.param), request.param)


def request_of(path: str, name: str, *numbers: int) -> Request:
    """Two images within a text that fills a block of the prefix cache before and after the second."""
    files = [image_file(number, 19 + 8 * place, 90) for place, number in enumerate(numbers)]
    processor = ImageProcessor(ModelConfig(path=path), DataConfig(max_pixels=1024), torch.float32)
    [counts] = processor.token_counts([files], [name])
    ids = processor.expand(np.array([5, IMAGE, *range(7, 40), IMAGE, *range(40, 80)]), counts, name)
    [images] = processor.inputs([(files, ids)])
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, seed=1)
    return Request(name, tuple(ids.tolist()), sampling, images=images)


def engine_of(name: str, path: str, **options: Any) -> RolloutEngine:
    config = RolloutConfig(kv_cache_memory_mb=32, max_num_seqs=8, **options)
    return build_rollout_engine(name, path, config, max_model_len=128, device=CPU, dtype=torch.float32, seed=0)


def fake_engine(arguments: Any) -> MagicMock:
    """Stands in for `vllm.LLMEngine`: records its calls, and consumes the weights into `names`."""
    fake = MagicMock(arguments=arguments, names=[])
    fake.collective_rpc.side_effect = lambda method, kwargs=None: (
        fake.names.extend(name for name, _ in kwargs["weights_iterator"]) if kwargs else [""]
    )
    fake.renderer.render_cmpl.side_effect = lambda prompts: prompts
    return fake


@pytest.mark.parametrize("recompute", [True, False])
def test_vllm_gets_one_token_and_one_picture_of_the_grid_s_size_for_each_image(
    path: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.engines import vllm_engine

    vllm_engine.import_vllm()
    import vllm

    monkeypatch.setattr(vllm_engine, "_open_engines", 0)  # this engine is not closed
    monkeypatch.setattr(vllm.ModelRegistry, "get_supported_archs", list)
    monkeypatch.setattr(vllm.LLMEngine, "from_engine_args", fake_engine)
    engine: Any = engine_of("vllm", path, recompute_kv_on_update=recompute)
    fake = engine._engine
    assert fake.arguments.skip_tokenizer_init is False and fake.arguments.limit_mm_per_prompt == {"video": 0}
    assert fake.arguments.mm_device_do_normalize is False
    engine.load_weights(network_of(path).state_dict().items(), 7)
    fake.reset_encoder_cache.assert_called_once()
    assert fake.reset_prefix_cache.called == recompute
    with safe_open(Path(path, "model.safetensors"), "pt") as file:
        assert sorted(fake.names) == sorted(file.keys())

    request = replace(request_of(path, "a", 0, 1), sampled=Sampled((9, 11), (0.0, 0.0), (7, 7)))
    engine.submit(request)
    _, prompt, sampling = fake.add_request.call_args.args
    pictures = prompt["multi_modal_data"].pop("image")
    assert prompt == {
        "prompt_token_ids": [5, IMAGE, *range(7, 40), IMAGE, *range(40, 80), 9, 11],
        "multi_modal_data": {},
        "mm_processor_kwargs": {"do_resize": False},
        "cache_salt": "" if recompute else "7",
    }
    assert sampling.logit_bias == {IMAGE: -100.0, VIDEO: -100.0} and sampling.max_tokens == TOKENS - 2
    assert [picture.size for picture in pictures] == [(64, 8), (56, 16)]
    processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    found = processor(pictures, do_resize=False, return_tensors="pt")
    assert torch.equal(found["image_grid_thw"], request.images.image_grid_thw)
    assert torch.equal(found["pixel_values"], request.images.pixel_values)


@pytest.fixture
def engines(path: str) -> Iterator[dict[str, RolloutEngine]]:
    if not has_torchvision():
        pytest.skip("vLLM's classes of these models import torchvision, which cannot be imported here")
    made = {name: engine_of(name, path) for name in ("vllm", "hf")}
    yield made
    for engine in made.values():
        engine.close()


def test_vllm_samples_as_the_hf_engine_does(path: str, engines: dict[str, RolloutEngine]) -> None:
    requests = [request_of(path, name, *numbers) for name, *numbers in (("a", 0, 1), ("b", 0, 2), ("c", 3, 1))]
    requests.append(requests[0])
    weights, found = network_of(path).state_dict(), {}
    for version in (1, 2):
        for name, engine in engines.items():
            engine.load_weights(weights.items(), version)
            found[name] = [run(engine, [request])[request.request_id] for request in requests]  # one after the other
        for mine, expected in zip(found["vllm"], found["hf"], strict=True):
            assert mine.token_ids == expected.token_ids
            assert np.abs(np.subtract(mine.log_probs, expected.log_probs)).max() < 1e-4
        first, other, _, again = found["vllm"]
        assert first.token_ids == again.token_ids and first.log_probs != other.log_probs
        # the next weights have another vision tower, and prefer an image token to the first sampled token
        weights = {key: value * 0.7 if "visual" in key else value for key, value in weights.items()}
        weights["lm_head.weight"][IMAGE] = 2 * weights["lm_head.weight"][first.token_ids[0]]
    sampled = Sampled(*(tuple(values[:3]) for values in (first.token_ids, first.log_probs, first.versions)))
    continued = run(engines["vllm"], [replace(requests[0], sampled=sampled)])["a"]
    assert continued.token_ids == first.token_ids
    assert np.abs(np.subtract(continued.log_probs, first.log_probs)).max() < 1e-4


def test_a_machine_without_torchvision_samples_with_the_hf_engine(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rollout = ModelConfig(path=path), RolloutConfig()
    monkeypatch.setattr(base, "has_torchvision", lambda: False)
    assert "torchvision" in (base.vllm_problem(model, rollout, "cpu") or "")
    assert base.vllm_problem(model, rollout, "cuda") is None
    assert base.choose_engine(model, rollout, 128, "cpu")[0] == "hf"
    monkeypatch.setattr(base, "has_torchvision", lambda: True)
    assert base.vllm_problem(model, rollout, "cpu") is None
