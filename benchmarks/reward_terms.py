"""PPO with values for every term of the reward: an example of building on the scripts.

    python benchmarks/reward_terms.py                   # Hopper-v5, both ways, three seeds; report
    python benchmarks/reward_terms.py --seeds 1 --steps 100000
    python benchmarks/reward_terms.py --report          # the table from what is kept

Runs that have a row in results/reward_terms.csv are skipped. To repeat one, delete its row. In a
copy of this program change TASK and TABLE as well, or old rows pass for yours.
The figure is of the agent with terms and seed 1. It is drawn when that has trained for STEPS steps,
and neither by --report nor by runs of another length.

A robot's reward is a sum: it is paid for running, for not falling, and it pays for the work of its
motors. Here every term has values, targets and advantages of its own. The policy follows the
weighted sum of the terms' advantages. With equal weights, as here, and since advantages are
normalised, that is their sum but for a factor: what differs is how the critics learn. One more head
predicts the whole reward, for comparison. Its advantages have the weight 0, but it trains the
critics' body as the others do. With the terms summed ahead ("one") the program is the script with
one critic.

What is taken from the script as it is: environments, rollout, networks, GAE (which takes the terms
as a last axis), the value distribution, the policy's loss, minibatches and steps. What is written
here is what differs: an agent with a head and return statistics for each term, the batch, and the
critics' loss. There are no checkpoints and no log. `check` refuses flags that this program does not
serve.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

import common
import gymnasium as gym
import numpy as np
import torch
from common import CATEGORICAL, RESULTS, Cell, Run, Table
from torch import Tensor, nn

script = common.load_script(CATEGORICAL)
TASK = "Hopper-v5"
TERMS = ("reward_forward", "reward_survive", "reward_ctrl")
NAMES = {"reward_forward": "running", "reward_survive": "not falling", "reward_ctrl": "motors"}
FLAGS = {"num_critics": 1, "eval_episodes": 20, "save_envs": "never"}
PRESET = "--preset mujoco"
STEPS = 300_000
UNKNOWN = 0.05  # the weight that what follows a time limit may have in a return that is drawn
COLUMNS = (
    "task", "script", "variant", "seed", "steps", "return_mean", "return_std", "gap", "correlation",
    "seconds", *common.ORIGIN,
    "flags",  # of the preset
)  # fmt: skip
TABLE = Table(RESULTS / "reward_terms.csv", COLUMNS, "\n", (*common.OF_A_RUN, "steps"))


# ------------------------------------------------------------------------------------ environments
class Terms(gym.Wrapper):
    """It keeps the terms of the last reward. The script's own wrappers drop `info`."""

    def step(self, action):
        """Step."""
        *facts, info = self.env.step(action)
        missing = [name for name in TERMS if name not in info]
        if missing:
            raise ValueError(f"{TASK}: its info lacks {', '.join(missing)}; change TERMS")
        self.terms = [info[name] for name in TERMS]
        return *facts, info


def hopper(**options) -> gym.Env:
    """Hopper-v5 with the terms of its reward."""
    return Terms(gym.make(TASK, disable_env_checker=True, **options))


gym.register("TermsHopper-v0", hopper, max_episode_steps=1000)


class WithTerms(gym.vector.VectorWrapper):
    """It keeps the terms of every step of a rollout."""

    def __init__(self, envs: gym.vector.VectorEnv) -> None:
        super().__init__(envs)
        self.kept: list[list] = []

    def step(self, actions):
        """Step. An environment that was reset within the step still knows its terms."""
        result = self.env.step(actions)
        self.kept.append([env.get_wrapper_attr("terms") for env in self.env.envs])
        return result

    def take(self) -> Tensor:
        """Return the terms (T, N, R) of the rollout, and forget them."""
        terms = torch.tensor(self.kept, dtype=torch.float64)
        self.kept = []
        return terms


