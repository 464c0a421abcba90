"""Vision-language models against transformers: sampling with images, log-probs and gradients of packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from tests.tiny_vision import FAMILIES, IMAGE, VIDEO, image_file, tiny_vision_model
from tests.workers.critic_cases import value_loss
from tests.workers.engine_cases import CPU, TEMPERATURE, Case, gradient_of, loss_fn, planned, relative_error
from tests.workers.invariance import with_empty_rows
from tests.workers.ranks import OnRanks
from trainer.data.images import ImageProcessor
from verl_lite.config import DataConfig, FSDPConfig, ModelConfig, OptimConfig, RolloutConfig
from verl_lite.images import open_image
from verl_lite.protocol import DataProto, as_column
from workers.engine.fsdp import FSDPEngine
from workers.engines import lean_decoder
from workers.engines.base import Request, RolloutEngine, SamplingParams, build_rollout_engine
from workers.policy.causal_lm import causal_lm
from workers.policy.export import export
from workers.policy.loading import PolicyBuilder, token_network
from workers.policy.value_head import value_head
from workers.policy.vision import MULTI_MODAL_INPUTS, ImageInputs

PROMPT, RESPONSE = 40, 6
OPTIONS = {"temperature": TEMPERATURE, "calculate_entropy": True}
OPTIM = OptimConfig(lr=1e-3)
TEXTS = ("a <image> b", "what <image> and <image>", "no image", "a <image> b", "z<image>z")
FILES = ((0,), (1, 2), (), (3,), (4,))  # the first and the fourth prompt have equal tokens and other images


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@cache
def prompts_of(path: str) -> list[tuple[tuple[int, ...], ImageInputs | None]]:
    """Token ids and images of the prompts `TEXTS`."""
    processor, tokenizer = ImageProcessor(ModelConfig(path=path), DataConfig(), torch.float32), tokenizer_of(path)
    found = []
    for text, numbers in zip(TEXTS, FILES, strict=True):
        files = [image_file(number, height=16 + 8 * (number == 2)) for number in numbers]
        chat = text.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
        [counts] = processor.token_counts([files], ["here"])
        ids = processor.expand(np.array(tokenizer(chat)["input_ids"]), counts, "here")
        images = processor.inputs([(files, ids)])[0] if files else None
        found.append((tuple(ids.tolist()), images))
    return found


def tokenizer_of(path: str) -> Any:
    return AutoTokenizer.from_pretrained(path)


def network_of(path: str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(path).eval()


def arguments_of(path: str, ids: list[int], images: ImageInputs | None) -> dict[str, torch.Tensor]:
    """Arguments of a transformers network for one sequence, with pixels from transformers' own processor."""
    tokens = torch.tensor([ids])
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if images is not None:
        processor = AutoImageProcessor.from_pretrained(path, backend="pil")
        given |= dict(processor([open_image(data) for data in images.files], return_tensors="pt"))
        given["mm_token_type_ids"] = (tokens == IMAGE).int()
    return given


@pytest.fixture
def engine(path: str) -> Iterator[RolloutEngine]:
    options = RolloutConfig(kv_cache_memory_mb=32, max_num_seqs=8)
    common: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "seed": 0}
    made = build_rollout_engine("hf", path, options, max_model_len=PROMPT + RESPONSE, **common)
    made.load_weights(network_of(path).state_dict().items(), 1)
    yield made
    made.close()


def run(engine: RolloutEngine, requests: list[Request]) -> dict[str, Any]:
    for request in requests:
        engine.submit(request)
    done: dict[str, Any] = {}
    while engine.unfinished:
        done |= {each.request_id: each for each in engine.step()}
    return done


def requests_of(path: str, n: int = 2, **options: Any) -> list[Request]:
    sampling = SamplingParams(max_tokens=RESPONSE, ignore_eos=True, **options)
    return [
        Request(f"{row}/{k}", ids, replace(sampling, seed=10 * row + k), images=images)
        for row, (ids, images) in enumerate(prompts_of(path))
        for k in range(n)
    ]


@torch.no_grad()
def plain_log_probs(network: Any, given: dict[str, torch.Tensor], tokens: list[int], temperature: float) -> Any:
    logits = network(**given).logits[0, -len(tokens) - 1 : -1].float()
    logits[:, [IMAGE, VIDEO]] = -torch.inf
    return torch.log_softmax(logits / temperature, dim=1)[range(len(tokens)), tokens]


