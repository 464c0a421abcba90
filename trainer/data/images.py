"""The images of prompts: reads the entries of an image column, and prepares images with the model's image processor.

An image is decoded once when the dataset is read, which checks it and counts its tokens, and once per drawn prompt. All
samples of the prompt share the result (`workers.policy.vision.ImageInputs`).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL.Image import Image
from transformers import AutoImageProcessor

from verl_lite.config import DataConfig, ModelConfig
from verl_lite.errors import UserError
from verl_lite.images import open_image, rgb_image
from verl_lite.json_types import ChatMessage
from verl_lite.machine.host import cpu_count
from workers.policy.loading import empty_network, load_model_config
from workers.policy.model_errors import user_error_on_failure
from workers.policy.vision import ImageInputs, has_vision, prompt_positions

PLACEHOLDER = "<image>"
"""The text that stands for an image in a message, as in verl."""
_MOST_THREADS = 8


class _HuggingFaceProcessor(Protocol):
    """The image processor of Qwen2.5-VL and Qwen3-VL, as far as this module uses it.

    Attributes:
        size: Limits of the number of pixels, shortest_edge and longest_edge.
        merge_size: Patches per token along each side.
    """

    size: dict[str, int]
    merge_size: int

    def __call__(self, images: Sequence[Image], return_tensors: str) -> Mapping[str, torch.Tensor]:
        """Returns pixel_values and image_grid_thw of the images."""
        ...

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        """Returns the number of patches of an image with this size in pixels."""
        ...


def read_image(entry: object, folder: Path | None, where: str) -> bytes:
    """Returns the encoded file of an entry of an image column.

    Args:
        entry: Bytes, a path, a PIL image, or a dict with one of these under `bytes`, `path` or `image`.
        folder: Folder in which paths must be, and to which relative paths refer. None accepts no paths.
        where: Location of the entry for messages.

    Raises:
        UserError: If the entry is none of these, or if its file cannot be read.
    """
    # dicts of `datasets` (bytes, path), of verl and of Qwen's message parts (image); the value can be a dict again.
    # The bytes come first, because next to them the path of `datasets` is only a name
    while isinstance(entry, dict):
        values = [entry[key] for key in ("bytes", "image", "path") if entry.get(key) is not None]
        if not values:
            keys = ", ".join(map(str, entry))
            entry = f"a dict with {keys}"
            break
        entry = values[0]

    if isinstance(entry, bytes):
        return entry
    if isinstance(entry, Image):
        return _encoded(entry, where)
    if not isinstance(entry, str) or _is_url(entry):
        raise UserError(
            f"{where}: found {entry!r:.200}, expected the bytes or the path of an image file; download images before "
            "training"
        )
    if folder is None:
        raise UserError(f"{where}: found the path {entry!r}; set data.image_folder to the folder of the images")
    return _read_below(folder, entry, where)


def _is_url(text: str) -> bool:
    """True for an image that is not a file of this machine. The URL file:// stands for a path."""
    return text.startswith("data:") or "://" in text.removeprefix("file://")


def _encoded(image: Image, where: str) -> bytes:
    """Returns a PIL image as a file."""
    try:
        rgb = rgb_image(image)
    # PIL decodes an image that it has opened only here
    except (ValueError, OSError, SyntaxError) as error:
        raise UserError(f"{where}: {error}. Replace or remove it") from error
    file = io.BytesIO()
    # without loss
    rgb.save(file, "PNG")
    return file.getvalue()


def _read_below(folder: Path, entry: str, where: str) -> bytes:
    """Reads an image file by its path, which must be inside the folder: a dataset must not read other files."""
    try:
        # resolved, because a link or ".." could lead out of the folder
        path = (folder / entry.removeprefix("file://")).resolve()
        is_inside = path.is_relative_to(folder.resolve())
        if is_inside:
            # reading a pipe would wait
            if path.exists() and not path.is_file():
                raise OSError("not a file")
            return path.read_bytes()
    # ValueError: null bytes in the path; RuntimeError: a circle of links
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: {entry!r:.200} cannot be read ({error}); expected a file in {folder}") from error
    raise UserError(
        f"{where}: {entry!r:.200} is outside of the folder {folder.absolute()}; set data.image_folder to the "
        "folder of the images"
    )