# --------------------------------------------------------------------------------------- algorithm
class TermsAgent(script.Agent):
    """It has a value head and return statistics for each of R terms.

    `term_values` gives the values. `value` and `predict_returns` of the script's agent know of one
    distribution alone, so they are refused.
    """

    def __init__(self, observation_space, action_space, args, num_terms: int) -> None:
        super().__init__(observation_space, action_space, args)
        [first] = self.critic_heads
        for _ in range(num_terms - 1):
            hidden = nn.Linear(args.hidden_size, args.hidden_size)
            output = nn.Linear(args.hidden_size, self.value_dist.num_outputs)
            layers = script.layer_init(hidden), type(first[1])(), script.layer_init(output, 0.1)
            self.critic_heads.append(nn.Sequential(*layers))
        self.dists = nn.ModuleList(script.ValueDistribution(args) for _ in range(num_terms))

    def term_values(self, outputs: Tensor) -> Tensor:
        """Turn outputs (R, ..., K + 1) into values (..., R) in the task's units."""
        return torch.stack([dist.value(x) for dist, x in zip(self.dists, outputs)], -1)

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Refuse: see `term_values`."""
        raise NotImplementedError("each term has values of its own: call term_values")

    def predict_returns(self, obs: np.ndarray, levels: tuple[float, ...]) -> np.ndarray:
        """Refuse: each term has a distribution of its own."""
        raise NotImplementedError("each term has a distribution of its own, in `dists`")


def check(args: Any) -> None:
    """Raise the script's `UsageError` for a flag that this program would ignore."""
    served = {
        "num_critics": 1,
        "norm_returns": True,
        "value_target": "lambda_return",
        "cvar_weight": 0.0,
        "cuda": False,
        "async_envs": False,
        "init_from": "",
        "resume": "",
        "eval_every": 0,
    }
    for name, value in served.items():
        if getattr(args, name) != value:
            raise script.flag_error(args, name, f"this program serves {value!r} alone")
    if script.WORLD_SIZE > 1:
        raise script.UsageError("torchrun: this program has one process")


def check_sum(terms: Tensor, rewards: Tensor) -> None:
    """Raise ValueError unless the terms (T, N, R) of a rollout add up to its rewards (T, N)."""
    gap = float((terms.sum(-1) - rewards).abs().max())
    if gap > 1e-4 * max(1.0, float(rewards.abs().max())):
        raise ValueError(f"the terms {', '.join(TERMS)} are up to {gap:g} off the reward")


@torch.no_grad()
def prepare_batch(agent: TermsAgent, rollout: Any, terms: Tensor, weights: Tensor, args: Any):
    """Turn a rollout and its terms (T, N, R) into a batch, as the script does for one reward.

    Targets (B, R, K), returns (B, R) and old values (B, R, 2) have an axis of terms. Advantages are
    the weighted sum over the terms.
    """
    for dist, term in zip(agent.dists, terms.unbind(-1)):
        if dist.moments.count == 0:
            first = script.first_return_moments(rollout._replace(rewards=term), args)
            dist.moments.merge(*first, weight=1)

    obs = agent.normalize_obs(rollout.obs)
    next_obs = agent.normalize_obs(rollout.next_obs)
    outputs, next_outputs = script.run_critics(agent, rollout, obs, next_obs)
    advantages, returns = script.gae(
        terms,
        agent.term_values(outputs),
        agent.term_values(next_outputs),
        rollout.terminated,
        rollout.truncated,
        args.gamma,
        args.gae_lambda,
    )

    targets = []
    old_predictions = []
    normalized = []
    for r, dist in enumerate(agent.dists):
        target = dist.point_targets(returns[..., r])
        head = agent.critic_heads[r : r + 1]
        old, _ = dist.move_statistics(head, outputs[r : r + 1], target)
        targets.append(dist.encode_targets(target))
        old_predictions.append(old[0])
        normalized.append(dist.moments.normalize(returns[..., r]))
    batch = script.Batch(  # (T, N, ...)
        obs=obs,
        actions=rollout.actions,
        params=rollout.params,
        log_probs=agent.action_dist.log_prob(rollout.params, rollout.actions),
        advantages=(weights * advantages).sum(-1),
        targets=torch.stack(targets, 2),
        returns=torch.stack(normalized, 2).float(),
        old_predictions=torch.stack(old_predictions, 2).float(),
    )
    return script.Batch(*(x.flatten(0, 1) for x in batch))


def terms_loss(agent: TermsAgent, mb: Any, args: Any) -> tuple[Tensor, dict]:
    """Compute the mean over terms of the critics' loss on a minibatch."""
    outputs = agent.value_outputs(mb.obs)  # (R, B, K + 1)
    losses = []
    for r, dist in enumerate(agent.dists):
        old = mb.old_predictions[None, :, r]
        loss, _ = dist.loss(outputs[r : r + 1], mb.targets[:, r], mb.returns[:, r], old)
        losses.append(loss.mean())
    loss = torch.stack(losses).mean()
    return loss, {"losses/value_loss": loss}


