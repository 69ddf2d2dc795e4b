"""Learning curves: runs what is missing of a grid of tasks and seeds, and reports on the rest.

    python benchmarks/learning.py             # run the missing seeds, two at a time, and report
    python benchmarks/learning.py --report    # tables and figure from the committed files alone
    python benchmarks/learning.py --only Acrobot-v1 --seeds 8001 8002
    python benchmarks/learning.py --again --only Acrobot-v1 default --seeds 8001   # writes nothing
    python benchmarks/learning.py --merge FOLDER        # take in the runs of another results/

A run leaves a row in results/runs.csv (final evaluation, what the training returns came to, flags,
versions, commit, wall time) and a hundred bins of its training returns in results/curves.csv.gz.
What a row says of the training returns is computed from every episode, ahead of the binning.
Interrupted at any point, the next call continues. Reported seeds are 1 and up for peers and older
versions of our scripts, and 8001 and up for others. Flags were tuned on 1000 to 7999, but for
fourteen choices that README.md tells. The runs of ABLATIONS, in which one thing is changed, are of
an earlier version.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import common
import gymnasium as gym
import numpy as np
from common import (
    CATEGORICAL,
    LSTM,
    QUANTILE,
    RESULTS,
    Archive,
    Bin,
    Cell,
    Point,
    Row,
    Run,
    Table,
)

SB3 = "stable_baselines3_ppo"
CONTRIB = "sb3_contrib_recurrent_ppo"
ARCHIVE = Archive(RESULTS)
RETURNS_OVER_100 = " --norm-returns-memory 100"
PENDULUM_NOVEL, MOUNTAIN = "--preset pendulum_novel", "--preset mountaincar_novel"
PENDULUM, ACROBOT, LUNAR = "--preset pendulum", "--preset acrobot", "--preset lunarlander"
MUJOCO = "--preset mujoco --compile"  # compiled: the same but for rounding, 1.4 times as fast
SWIMMER = MUJOCO + " --gamma 0.9999 --gae-lambda 0.98"  # 8001 to 8005 had the preset's lambda
MINATAR = "--preset minatar"
GAMES = ("Breakout", "Asterix", "Freeway", "Seaquest", "SpaceInvaders")
# Also trained as long as others have, with these seeds: 40 minutes a run, and 155 on a slow machine
LONG_GAMES = dict.fromkeys(("Breakout", "Asterix", "SpaceInvaders"), range(8001, 8003))
TEN_MILLION = MINATAR + " --total-timesteps 10000000"
# rl-baselines3-zoo, hyperparams/ppo_lstm.yml at 22e3ff2; all with VecNormalize
NET = {
    "ortho_init": False,
    "lstm_hidden_size": 64,
    "enable_critic_lstm": True,
    "net_arch": {"pi": [64], "vf": [64]},
    "activation_fn": "ReLU",
}
ZOO_FLAGS = {
    "CartPoleNoVel-v1": {
        "n_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "ent_coef": 0.0,
        "learning_rate": "lin_0.001",
        "clip_range": "lin_0.2",
    },
    "PendulumNoVel-v1": {
        "n_envs": 4,
        "n_steps": 1024,
        "gae_lambda": 0.95,
        "gamma": 0.9,
        "n_epochs": 10,
        "ent_coef": 0.0,
        "learning_rate": 1e-3,
        "clip_range": 0.2,
        "use_sde": True,
        "sde_sample_freq": 4,
    },
    "MountainCarContinuousNoVel-v0": {
        "n_envs": 8,
        "n_steps": 1024,
        "batch_size": 256,
        "gae_lambda": 0.9,
        "gamma": 0.9999,
        "n_epochs": 10,
        "ent_coef": 0.00429,
        "learning_rate": 7.77e-5,
        "clip_range": 0.1,
        "max_grad_norm": 5,
        "vf_coef": 0.19,
        "use_sde": True,
        "sde_sample_freq": 8,
        "policy_kwargs": {"lstm_hidden_size": 32, "activation_fn": "Tanh"},
    },
}
# training return, mean of 20 episodes, at which a task counts as learnt; a kept row says when its
# run reached the number that stood here then
THRESHOLDS = {
    "CartPoleNoVel-v1": 475,
    "CartPole-v1": 475,
    "Acrobot-v1": -100,
    "Pendulum-v1": -200,
    "LunarLander-v3": 200,
    "HalfCheetah-v5": 3000,
    "Hopper-v5": 2000,
    "Walker2d-v5": 2000,
}
# what others have published, with how it was measured; zoo: DLR-RM/rl-baselines3-zoo, benchmark.md
# at 0088472, without velocities huggingface.co/sb3/ppo_lstm-TASK
PUBLISHED = Table(
    RESULTS / "published.csv",
    ("task", "source", "kind", "steps", "value", "spread", "note"),
    end="\n",
)
ZOO = "rl-baselines3-zoo"
LONG = "--total-timesteps 500000"
MILLION = "--total-timesteps 1000000"
MEMORY = "--preset memory"  # evaluates samples: of some popgym tasks the policy's mode is no good
POPGYM = (
    "AutoencodeEasy", "RepeatPreviousEasy", "RepeatFirstEasy", "CountRecallEasy",
    "PositionOnlyCartPoleEasy", "PositionOnlyPendulumEasy", "VelocityOnlyCartpoleEasy",
    "NoisyPositionOnlyCartPoleEasy", "NoisyPositionOnlyPendulumEasy", "MultiarmedBanditEasy",
    "HigherLowerEasy", "BattleshipEasy", "ConcentrationEasy", "MineSweeperEasy",
)  # fmt: skip
SINGLE = " --num-quantiles 51 --num-critics 1"
ROBOTS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5")
BLIND = tuple(task.replace("-", "NoVel-") for task in ROBOTS[:4])  # robots without velocities
MUJOCO_NOVEL = "--preset mujoco_novel"
# The peer needs more than an hour for the preset's million steps, so both have fewer here.
SHORT = MUJOCO_NOVEL + " --total-timesteps 300000"
SHORT_ROBOTS = ("HalfCheetahNoVel-v5", "Walker2dNoVel-v5")
# what the preset `calibrated` costs in return, on these tasks
CALIBRATED = {
    "CartPoleNoVel-v1": (LSTM, "--preset calibrated"),
    "PendulumNoVel-v1": (LSTM, "--preset pendulum_novel calibrated"),
    "Hopper-v5": (CATEGORICAL, "--preset mujoco calibrated --compile"),
    "LunarLander-v3": (CATEGORICAL, "--preset lunarlander calibrated"),
}
# seeds of peers and of older runs, and of runs of today's scripts
THREE, FIVE, TEN, TWENTY = (range(1, seeds + 1) for seeds in (3, 5, 10, 20))
NEW_THREE, NEW_FIVE, NEW_TEN, NEW_TWENTY = (
    range(common.RENEWED, common.RENEWED + seeds) for seeds in (3, 5, 10, 20)
)
AGAIN_THREE, AGAIN_FIVE, AGAIN_TEN = (
    range(common.RENEWED_AGAIN, common.RENEWED_AGAIN + seeds) for seeds in (3, 5, 10)
)


# flags: beyond --env-id and --seed
GRID = [
    Cell("CartPoleNoVel-v1", LSTM, "default", "", NEW_TWENTY),
    Cell("CartPoleNoVel-v1", LSTM, "no_memory", "", NEW_THREE),
    Cell("PendulumNoVel-v1", LSTM, "default", PENDULUM_NOVEL, NEW_TWENTY),
    Cell("PendulumNoVel-v1", LSTM, "memory_100", PENDULUM_NOVEL + RETURNS_OVER_100, TWENTY),
    Cell("MountainCarContinuousNoVel-v0", LSTM, "default", MOUNTAIN, NEW_TWENTY),
    *[Cell(f"popgym:popgym-{name}-v0", LSTM, "default", MEMORY, NEW_THREE) for name in POPGYM],
    Cell(
        "envs:MiniGrid-MemoryS7-OneHot-v0", LSTM, "default", "--preset minigrid", range(8004, 8007)
    ),
    *[Cell(task, LSTM, "default", MUJOCO_NOVEL, NEW_FIVE) for task in BLIND],
    *[Cell(task, CATEGORICAL, "feed_forward", MUJOCO, AGAIN_FIVE) for task in BLIND],
    *[Cell(task, LSTM, "short", SHORT, NEW_THREE) for task in SHORT_ROBOTS],
    Cell("CartPole-v1", CATEGORICAL, "default", "", NEW_TWENTY),
    Cell("Pendulum-v1", CATEGORICAL, "default", PENDULUM, NEW_TWENTY),
    Cell("Acrobot-v1", CATEGORICAL, "default", ACROBOT, NEW_TWENTY),
    Cell("LunarLander-v3", CATEGORICAL, "default", LUNAR, NEW_TWENTY),
    *[Cell(task, CATEGORICAL, "default", MUJOCO, AGAIN_TEN) for task in ROBOTS[:4]],
    Cell("Humanoid-v5", CATEGORICAL, "default", MUJOCO, AGAIN_FIVE),
    Cell("HalfCheetah-v5", CATEGORICAL, "memory_100", MUJOCO + RETURNS_OVER_100, FIVE),
    *[Cell(task, QUANTILE, "quantiles_single", MUJOCO + SINGLE, TEN) for task in ROBOTS[:4]],
    Cell("Swimmer-v5", CATEGORICAL, "default", SWIMMER, range(8106, 8111)),
    *[
        Cell(f"envs:MinAtar/{game}-v1", CATEGORICAL, "default", MINATAR, NEW_THREE)
        for game in GAMES
    ],
    *[
        Cell(f"envs:MinAtar/{game}-v1", CATEGORICAL, "ten_million", TEN_MILLION, seeds)
        for game, seeds in LONG_GAMES.items()
    ],
    *[
        Cell(task, script, "calibrated", flags, AGAIN_THREE if "mujoco" in flags else NEW_THREE)
        for task, (script, flags) in CALIBRATED.items()
    ],
    Cell("CartPoleNoVel-v1", CONTRIB, "zoo", "--total-timesteps 100000", FIVE),
    Cell("PendulumNoVel-v1", CONTRIB, "zoo", "--total-timesteps 100000", FIVE),
    Cell("MountainCarContinuousNoVel-v0", CONTRIB, "zoo", "--total-timesteps 300000", FIVE),
    *[
        # It has the wall time of ours, so that both have new rows, or neither: see `settled`.
        Cell(f"popgym:popgym-{name}-v0", CONTRIB, "equal_time", MEMORY, NEW_THREE)
        for name in POPGYM
    ],
    *[Cell(task, CONTRIB, "short", SHORT, THREE) for task in SHORT_ROBOTS],
    Cell("CartPole-v1", SB3, "default", "--total-timesteps 50000", THREE),
    Cell("Pendulum-v1", SB3, "default", "--total-timesteps 100000", THREE),
    Cell("Acrobot-v1", SB3, "default", LONG, THREE),
    Cell("LunarLander-v3", SB3, "default", MILLION, THREE),
    *[Cell(task, SB3, "default", MILLION, THREE) for task in ROBOTS[:4]],
    *[Cell(f"envs:MinAtar/{game}-v1", SB3, "same_flags", MINATAR, THREE) for game in GAMES],
]
BOTH = {  # variant: flags; one thing differs from the row of the task in GRID
    "no_floor": "--min-entropy-penalty 0",
    "single_critic": "--num-critics 1",
    "twin_min": "--twin-reduce min",
    "twin_mean": "--twin-reduce mean",
    "twin_min_quantile": "--twin-reduce min_quantile",  # its runs are kept, the flag is gone
    "clip_mean_only": "--vf-clip mean_only",
    "no_norm_returns": "--no-norm-returns",
    "no_popart": "",  # its runs are kept, the code that took rescaling out is gone
    "raw_observations": "--no-norm-obs",
    "sr_lambda": "--value-target sr_lambda",
}
OWN = {
    LSTM: {
        "clip_per_quantile": "--vf-clip per_quantile",
        "clip_mean_and_variance": "--vf-clip mean_and_variance",
        "kappa_0": "--kappa 0",
        "kappa_0.1": "--kappa 0.1",
        "kappa_1": "--kappa 1",
        "quantiles_8": "--num-quantiles 8",
        "quantiles_128": "--num-quantiles 128",
        "sequence_16": "--seq-len 16",
    },
    CATEGORICAL: {
        "two_hot": "--target-encoding two_hot",
        "atoms_21": "--num-atoms 21",
        "atoms_101": "--num-atoms 101",
    },
}


def ablations() -> list[Cell]:
    """One thing changed at a time."""
    cells = []
    for script, task, same in (  # as what the task's row in GRID has already
        (LSTM, "CartPoleNoVel-v1", ("twin_min", "no_floor")),
        (CATEGORICAL, "CartPole-v1", ("twin_min", "no_floor")),
        (CATEGORICAL, "Pendulum-v1", ("twin_mean",)),
    ):
        base = next(cell for cell in GRID if cell.setting == (task, script, "default"))
        for variant, own in (BOTH | OWN[script]).items():
            if variant not in same:
                cells.append(Cell(task, script, variant, f"{base.flags} {own}", FIVE))
        if script == CATEGORICAL:  # of the recurrent script it is in critics.py
            cells.append(Cell(task, QUANTILE, "exchanged", base.flags, FIVE))
    return cells


ABLATIONS = ablations()


def name_of(cell: Cell) -> str:
    """The task without the module that registers it."""
    return cell.task.split(":")[-1].replace("/", "-")


# --------------------------------------------------------------------------------------------- runs
class Result(NamedTuple):
    """What is kept of a run."""

    points: list[Point]  # step and return of every training episode
    row: dict[str, Any]  # of common.RUN_COLUMNS


def forget(module: ModuleType) -> None:
    """The control without memory: the LSTM state is zero ahead of every step, everywhere.

    Training unrolls the LSTM, the critics' value of a successor takes one step of it, and acting
    takes its steps in NumPy.
    """
    import torch

    unroll = module.unroll_lstm
    step = module.Body.step
    in_numpy = module.lstm_in_numpy

    def step_without_state(body, obs, state):
        return step(body, obs, torch.zeros_like(state))

    def unroll_without_state(lstm, inputs, state, episode_start):
        zero = tuple(torch.zeros_like(s) for s in state)
        return unroll(lstm, inputs, zero, torch.ones_like(episode_start))

    def acting_without_state(lstm):
        act = in_numpy(lstm)
        return lambda inputs, state: act(inputs, np.zeros_like(state))

    module.unroll_lstm = unroll_without_state
    module.Body.step = step_without_state
    module.lstm_in_numpy = acting_without_state


def run_ours(run: Run) -> Result:
    """Train one seed of a script of this repository."""
    cell = run.cell
    module = common.load_script(cell.script)
    if cell.variant == "no_memory":
        forget(module)

    with common.trained(module, cell.task, run.seed, cell.flags) as done:
        metrics = done.metrics
        followed = [tag for tag in common.FOLLOWED if tag in metrics]
        curves = common.scalars(done.directory, ("charts/episodic_return", *followed))
        told = json.loads((done.directory / "args.json").read_text())

    row = {
        "steps": told["args"]["total_timesteps"],
        "return_mean": round(metrics["eval/return_mean"], 4),
        "return_std": round(metrics["eval/return_std"], 4),
        "return_cvar": round(metrics["eval/return_cvar"], 4),
        "length_mean": round(metrics["eval/length_mean"], 4),
        "steps_per_second": round(metrics["charts/SPS"], 4),
        "versions": versions_text(told["versions"]),
    }
    for tag in followed:
        values = [point.value for point in curves[tag]]
        row[common.over_run(tag, "mean")] = float(np.mean(values))
        row[common.over_run(tag, "max")] = float(np.max(values))
    return Result(curves["charts/episodic_return"], row)


def versions_text(versions: dict[str, str]) -> str:
    """Names and versions of packages in one line."""
    return " ".join(f"{name} {version.split()[0]}" for name, version in versions.items())


def zoo_options(task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of RecurrentPPO and of its networks, from the zoo's text."""
    import torch

    options = dict(ZOO_FLAGS[task])
    for name in ("learning_rate", "clip_range"):
        if isinstance(options[name], str):  # "lin_x": x falls linearly to 0
            start = float(options[name].removeprefix("lin_"))
            options[name] = lambda remaining, start=start: start * remaining
    net = NET | options.pop("policy_kwargs", {})
    net["activation_fn"] = getattr(torch.nn, net["activation_fn"])
    return options, net