@pytest.mark.parametrize("smallest", [0, lean_decoder.PACKED_ELEMENTS])
def test_greedy_tokens_and_log_probs_equal_transformers_generate(
    path: str, smallest: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(lean_decoder, "PACKED_ELEMENTS", smallest)
    requests, network = requests_of(path, n=1, temperature=0.0), network_of(path)
    engine = request.getfixturevalue("engine")
    done = run(engine, requests)
    for request in requests:
        given, completion = arguments_of(path, list(request.prompt_ids), request.images), done[request.request_id]
        options = {"max_new_tokens": RESPONSE, "min_new_tokens": RESPONSE, "suppress_tokens": [IMAGE, VIDEO]}
        expected = network.generate(**given, **options, do_sample=False, eos_token_id=None)
        assert completion.token_ids == expected[0, len(request.prompt_ids) :].tolist(), request.request_id
        whole = arguments_of(path, [*request.prompt_ids, *completion.token_ids], request.images)
        log_probs = plain_log_probs(network, whole, completion.token_ids, 1.0)
        assert (torch.tensor(completion.log_probs) - log_probs).abs().max() < 1e-4


def test_images_make_a_difference_where_the_tokens_do_not(path: str, engine: RolloutEngine) -> None:
    first, *_, fourth, _ = requests_of(path, n=1, temperature=0.0)
    assert first.prompt_ids == fourth.prompt_ids
    done = run(engine, [first, fourth])
    assert done[first.request_id].log_probs != done[fourth.request_id].log_probs


def test_an_interrupted_response_continues_with_the_images_of_its_prompt(path: str, engine: RolloutEngine) -> None:
    requests = requests_of(path, n=1, temperature=1.0)
    whole = run(engine, requests)
    for request in requests:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    names = [request.request_id for request in requests]
    continued = engine.snapshot(names)
    assert all(
        each.sampled.token_ids and each.images is one.images for each, one in zip(continued, requests, strict=True)
    )
    engine.abort(names)
    again = run(engine, continued)
    for name in names:
        assert again[name].token_ids == whole[name].token_ids
        assert again[name].log_probs == pytest.approx(whole[name].log_probs, abs=1e-5)


def rows_of(path: str, n: int = 2) -> DataProto:
    """Rows with random responses, `n` for each prompt."""
    generator = np.random.default_rng(0)
    ids = torch.zeros(n * len(TEXTS), PROMPT + RESPONSE, dtype=torch.long)
    attention, images, prompts = torch.zeros_like(ids), [], prompts_of(path)
    for row in range(len(ids)):
        prompt, shown = prompts[row // n]
        response = generator.integers(3, 60, generator.integers(2, RESPONSE + 1))
        start, end = PROMPT - len(prompt), PROMPT + len(response)
        ids[row, start:end] = torch.from_numpy(np.concatenate([prompt, response]))
        attention[row, start:end] = 1
        images.append(shown)
    advantages = torch.from_numpy(generator.standard_normal((len(ids), RESPONSE)).astype(np.float32))
    columns = {
        "responses": ids[:, PROMPT:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": attention[:, PROMPT:].clone(),
        "advantages": advantages,
    }
    columns["response_mask"][3] = 0
    return DataProto.from_dict(columns, {MULTI_MODAL_INPUTS: as_column(images)})


def engine_of(
    path: str,
    case: Case,
    *,
    trains_vision: bool = False,
    build_policy: PolicyBuilder = causal_lm(64),  # noqa: B008
    **model: Any,
) -> FSDPEngine:
    options = ModelConfig(path=path, use_remove_padding=case.packed, enable_gradient_checkpointing=False, **model)
    network = token_network(options, build_policy, trains_vision=trains_vision)
    made = FSDPEngine(network, FSDPConfig(), OPTIM, device=CPU, total_training_steps=1, seed=0)
    made.move_in()
    return made


@pytest.mark.parametrize("packed", [True, False])
def test_log_probs_of_micro_batches_equal_those_of_single_rows_by_transformers(path: str, packed: bool) -> None:
    data, network = rows_of(path), network_of(path)
    case = Case(packed=packed, micro_batch_size=None if packed else 3)
    plan_data, plan = planned(data, case)
    found = engine_of(path, case).infer(plan_data, **OPTIONS)["log_probs"]
    for place, row in enumerate(plan.order.tolist()):
        if data.batch["response_mask"][row].any():
            ids = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()
            length = int(data.batch["response_mask"][row].sum())
            given = arguments_of(path, ids, data.non_tensor_batch[MULTI_MODAL_INPUTS][row])
            expected = plain_log_probs(network, given, ids[-length:], TEMPERATURE)
            assert (found[place, :length] - expected).abs().max() < 1e-5, row


CUTS = (
    Case(),
    Case(micro_batch_size=1),
    Case(micro_batch_size=2, row_order_seed=3),
    Case(packed=False, micro_batch_size=3),
    Case(max_token_len=120, row_order_seed=5, empty_rows=1),
)


def gradients(path: str, case: Case, trains_vision: bool, n: int = 3) -> dict[str, np.ndarray]:
    """The whole gradient of one step."""
    engine = engine_of(path, case, trains_vision=trains_vision)
    return gradient_of(engine, with_empty_rows(rows_of(path, n), case.empty_rows), case, loss_fn, **OPTIONS)


@pytest.mark.parametrize("trains_vision", [False, True])
def test_gradients_do_not_depend_on_the_cut(path: str, trains_vision: bool) -> None:
    expected = gradients(path, CUTS[0], trains_vision)
    assert any("visual" in name for name in expected) is trains_vision
    assert all(value.any() for name, value in expected.items() if "k_proj.bias" not in name)
    for case in CUTS[1:]:
        assert relative_error(gradients(path, case, trains_vision), expected) < 2e-5, case


def gradients_of_ranks(path: str, trains_vision: bool) -> list[dict[str, np.ndarray]]:
    """Gradients with two ranks, one micro-batch of which has only text."""
    return [gradients(path, case, trains_vision) for case in (Case(micro_batch_size=2), Case(micro_batch_size=1))]


@pytest.mark.parametrize("trains_vision", [False, True])
def test_two_ranks_with_and_without_images_have_the_same_gradients(
    path: str, trains_vision: bool, two_ranks: OnRanks
) -> None:
    expected = gradients(path, CUTS[0], trains_vision)
    for found in two_ranks(gradients_of_ranks, path, trains_vision)[0]:
        assert relative_error(found, expected) < 2e-5


def test_the_gradient_equals_that_of_transformers_over_single_rows(path: str) -> None:
    data, network = rows_of(path), network_of(path)
    schedule = planned(data, Case())[0].meta_info["schedule"][0][0]
    mask, advantages = data.batch["response_mask"], data.batch["advantages"]
    for row in range(len(data)):
        if not (length := int(mask[row].sum())):
            continue
        ids = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()
        given = arguments_of(path, ids, data.non_tensor_batch[MULTI_MODAL_INPUTS][row])
        logits = network(**given).logits[0, -length - 1 : -1].index_fill(1, torch.tensor([IMAGE, VIDEO]), -1e30)
        log_probs = torch.log_softmax(logits / TEMPERATURE, dim=1)
        picked = log_probs[range(length), ids[-length:]]
        entropy = -(log_probs.exp() * log_probs).sum(1)
        loss = -(picked * advantages[row, :length]).sum() / schedule.num_tokens
        (loss - 0.1 * entropy.mean() / schedule.num_sequences).backward()
    expected = {name: each.grad.double().numpy() for name, each in network.named_parameters()}
    found = gradients(path, Case(), True, n=2)
    assert relative_error(found, {name: expected[name] for name in found}) < 1e-4


def test_an_adapter_trains_the_text_part_only(path: str) -> None:
    for targets in (["all-linear"], ["gate_proj", "q_proj"]):
        engine = engine_of(path, Case(), lora_rank=2, target_modules=targets)
        trained = [name for name, each in engine.policy.named_parameters() if each.requires_grad]
        assert trained and all("language_model" in name for name in trained)
        assert engine.train(planned(rows_of(path), Case())[0], loss_fn, **OPTIONS)["grad_norm"].value > 0


def test_the_critic_reads_images(path: str, tmp_path: Path) -> None:
    data = rows_of(path)
    columns = {"values": torch.zeros(len(data), RESPONSE), "returns": torch.ones(len(data), RESPONSE)}
    data = data | DataProto.from_dict(columns)
    whole, single = (
        engine_of(path, case, build_policy=value_head) for case in (Case(), Case(packed=False, micro_batch_size=1))
    )
    for engine in (whole, single):
        for _ in range(2):  # the head begins with zeros, so that the backbone learns in the second step
            engine.train(planned(data, Case())[0], value_loss)
    part, plan = planned(data, Case())
    expected, _ = planned(data, Case(packed=False, micro_batch_size=1))
    found = plan.restore(DataProto.from_dict({"values": whole.infer(part)["values"]})).batch["values"]
    _, other = planned(data, Case(packed=False, micro_batch_size=1))
    again = other.restore(DataProto.from_dict({"values": single.infer(expected)["values"]})).batch["values"]
    assert found.any() and (found - again).abs().max() < 1e-5
    one, four = 0, 6  # rows of prompts with equal tokens and other images, and the first value after the prompt
    assert (found[one, 0] - found[four, 0]).abs() > 1e-5


def test_an_export_is_the_whole_model_with_its_image_processor(path: str, tmp_path: Path) -> None:
    data, engine = rows_of(path), engine_of(path, Case())
    engine.train(planned(data, Case())[0], loss_fn, **OPTIONS)
    engine.save(str(tmp_path / "saved"))
    export(str(tmp_path / "saved"), str(tmp_path / "out"))
    part, plan = planned(data, Case())
    found = engine.infer(part, **OPTIONS)["log_probs"]
    network = network_of(str(tmp_path / "out"))
    row = plan.order.tolist().index(0)
    ids = data.batch["input_ids"][0][data.batch["attention_mask"][0].bool()].tolist()
    length = int(data.batch["response_mask"][0].sum())
    given = arguments_of(str(tmp_path / "out"), ids, data.non_tensor_batch[MULTI_MODAL_INPUTS][0])
    expected = plain_log_probs(network, given, ids[-length:], TEMPERATURE)
    assert (found[row, :length] - expected).abs().max() < 1e-5
    before, after = network_of(path).state_dict(), network.state_dict()
    assert before.keys() == after.keys()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert (
        kept and all("visual" in name for name in kept) and not any("visual" in name for name in before.keys() - kept)
    )
