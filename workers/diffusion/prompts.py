"""Prompts as the model reads them: embeddings of a frozen text encoder, each prompt encoded once."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from workers.diffusion.memory import Placement

LONGEST_PROMPT = 512  # tokens that a Wan transformer reads


class PromptEncoder:
    """Embeddings of prompts, kept on the host; the encoder works only for prompts that it has not seen.

    placement: takes charge of the encoder. Every prompt is encoded alone, so that nothing depends on its neighbours.
    """

    def __init__(self, tokenizer: Any, text_encoder: nn.Module, placement: Placement) -> None:
        self.tokenizer, self.text_encoder, self.placement = tokenizer, text_encoder, placement
        self.length = min(LONGEST_PROMPT, int(tokenizer.model_max_length))
        self._known: dict[str, torch.Tensor] = {}
        placement.add(text_encoder)

    def __call__(self, prompts: Sequence[str], device: torch.device) -> torch.Tensor:
        """(b, L, D) with zeros behind each prompt's tokens, as diffusers' pipeline has them."""
        new = dict.fromkeys(prompt for prompt in prompts if prompt not in self._known)
        if new:
            with self.placement.at_work(self.text_encoder):
                self._known |= {prompt: self._encode(prompt) for prompt in new}
        rows = [self._known[prompt].to(device) for prompt in prompts]
        return torch.stack([nn.functional.pad(row, (0, 0, 0, self.length - len(row))) for row in rows])

    def _encode(self, prompt: str) -> torch.Tensor:
        """(tokens, D), on the host."""
        plain = " ".join(html.unescape(html.unescape(prompt)).split())
        tokens = self.tokenizer(
            [plain],
            padding="max_length",
            max_length=self.length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        ids, mask = tokens.input_ids.to(self.placement.device), tokens.attention_mask.to(self.placement.device)
        states = self.text_encoder(ids, mask).last_hidden_state[0]
        return states[: int(mask.sum())].cpu()