def same_options(args: Any) -> dict[str, Any]:
    """Arguments of SB3's PPO for flags of ours. It normalises advantages in each minibatch, and
    returns by VecNormalize or, in SB3's PPO here, not at all. It has no learning rate of critics.
    It stops where an estimate of the KL divergence is above 1.5 times its limit."""
    return {
        "n_steps": args.num_steps,
        "batch_size": args.batch_size // args.num_minibatches,
        "n_epochs": args.update_epochs,
        "learning_rate": lambda remaining: args.learning_rate * remaining,
        "gamma": args.gamma,
        "gae_lambda": args.gae_lambda,
        "clip_range": args.clip_coef,
        "ent_coef": args.ent_coef,
        "vf_coef": 0.5,
        "max_grad_norm": args.max_grad_norm,
        "target_kl": None if args.target_kl is None else args.target_kl / 1.5,
    }


def make_peer(run: Run, ours: ModuleType, args: Any, make: Callable) -> Any:
    """The model to train, with its environments. Variants: `zoo` has the zoo's flags; `same_flags`,
    `short` and `equal_time` have ours, and our encoders; `default` has SB3's."""
    import sb3_contrib
    import stable_baselines3 as sb3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    seed = 1000 * run.seed  # SB3 gives environment i the seed plus i, and runs should share none
    if run.cell.variant == "zoo":
        options, net = zoo_options(run.cell.task)
        envs = make_vec_env(make, options.pop("n_envs"), seed)
    elif run.cell.variant == "default":
        return sb3.PPO("MlpPolicy", make_vec_env(make, 1, seed), seed=seed)
    else:
        options, net = same_options(args), common.peer_network(ours, args)
        envs = make_vec_env(make, args.num_envs, seed)
    if run.cell.script == SB3:
        return sb3.PPO("MlpPolicy", envs, seed=seed, policy_kwargs=net, **options)

    envs = VecNormalize(envs, gamma=options["gamma"])
    if run.cell.variant != "zoo":
        net |= {"lstm_hidden_size": args.lstm_hidden_size, "enable_critic_lstm": True}
    recurrent = sb3_contrib.RecurrentPPO
    return recurrent("MlpLstmPolicy", envs, seed=seed, policy_kwargs=net, **options)