def message_parts(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns messages with typed parts, as chat templates expect them, in place of `PLACEHOLDER` in their texts."""
    converted: list[ChatMessage] = []
    for message in messages:
        parts: list[dict[str, str]] = []
        texts = (message["content"] or "").split(PLACEHOLDER)
        for number, text in enumerate(texts):
            if number > 0:
                parts.append({"type": "image"})
            if text:
                parts.append({"type": "text", "text": text})
        converted.append({**message, "content": parts})
    return converted


class ImageProcessor:
    """The image processor of a vision-language model, on PIL, and the positions of its image tokens.

    Args:
        model: The model, whose folder contains the configuration of the image processor.
        data: Contains the limit data.max_pixels.
        dtype: Compute dtype of the network.

    Raises:
        UserError: If the model's folder has no image processor.
    """

    def __init__(self, model: ModelConfig, data: DataConfig, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._image_token = load_model_config(model).image_token_id
        remedy = "expected preprocessor_config.json in that folder, as Hugging Face writes it"
        with user_error_on_failure(f"model.path={model.path!r}: its image processor cannot be read", remedy):
            # on PIL, which needs no torchvision
            self._processor: _HuggingFaceProcessor = AutoImageProcessor.from_pretrained(
                model.path,
                backend="pil",
                trust_remote_code=model.trust_remote_code,
            )
        # a limit below the model's smallest size lowers that, too; small images would be enlarged beyond the limit
        if data.max_pixels is not None:
            least_pixels = min(data.max_pixels, self._processor.size["shortest_edge"])
            self._processor.size = {
                "shortest_edge": least_pixels,
                "longest_edge": data.max_pixels,
            }
        self._network = empty_network(model)
        num_threads = min(_MOST_THREADS, cpu_count())
        self._threads = ThreadPoolExecutor(num_threads, "images")

    def token_counts(self, rows: Sequence[Sequence[bytes]], locations: Sequence[str]) -> list[tuple[int, ...]]:
        """Decodes the images of several rows, and returns the number of tokens of each image.

        Args:
            rows: The image files of each row.
            locations: Locations of the rows for messages.

        Raises:
            UserError: For an image that cannot be used.
        """
        # threads suffice, because PIL decodes without the interpreter's lock
        counts = self._threads.map(self._tokens_of_row, rows, locations)
        return list(counts)

    def _tokens_of_row(self, files: Sequence[bytes], where: str) -> tuple[int, ...]:
        """Returns the number of tokens of each image of a row."""
        counts = []
        for number, data in enumerate(files):
            try:
                image = open_image(data)
                patches = self._processor.get_number_of_image_patches(image.height, image.width)
            except ValueError as error:
                raise UserError(f"{where}: image {number} {error}. Replace or remove it") from error
            # the model merges a square of patches into one token
            counts.append(patches // self._processor.merge_size**2)
        return tuple(counts)

    def expand(self, token_ids: np.ndarray, counts: Sequence[int], where: str) -> np.ndarray:
        """Repeats the image token of each image as often as the image has tokens.

        Args:
            token_ids: Tokens of a prompt, with one image token for each image.
            counts: Number of tokens of each image.
            where: Location of the prompt for messages.

        Raises:
            UserError: If the number of image tokens differs, for example because the text contains one, or if no other
                token separates two images or follows the last one.
        """
        is_image = token_ids == self._image_token
        are_adjacent = is_image[1:] & is_image[:-1]
        ends_with_image = is_image[-1:].any()
        if is_image.sum() != len(counts) or are_adjacent.any() or ends_with_image:
            raise UserError(
                f"{where}: its tokens contain {int(is_image.sum())} image tokens for {len(counts)} images; expected "
                "one for each image, with other tokens between and after them. The chat template of the model must "
                "show images (data.chat_template), and the text must not contain the model's image token itself"
            )
        repeats = np.ones(len(token_ids), dtype=np.int64)
        repeats[is_image] = counts
        return token_ids.repeat(repeats)

    def inputs(self, rows: Sequence[tuple[Sequence[bytes], np.ndarray]]) -> list[ImageInputs]:
        """Prepares the images of several prompts.

        Args:
            rows: The image files of each prompt, and its token ids as `expand` returns them.
        """
        inputs = self._threads.map(self._inputs_of_row, rows)
        return list(inputs)

    def _inputs_of_row(self, row: tuple[Sequence[bytes], np.ndarray]) -> ImageInputs:
        """Returns the model's inputs for the images of one prompt."""
        files, token_ids = row
        images = [open_image(data) for data in files]
        processed = self._processor(images=images, return_tensors="pt")
        grid = processed["image_grid_thw"].long()
        tokens = torch.from_numpy(token_ids.astype(np.int64))
        positions, following = prompt_positions(self._network, tokens, grid)
        return ImageInputs(
            processed["pixel_values"].to(self._dtype),
            grid,
            positions,
            following,
            _number_of(files),
            tuple(files),
        )


def _number_of(files: Sequence[bytes]) -> int:
    """Returns a number that identifies the contents of the files and their order."""
    # a digest of digests, because files joined directly could be divided in another way
    digest = hashlib.blake2b(digest_size=8)
    for data in files:
        file_digest = hashlib.blake2b(data, digest_size=16)
        digest.update(file_digest.digest())
    number = int.from_bytes(digest.digest(), "big")
    return number >> 1  # 63 bits, which int64 can hold


def image_processor(model: ModelConfig, data: DataConfig, dtype: torch.dtype) -> ImageProcessor | None:
    """Returns the image processor of a vision-language model; None for a model of text."""
    if not has_vision(load_model_config(model)):
        return None
    return ImageProcessor(model, data, dtype)