def update(agent: TermsAgent, optimizers: Any, batch: Any, args: Any, progress: float) -> None:
    """Train the actor, and then the critics, as the script does. Raises RuntimeError as it does."""
    learning_rate, critic_learning_rate, ent_coef = script.schedules(args, progress)
    scaled = script.scale_advantages(agent, batch.advantages, args)
    batch = batch._replace(advantages=scaled.float())
    optimizers.actor.param_groups[0]["lr"] = learning_rate
    optimizers.critics.param_groups[0]["lr"] = critic_learning_rate

    actor_batches = script.minibatches(batch, args)
    critic_batches = script.minibatches(batch, args)
    tickets = SimpleQueue()
    script.train_actor(agent, optimizers.actor, actor_batches, args, ent_coef, tickets)
    tickets.put(None)
    _, parameters = agent.parts()
    for i, mb in zip(iter(tickets.get, None), critic_batches):
        gradient, loss, _ = script.with_gradient(terms_loss, parameters, agent, mb, args)
        norm = float(gradient.norm())
        name = f"minibatch {i} of the critics' update"
        script.check_step(float(loss), norm, name, "--critic-learning-rate")
        script.take_step(optimizers.critics, gradient, norm, args.max_grad_norm)


def train(args: Any, together: bool) -> TermsAgent:
    """Train on the terms, or on their sum if `together`. Returns the agent.

    The last of several heads predicts the whole reward. Its advantages have no weight. Raises
    `UsageError` like `check`, and ValueError like `check_sum`.
    """
    check(args)
    script.set_up_process(args)
    envs = WithTerms(script.make_envs(args))
    script.seed_torch(args)  # again: the task may have drawn numbers
    spaces = (envs.single_observation_space, envs.single_action_space)
    num_terms = 1 if together else len(TERMS) + 1
    agent = TermsAgent(*spaces, args, num_terms)
    optimizers = script.make_optimizers(agent, args)
    weights = torch.ones(1) if together else torch.tensor([1 / len(TERMS)] * len(TERMS) + [0.0])

    seeds = [
        script.derived_seed(args.seed, "environments", i, bits=31) for i in range(args.num_envs)
    ]
    obs, _ = envs.reset(seed=seeds)
    for iteration in range(args.num_iterations):
        step = iteration * args.batch_size
        torch.manual_seed(script.derived_seed(args.seed, "iterations", step))
        rollout, obs = script.collect_rollout(envs, agent, obs, args)
        terms = envs.take()
        check_sum(terms, rollout.rewards)
        whole = rollout.rewards[..., None]  # it is float32 inside the task: not quite the sum
        terms = whole if together else torch.cat((terms, whole), -1)
        batch = prepare_batch(agent, rollout, terms, weights, args)
        update(agent, optimizers, batch, args, iteration / args.num_iterations)
        agent.update_obs_moments(rollout.obs)
    envs.close()
    return agent


# ----------------------------------------------------------------------------------------- figures
class Episode(NamedTuple):
    """What the terms promised along an episode, and what they paid."""

    values: np.ndarray  # (T, R)
    returns: np.ndarray  # (T, terms) discounted, to the end of the episode
    known: int  # the returns of so many first steps lack nothing that counts


def play(agent: TermsAgent, args: Any, seed: int) -> Episode:
    """Play an episode by the policy's mode, of 10,000 steps at most.

    The values are of the policy as it samples, so what came may lie a little off for that reason.
    """
    env = script.make_env(args)
    obs, _ = env.reset(seed=seed)
    seen = []
    terms = []
    ended = False
    terminated = False
    while not ended and len(seen) < script.LONGEST_EPISODE:
        seen.append(obs)
        obs, _, terminated, truncated, _ = env.step(agent.act(obs))
        terms.append(env.get_wrapper_attr("terms"))
        ended = terminated or truncated
    env.close()
    with torch.no_grad():
        batch, _ = agent.as_batch(np.stack(seen))
        values = agent.term_values(agent.value_outputs(batch)).numpy()
    returns = np.array(terms)
    for t in reversed(range(len(returns) - 1)):
        returns[t] += args.gamma * returns[t + 1]
    return Episode(values, returns, known_returns(len(returns), terminated, args.gamma))


def known_returns(length: int, terminated: bool, gamma: float) -> int:
    """Count the first steps of an episode whose returns are known. A time limit hides what would
    have followed it, which counts gamma^n in the return of the n-th last step."""
    if terminated:
        return length
    return sum(gamma**n <= UNKNOWN for n in range(1, length + 1))


def draw(episode: Episode, path: Any) -> None:
    """What each term promises along an episode, and what the whole reward does."""
    figure, axis = common.pyplot().subplots(figsize=(common.WIDTH, 3.8))
    whole = episode.values[:, -1]
    for r, name in enumerate(TERMS):
        axis.plot(episode.values[:, r], color=f"C{r}", label=NAMES[name])
        axis.plot(episode.returns[: episode.known, r], color=f"C{r}", alpha=0.35, lw=0.8)
    axis.plot(episode.values[:, :-1].sum(1), color="black", label="sum of the terms' values")
    axis.plot(whole, "--", color="0.5", label="value of the whole reward")
    axis.set(xlabel="step of an episode", ylabel="discounted return")
    axis.set_title("Values of each term (pale: what came, where that is known)", fontsize=10)
    figure.legend(loc="outside lower center", ncols=5)
    common.save(figure, path)