def run_peer(run: Run) -> Result:
    """SB3's PPO or sb3-contrib's RecurrentPPO. The environments are ours; evaluated like ours: 50
    episodes, mode of the policy, or its samples where ours are. With `equal_time` training ends
    when it has taken as long as ours did, a median over its seeds; its learning rate reaches 0
    then."""
    import sb3_contrib
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    task = run.cell.task
    contrib = run.cell.script == CONTRIB
    ours = common.load_script(LSTM if contrib else CATEGORICAL)
    args = ours.parse_args(["--env-id", task, *run.cell.flags.split()])
    torch.set_num_threads(1)
    limit = math.inf
    if run.cell.variant == "equal_time":
        limit = training_seconds(
            dataclasses.replace(cell_of(LSTM, task, "default"), seeds=run.cell.seeds)
        )

    model = make_peer(run, ours, args, lambda: ours.make_env(args))
    points: list[Point] = []
    began = time.time()
    if run.cell.variant == "equal_time":
        model.lr_schedule = lambda _: args.learning_rate * max(0, 1 - (time.time() - began) / limit)

    def watch(local: dict, _: dict) -> bool:
        ended = [info["episode"] for info in local["infos"] if "episode" in info]
        points.extend(Point(model.num_timesteps, episode["r"]) for episode in ended)
        return time.time() - began < limit

    model.learn(args.total_timesteps, watch)
    fresh = make_vec_env(
        lambda: gym.wrappers.TimeLimit(ours.make_env(args), 10_000), 1, run.seed + 1_000_000
    )
    if contrib:
        envs = model.get_env()
        fresh = VecNormalize(fresh, training=False, norm_reward=False)
        fresh.obs_rms = envs.obs_rms
    mode = not args.eval_sampled
    returns, _ = evaluate_policy(model, fresh, 50, deterministic=mode, return_episode_rewards=True)

    versions = {module.__name__: module.__version__ for module in (sb3, sb3_contrib, torch)}
    row = {
        "steps": model.num_timesteps,
        "return_mean": float(np.mean(returns)),
        "return_std": float(np.std(returns)),
        "versions": versions_text(versions),
    }
    return Result(points, row)


