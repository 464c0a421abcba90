"""Every metric that a run logs, in one table; `find(name)` explains a logged name.

`python -m trainer.metric_docs` writes the table to trainer/METRICS.md, and a test (tests/conftest.py) fails on a metric
that a run logs and that is not here. Who logs a new one adds a line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

# name | unit | the options under which it is logged | healthy range | formula, and over what it is a mean.
# {a,b} stands for each of the words, {N} for a whole number, {data_source} and {tag} for anything, {entry} and other
# words for anything without a slash. An indented line goes on with the one before it.
TABLE = """
## Scores, rewards, advantages
critic/advantage_clip_frac | share | advantage_clip | | advantages cut at algorithm.advantage_clip / valid tokens
critic/advantages/{mean,max,min} | | | | over valid tokens; a mean near 0 is no fault, since estimators centre it
critic/episode_rewards_norm/{mean,max,min} | | gigpo | | GiGPO's part by episodes, over rows
critic/kl | nats | a reference model | <= 0.5 | KL(pi_old || reference) by kl_penalty, mean of answers' means
critic/kl_coef | | a reference model | | coefficient of the KL in the reward; 0 without it
critic/loss | | gae | | the same as critic/vf_loss
critic/returns/{mean,max,min} | | | | over valid tokens
critic/reward_baselines/mean | reward | remax | | score of the greedy answers
critic/reward_clip_frac | share | | | answers whose reward is cut at algorithm.reward_clip / answers
critic/rewards/{mean,max,min} | reward | | | sum of token_level_rewards of each row: after the penalties
critic/score/{mean,max,min} | reward | | | sum of token_level_scores of each answer (or episode), before any KL
critic/step_rewards_norm/{mean,max,min} | | gigpo | | GiGPO's part by equal states, over rows
critic/token_reward_clip_frac | share | reward_clip | | the same of tokens' rewards / valid tokens
critic/values/{mean,max,min} | | gae | | the critic's, over valid tokens
critic/vf_clipfrac | share | gae | <= 0.5 | tokens whose value was clipped by critic.cliprange_value / valid tokens
critic/vf_explained_var | | gae | >= 0 | 1 - Var(returns - values) / Var(returns), over valid tokens
critic/vf_loss | | gae | | clipped squared error of the values, aggregated as loss_agg_mode says
critic/vpred_mean | | gae | | values after each update's forward pass, mean over valid tokens
frac_reward_zero_std | share | | <= 0.5 | groups of several answers with one score / those of several answers
reward/baseline_error_rate | share | remax | | greedy answers whose reward failed / prompts
reward/error_rate | share | | <= 0 | answers whose reward failed / answers; they are masked, never a 0
reward/overlong/mean | share | overlong_buffer.log | | answers with such a penalty / answers
reward/overlong_reward/mean | reward | overlong_buffer.log | | penalty for length, over answers
reward/processes_replaced | | a reward pool | | reward processes that died or hung, since the start of the run
reward/timeout_rate | share | | <= 0 | answers whose reward was late / answers
reward/{entry}/mean | | | | an entry or part that the reward function returns, mean over answers with it
reward/{part}/{max,min} | reward | a reward model | | of a part of the score, before its weight
## The policy's update
actor/approxkl | nats | | | d^2 / 2 with d = log pi - log pi_old, aggregated as loss_agg_mode says
actor/clipfrac | share | | | tokens where PPO's clip lowers the objective, aggregated as loss_agg_mode says
actor/entropy | nats | calculate_entropy | >= 0.1 x first | -sum_v p_v log p_v, mean over valid tokens
actor/entropy_loss | nats | calculate_entropy | | the same, aggregated as loss_agg_mode says
actor/face_score | score | reward flow | | the reward's score, mean over the samples that count
actor/is_weight_clipfrac | share | rollout_is | | tokens whose raw weight is above the threshold / valid tokens
actor/kl_coef | | actor.use_kl_loss | | actor.kl_loss_coef
actor/kl_loss | nats | use_kl_loss, reward flow | <= 0.5 | KL(pi || reference) by kl_loss_type; reward flow: of latents
actor/no_face_frac | share | reward flow | <= 0.5 | samples in which the reward found nothing to score / samples
actor/perf/host_peak_gb | GiB | | | the most host memory that a worker had so far; `trainer.plan` expects it
actor/perf/{host_rss,max_memory_allocated,max_memory_reserved}_gb | GiB | | <= 1.5 x first | fullest worker; its peak
actor/pg_clipfrac | share | losses that clip | <= 0.3 | tokens where the loss clips or leaves out its ratio / all
actor/pg_clipfrac_lower | share | vanilla, geo_mean, dppo | | tokens bounded from the other side / valid tokens
actor/pg_loss | | | | the policy loss by actor.policy_loss.loss_mode, aggregated as loss_agg_mode says
actor/policykl | nats | | | d = log pi - log pi_old, aggregated as loss_agg_mode says
actor/ppo_kl | nats | | -0.1 to 0.1 | log pi_old - log pi within +-20, mean over valid tokens; kl_cov: its size
actor/ppo_ratio_{high_,low_,}clipfrac | share | | | tokens whose ratio is above the range, below, either / valid tokens
actor/ratio_{mean,max,min} | | | | pi / pi_old of tokens; the mean is over sequences, of each one's mean
actor/reward_kl_penalty | nats | use_kl_in_reward | | critic/kl under verl's name
actor/reward_kl_penalty_coeff | | use_kl_in_reward | | critic/kl_coef under verl's name
actor/train_infer_final_mask_mean | share | rollout_rs | | what all filters keep / valid tokens
actor/train_infer_{level}_{measure}_mask_mean | share | rollout_rs | | what one of ROLL's filters keeps / valid tokens
actor/train_infer_{ratio,diff}_{token,segment,geometric,sequence}_mean | | calculate_log_probs | | ROLL's, mean of means
actor/{loss,total_loss} | | | | pg_loss - entropy_coeff * entropy_loss + kl_loss_coef * kl_loss
pf_ppo/distinct_rows_frac | share | use_pf_ppo | >= 0.2 | distinct answers among those drawn / rows
## Rollout engine against trainer
rollout_corr/chi2_{seq,token} | | calculate_log_probs | | e^(2 sum x) - 1, mean over answers; e^(2x) - 1, over tokens
rollout_corr/k3_kl | nats | calculate_log_probs | <= 0.01 | e^x - 1 - x, mean over valid tokens: KL(rollout || trainer)
rollout_corr/kl | nats | calculate_log_probs | | -x, x = log p_trainer - log p_rollout within +-20, mean over tokens
rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min} | nats | calculate_log_probs | | d = training_ - rollout_log_ppl
rollout_corr/ppl_ratio | | calculate_log_probs | | e^d, mean over answers
rollout_corr/rollout_is_batch_norm_factor | | rollout_is_batch_normalize | | mean weight that all are divided by
rollout_corr/rollout_is_eff_sample_size | share | rollout_is | >= 0.5 | (mean w)^2 / mean w^2 over valid tokens
rollout_corr/rollout_is_oob_ratio | share | rollout_is | | tokens whose weight is beyond either threshold
rollout_corr/rollout_is_seq_{mean,std,max,min,max_deviation} | | rollout_is | | the same of answers' means
rollout_corr/rollout_is_{mean,std,max,min} | | rollout_is | | weights after bounding (max, min: before); tokens
rollout_corr/rollout_is_{ratio,seq}_fraction_{high,low} | share | rollout_is | | weights beyond a threshold
rollout_corr/rollout_rs_{,seq_}masked_fraction | share | rollout_rs | <= 0.3 | tokens, answers that any rejects / all
rollout_corr/rollout_rs_{option}_seq_{mean,std,max,min,max_deviation} | | rollout_rs | | the same of answers' means
rollout_corr/rollout_rs_{option}_{,seq_}fraction_{high,low} | share | rollout_rs | | tokens, answers beyond bounds
rollout_corr/rollout_rs_{option}_{,seq_}masked_fraction | share | rollout_rs | | tokens, answers that it rejects / all
rollout_corr/rollout_rs_{option}_{mean,std,max,min} | | rollout_rs | | what it rejects by (k1, ratio: logarithm), tokens
rollout_corr/{training,rollout}_{log_,}ppl | | calculate_log_probs | | -mean log p of the answer, or e^ that; of answers
training/rollout_probs_diff_max | share | calculate_log_probs | | the largest |p_trainer - p_rollout|
training/rollout_probs_diff_mean | share | calculate_log_probs | <= 0.005 | |p_trainer - p_rollout|, over valid tokens
## Lengths
global_seqlen/balanced_{min,max} | tokens | | | tokens of a rank, as the rows were dealt out
global_seqlen/{min,max,mean,minmax_diff} | tokens | | | tokens of a rank, if ranks took the rows in order
prompt_length/clip_ratio | share | | <= 0.1 | prompts as long as data.max_prompt_length / prompts
prompt_length/{mean,max,min} | tokens | | | tokens of a prompt
response/aborted_ratio | share | | <= 0.01 | rows, fillers aside, whose answer is empty / rows
response_length/clip_ratio | share | | <= 0.1 | answers cut off at data.max_response_length / answers
response_length/{mean,max,min} | tokens | | | tokens of an answer, those of tools and environments included
rollout/{response_length,prompt_length,non_prompt_length}/{mean,max,min} | tokens | episodes | | tokens of an episode
## Groups and dynamic sampling
groups/{all_right,all_wrong} | share | | <= 0.6 | groups whose answers are all right, all wrong / groups
groups/gen_batches | | filter_groups | <= 4 | generation batches of the step
groups/generated | | filter_groups | | groups asked for to fill the step
groups/{kept,unjudged} | share | | | groups whose answers differ in outcome, of which fewer than two have one / all
groups/wasted_tokens_frac | share | filter_groups | | generated tokens that no row of the step has / generated
sampler/{name} | | data.sampler | | what the update of a sampler of yours returns
training/filter_groups/{discarded_surplus,evicted}_samples | rows | filter_groups | | beyond the batch; teach nothing
## Rollout and episodes
env/error_rate | share | episodes | <= 0 | episodes that failed / episodes; they are masked, never a 0
env/processes_replaced | | episodes | <= 0 | environment processes that died or hung, since the start
env/step_seconds/{mean,max} | s | episodes | | time of one call of an environment
env/timeout_rate | share | episodes | | episodes that failed by being late / episodes
env/{metric} | | episodes | | what environments report, mean over the episodes that do
env/{tag}/{metric} | | episodes | | the same of one kind of environment
rollout/engine_busy_frac | share | episodes | >= 0.5 | time inside the engine / time that episodes were driven
rollout/engine_sequences | | episodes | | sequences in the engine, mean over its steps
rollout/idle_frac | share | | <= 0.33 | 1 - mean_rank_seconds / slowest_rank_seconds
rollout/num_turns/{mean,max,min} | | episodes | | actions of an episode
rollout/score/{mean,max,min} | reward | episodes | | sum of an episode's rewards, over episodes
rollout/seconds_beside_training | s | async_generation_ratio | | episodes driven beside training, mean over ranks
rollout/tokens_per_second_per_gpu | tokens/s | | | generated tokens / seconds of generation, all ranks
rollout/{slowest,mean}_rank_seconds | s | | | generation: the slowest rank's time, and the ranks' mean
scheduler/group_filter_count | | episodes | | groups that the filter dropped in this step
scheduler/groups_kept_though_dropped | | episodes | | groups that the filter dropped and none could replace
scheduler/off_policy_ratio | steps | episodes | | steps between the weights that sampled and the update
system/batch_{add,remove}_count | rows | episodes | | rows added or removed to make the batch divide
system/samples | rows | episodes | | step x agentic.rollout_batch_size
system/state_batch_size/{mean,max,min} | | rows are steps | | rows of a task that start from one state
system/tps | tokens/s | episodes | | tokens of all rows / timing_s/step
## Time and throughput
perf/samples_per_second | 1/s | reward flow | | samples of the step / timing_s/step
perf/throughput | tokens/s | | | perf/total_num_tokens / perf/time_per_step / devices
perf/time_per_step | s | | | timing_s/step
perf/total_num_tokens | tokens | | | tokens of all rows of the step, prompts and answers
time/get_batch_cost_{train,val} | s | episodes | | time that the driver waited for episodes
timing_per_token_ms/{gen,ref,values,adv,update_critic,update_actor} | ms | | | the stage's time / its tokens
timing_s/step | s | | | the whole step, without validation and saving
timing_s/{testing,save_checkpoint} | s | | | a validation; that a checkpoint kept the training waiting
timing_s/{data,train,videos} | s | reward flow | | waiting for clips; sampling, scoring and update; writing clips
timing_s/{gen,reward,old_log_prob,ref,values,adv,update_critic,update_actor,update_weights} | s | | | the driver's time
weight_sync/megabytes | MB | | | parameters sent to each engine
weight_sync/seconds | s | | | from the first parameter to the emptied cache, slowest rank
## Validation
val-aux/{,greedy/}num_turns/{mean,max,min} | | episodes | | actions of an episode of the validation
val-aux/{data_source}/no_face_frac | share | reward flow | | samples of the validation without a face
val-aux/{data_source}/{,greedy/}reward/{error_rate,timeout_rate} | share | | <= 0 | failed, or late / answers
val-aux/{data_source}/{variable}/pass@{K} | share | | | 1 - C(N - c, k) / C(N, k) with c right of N, mean over prompts
val-aux/{data_source}/{variable}/{best,worst,maj}@{N}/{mean,std} | | | | of n of the N answers, mean over prompts
val-aux/{data_source}/{variable}/{mean,best,maj,pass}@{N}/ci95 | | | | half width of that mean's 95% interval
val-aux/{data_source}/{variable}/{mean,std}@{N} | | | | of the N answers, mean over prompts; also {data_source}/greedy
val-core/{data_source}/{variable}/mean@{N} | | | | mean over prompts; variable: acc if the reward gives one, else reward
val-core/{data_source}/{variable}/{best,maj}@{N}/{mean,std} | | | | best, majority of the N answers, mean over prompts
val/{,greedy/}env/error_rate | share | episodes | | validation episodes that failed / episodes
val/{,greedy/}score/{mean,max,min} | reward | episodes | | sum of an episode's rewards, over the validation's
val/{,greedy/}env/{metric} | | episodes | | what the validation's environments report
val/{,greedy/}env/{tag}/{metric} | | episodes | | the same of one kind of environment
val/{tag}/score/{mean,max,min} | reward | episodes | | over the means of a tag's groups
## Steps and optimizer
training/epoch | | answers to prompts | | passes over the training data that are whole
training/global_step | steps | | | training steps done
{actor,critic,train}/empty_mini_batch_frac | share | | <= 0 | mini-batches without a valid token, no step / all
{actor,critic,train}/grad_norm | | | | L2 norm of all gradients before clipping, mean over the optimizer steps taken
{actor,critic,train}/grad_norm_nonfinite | share | | <= 0 | steps left out for a norm that is no number / steps
{actor,critic,train}/lr | | | | learning rate of the step
## Supervised training and reward models
{train,val}/accuracy | share | main_rm | | pairs in which the better answer has the higher score / pairs
{train,val}/loss | nats | main_sft, main_rm | | -log p of the answers' tokens, mean over these; main_rm: of the pairs
{train,val}/margin | | main_rm | | its score minus the other's, mean over pairs
"""

_TOP = """# Metrics

