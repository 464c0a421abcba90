"""Forward, losses and sampler on tensors that only pretend to be on a GPU: a program for the CUDA build of torch, which
needs no device. Prints a line for each part; ends with an exception where host and device are mixed, an argument is not
there, or the host would have to wait for a number.

The backward pass is not in it: autograd's engine wants a real device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.initialization import no_init_weights

from tests.workers.engine_cases import Batch, ragged_batch
from verl_lite.config import ActorConfig, CriticConfig, PolicyLossConfig
from verl_lite.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl_lite.protocol import DataProto
from verl_lite.registry import takes
from workers.engine import packing
from workers.engine.packing import PACKED_ATTENTION, pack
from workers.losses import actor_loss, critic_loss
from workers.policy import causal_lm
from workers.policy.causal_lm import CausalLMPolicy
from workers.rollout.sampling import sample

DEVICE = torch.device("cuda", 0)


def check_forward(columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a bf16 model with grouped heads, prompts shared; by torch's own flash attention."""
    packed = pack(columns)
    assert packed.sequences is not None and packed.sequences.expand is not None
    config = Qwen2Config(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    )
    causal_lm.logit_transform = lambda model: causal_lm.PLAIN_LOGITS  # found with real numbers
    packing._flash_attn_varlen.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with no_init_weights(), DEVICE:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION)
        outputs = CausalLMPolicy(model, 16)(packed.to(DEVICE), 0.7, True)
        assert all(value.device == DEVICE and value.dtype == torch.float32 for value in outputs.values())
    return outputs


def check_losses(rows: int, width: int) -> None:
    names = ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "returns")
    with FakeTensorMode(), torch.no_grad(), DEVICE:
        columns = {name: torch.randn(rows, width) for name in names}
        columns["response_mask"] = torch.ones(rows, width, dtype=torch.long)
        optional = {"selected": torch.ones(rows, width, dtype=torch.bool), "scores": torch.randn(rows)}
        outputs = {name: torch.randn(rows, width) for name in ("log_probs", "entropys", "values")}
        totals: dict[str, Any] = {"num_tokens": rows * width, "num_sequences": rows}
        for mode in sorted(POLICY_LOSS_REGISTRY):
            taken = {name: value for name, value in optional.items() if takes(get_policy_loss_fn(mode), name)}
            data = DataProto.from_dict(columns | taken, meta_info=totals)
            options = PolicyLossConfig(loss_mode=mode, dro_beta=0.5)
            config = ActorConfig(use_kl_loss=True, entropy_coeff=0.01, policy_loss=options)
            assert actor_loss(data, outputs, config)[0].device == DEVICE
            print("loss", mode)
        data = DataProto.from_dict(columns, meta_info=totals)
        assert critic_loss(data, outputs, CriticConfig(), ActorConfig())[0].device == DEVICE


def check_sampler(rows: int, vocabulary: int) -> None:
    with FakeTensorMode(), DEVICE:
        whole, part = torch.ones(rows, dtype=torch.long), torch.rand(rows)
        drawn = sample(
            torch.randn(rows, vocabulary), temperature=part, seeds=whole, positions=whole, top_k=whole, top_p=part
        )
    assert [each.device for each in drawn] == [DEVICE, DEVICE]


def main() -> None:
    print("torch", torch.__version__, torch.version.cuda)
    batch = ragged_batch(Batch(rows=6, shared_prompts=3))
    outputs = check_forward(dict(batch.batch))
    print("forward", {name: tuple(value.shape) for name, value in outputs.items()})
    check_losses(6, 10)
    check_sampler(4, 32)
    print("done")


if __name__ == "__main__":
    main()