def run_one(run: Run) -> Result:
    """Train one seed in this process."""
    origin = {"commit": common.origin()["commit"], **common.machine()}
    began = time.time()
    work = run_peer if run.cell.script in (SB3, CONTRIB) else run_ours
    points, row = work(run)
    seconds = {"seconds": round(time.time() - began, 1)}
    same = {**run.cell.setting._asdict(), "seed": run.seed, "flags": flags_text(run.cell)}
    return Result(points, {**same, **row, **learnt(run.cell, points), **seconds, **origin})


def flags_text(cell: Cell) -> str:
    """Flags with one blank between them. Presets are spelt out, since they may change."""
    flags = " ".join(cell.flags.split())
    whose = {CONTRIB: LSTM, SB3: CATEGORICAL}.get(cell.script, cell.script)  # peers have our flags
    return common.spelt_out(whose, flags)


def learnt(cell: Cell, points: list[Point]) -> dict[str, float]:
    """What a row says of the training returns, from every episode; nothing where none has ended."""
    if not len(points):
        return {}
    episodes = np.array(points)
    columns = {"mean_over_run": mean_over_run(episodes), "last_returns": last_returns(episodes)}
    threshold = THRESHOLDS.get(name_of(cell))
    if threshold is not None:
        columns["steps_to_threshold"] = first_step(episodes, threshold)
    return columns


def keep(result: Result) -> None:
    """Put the run into the two files."""
    ARCHIVE.keep(result.row, common.thinned(np.array(result.points), result.row["steps"]))


def missing(cells: list[Cell], only: list[str], seeds: list[int]) -> list[Run]:
    """Runs that match and have no row, of these seeds if any; the first seed of everything first.
    Peers that have our wall time come last.

    Lower seeds of our scripts are of earlier versions. What lacks there stays so, or today's update
    would be mixed in.
    """
    refuse_other_flags(cells)
    runs = [
        run
        for run in ARCHIVE.table.without_row(common.runs_of(cells, only))
        if run.cell.script not in common.OWN_SCRIPTS or is_current(run)
    ]
    if seeds:
        runs = [run for run in runs if run.seed in seeds]
    return sorted(runs, key=lambda run: (run.cell.variant == "equal_time", run.seed))


def is_current(run: Run) -> bool:
    """Tell whether a run of ours is one of today's scripts and presets."""
    return run.seed >= common.first_seed(run.cell.script, run.cell.task)


def refuse_other_flags(cells: list[Cell]) -> None:
    """Raise ValueError for a row of today's scripts, or of a peer, whose flags are not those of its
    cell, as `common.refuse_other_flags` tells."""
    current = [
        row
        for row in ARCHIVE.table.rows()
        if int(row["seed"]) >= common.RENEWED or row["script"] in (SB3, CONTRIB)
    ]
    common.refuse_other_flags(current, cells, flags_text)


def run_missing(runs: list[Run], processes: int) -> None:
    """Train them and keep what they give."""
    if not runs:
        print("no run is missing of what matches")
    for run, result in common.run_all(run_one, runs, processes):
        keep(result)
        print(run, "|", result.row["return_mean"], flush=True)


def train_again(only: list[str], seeds: list[int], processes: int) -> None:
    """Train runs that have a row once more, and print both scores. Nothing is written.

    Raises ValueError if no run that can be repeated matches.
    """
    refuse_other_flags(GRID)
    lacking = missing(GRID, only, seeds)
    runs = [
        run
        for run in common.runs_of(GRID, only, seeds)
        if run not in lacking and (run.cell.script not in common.OWN_SCRIPTS or is_current(run))
    ]
    if not runs:
        raise ValueError(f"no row of today's scripts matches {' '.join(only)}, with these seeds")
    rows = {(common.setting_of(row), row["seed"]): row for row in ARCHIVE.table.rows()}
    for run, result in common.run_all(run_one, runs, processes):
        row = rows[run.cell.setting, str(run.seed)]
        words = (*run.cell.setting, f"seed {run.seed}")
        print(
            f"{', '.join(words)}: {result.row['return_mean']:.4g} now, "
            f"{float(row['return_mean']):.4g} in the row ({row['versions']})",
            flush=True,
        )


# ------------------------------------------------------------------------------------------ reading
def settled(cell: Cell) -> Cell:
    """The cell whose rows count in this one's place: itself, or one of older seeds.

    Ours and the peer that has our wall time have new rows on both sides, or on none.
    """
    pair = {
        one.setting: one
        for one in GRID
        if one.task == cell.task and one.setting[1:] in ((LSTM, "default"), (CONTRIB, "equal_time"))
    }
    if len(pair) < 2 or cell.setting not in pair:
        return cell
    seeds = {
        setting: {int(row["seed"]) for row in ARCHIVE.rows_of(one)} for setting, one in pair.items()
    }
    complete = all(seeds[setting] == {*one.seeds} for setting, one in pair.items())
    return cell if complete else dataclasses.replace(cell, seeds=TWENTY)