What a run logs. Made of the table in [metric_docs.py](metric_docs.py) by `python -m trainer.metric_docs`; a test fails
on a metric that is logged and not here. `{a,b}` stands for each of the words, `{N}` for a number, `{data_source}` and
other words for a name of yours. *share* is 0 to 1. Means are over what the formula says, on all devices; rows that fill
up a batch, and samples whose reward failed, are in none unless it says so. A range is where a number raises no
question: a rule of thumb, not a law; `x first` means the multiple of the run's first value. `python -m trainer.report
RUN` judges a run, by the rules in [reports/health.py](reports/health.py).

| metric | formula | unit | healthy |
|---|---|---|---|
"""

_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")


@dataclass(frozen=True)
class Metric:
    """A line of the table: one metric, or several that differ in a part of the name."""

    name: str
    unit: str
    when: str
    healthy: str
    formula: str
    section: str

    @property
    def names(self) -> list[str]:
        """The name with each of its alternatives; placeholders stay."""
        parts = _ALTERNATIVES.split(self.name)  # text and alternatives in turn
        choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
        return ["".join(chosen) for chosen in itertools.product(*choices)]

    def matches(self, logged: str) -> bool:
        """Whether `logged` is one of the names."""
        return self._pattern.fullmatch(logged) is not None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        def placeholder(word: str) -> str:
            return r"\d+" if word in "NK" else ".+" if word in ("data_source", "tag") else "[^/]+"

        split = [_PLACEHOLDER.split(name) for name in self.names]
        patterns = ([placeholder(x) if at % 2 else re.escape(x) for at, x in enumerate(parts)] for parts in split)
        return re.compile("|".join(map("".join, patterns)))


@cache
def metrics() -> tuple[Metric, ...]:
    """The table, in its order."""
    found, section = [], ""
    for line in re.sub(r"\n {4}", " ", TABLE).strip().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        else:
            name, unit, when, healthy, formula = (cell.strip() for cell in re.split(r" \|(?= )", line, maxsplit=4))
            found.append(Metric(name, unit, when, healthy, formula, section))
    return tuple(found)


@cache
def find(name: str) -> Metric | None:
    """The line of a logged name; one without placeholders before a pattern, the longer pattern first."""
    fitting = [metric for metric in metrics() if metric.matches(name)]
    return min(fitting, key=lambda metric: (bool(_PLACEHOLDER.search(metric.name)), -len(metric.name)), default=None)


def undocumented(names: Iterable[str]) -> list[str]:
    """Those of these names that no line explains, sorted."""
    return sorted(name for name in set(names) if find(name) is None)


def render() -> str:
    """METRICS.md."""
    lines: list[str] = []
    for section, own in itertools.groupby(metrics(), key=lambda metric: metric.section):
        lines.append(f"| **{section}** | | | |")
        for x in own:
            formula = x.formula.replace("|", "\\|") + (f" *({x.when})*" if x.when else "")
            lines.append(f"| `{x.name}` | {formula} | {x.unit} | {x.healthy} |")
    return _TOP + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("METRICS.md").write_text(render(), encoding="utf-8")
