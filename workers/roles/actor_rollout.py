"""The policy's worker, with a training engine and a rollout engine that share a device.

Its methods take and return `DataProto`. The engines, the loss and the phases are implemented in other modules. With
async_training.batches_ahead, groups of samples run between training micro-batches; the rollout engine's weights do not
change meanwhile.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from verl_lite.config import PPOConfig
from verl_lite.config.pools import num_engines
from verl_lite.core_algos import LossResult
from verl_lite.errors import TransferError
from verl_lite.machine.profiling import count_moved
from verl_lite.metrics import Metric, values
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl_lite.single_controller.resource_pool import ServiceHandle
from verl_lite.single_controller.worker import host_store
from workers.engine.fsdp import FSDPEngine
from workers.engines.base import RolloutEngine, SamplingParams
from workers.engines.weight_transfer import ChannelEnd, WeightChannel
from workers.losses import actor_loss, check_loss_is_additive
from workers.policy.adapter import KeptBase, sends_adapter
from workers.policy.causal_lm import TEACHER_IDS, causal_lm
from workers.policy.loading import token_network
from workers.policy.tokenizer import load_tokenizer
from workers.roles.frozen_models import ref_log_prob, teacher_log_probs
from workers.roles.sampling_worker import SamplingWorker
from workers.roles.training_worker import COMPUTE_METRIC, COMPUTE_PROTO, TrainingWorker, with_prefix
from workers.roll_loss import loss_of_batch, user_loss
from workers.rollout.answers import answer_plans
from workers.rollout.group_run import GroupRun
from workers.rollout.specs import GroupPlan, GroupResults

USER_LOSS_REMEDY = (
    "divide by the counts of the mini-batch, data.meta_info['num_tokens'] or ['num_sequences'], not by those of data; "
    "or set actor.policy_loss.loss_mode=module:function"
)


class ActorWorker(SamplingWorker, TrainingWorker):
    """Generates with the policy and trains it. For the arguments see `ModelWorker` and `SamplingWorker`."""

    config: PPOConfig

    def __init__(
        self,
        config: PPOConfig,
        total_training_steps: int,
        rewards: ServiceHandle | None,
        env_modules: Sequence[str] = (),
        log_dir: str | None = None,
    ) -> None:
        super().__init__(config, total_training_steps)
        self.rewards = rewards
        self.env_modules = tuple(env_modules)
        self.log_dir = log_dir
        # number of the weights that the rollout engine has
        self.version = 0
        # to engines in separate pools: the channel on the first rank, its address on all ranks
        self._channel: WeightChannel | None = None
        self._channel_address: tuple[str, int] | None = None
        # the host's copy of the base model, if the engine in this process gets an adapter merged into it
        self._kept_base = KeptBase(config.model) if sends_adapter(config) else None
        # True after the first successful check of a subclass's loss
        self._is_additive = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the training engine, then the rollout engine, which sees the remaining memory. With
        hybrid_engine=false the rollout engines are workers of their own (`workers.roles.rollout_worker`)."""
        config = self.config
        actor = config.actor
        self.tokenizer = load_tokenizer(config.model, config.data.chat_template)
        with_routers = actor.router_aux_loss_coef > 0 or config.rollout.router_replay
        network = token_network(
            config.model,
            causal_lm(actor.log_prob_chunk_tokens, with_routers),
            actor.ulysses_sequence_parallel_size,
            trains_vision=not actor.freeze_vision_tower,
            chat_template=config.data.chat_template,
        )
        self.build_engine(network, actor.fsdp_config, actor.optim)
        if config.hybrid_engine:
            self._build_colocated_rollout()

    def _build_colocated_rollout(self) -> None:
        """Builds the rollout engine on the device of the training engine, and its mesh "rollout"."""
        config = self.config
        self.engine_index = self.rank
        self.num_engines = num_engines(config, self.world_size)
        self.build_rollout()
        self.phases.add(self.rollout)

        # the ranks of one engine get the same prompts, and its first rank returns their answers
        tensor_parallel = config.rollout.tensor_model_parallel_size
        self.register_mesh(
            "rollout",
            dp_rank=self.rank // tensor_parallel,
            dp_size=self.world_size // tensor_parallel,
            is_collect=self.rank % tensor_parallel == 0,
        )

        # Groups run between the micro-batches of all training engines of this process: also during the passes of critic
        # and reference, whose workers are built before this one.
        if config.async_training.depth or config.spans_updates:
            for role in self.slot.roles.values():
                engine = getattr(role, "engine", None)
                if isinstance(engine, FSDPEngine):
                    engine.interleave = self._run_slice

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        """Starts groups without waiting for them. They run in `run_groups` and between micro-batches of training."""
        self.enter_rollout()
        with self.runner.lead() as leads:
            if leads:
                self.groups.begin(plans, sampling)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> GroupResults | None:
        """Runs until the groups with these keys are complete; see `GroupRun.run`. Returns the results on the first rank
        of each engine, None on the others."""
        self.enter_rollout()
        with self.runner.lead() as leads:
            if not leads:
                return None
            return self.groups.run(keys, seconds)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def snapshot_groups(self) -> list[GroupPlan]:
        """Returns plans that continue the running groups; see `GroupRun.snapshot`. Empty except on the first rank of
        each engine."""
        # no engine step, so that the other ranks of an engine need not take part and have no groups
        return self.groups.snapshot()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def abort_groups(self, keys: Sequence[str]) -> int:
        """Ends groups without rows; see `GroupRun.abort`. Returns 0 except on the first rank of each engine."""
        self.enter_rollout()
        with self.runner.lead() as leads:
            if not leads:
                return 0
            return self.groups.abort(keys)

    def _run_slice(self) -> None:
        """Runs the groups for a slice of time between micro-batches, unless the engine sleeps during training."""
        if not self.rollout.has_weights:
            return
        with self.runner.lead() as leads:
            if leads:
                self.groups.run_slice()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generates one answer for each prompt, for loops without a trainer. Returns token columns.

        Args:
            prompts: the rows of `answers.answer_plans`; meta_info sampling (`SamplingParams`), step and seed.

        Raises:
            RuntimeError: groups are running on the engine.
        """
        self.enter_rollout()
        meta = prompts.meta_info
        keys = [f"generate/{row}" for row in range(len(prompts))]
        one_answer_each = [1] * len(keys)
        plans = answer_plans(prompts, one_answer_each, keys, meta["seed"], meta["step"])
        with self.runner.lead() as leads:
            # only the first rank of an engine returns its rows
            if not leads:
                return DataProto()
            # these groups are another run than `self.groups` on the same engine, which would mix their completions
            if not self.groups.is_idle:
                raise RuntimeError(
                    "groups are running, and generate_sequences would take their completions: end them first"
                )
            groups = GroupRun(self.answer_runner())
            groups.begin(list(plans), meta["sampling"])
            results = groups.run(keys)

        # the rows come in the order in which the answers ended
        row_of_key = {report.key: row for row, report in enumerate(results.reports)}
        rows_of_prompts = [row_of_key[key] for key in keys]
        assert results.rows is not None
        answers = results.rows.select_idxs(rows_of_prompts)
        answers.meta_info["metrics"] = results.metrics
        return answers

    def enter_rollout(self) -> None:
        """Moves the rollout engine onto the device; reloads its weights if they were freed."""
        self.phases.enter(self.rollout)
        if not self.rollout.has_weights:  # another model used the device since the last update, such as a critic
            self.update_weights(self.version)

    @register(dispatch_mode=COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Computes statistics of the responses under the current weights.

        Args:
            data: a planned batch (`BatchPlan.apply`); meta_info temperature, calculate_entropy,
                calculate_sum_pi_squared, calculate_topk (K, or 0).

        Returns:
            old_log_probs (n, R), and on request entropys and sum_pi_squared (n, R), and teacher_ids (n, R, K), the K
            most probable tokens.
        """
        self.phases.enter(self.engine)
        meta = data.meta_info
        outputs = self.engine.infer(
            data,
            temperature=meta["temperature"],
            calculate_entropy=meta["calculate_entropy"],
            calculate_sum_pi_squared=meta["calculate_sum_pi_squared"],
            calculate_topk=meta["calculate_topk"],
        )

        columns = {"old_log_probs": outputs.pop("log_probs")}
        if "topk_ids" in outputs:
            columns[TEACHER_IDS] = outputs.pop("topk_ids")
            # the update computes the log-probs of these tokens again, with gradient
            del outputs["topk_log_probs"]
        return DataProto.from_dict(tensors=columns | outputs)

    @register(dispatch_mode=COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Computes ref_log_prob (n, R) of a planned batch as `ReferenceWorker` does, with the policy's adapter
        disabled."""
        # the base model of the adapter is the initial policy, so that no second network is needed
        self.phases.enter(self.engine)
        with self.engine.adapter_off():
            return ref_log_prob(self.engine, data)

    @register(dispatch_mode=COMPUTE_PROTO)
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """Computes the columns of `teacher_log_probs` with the policy's current weights as the teacher."""
        self.phases.enter(self.engine)
        return teacher_log_probs(self.engine, data)

    @register(dispatch_mode=COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> DataProto:
        """Trains on a planned batch, one optimizer step per mini-batch. Returns metrics in meta_info."""
        self.phases.enter(self.engine)
        actor = self.config.actor
        needs_entropy = actor.calculate_entropy or actor.entropy_coeff != 0
        metrics = self.engine.train(
            data,
            self._loss,
            temperature=data.meta_info["temperature"],
            calculate_entropy=needs_entropy,
            calculate_router_aux_loss=actor.router_aux_loss_coef > 0,
            count_router_replay=self.config.rollout.router_replay,
        )
        all_metrics = with_prefix(metrics) | self.memory_metrics("actor/perf/")
        return DataProto(meta_info={"metrics": all_metrics})

    def loss_func(
        self, data: DataProto, output_tensor: dict[str, torch.Tensor] | torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Computes the policy's loss as ROLL's actor does, with token or segment ratios.

        A subclass may override this method and then trains with its own loss. In that case data is a micro-batch with
        columns (b, R), output_tensor has the outputs by name, and the losses of all micro-batches are added. Therefore
        the loss must be divided by the counts of the mini-batch in data.meta_info (num_tokens, num_sequences, or
        ROLL's counts); the first update raises UserError if it is not. Its metrics may have ROLL's suffixes (see
        `verl_lite.metrics.declared`).

        Args:
            data: a batch with ROLL's columns or ours; see `workers.roll_loss.loss_of_batch`.
            output_tensor: logits (b, S, V), or the policy's outputs (b, R) by name.

        Returns:
            The loss and actor/* metrics under ROLL's names without the suffixes @sum, @max and @min, which its
            trackers remove.
        """
        # numbers instead of `Metric`, as a loss of ROLL returns them
        loss, metrics = loss_of_batch(data, output_tensor, self.config)
        return loss, values(with_prefix(metrics))

    def _loss(self, data: DataProto, outputs: dict[str, torch.Tensor]) -> LossResult:
        """Computes the loss and the metrics of a planned micro-batch. The losses of all micro-batches are added, and
        their metrics combined."""
        # no subclass has a loss of its own
        if type(self).loss_func is ActorWorker.loss_func:
            config = self.config
            correction = config.algorithm.rollout_correction
            distillation_loss = config.distillation.active_loss
            loss, metrics = actor_loss(data, outputs, config.actor, correction, distillation_loss)
            return loss, with_prefix(metrics)

        loss_func = partial(user_loss, self.loss_func)
        # a loss that averages over its own arguments would change with the size of the micro-batches
        if not self._is_additive:
            self._is_additive = check_loss_is_additive(loss_func, data, outputs, "loss_func", USER_LOSS_REMEDY)
        loss, metrics = loss_func(data, outputs)
        return loss, with_prefix(metrics)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> dict[str, Metric]:
        """Copies the trained weights to the rollout engine. Returns seconds and megabytes as metrics.

        Args:
            version: number of the weights, which later samples carry.

        Raises:
            RuntimeError: groups are running, and the run is not allowed to change the weights under them.
        """
        if not (self.groups.is_idle or self.config.spans_updates):
            raise RuntimeError(
                "groups are running, and new weights would change the policy within them: wait for them with "
                "RolloutScheduler.finish() first"
            )
        self.version = version
        # parameters and rollout weights are on the device together while they are copied, without the optimizer state
        self.engine.move_out_optimizer()
        self.phases.enter(self.rollout)
        self.engine.move_in()
        bucket_mb = self.config.rollout.bucket_megabytes(self.device.type == "cpu")
        metrics = sync_weights(self.engine, self.rollout, version, bucket_mb, self._kept_base)
        # the rollout engine has the device from here on
        self.engine.move_out()
        return metrics

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_channel(self) -> tuple[str, int]:
        """Opens the store of a new channel to engines in separate pools. Returns its address."""
        # a run on several processes has a store, at an address that the other machines can reach
        host = "127.0.0.1"
        if self.slot.store is not None:
            host, _ = self.slot.store
        # kept, because a store ends with the object that hosts it
        self._channel_store = host_store(host)
        return host, self._channel_store.port

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, end: ChannelEnd) -> dict[str, Metric] | TransferError:
        """Sends the trained weights from the first rank to the engines of the channel.

        If only an adapter is trained, the base model is sent through each channel once.

        Returns:
            Seconds and megabytes as metrics, or the error if an engine did not receive the weights.
        """
        self.phases.enter(self.engine)
        started = time.perf_counter()
        bucket_bytes = self.config.rollout.bucket_megabytes(self.device.type == "cpu") << 20

        # compared on all ranks, because they must agree on the weights that they gather
        is_new = end.address != self._channel_address
        self._channel_address = end.address
        if sends_adapter(self.config):
            weights = self.engine.unmerged_params(with_base=is_new, bucket_bytes=bucket_bytes)
        else:
            weights = self.engine.full_params(bucket_bytes)

        sent_bytes = 0
        failure = None
        if self.rank == 0:
            try:
                if is_new or self._channel is None:
                    self._channel = end.connect(self.device, self._channel_store)
                sent_bytes = self._channel.send(weights, bucket_bytes)
            except TransferError as error:
                failure = error
        # gathering is collective: the other ranks do it with the first one, which does the rest after a failure
        for _ in weights:
            pass
        return failure or _sync_metrics(started, sent_bytes)


ActorRolloutWorker = ActorWorker
"""Deprecated alias of `ActorWorker`."""


def sync_weights(
    source: FSDPEngine,
    rollout: RolloutEngine,
    version: int,
    bucket_mb: int,
    kept: KeptBase | None = None,
) -> dict[str, Metric]:
    """Copies all parameters into the rollout engine and resets its cache. Collective.

    Args:
        source: the training engine.
        rollout: the rollout engine.
        version: number of the weights.
        bucket_mb: size of the full tensors that exist at one time, in MiB.
        kept: the host's copy of an adapter's base model, filled by the first call. Later calls then gather the adapter
            alone; with None, all calls gather all parameters.

    Returns:
        Seconds and megabytes as metrics.
    """
    started = time.perf_counter()
    bucket_bytes = bucket_mb << 20
    sent_bytes = 0

    def counted(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal sent_bytes
        for name, tensor in weights:
            sent_bytes += tensor.nbytes
            yield name, tensor

    whole = source.whole_params()
    if whole is not None:
        # nothing to gather: an engine in this process can use the parameters where they are
        rollout.load_weights(whole, version)
        sent_bytes = whole.nbytes
    elif kept is None:
        full_weights = source.full_params(bucket_bytes)
        rollout.load_weights(counted(full_weights), version)
    else:
        # the first call gathers the base model too
        unmerged = source.unmerged_params(with_base=not kept.tensors, bucket_bytes=bucket_bytes)
        merged_weights = kept.merged(counted(unmerged), source.device)
        rollout.load_weights(merged_weights, version)
    # cached keys and values of prefixes are those of the former weights
    rollout.reset_cache()
    return _sync_metrics(started, sent_bytes)


def _sync_metrics(started: float, sent_bytes: int) -> dict[str, Metric]:
    """Returns the metrics of an update of the rollout weights.

    Args:
        started: Its beginning, as `time.perf_counter` measures it.
        sent_bytes: Size of the weights that were sent.
    """
    count_moved(sent_bytes)
    return {
        "weight_sync/seconds": Metric.max(time.perf_counter() - started),
        "weight_sync/megabytes": Metric.max(sent_bytes / 1e6),
    }