def rows_of(cell: Cell) -> list[Row]:
    """The row of every run of a cell, in the order of their seeds."""
    return ARCHIVE.rows_of(settled(cell))


def numbers(rows: list[Row], column: str) -> list[float]:
    """A column of rows; nan where it is not known."""
    return [float(row[column] or "nan") for row in rows]


def scores_of(cell: Cell) -> list[float]:
    """Final evaluation of every run of a cell."""
    return numbers(rows_of(cell), "return_mean")


def last_returns_of(cell: Cell) -> list[float]:
    """Mean training return of the last twentieth of the steps of every run of a cell."""
    return numbers(rows_of(cell), "last_returns")


def replaced(cell: Cell) -> list[Cell]:
    """The cells whose rows this one's have replaced, the newest first."""
    if not cell.seeds or min(cell.seeds) < common.RENEWED:
        return []
    older = [dataclasses.replace(cell, seeds=TWENTY)]
    if min(cell.seeds) >= common.RENEWED_AGAIN:
        older.insert(0, common.before_renewed_again(cell))
    known = [rows_of(cell), []]
    found = []
    for one in older:
        if ARCHIVE.rows_of(one) not in known:
            known.append(ARCHIVE.rows_of(one))
            found.append(one)
    return found


def cell_of(script: str, task: str, variant: str) -> Cell:
    """One cell of the grid."""
    wanted = (task, script, variant)
    return next(cell for cell in GRID if cell.setting == wanted)


def groups_of_task(task: str) -> tuple[list[Row], list[Row]]:
    """The default runs of the feed-forward script on a task: today's if all are there, and the
    older ones."""
    cell = cell_of(CATEGORICAL, task, "default")
    rows = common.groups_of_file(ARCHIVE.table.path).get(cell.setting, [])
    older = [row for row in rows if int(row["seed"]) < common.RENEWED]
    standing = rows_of(cell)
    return ([] if standing == older else standing), older


def published(task: str, source: str, steps: int = 0) -> Row | None:
    """What a project has published of its PPO on a task, if anything: of the fewest steps that are
    not below `steps`."""
    rows = [
        row
        for row in PUBLISHED.rows()
        if (row["task"], row["source"]) == (task, source)
        and row["kind"] != "TRPO"
        and int(row["steps"]) >= steps
    ]
    return min(rows, key=lambda row: int(row["steps"]), default=None)


