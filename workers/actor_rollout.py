"""The policy's worker: one training engine and one rollout engine that share a device, and the calls between them.

Takes and gives `DataProto`; what it is made of (FSDP engine, rollout engine, loss, phases, weight sync) lives in
files of its own.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from verl_lite.config import PPOConfig
from verl_lite.device import compute_dtype, device_memory
from verl_lite.metrics import Metric, values
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from workers.engine.fsdp import FSDPEngine
from workers.frozen_models import ref_log_prob
from workers.losses import actor_loss, check_loss_is_additive, loss_of_batch, user_loss
from workers.policy.causal_lm import causal_lm
from workers.policy.loading import token_network
from workers.policy.tokenizer import load_tokenizer, stop_token_ids
from workers.rewards.pool import RewardItem
from workers.rollout.base import Completion, RolloutEngine, SamplingParams, build_rollout_engine
from workers.rollout.single_turn import generate
from workers.training_worker import TrainingWorker

USER_LOSS_REMEDY = (
    "divide by the counts of the mini-batch, data.meta_info['num_tokens'] or ['num_sequences'], not by those of data; "
    "or say actor.policy_loss.loss_mode=module:function"
)


class ActorWorker(TrainingWorker):
    """Generates with the policy and trains it.

    rewards: handle of the reward pool; finished samples are sent to it while others still generate. None = no reward
        function is called. Other arguments: as of `ModelWorker`.
    """

    config: PPOConfig

    def __init__(self, config: PPOConfig, total_training_steps: int, rewards: Any) -> None:
        super().__init__(config, total_training_steps)
        self.rewards = rewards
        self.version, self._adds_up = 0, False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds both engines; the training engine first, so that the rollout engine sees the memory that is left."""
        config, model = self.config, self.config.model
        assert model.path is not None
        self.tokenizer = load_tokenizer(model, config.data.chat_template)
        policy = causal_lm(config.actor.log_prob_chunk_tokens, with_routers=self._asks_routers)
        network = token_network(model, policy)
        self.build_engine(network, config.actor.fsdp_config, config.actor.optim)
        self.max_model_len = (
            config.rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length
        )
        self.rollout = build_rollout_engine(
            config.rollout.name,
            model.path,
            config.rollout,
            max_model_len=self.max_model_len,
            device=self.device,
            dtype=compute_dtype(config.rollout.dtype, self.device),
            seed=config.trainer.seed,
            override_config=model.override_config,
            trust_remote_code=model.trust_remote_code,
        )
        self.phases.add(self.rollout)
        tensor_parallel = config.rollout.tensor_model_parallel_size
        self.register_mesh(
            "rollout",
            dp_rank=self.rank // tensor_parallel,
            dp_size=self.world_size // tensor_parallel,
            is_collect=self.rank % tensor_parallel == 0,
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers each prompt once. Reads prompts, prompt_mask, uid, sample and what rewards need; writes token
        columns.

        meta_info: sampling (`SamplingParams`), step, seed and `purpose`, which keys the rewards of this call.
        """
        self.enter_rollout()
        meta, started = prompts.meta_info, time.perf_counter()
        sampling: SamplingParams = meta["sampling"]

        def send_rewards(finished: list[tuple[int, Completion]]) -> None:
            columns, decode = prompts.non_tensor_batch, self.tokenizer.decode
            items = [
                RewardItem(
                    key=columns["sample_id"][row],
                    data_source=columns["data_source"][row],
                    solution_str=str(decode(done.token_ids, skip_special_tokens=True)),
                    ground_truth=columns["reward_model"][row]["ground_truth"],
                    extra_info=columns["extra_info"][row],
                    prompt=columns["raw_prompt"][row],
                )
                for row, done in finished
            ]
            self.rewards.send("submit", items)

        result = generate(
            self.rollout,
            prompts,
            sampling=replace(sampling, stop_token_ids=stop_token_ids(self.config.model, self.tokenizer)),
            seed=meta["seed"],
            step=meta["step"],
            response_length=self.config.data.max_response_length,
            pad_token_id=self.tokenizer.pad_token_id,
            on_finished=send_rewards if self.rewards and self.is_collecting("rollout") else lambda finished: None,
        )
        seconds = time.perf_counter() - started
        tokens = int(result.batch["response_mask"].sum())
        result.meta_info["metrics"] = {
            "rollout/tokens_per_second_per_gpu": Metric.mean(tokens, seconds),
            "rollout/slowest_rank_seconds": Metric.max(seconds),
            "rollout/mean_rank_seconds": Metric.mean(seconds, 1),
        }
        return result

    def enter_rollout(self) -> None:
        """Gives the device to the rollout engine, with its weights."""
        self.phases.enter(self.rollout)
        if not self.rollout.has_weights:  # another model took the device since the last update, as a critic's warm-up
            self.update_weights(self.version)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs of the responses under the current weights: old_log_probs (n, R), and entropys and sum_pi_squared
        (n, R) where asked for.

        data: a planned batch (`BatchPlan.apply`); meta_info temperature, calculate_entropy, calculate_sum_pi_squared.
        """
        self.phases.enter(self.engine)
        asked = ("temperature", "calculate_entropy", "calculate_sum_pi_squared")
        outputs = self.engine.infer(data, **{name: data.meta_info[name] for name in asked})
        columns = {"log_probs": "old_log_probs", "entropys": "entropys", "sum_pi_squared": "sum_pi_squared"}
        return DataProto.from_dict(tensors={columns[name]: value for name, value in outputs.items()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """ref_log_prob (n, R) of a planned batch: the policy without its adapter. As `ReferenceWorker`'s."""
        self.phases.enter(self.engine)
        with self.engine.adapter_off():
            return ref_log_prob(self.engine, data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> DataProto:
        """Trains on a planned batch, one optimizer step per mini-batch. Gives metrics in meta_info."""
        self.phases.enter(self.engine)
        actor = self.config.actor
        options: dict[str, bool] = {}
        if self._asks_routers:
            options["calculate_router_aux_loss"] = actor.router_aux_loss_coef > 0
            options["count_router_replay"] = self.config.rollout.router_replay
        metrics = self.engine.train(
            data,
            self._loss,
            temperature=data.meta_info["temperature"],
            calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0,
            **options,
        )
        result = _of_actor(metrics)
        result |= {f"actor/perf/{name}": Metric.max(value) for name, value in device_memory(self.device).items()}
        return DataProto(meta_info={"metrics": result})

    @property
    def _asks_routers(self) -> bool:
        return self.config.actor.router_aux_loss_coef > 0 or self.config.rollout.router_replay

    def loss_func(
        self, data: DataProto, output_tensor: dict[str, torch.Tensor] | torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """ROLL's loss entry, of token and segment ratios alike: (loss, actor/* metrics) of a batch, ROLL's or ours.

        output_tensor: logits (b, S, V), or the policy's outputs by name (b, R). See `workers.losses.loss_of_batch`.
        Metrics are numbers under ROLL's names, without the @sum, @max or @min that its trackers take off.
        A subclass that has its own trains with it: data is then a micro-batch with columns (b, R), output_tensor the
        outputs by name, and the losses of micro-batches add up. So it divides by the mini-batch's counts in
        data.meta_info (num_tokens, num_sequences; or ROLL's): a UserError in the first update tells where it does not.
        Metrics may carry ROLL's suffixes: see `verl_lite.metrics.declared`.
        """
        loss, metrics = loss_of_batch(data, output_tensor, self.config)
        return loss, values(_of_actor(metrics))

    def _loss(self, data: DataProto, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The same of a micro-batch that the driver prepared, in parts that add up to a step's metrics."""
        if type(self).loss_func is not ActorWorker.loss_func:
            own = partial(user_loss, self.loss_func)
            if not self._adds_up:
                self._adds_up = check_loss_is_additive(own, data, outputs, "loss_func", USER_LOSS_REMEDY)
            loss, metrics = own(data, outputs)
        else:
            loss, metrics = actor_loss(data, outputs, self.config.actor, self.config.algorithm.rollout_correction)
        return loss, _of_actor(metrics)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> dict[str, Metric]:
        """Gives the trained weights to the rollout engine, which generates with them from now on."""
        self.version = version
        self.engine.move_out_optimizer()
        self.phases.enter(self.rollout)
        self.engine.move_in()
        metrics = sync_weights(self.engine, self.rollout, version, self.config.rollout.update_weights_bucket_megabytes)
        self.engine.move_out()
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Ends the rollout engine; nothing of it stays behind."""
        self.rollout.close()


ActorRolloutWorker = ActorWorker
"""The name that it had."""


def sync_weights(source: FSDPEngine, rollout: RolloutEngine, version: int, bucket_mb: int) -> dict[str, Metric]:
    """Streams all parameters into the rollout engine and resets its cache.

    All ranks call it together (gathering is collective). bucket_mb: MiB of full tensors alive at one time.
    Returns seconds and megabytes, for the log.
    """
    started, sent = time.perf_counter(), 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal sent
        for name, tensor in source.full_params(bucket_mb << 20):
            sent += tensor.numel() * tensor.element_size()
            yield name, tensor

    rollout.load_weights(counted(), version)
    rollout.reset_cache()
    return {
        "weight_sync/seconds": Metric.max(time.perf_counter() - started),
        "weight_sync/megabytes": Metric.max(sent / 1e6),
    }


def _of_actor(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Metrics under actor/, where they have no place of their own."""
    return {name if "/" in name else f"actor/{name}": metric for name, metric in metrics.items()}