# -------------------------------------------------------------------------------------------- runs
def args_of(seed: int, steps: int, **flags: Any) -> Any:
    """Flags of a run."""
    task = {"env_id": "TermsHopper-v0", "total_timesteps": steps, "seed": seed}
    return script.preset_args("mujoco", **FLAGS | task | flags)


def done_steps(steps: int) -> int:
    """Round steps down to whole rollouts, as a run does."""
    args = args_of(1, steps)
    return args.num_iterations * args.batch_size


def cells(steps: int) -> Iterator[Cell]:
    """Both ways, with the steps that are done as flags."""
    for variant in ("terms", "one"):
        yield Cell(TASK, CATEGORICAL, variant, str(done_steps(steps)), range(1, 4))


def missing(steps: int, seeds: list[int]) -> list[Run]:
    """Runs of this length without a row. Raises ValueError for rows of an older preset."""
    today = common.flag_values(common.spelt_out(CATEGORICAL, PRESET))
    for row in TABLE.rows():
        if common.flag_values(row["flags"]) != today:
            told = f"seed {row['seed']} of {row['steps']} steps has {row['flags']}"
            raise ValueError(f"{told}, and {PRESET} has other flags; take its rows out first")
    known = {(row["variant"], row["steps"], row["seed"]) for row in TABLE.rows()}
    runs = common.runs_of(cells(steps), (), seeds)
    return [run for run in runs if (run.cell.variant, run.cell.flags, str(run.seed)) not in known]


def run_one(run: Run) -> dict[str, Any]:
    """Train one way, and compare the sum of the values with the value of the sum."""
    steps = int(run.cell.flags)
    args = args_of(run.seed, steps)
    origin = common.origin()
    began = time.time()
    agent = train(args, together=run.cell.variant == "one")
    seconds = time.time() - began
    with contextlib.redirect_stdout(io.StringIO()):
        found = script.evaluate(agent, args)
    row = {**run.cell.setting._asdict(), "seed": run.seed, "steps": steps}
    row |= {name: found[f"eval/{name}"] for name in ("return_mean", "return_std")}
    if run.cell.variant == "terms":
        episodes = [play(agent, args, seed) for seed in range(10)]
        values = np.concatenate([one.values for one in episodes])
        total, whole = values[:, :-1].sum(1), values[:, -1]
        row["gap"] = np.abs(total - whole).mean() / abs(whole.mean())
        row["correlation"] = np.corrcoef(total, whole)[0, 1]
        if run.seed == 1 and steps == done_steps(STEPS):
            draw(episodes[0], RESULTS / "reward_terms.png")
    row |= {"seconds": seconds, **origin, "flags": common.spelt_out(CATEGORICAL, PRESET)}
    return {name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()}


def report() -> None:
    """A table in results/reward_terms.md: a line for each way and length."""
    rows = TABLE.rows()
    lines = common.markdown_head(
        "variant | seeds | steps | return, mean over seeds | by seed "
        "| mean distance of the sum of values from the value of the sum / mean value | correlation"
    )
    groups: dict[tuple[int, str], list[common.Row]] = {}
    for row in rows:
        groups.setdefault((int(row["steps"]), row["variant"]), []).append(row)
    for (steps, variant), own in sorted(groups.items(), reverse=True):  # the longest runs first
        own.sort(key=lambda row: int(row["seed"]))
        returns = [float(row["return_mean"]) for row in own]
        told = [variant, len(own), steps, f"{np.mean(returns):.0f}"]
        told.append(", ".join(f"{x:.0f}" for x in returns))
        for column, text in (("gap", "{:.1%}"), ("correlation", "{:.3f}")):
            x = [float(row[column]) for row in own if row[column]]
            told.append(text.format(np.mean(x)) if x else "")
        lines.append(common.markdown_row(told))
    lines += ["", f"Commit of the scripts, machine: {common.origins(rows)}."]
    common.publish(RESULTS / "reward_terms.md", lines)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a run; default: {STEPS:,}")
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=[], choices=(1, 2, 3), help="some of the seeds"
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help=f"only rebuild the table; the figure is drawn when seed 1 has trained {STEPS:,} steps",
    )
    args = parser.parse_args()
    rollout = args_of(1, STEPS).batch_size
    if args.steps < rollout:
        parser.error(f"--steps {args.steps}: must be at least one rollout, {rollout}")
    if not args.report:
        common.require("matplotlib", "mujoco")
        try:
            runs = missing(args.steps, args.seeds)
        except ValueError as error:
            parser.error(str(error))
        TABLE.record(run_one, runs, processes=2)
    report()


if __name__ == "__main__":
    main()