def iqm(scores: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis: of what is left without the lowest and the highest
    quarter."""
    count = scores.shape[-1]
    cut = count // 4
    return np.sort(scores)[..., cut : count - cut].mean(-1)


def interval(scores: np.ndarray) -> np.ndarray:
    """Bootstrap 95 % interval of the interquartile mean over seeds."""
    draws = np.random.default_rng(0).choice(scores, (10_000, len(scores)))
    return np.percentile(iqm(draws), [2.5, 97.5])


def first_step(points: np.ndarray, threshold: float) -> float:
    """Step at which the mean of the last 20 training episodes, (step, return), reaches the
    threshold; infinite where it never does."""
    steps, returns = points.T
    if len(returns) < 20:
        return np.inf
    good = np.convolve(returns, np.ones(20) / 20, "valid") >= threshold
    return steps[19 + good.argmax()] if good.any() else np.inf


def mean_over_run(points: np.ndarray) -> float:
    """Training returns, (step, return), in the mean over all steps: larger where a run learns
    sooner or ends higher."""
    grid = np.linspace(points[0, 0], points[-1, 0], 200)
    return float(common.smoothed(points, grid).mean())


def last_returns(points: np.ndarray) -> float:
    """Mean training return, (step, return), of the last twentieth of the steps."""
    steps, returns = points.T
    return float(returns[steps > 0.95 * steps[-1]].mean())


# ------------------------------------------------------------------------------------------ reports
def training_seconds(cell: Cell) -> float:
    """Median time that the runs of a cell's seeds spent on training, evaluations apart.

    Raises ValueError unless all of them have ended.
    """
    runs = ARCHIVE.rows_of(cell)
    if {int(run["seed"]) for run in runs} != {*cell.seeds}:
        raise ValueError(f"{cell.task}: run {cell.script} first; its time is the limit")
    return float(np.median([float(run["steps"]) / float(run["steps_per_second"]) for run in runs]))


def steps_needed(cell: Cell) -> str:
    """Median steps to the threshold, in words."""
    if name_of(cell) not in THRESHOLDS:
        return "-"
    steps = np.array(numbers(rows_of(cell), "steps_to_threshold"))
    reached = np.isfinite(steps).sum()
    if not reached:
        return "not reached"
    median = f"{np.median(steps):,.0f}" if 2 * reached > len(steps) else "not by most"
    return median if reached == len(steps) else f"{median} ({reached} of {len(steps)})"


def version_of(cell: Cell) -> str:
    """Whether rows of our scripts are of today's or of an older script or preset."""
    if cell.script not in common.OWN_SCRIPTS:
        return "-"
    return "older" if any(map(common.is_older, rows_of(cell))) else "today's"


def steps_told(runs: list[Row]) -> str:
    """The steps of runs, or their range where a time limit made them differ."""
    steps = sorted({int(run["steps"]) for run in runs})
    return f"{steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"{steps[0]:,}"


def table(cells: list[Cell]) -> list[str]:
    """A line for each cell with results."""
    lines = common.markdown_head(
        "script | task | variant | version | steps | seeds | mean | IQM, 95 % interval "
        "| worst, best | steps to threshold | seconds"
    )
    for cell in cells:
        runs = rows_of(cell)
        if not runs:
            continue
        scores = np.array(scores_of(cell))
        low, high = interval(scores)
        enough = len(runs) > 4
        digits = 1 if np.abs(scores).max() > 10 else 2
        lines.append(
            common.markdown_row(
                [
                    cell.script,
                    name_of(cell),
                    cell.variant,
                    version_of(cell),
                    steps_told(runs),
                    len(runs),
                    f"{scores.mean():.{digits}f}",
                    f"{iqm(scores):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
                    if enough
                    else "-",
                    f"{scores.min():.{digits}f}, {scores.max():.{digits}f}",
                    steps_needed(cell),
                    f"{np.median(numbers(runs, 'seconds')):.0f}",
                ]
            )
        )
    return lines


EVERY_RUN_HEAD = """\
"Final evaluations" has one number for each run: the mean return over its evaluation episodes.
"Last training returns" is the mean of the last twenty training episodes, over the runs of a line.
Lines with one task and variant are of today's scripts and of older ones.
"""


def every_run(cells: list[Cell]) -> list[str]:
    """A line for each cell with results: what the table's figures are of."""
    lines = common.markdown_head(
        "script | task | variant | version | steps | final evaluations, sorted "
        "| last training returns | commit"
    )
    for cell in cells:
        runs = rows_of(cell)
        if not runs:
            continue
        scores = sorted(scores_of(cell))
        digits = 1 if max(map(abs, scores)) > 10 else 3
        last = np.mean(last_returns_of(cell))
        lines.append(
            common.markdown_row(
                [
                    cell.script,
                    name_of(cell),
                    cell.variant,
                    version_of(cell),
                    steps_told(runs),
                    " ".join(f"{score:.{digits}f}" for score in scores),
                    f"{last:.{digits}f}",
                    " ".join(sorted({run["commit"] or "-" for run in runs})),
                ]
            )
        )
    return lines


def beside_published() -> list[str]:
    """A line for each task of which others have published scores."""
    names = "task | evaluation | zoo | its steps | last training returns | CleanRL | its steps"
    lines = ["Beside what others have published of their PPO:", "", *common.markdown_head(names)]
    for cell in GRID:
        theirs = [published(cell.task, source) for source in (ZOO, "CleanRL")]
        if not any(theirs) or cell.variant != "default" or not cell.script.startswith("dist"):
            continue
        mine = (np.mean(scores_of(cell)), np.mean(last_returns_of(cell)))
        cells = [cell.task]
        for own, row in zip(mine, theirs):
            if row is None:
                cells += ["-"] * 3
                continue
            score = float(row["value"])
            digits = 0 if abs(score) >= 1000 else 1
            steps = common.brief_count(int(row["steps"]))
            cells += [f"{own:.{digits}f}", f"{score:.{digits}f}", steps]
        lines.append(common.markdown_row(cells))
    return lines


def over_published(scores: dict[str, list[float]]) -> str:
    """Scores of each MuJoCo task over CleanRL's and over the zoo's per-task tuned PPO, in words.
    Tasks count alike in what is pooled: as many of their first seeds as every task has."""
    fewest = min(map(len, scores.values()))
    over_cleanrl = []
    over_zoo = {}
    for task, own in scores.items():
        over_zoo[task] = np.mean(own) / float(published(task, ZOO)["value"])
        if cleanrl := published(task, "CleanRL"):
            over_cleanrl += [score / float(cleanrl["value"]) for score in own[:fewest]]
    told = ", ".join(f"{task} {ratio:.2f}" for task, ratio in over_zoo.items())
    return (
        f"IQM of score over CleanRL's on the three of these tasks that it reports "
        f"{iqm(np.array(over_cleanrl)):.2f}; "
        f"mean of score over the zoo's {np.mean([*over_zoo.values()]):.2f} ({told})"
    )


def mujoco(title: str, script: str, variant: str) -> str:
    """Runs with the one MuJoCo line beside published scores, final evaluations and training
    returns."""
    cells = {task: cell_of(script, task, variant) for task in ROBOTS[:4]}
    scores = {task: scores_of(cell) for task, cell in cells.items()}
    fewest = min(map(len, scores.values()))
    like_for_like = []  # training returns, as CleanRL reports
    for task, cell in cells.items():
        if cleanrl := published(task, "CleanRL"):
            ratios = np.array(last_returns_of(cell)[:fewest]) / float(cleanrl["value"])
            like_for_like += ratios.tolist()
    return (
        f"{title}: {over_published(scores)}; IQM of the last training returns, "
        f"which CleanRL reports, over CleanRL's {iqm(np.array(like_for_like)):.2f}."
    )


def beside(title: str, pairs: list[tuple[Cell, Cell]]) -> str:
    """On how many tasks our mean is at least the peer's, of those that both have run."""
    means = {
        name_of(ours): (np.mean(scores_of(ours)), np.mean(scores_of(peer)))
        for ours, peer in pairs
        if rows_of(ours) and rows_of(peer)
    }
    behind = [task for task, (mine, theirs) in means.items() if mine < theirs]
    return (
        f"{title}: at least the peer's mean on {len(means) - len(behind)} of {len(means)} tasks"
        f"{'; behind on ' if behind else ''}{', '.join(behind)}."
    )


def popgym() -> str:
    """Beside RecurrentPPO at equal wall time."""
    tasks = [f"popgym:popgym-{name}-v0" for name in POPGYM]
    return beside(
        "POPGym Easy beside RecurrentPPO, equal flags and wall time",
        [(cell_of(LSTM, task, "default"), cell_of(CONTRIB, task, "equal_time")) for task in tasks],
    )


def minatar() -> str:
    """Beside SB3's PPO at equal steps."""
    tasks = [f"envs:MinAtar/{game}-v1" for game in GAMES]
    return beside(
        "MinAtar beside SB3's PPO, equal sizes, rates and steps",
        [
            (cell_of(CATEGORICAL, task, "default"), cell_of(SB3, task, "same_flags"))
            for task in tasks
        ],
    )


def panel_of(cell: Cell) -> tuple[bool, str]:
    """What the ablations of one row of the grid share: networks and task."""
    return cell.script in (CATEGORICAL, QUANTILE), cell.task


# ------------------------------------------------------------------------------------------ figures
SAID = {  # variants of ABLATIONS in a figure's words
    "no_floor": "no entropy floor",
    "single_critic": "a single critic",
    "twin_min": "twins: smaller mean",
    "twin_mean": "twins: mean",
    "twin_min_quantile": "twins: smaller quantiles",
    "clip_mean_only": "value clip: mean",
    "clip_per_quantile": "value clip: each quantile",
    "clip_mean_and_variance": "value clip: mean, variance",
    "no_norm_returns": "returns not normalised",
    "no_popart": "no PopArt rescaling",
    "raw_observations": "observations not normalised",
    "sr_lambda": "SR(λ) targets",
    "kappa_0": "Huber κ = 0",
    "kappa_0.1": "Huber κ = 0.1",
    "kappa_1": "Huber κ = 1",
    "quantiles_8": "8 quantiles",
    "quantiles_128": "128 quantiles",
    "sequence_16": "sequences of 16 steps",
    "two_hot": "two-hot targets",
    "atoms_21": "21 atoms",
    "atoms_101": "101 atoms",
    "exchanged": "32 quantiles, not atoms",
}


def draw_steps(panel: Any, cells: list[Cell]) -> None:
    """Draw steps to the threshold of one task's cells: every seed is a point, the median a bar.
    Runs that never reach it are counted in a strip at the right edge."""
    last = float(rows_of(cells[0])[0]["steps"])
    never = 1.1 * last
    panel.axvspan(1.03 * last, 1.45 * last, color="#F3F3F3", lw=0)
    for place, cell in enumerate(cells):
        steps = np.array(numbers(rows_of(cell), "steps_to_threshold"))
        default = cell.variant == "default"
        colour = common.OURS if default else common.SKY
        lost = int(np.isinf(steps).sum())
        panel.plot(steps, [place] * len(steps), "o", color=colour, alpha=0.75, mew=0)
        if lost:
            panel.plot(never, place, "x", color=common.INK, mew=1.2)
            panel.text(1.17 * last, place, f"{lost} of {len(steps)}", va="center", fontsize=6.5)
        middle = min(np.median(steps), never)
        panel.plot([middle] * 2, [place - 0.38, place + 0.38], color=common.INK, lw=1.6)
        if default:
            panel.axvline(middle, color=common.OURS, lw=0.8, ls=":")
    panel.text(1.24 * last, -0.75, "never", ha="center", va="center", fontsize=7)
    panel.set(xlim=(0, 1.45 * last), ylim=(len(cells) - 0.4, -1.2))
    panel.set_xticks([0, last / 2, last])
    panel.set_yticks(range(len(cells)), [SAID.get(cell.variant, cell.variant) for cell in cells])
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="y", visible=False)
    panel.xaxis.set_major_formatter(common.brief_count)


