"""The critic: values equal those of transformers; checkpoints: test_checkpoint_ranks.py, exports: test_family_roles.py.

That its gradient does not depend on the cut is shown with all losses in test_loss_invariance.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from tests.workers.critic_cases import build_critic, critic_batch, write_critic
from tests.workers.engine_cases import BATCH, PROMPT, Case, in_order, planned
from verl_lite.config import NetworkConfig, PPOConfig
from verl_lite.errors import UserError
from workers.policy.loading import NetworkSpec, load_model_config
from workers.policy.value_head import value_head
from workers.roles.critic import critic_network


@pytest.fixture(scope="module")
def critic(path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_critic(path, tmp_path_factory.mktemp("critic"))


@pytest.mark.parametrize("case", [Case(), Case(max_token_len=20), Case(packed=False)])
def test_values_equal_those_of_transformers(critic: str, case: Case) -> None:
    """The value of a state stands at the token that the state leads to: one place before it in the model's output."""
    network = AutoModelForTokenClassification.from_pretrained(critic, dtype=torch.float64)
    data = critic_batch(BATCH).batch
    with torch.no_grad():
        inputs = {name: data[name] for name in ("input_ids", "attention_mask", "position_ids")}
        expected = network(**inputs).logits[:, PROMPT - 1 : -1, 0] * data["response_mask"]
    assert expected.std() > 0.3
    _, plan = planned(critic_batch(BATCH), case)
    found = build_critic(critic, case).infer(planned(critic_batch(BATCH), case)[0])["values"].numpy()
    assert found.dtype == np.float32 and np.abs(in_order(found, plan) - expected.numpy()).max() < 1e-5


def test_the_head_of_a_path_starts_at_zero_in_silence(path: str, capfd: pytest.CaptureFixture[str]) -> None:
    engine = build_critic(path, Case())
    data, _ = planned(critic_batch(BATCH), Case())
    assert not engine.infer(data)["values"].any()
    backbone = AutoModelForCausalLM.from_pretrained(path).model.state_dict()
    found = dict(engine.full_params())
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in backbone.items())
    assert capfd.readouterr().err.count("MISSING") == 0


def test_wrong_checkpoints_are_one_sentence(critic: str, path: str, tmp_path: Path) -> None:
    network = AutoModelForTokenClassification.from_pretrained(path, num_labels=3)
    network.save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match="token-classification model with 3 labels; a critic has one"):
        build_critic(str(tmp_path / "three"), Case())
    AutoConfig.for_model("vit").save_pretrained(tmp_path / "vit")
    with pytest.raises(UserError, match="neither a ForTokenClassification nor a ForCausalLM network of the family vit"):
        build_critic(str(tmp_path / "vit"), Case())
    short = AutoModelForTokenClassification.from_pretrained(critic)
    kept = {name: value for name, value in short.state_dict().items() if "layers.1.mlp" not in name}
    short.save_pretrained(tmp_path / "short", state_dict=kept)
    with pytest.raises(UserError, match=r"do not fit a Qwen2ForTokenClassification.*model\.layers\.1\.mlp\.down_proj"):
        build_critic(str(tmp_path / "short"), Case())


def test_no_dropout_anywhere(path: str) -> None:
    network = NetworkConfig(path=path, override_config={"attention_dropout": 0.5})
    config = load_model_config(network)
    policy = value_head(NetworkSpec(network, config, torch.float32, with_weights=True)).train()
    rates = [module.p for module in policy.modules() if isinstance(module, torch.nn.Dropout)]
    rates += [module.attention_dropout for module in policy.modules() if hasattr(module, "attention_dropout")]
    assert len(rates) == 3 and not any(rates), "the head's and one of each layer"


def test_without_a_path_of_its_own_the_critic_starts_from_the_policy() -> None:
    config = PPOConfig()
    config.model.path, config.model.override_config = "policy", {"rope_theta": 1.0}
    assert critic_network(config).path == "policy"
    assert critic_network(config).override_config == {"rope_theta": 1.0}
    config.critic.model.path = "critic"
    assert (critic_network(config).path, critic_network(config).override_config) == ("critic", {})
