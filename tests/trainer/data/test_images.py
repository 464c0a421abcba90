"""Images of prompts: the forms in which data have them, what is refused, and their bytes on the way to the workers."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from tests.tiny_vision import IMAGE, image_file, tiny_vision_model
from trainer.data.images import ImageProcessor, image_processor, read_image
from trainer.data.prompts import PromptDataset
from trainer.data.row_formats import RowSchema
from trainer.data.sft_dataset import rows_of as sft_rows
from trainer.data.sources import RowTable
from trainer.rollout.group_sources import prompt_groups
from verl_lite.config import DataConfig, ModelConfig
from verl_lite.errors import UserError
from verl_lite.images import MOST_PIXELS, open_image, rgb_image
from verl_lite.machine.safe_state import read_state, write_state
from verl_lite.rewards.results import RewardItem
from verl_lite.rewards.scoring import RewardPart
from workers.policy.vision import MULTI_MODAL_INPUTS, ImageInputs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_vision_model(tmp_path_factory.mktemp("model"))


def row_of(prompt: Any, **columns: Any) -> dict[str, Any]:
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return {"data_source": "exact_match", "prompt": messages, "reward_model": {"ground_truth": "1"}, **columns}


def load(model: str, rows: list[dict[str, Any]], folder: Path, **options: Any) -> PromptDataset:
    file = folder / "rows.parquet"
    if any("json" in row for row in rows):
        file = folder / "rows.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows))
    else:
        names = dict.fromkeys(name for row in rows for name in row)
        pq.write_table(pa.Table.from_pylist([dict.fromkeys(names) | row for row in rows]), file)
    config = DataConfig(**{"max_prompt_length": 64, **options})
    images = ImageProcessor(ModelConfig(path=model), config, torch.float32)
    return PromptDataset([str(file)], AutoTokenizer.from_pretrained(model), config, split="train", images=images)


def test_every_form_of_an_image_gives_the_same_prompt(model: str, tmp_path: Path) -> None:
    data = image_file(0)
    (tmp_path / "a.png").write_bytes(data)
    text = "what is <image>?"
    parts = [{"type": "text", "text": "what is "}, {"type": "image", "text": None}, {"type": "text", "text": "?"}]
    typed = [{"role": "user", "content": parts}]
    forms: list[list[dict[str, Any]]] = [
        [row_of(text, images=[{"bytes": data, "path": None}])],
        [row_of(text, images=[data])],
        [row_of(text, images=["a.png"])],
        [row_of(text, image={"bytes": data, "path": "gone.png"})],
        [row_of(typed, images=[data])],
        [row_of([{"role": "user", "content": [{**parts[1], "image": "a.png"}, parts[2]]}], json=1)],
        [row_of("?", images=[data])],
    ]
    batches = [load(model, rows, tmp_path)[0] for rows in forms]
    expected = batches[0].non_tensor_batch[MULTI_MODAL_INPUTS][0]
    for batch in batches:
        shown = batch.non_tensor_batch[MULTI_MODAL_INPUTS][0]
        assert torch.equal(shown.pixel_values, expected.pixel_values) and shown.files == (data,)
        tokens = batch.batch["prompts"][0]
        assert (tokens == IMAGE).sum() == shown.image_grid_thw.prod() // 4 == shown.pixel_values.shape[0] // 4
    assert len({tuple(batch.batch["prompts"][0].tolist()) for batch in batches[:5]}) == 1
    assert batches[0].non_tensor_batch["raw_prompt"][0] == [{"role": "user", "content": text}]
    assert batches[4].non_tensor_batch["raw_prompt"][0] == [{"role": "user", "content": text}]
    assert torch.equal(batches[5].batch["prompts"], batches[6].batch["prompts"])


def test_images_are_scaled_down_to_max_pixels(model: str, tmp_path: Path) -> None:
    rows = [row_of("<image>", images=[image_file(0, 64, 64)])]
    counts = [
        int((load(model, rows, tmp_path, max_prompt_length=99, max_pixels=limit)[0].batch["prompts"] == IMAGE).sum())
        for limit in (None, 32 * 32, 40 * 40)
    ]
    assert counts == [64, 16, 25]


def test_text_rows_are_mixed_in_and_long_prompts_with_images_are_dropped(model: str, tmp_path: Path) -> None:
    rows = [
        row_of("<image>", images=[image_file(0)]),
        row_of("<image>" + "z" * 60, images=[image_file(0)]),
        row_of("y" * 70, images=[]),
        row_of("x", images=[]),
    ]
    data = load(model, rows, tmp_path, truncation="left", max_prompt_length=50)
    assert len(data) == 3
    assert "1 longer than 50 have images and were dropped, 3 kept; 1 longer than 50 were cut" in data.report
    shown = next(data.batches()).non_tensor_batch[MULTI_MODAL_INPUTS]
    assert [each is None for each in shown] == [False, True, True]
    with pytest.raises(UserError, match=r"2 of 4 prompts are longer than data.max_prompt_length=50"):
        load(model, rows, tmp_path, max_prompt_length=50)
    with pytest.raises(UserError, match="raise data.max_prompt_length, or lower data.max_pixels"):
        load(model, rows[1:2], tmp_path, max_prompt_length=50, truncation="left")


@pytest.mark.parametrize(
    ("options", "has_text", "has_images", "advice", "not_advice"),
    [
        ({}, False, True, ["overlong_prompts=true", "or lower data.max_pixels"], ["truncation"]),
        ({}, True, False, ["overlong_prompts=true", "or cut them with data.truncation="], ["pixels"]),
        (
            {},
            True,
            True,
            ["lower data.max_pixels", "or cut prompts without images with data.truncation="],
            ["cut them"],
        ),
        ({"filter_overlong_prompts": True}, False, True, ["Raise it or lower data.max_pixels"], ["drop such", "trunc"]),
        (
            {"filter_overlong_prompts": True},
            True,
            False,
            ["filter_overlong_prompts=false and data.trunc"],
            ["drop such"],
        ),
    ],
)
def test_the_advice_for_long_prompts_is_only_what_applies_to_them(
    model: str,
    tmp_path: Path,
    options: dict[str, Any],
    has_text: bool,
    has_images: bool,
    advice: list[str],
    not_advice: list[str],
) -> None:
    rows = []
    if has_text:
        rows.append(row_of("y" * 70, images=[]))
    if has_images:
        rows.append(row_of("<image>" + "z" * 60, images=[image_file(0)]))
    with pytest.raises(UserError) as raised:
        load(model, rows, tmp_path, max_prompt_length=50, **options)
    message = str(raised.value)
    assert all(part in message for part in advice), message
    assert not any(part in message for part in not_advice), message


# ----------------------------------------------------------------------------------------------------- modes of pixels


def encoded(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def greys(image: Image.Image) -> list[int]:
    """The values of a grey RGB image."""
    pixels = np.asarray(image)
    assert image.mode == "RGB" and (pixels == pixels[..., :1]).all()
    return [int(value) for value in pixels[..., 0].flatten()]


SIXTEEN_BITS = np.array([[0, 257, 128 * 257, 65535]], dtype=np.uint16)  # white is 65535 = 255 x 257
EIGHT_BITS = [0, 1, 128, 255]


def test_a_file_of_16_bits_is_scaled_to_8_bits() -> None:
    assert greys(open_image(encoded(Image.fromarray(SIXTEEN_BITS)))) == EIGHT_BITS
    assert greys(open_image(read_image(Image.fromarray(SIXTEEN_BITS), None, "row 0"))) == EIGHT_BITS


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("I", SIXTEEN_BITS.astype(np.int32), EIGHT_BITS),
        ("I", np.array([[0, 1, 128, 255]], np.int32), EIGHT_BITS),
        ("F", np.array([[0, 1 / 255, 128 / 255, 1]], np.float32), EIGHT_BITS),
        ("F", np.array([[0, 1, 128, 255]], np.float32), EIGHT_BITS),
        ("L", np.array([[0, 1, 128, 255]], np.uint8), EIGHT_BITS),
        ("1", np.array([[False, True]]), [0, 255]),
    ],
)
def test_grey_images_of_other_ranges_keep_their_brightness(mode: str, values: np.ndarray, expected: list[int]) -> None:
    image = Image.fromarray(values)
    assert image.mode == mode
    assert greys(open_image(read_image(image, None, "row 0"))) == expected


@pytest.mark.parametrize("order", ["I;16", "I;16L", "I;16B"])
def test_every_order_of_the_bytes_of_16_bits(order: str) -> None:
    data = SIXTEEN_BITS.astype(">u2" if order == "I;16B" else "<u2").tobytes()
    assert greys(rgb_image(Image.frombytes(order, (4, 1), data))) == EIGHT_BITS


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.array([[70000]], np.int32), "row 3: has values from 0 to 70000 in PIL's mode I; expected 0 to 65535"),
        (np.array([[-1]], np.int32), "has values from -1 to 0"),
        (np.array([[256.0]], np.float32), "in PIL's mode F; expected 0 to 255"),
        (np.array([[np.nan]], np.float32), "in PIL's mode F"),
    ],
)
def test_values_of_an_unknown_range_are_refused(values: np.ndarray, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_image(Image.fromarray(values), None, "row 3")


def test_transparent_parts_are_white_and_half_transparent_ones_are_mixed_with_it() -> None:
    """0.5 x black over white is grey: 255 - 128 = 127."""
    half_black = Image.fromarray(np.array([[[0, 0], [0, 128], [0, 255]]], np.uint8))
    assert half_black.mode == "LA"
    palette = Image.new("P", (3, 1))
    palette.putpalette([0, 0, 0, 0, 0, 0, 0, 0, 0])
    palette.putdata([0, 1, 2])
    files = {
        "LA": encoded(half_black),
        "RGBA": encoded(half_black.convert("RGBA")),
        "palette": encoded(palette, transparency=bytes([0, 128, 255])),
    }
    for name, data in files.items():
        assert greys(open_image(data)) == [255, 127, 0], name
        assert greys(open_image(read_image(Image.open(io.BytesIO(data)), None, "row 0"))) == [255, 127, 0], name
    assert greys(rgb_image(half_black.convert("RGBA").convert("PA"))) == [255, 127, 0]
    assert greys(rgb_image(half_black.convert("La"))) == [255, 127, 0]


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "RGBX", "P"])
def test_colours_of_other_modes(mode: str) -> None:
    red = Image.new("RGB", (2, 2), (255, 0, 0)).convert(mode)
    [(count, (r, g, b))] = rgb_image(red).getcolors()
    assert count == 4 and r >= 254 and g <= 1 and b <= 1


def test_an_image_is_rotated_as_its_exif_data_say_in_every_form(tmp_path: Path) -> None:
    """Orientation 6 stands for a rotation by 90 degrees clockwise, so the left pixel becomes the upper one."""
    lying = Image.fromarray(np.array([[[255, 0, 0], [0, 0, 255]]], np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(lying, exif=exif.tobytes())
    expected = [[[255, 0, 0]], [[0, 0, 255]]]
    in_memory = lying.copy()
    in_memory.getexif()[0x0112] = 6
    forms = {"bytes": data, "opened": Image.open(io.BytesIO(data)), "in memory": in_memory}
    for name, entry in forms.items():
        image = open_image(read_image(entry, None, "row 0"))
        assert np.asarray(image).tolist() == expected, name


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("black", "white")]
    for kind in ("GIF", "PNG", "WEBP"):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
        assert set(greys(open_image(file.getvalue()))) == {0}, kind


def test_a_pil_image_that_is_damaged_or_too_large_is_refused_with_its_row() -> None:
    with pytest.raises(UserError, match="row 7: .*Replace or remove it"):
        read_image(Image.open(io.BytesIO(image_file(0)[:-60])), None, "row 7")
    with pytest.raises(UserError, match="row 7: has .* pixels, more than the"):
        read_image(Image.new("1", (MOST_PIXELS // 1024 + 1, 1024)), None, "row 7")


def bomb() -> bytes:
    """A small file of an image with more pixels than allowed."""
    file = io.BytesIO()
    Image.new("1", (MOST_PIXELS // 1024 + 1, 1024)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            row_of("<image><image>", images=[image_file(0)]),
            "row 1 .*has 1 images in column images.* and 2 placeholders",
        ),
        (row_of("<image>", images=[]), "row 1 .*has 0 images .* 1 placeholders"),
        (row_of("<image>", images=[b"GIF89a"]), "row 1 .*: image 0 is no image in one of the formats PNG"),
        (row_of("<image>", images=[image_file(0)[:-40]]), "row 1 .*: image 0 cannot be decoded"),
        (row_of("<image>", images=[b"%!PS-Adobe-3.0 EPSF-3.0\n"]), "is no image in one of the formats"),
        (row_of("<image>", images=[bomb()]), r"row 1 .*: image 0 has \d+ x 1024 pixels, more than the 67,108,864"),
        (row_of("<image>", images=[image_file(0, 2, 600)]), "row 1 .*: image 0 absolute aspect ratio"),
        (row_of("<image>", images=["../outside.png"]), "outside of the folder .*set data.image_folder"),
        (row_of("<image>", images=["link.png"]), "outside of the folder"),
        (row_of("<image>", images=["/etc/hostname"]), "outside of the folder"),
        (row_of("<image>", images=["none.png"]), "'none.png' cannot be read"),
        (row_of("<image>", images=["pipe"]), "'pipe' cannot be read .not a file"),
        (row_of("<image>", images=["x" * 5000]), "x' cannot be read|cannot be read .*too long"),
        (row_of("<image>", images=["a\0.png"], json=1), "cannot be read .*null"),
        (row_of("<image>", images=["http://example.org/a.png"]), "download images before training"),
        (row_of("<image><|image_pad|>", images=[image_file(0)]), "row 1 .*contain 2 image tokens for 1 images"),
        (row_of("<|image_pad|>", images=[]), "row 1 .*contain 1 image tokens for 0 images"),
        (row_of("<image>", images=[image_file(0)], videos=["a"]), "column 'videos' is not empty"),
        (
            row_of([{"role": "user", "content": [{"type": "video", "video": "a"}]}], images=[], json=1),
            "the message part",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_row(
    model: str, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    inside = tmp_path / "data"
    inside.mkdir()
    (tmp_path / "outside.png").write_bytes(image_file(0))
    (inside / "link.png").symlink_to(tmp_path / "outside.png")
    os.mkfifo(inside / "pipe")
    has_bytes = any(isinstance(each, bytes) for each in row["images"])
    first = row_of("<image>", images=[image_file(0)]) if has_bytes else row_of("x", images=[])
    with pytest.raises(UserError, match=message):
        load(model, [first, row], inside)


def test_files_elsewhere_are_read_on_request(model: str, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(image_file(0))
    (tmp_path / "rows").mkdir()
    rows = [row_of("<image>", images=["a.png"])]
    assert len(load(model, rows, tmp_path / "rows", image_folder=str(tmp_path / "pictures"))) == 1


def test_a_saved_dataset_reads_only_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for name in ("inside", "outside"):
        (tmp_path / ("saved" if name == "inside" else ".") / f"{name}.png").write_bytes(image_file(0))
    schema = RowSchema(DataConfig(), "train", accepts_images=True)
    for name, found in (("inside.png", 1), ("../outside.png", 0)):
        table = RowTable(str(tmp_path / "saved"), [row_of("<image>", images=[name])])
        if found:
            assert len(next(schema.rows(table, [0]))["images"]) == 1
        else:
            with pytest.raises(UserError, match="outside of the folder"):
                next(schema.rows(table, [0]))


def test_a_text_model_and_a_model_without_a_processor_are_refused(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row_of("<image>", images=[image_file(0)])]), file)
    config, tokenizer = DataConfig(max_prompt_length=64), AutoTokenizer.from_pretrained(model)
    with pytest.raises(UserError, match="row 0 .*has 1 images, but the model of model.path reads only text"):
        PromptDataset([str(file)], tokenizer, config, split="train")
    bare = Path(tiny_vision_model(tmp_path / "bare"))
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match="its image processor cannot be read.*expected preprocessor_config.json"):
        image_processor(ModelConfig(path=str(bare)), config, torch.float32)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats_and_broken_files(kind: str) -> None:
    whole = image_file(1, kind=kind)
    assert open_image(whole).size == (24, 16)
    generator = np.random.default_rng(0)
    for _ in range(200):  # of random damage nothing but a ValueError or an image comes out
        damaged = bytearray(whole)
        for place in generator.integers(0, len(whole), 8):
            damaged[place] = generator.integers(256)
        try:
            assert open_image(bytes(damaged[: generator.integers(8, len(whole))])).mode == "RGB"
        except ValueError:
            continue


def test_bytes_do_not_grow_with_the_number_of_answers(model: str, tmp_path: Path) -> None:
    rows = [row_of("<image>", images=[image_file(seed, 64, 64)]) for seed in range(3)]
    prompts = next(load(model, rows, tmp_path, max_prompt_length=99).batches())
    sizes: dict[str, list[int]] = {}
    for n in (1, 16):
        groups = prompt_groups(prompts, n, "train/1", 0, 1)
        columns = groups[0].columns
        assert columns is not None
        batch, file = columns.batch, tmp_path / "state.pt"
        write_state(file, {"columns": batch.non_tensor_batch, "plans": [group.plan for group in groups]})
        restored = read_state(file)["columns"][MULTI_MODAL_INPUTS]
        assert restored[0] is restored[n - 1]
        batch.save_to_disk(tmp_path / "dump.pkl")
        found = {
            "dispatch": len(pickle.dumps(batch.select(non_tensor_batch_keys=[MULTI_MODAL_INPUTS]))),
            "plans": len(pickle.dumps([group.plan for group in groups])),
            "checkpoint": file.stat().st_size,
            "crash dump": (tmp_path / "dump.pkl").stat().st_size,
        }
        for name, size in found.items():
            sizes.setdefault(name, []).append(size)
        again = pickle.loads(pickle.dumps(batch)).non_tensor_batch[MULTI_MODAL_INPUTS]
        assert again[0] is again[n - 1] and isinstance(again[0], ImageInputs)
    pixels = 3 * 256 * 96 * 4
    for name, (one, many) in sizes.items():
        assert pixels < one < 1.3 * pixels and many - one < 0.1 * pixels, (name, one, many)


def test_rewards_receive_the_images() -> None:
    item = RewardItem("a", "mine", "2", "2", images=(image_file(0), image_file(1)))

    def one(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, images: list[Any]) -> float:
        return float(len(images) == 2 and images[0].size == (24, 16))

    def trl(prompts: Any, completions: Any, images: list[list[Any]], **columns: Any) -> list[float]:
        return [float(len(each)) for each in images]

    assert RewardPart(function=one).score_all([item])[0].score == 1.0
    assert RewardPart(function=trl, style="trl").score_list([item])[0].score == 2.0
    assert RewardPart(function=trl, style="trl").score_list([RewardItem("b", "mine", "2", "2")])[0].score == 0.0


def test_supervised_training_refuses_rows_with_images(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat, "images": ["a.png"]}))
    with pytest.raises(UserError, match="row 0 of .*, column 'images' is not empty"):
        list(sft_rows([str(tmp_path / "rows.jsonl")], "data.train_files"))


def test_damaged_exif_data_leave_an_image_as_it_is_stored() -> None:
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (4, 5, 6))
    for exif in (b"Exif\0\0garbage", b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff"):
        image.info["exif"] = exif
        data = io.BytesIO()
        image.save(data, "PNG", exif=exif)
        for converted in (rgb_image(image.copy()), open_image(data.getvalue())):
            assert converted.size == (2, 1)
            assert converted.getpixel((0, 0)) == (1, 2, 3)
            assert converted.getpixel((1, 0)) == (4, 5, 6)