def draw_ablations(cells: list[Cell]) -> None:
    """Draw steps to the threshold with one thing changed at a time; each task has a panel."""
    plt = common.pyplot()
    panels: dict[tuple[bool, str], list[Cell]] = {}
    for cell in cells:
        if rows_of(cell) and name_of(cell) in THRESHOLDS:
            panels.setdefault(panel_of(cell), []).append(cell)
    if not panels:
        return

    figure, axes = plt.subplots(1, len(panels), figsize=(common.WIDTH, 3.7), squeeze=False)
    for number, ((feed_forward, task), own) in enumerate(panels.items()):
        draw_steps(axes[0][number], own)
        kind = "feed-forward, atoms" if feed_forward else "recurrent, quantiles"
        common.letter(axes[0][number], number, f"{common.title_of(task)}\n{kind}")
        threshold = THRESHOLDS[name_of(own[0])]
        axes[0][number].set_xlabel(f"steps to a return of {threshold:g}")
    looks = (
        {"marker": "o", "color": common.OURS, "label": "one seed, default"},
        {"marker": "o", "color": common.SKY, "label": "one seed, one thing changed"},
        {"marker": "|", "color": common.INK, "ms": 10, "mew": 1.6, "label": "median over seeds"},
        {"marker": "x", "color": common.INK, "mew": 1.2, "label": "seeds that never reach it"},
    )
    handles = [plt.Line2D([], [], ls="", **look) for look in looks]
    handles.append(plt.Line2D([], [], color=common.OURS, lw=0.8, ls=":", label="default's median"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    common.save(figure, RESULTS / "ablations.png")


def latest(bins: list[Bin], grid: np.ndarray) -> np.ndarray:
    """Mean return of the 20 episodes before each step of `grid`, which has ends of bins."""
    steps = np.array([one.step for one in bins])
    means = np.array([np.nan, *[one.last_20 for one in bins]])
    return means[np.searchsorted(steps, grid, side="right")]


class Band(NamedTuple):
    """It is the interquartile mean over seeds, step by step, with its 95 % interval."""

    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def iqm_band(curves: np.ndarray, repeats: int = 2_000) -> Band:
    """Return the band of curves (seeds, steps). The bootstrap draws whole curves."""
    seeds = len(curves)
    cut = seeds // 4

    def middle(ordered: np.ndarray) -> np.ndarray:
        return ordered[..., cut : seeds - cut, :].mean(-2)

    rows = np.random.default_rng(0).integers(seeds, size=(repeats, seeds))
    draws = middle(np.sort(curves[rows], axis=1))
    low, high = np.percentile(draws, [2.5, 97.5], axis=0)
    return Band(middle(np.sort(curves, axis=0)), low, high)


SHOWN = (  # all feed-forward tasks, and ten of the recurrent ones
    *("CartPoleNoVel-v1", "PendulumNoVel-v1", "MountainCarContinuousNoVel-v0"),
    *BLIND,
    *[f"popgym:popgym-{name}-v0" for name in POPGYM[:3]],
    *("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "LunarLander-v3"),
    *ROBOTS,
    "Swimmer-v5",
    *[f"envs:MinAtar/{game}-v1" for game in GAMES],
)
PEERS = {  # rows of GRID in a figure's words
    (CONTRIB, "zoo"): "RecurrentPPO of sb3-contrib, flags of rl-zoo",
    (CONTRIB, "equal_time"): "RecurrentPPO, our flags, stopped after our wall time",
    (CONTRIB, "same_flags"): "RecurrentPPO of sb3-contrib, our flags",
    (SB3, "default"): "PPO of Stable-Baselines3, its default flags",
    (SB3, "same_flags"): "PPO of Stable-Baselines3, our sizes and rates",
}
CONTROLS = {  # ours without memory, where the task needs one
    (LSTM, "no_memory"): "ours, LSTM state zeroed",
    (CATEGORICAL, "feed_forward"): "ours, feed-forward",
}


def look_of(cell: Cell) -> dict[str, Any] | None:
    """Return how a cell's curve is drawn, or nothing for a cell that the figure leaves out."""
    kind = (cell.script, cell.variant)
    if kind in ((LSTM, "default"), (CATEGORICAL, "default")):
        return {"color": common.OURS, "ls": "-"}
    if kind in CONTROLS:
        return {"color": common.FLOOR, "ls": ":"}
    if kind in PEERS:
        return {"color": common.PEER, "ls": "--"}
    return None


def family_of(task: str) -> str:
    """Return what kind of task it is, in a figure's words."""
    if "popgym" in task:
        return "POPGym Easy"
    if "MinAtar" in task:
        return "MinAtar"
    if task in (*ROBOTS, "Swimmer-v5"):
        return "MuJoCo"
    if task in BLIND:
        return "MuJoCo, recurrent"
    return "recurrent" if "NoVel" in task else "feed-forward"


def draw_curves(panel: Any, cells: list[Cell]) -> None:
    """Draw the curves of one task, and tell how many seeds they are of."""
    for cell in cells:
        runs = ARCHIVE.curves_of(settled(cell))
        steps = int(min(numbers(rows_of(cell), "steps")))
        grid = steps * np.arange(1, common.BINS + 1) // common.BINS
        curves = np.array([latest(bins, grid) for bins in runs])
        known = np.isfinite(curves).all(0)  # from where on every run has ended an episode
        band = iqm_band(curves[:, known])
        look = look_of(cell)
        panel.plot(grid[known], band.middle, **look)
        panel.fill_between(grid[known], band.low, band.high, color=look["color"], alpha=0.2, lw=0)
    seeds = ", ".join(str(len(rows_of(cell))) for cell in cells)
    told = f"{family_of(cells[0].task)}; seeds: {seeds}"
    panel.text(0, 1.02, told, transform=panel.transAxes, fontsize=6.5, color="#666666")
    panel.xaxis.set_major_formatter(common.brief_count)
    panel.yaxis.set_major_formatter(common.brief_count)
    panel.locator_params(nbins=4)
    panel.set_xlim(left=0)


def panels_told(places: list[int]) -> str:
    """Return the letters of panels, in their order: (a), (c) to (e)."""
    runs: list[list[str]] = []
    for number, place in enumerate(places):
        if not number or place != places[number - 1] + 1:
            runs.append([])
        runs[-1].append(f"({chr(ord('a') + place)})")
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def legend_looks(tasks: list[str], cells: list[Cell]) -> list[dict[str, Any]]:
    """Return the lines of the legend, which tells in which panels which of them is."""
    looks = [{"color": common.OURS, "label": "ours"}]
    for kind, words in (PEERS | CONTROLS).items():
        own = {cell.task for cell in cells if (cell.script, cell.variant) == kind}
        places = [number for number, task in enumerate(tasks) if task in own]
        if places:
            cell = next(cell for cell in cells if (cell.script, cell.variant) == kind)
            looks.append({**look_of(cell), "label": f"{panels_told(places)}: {words}"})
    return looks


def draw_learning() -> None:
    """Draw training curves of ours and of the peers; each task that has run has a panel."""
    plt = common.pyplot()
    drawn = [cell for cell in GRID if look_of(cell) and rows_of(cell)]
    # The numbers of seeds are told in the order of the legend.
    drawn.sort(key=lambda cell: (cell.script, cell.variant) in CONTROLS)
    tasks = [task for task in SHOWN if any(cell.task == task for cell in drawn)]
    if not tasks:
        return
    rows = -(-len(tasks) // 5)
    figure, axes = plt.subplots(rows, 5, figsize=(common.WIDTH, 1.6 * rows + 0.8), squeeze=False)
    for number, (panel, task) in enumerate(zip(axes.flat, tasks)):
        own = [cell for cell in drawn if cell.task == task]
        draw_curves(panel, own)
        older = " (older)" if "older" in map(version_of, own) else ""
        common.letter(panel, number, f"{common.title_of(task)}{older}", fontsize=7.5, pad=13)
    for panel in axes.flat[len(tasks) :]:
        panel.set_axis_off()
    for panel in axes[:, 0]:
        panel.set_ylabel("training return", fontsize=7)
    for panel in axes[-1]:
        panel.set_xlabel("environment steps", fontsize=7)
    handles = [plt.Line2D([], [], **look) for look in legend_looks(tasks, drawn)]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=2,
        title="Interquartile mean over seeds (mean of three); band: 95 % bootstrap interval, "
        "of three or four seeds the whole range",
        title_fontsize=7.5,
    )
    common.save(figure, RESULTS / "learning.png")


def report() -> None:
    """Tables in results/ (learning.md, every_run.md, ablations.md) and on stdout; two figures."""
    told = "Seconds are of shared machines, of which some are about three times as fast as others."
    lines = [told, "", *table(GRID)]
    beside_peers = (
        mujoco("MuJoCo, --preset mujoco", CATEGORICAL, "default"),
        mujoco(
            "A single critic of 51 quantiles, older scripts and preset",
            QUANTILE,
            "quantiles_single",
        ),
        popgym(),
        minatar(),
    )
    for told in beside_peers:
        lines += ["", told]
    common.publish(RESULTS / "learning.md", [*lines, "", *beside_published()])
    changed = {panel_of(cell) for cell in ABLATIONS}
    base = [  # the older runs of the same seeds: others start in easier or harder states
        dataclasses.replace(cell, seeds=FIVE)
        for cell in GRID
        if cell.variant == "default" and panel_of(cell) in changed
    ]
    panels = sorted([*base, *ABLATIONS], key=panel_of)
    common.publish(RESULTS / "ablations.md", table(panels))
    older = [one for cell in GRID for one in replaced(cell)]
    every = every_run([*GRID, *older, *ABLATIONS])
    common.publish(RESULTS / "every_run.md", [EVERY_RUN_HEAD, *every])

    draw_ablations(panels)
    draw_learning()


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="only rebuild tables and figure")
    parser.add_argument("--only", nargs="*", default=[], help="words, all to match")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="seeds to run")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--again", action="store_true", help="repeat runs, and write nothing")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="only take in its runs")
    args = parser.parse_args()
    if args.merge:
        for file in (ARCHIVE.table.path, ARCHIVE.curves):
            if not (args.merge / file.name).is_file():
                parser.error(f"--merge {args.merge}: has no {file.name}")
        other = Archive(args.merge)
        ARCHIVE.merge(other.table.rows(), other.curve_rows())
        return
    common.require("matplotlib", *([] if args.report else ["sb3_contrib"]))
    if args.again:
        if not args.only or args.report:
            parser.error("--again needs --only, and does not report")
        try:
            train_again(args.only, args.seeds, args.processes)
        except ValueError as error:
            parser.error(str(error))
        return
    if not args.report:
        try:
            runs = missing(GRID, args.only, args.seeds)
        except ValueError as error:
            parser.error(str(error))
        run_missing(runs, args.processes)
    report()


if __name__ == "__main__":
    main()
