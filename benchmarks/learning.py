"""Learning curves: runs what is missing of a grid of tasks and seeds, and reports on the rest.

    python benchmarks/learning.py             # run the missing seeds, two at a time, and report
    python benchmarks/learning.py --report    # tables and figure from the committed files alone
    python benchmarks/learning.py --only CartPoleNoVel-v1 --seeds 1 2 3
    python benchmarks/learning.py --ablations           # one thing changed at a time

A run leaves results/<script>/<task>/<variant>/seed<k>.csv (step, return of every training episode)
and seed<k>.json (final evaluation, flags, versions, commit, wall time). Interrupted at any point,
the next call continues. Reported seeds are 1 to 10; whatever was tuned was tuned on 1000 and up.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LSTM, CATEGORICAL = "distributional_ppo_lstm", "distributional_ppo_categorical"
SB3, CONTRIB = "stable_baselines3_ppo", "sb3_contrib_recurrent_ppo"
FOLLOWED = ("norm/return_std", "norm/value_shift", "value/outside_support")
# keeps the std at 1 or above: a mean beyond the limits of the action is not left with little noise
FLOOR = " --min-entropy 1.4 --min-entropy-penalty 0.1"
PENDULUM_NOVEL = (
    "--gamma 0.9 --gae-lambda 0.95 --num-envs 4 --num-steps 1000 --seq-len 100 "
    "--num-minibatches 20 --update-epochs 10 --learning-rate 2e-3 --ent-coef 0" + FLOOR
)
MOUNTAIN = (
    "--total-timesteps 300000 --gamma 0.999 --gae-lambda 0.95 --num-envs 16 --num-steps 500 "
    "--seq-len 250 --num-minibatches 16 --update-epochs 10 --learning-rate 3e-3 --log-std-init 2 "
    "--ent-coef 0"
)
PENDULUM = (
    "--total-timesteps 100000 --gamma 0.9 --num-envs 4 --num-steps 256 --num-minibatches 16 "
    "--update-epochs 10 --twin-reduce mean"
)
ACROBOT = (
    "--total-timesteps 500000 --learning-rate 3e-4 --ent-coef 0.01 --num-envs 16 "
    "--num-steps 128 --num-minibatches 32 --update-epochs 10"
)
LUNAR = (
    "--total-timesteps 1000000 --learning-rate 2.5e-4 --ent-coef 0.01 --num-envs 16 "
    "--num-steps 128 --num-minibatches 8 --update-epochs 4 --gamma 0.999 --gae-lambda 0.98"
)
MUJOCO = (
    "--total-timesteps 1000000 --num-steps 256 --num-minibatches 32 --update-epochs 10 "
    "--learning-rate 3e-4 --log-std-init -0.5 --target-kl 0.02"
)
# rl-baselines3-zoo, hyperparams/ppo_lstm.yml at 22e3ff2; all with VecNormalize
NET = {"ortho_init": False, "lstm_hidden_size": 64, "enable_critic_lstm": True}
NET |= {"net_arch": {"pi": [64], "vf": [64]}, "activation_fn": "ReLU"}
ZOO = {
    "CartPoleNoVel-v1": {
        "n_envs": 8, "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98,
        "n_epochs": 20, "ent_coef": 0.0, "learning_rate": "lin_0.001", "clip_range": "lin_0.2",
    },
    "PendulumNoVel-v1": {
        "n_envs": 4, "n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10,
        "ent_coef": 0.0, "learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True,
        "sde_sample_freq": 4,
    },
    "MountainCarContinuousNoVel-v0": {
        "n_envs": 8, "n_steps": 1024, "batch_size": 256, "gae_lambda": 0.9, "gamma": 0.9999,
        "n_epochs": 10, "ent_coef": 0.00429, "learning_rate": 7.77e-5, "clip_range": 0.1,
        "max_grad_norm": 5, "vf_coef": 0.19, "use_sde": True, "sde_sample_freq": 8,
        "policy_kwargs": {"lstm_hidden_size": 32, "activation_fn": "Tanh"},
    },
}  # fmt: skip
# training return, mean of 20 episodes, at which a task counts as learnt
THRESHOLDS = {"CartPoleNoVel-v1": 475, "CartPole-v1": 475, "Acrobot-v1": -100, "Pendulum-v1": -200}
THRESHOLDS |= {
    "LunarLander-v3": 200,
    "HalfCheetah-v5": 3000,
    "Hopper-v5": 2000,
    "Walker2d-v5": 2000,
}
# CleanRL's PPO (v4 tasks, training return) and rl-baselines3-zoo's, tuned per task, at 1M steps
PUBLISHED = {"HalfCheetah-v5": (1443, 5819), "Hopper-v5": (2383, 2410)}
PUBLISHED |= {"Walker2d-v5": (2288, 3479), "Ant-v5": (None, 1327)}
# (script, task, variant, flags beyond --env-id, seeds)
GRID = [
    (LSTM, "CartPoleNoVel-v1", "default", "", range(1, 11)),
    (LSTM, "CartPoleNoVel-v1", "evaluated", "--eval-every 10 --eval-episodes 10", range(1, 11)),
    # the defaults once more, on another processor: rounding differs and so do the runs
    (LSTM, "CartPoleNoVel-v1", "again", "", range(1, 11)),
    (LSTM, "CartPoleNoVel-v1", "no_memory", "", range(1, 4)),
    (LSTM, "PendulumNoVel-v1", "default", PENDULUM_NOVEL, range(1, 11)),
    (LSTM, "MountainCarContinuousNoVel-v0", "default", MOUNTAIN, range(1, 11)),
    (LSTM, "popgym:popgym-RepeatFirstEasy-v0", "default", "", range(1, 6)),
    (LSTM, "popgym:popgym-RepeatPreviousEasy-v0", "default", "", range(1, 6)),
    (LSTM, "popgym:popgym-RepeatFirstEasy-v0", "long", "--total-timesteps 500000", range(1, 6)),
    (LSTM, "popgym:popgym-RepeatPreviousEasy-v0", "long", "--total-timesteps 500000", range(1, 6)),
    (LSTM, "envs:MiniGrid-MemoryS7-Image-v0", "default", "--total-timesteps 500000", range(1, 6)),
    (CATEGORICAL, "CartPole-v1", "default", "", range(1, 11)),
    (CATEGORICAL, "CartPole-v1", "again", "", range(1, 11)),
    (CATEGORICAL, "Pendulum-v1", "default", PENDULUM + FLOOR, range(1, 6)),
    (CATEGORICAL, "Acrobot-v1", "default", ACROBOT, range(1, 6)),
    (CATEGORICAL, "LunarLander-v3", "default", LUNAR, range(1, 6)),
    (CATEGORICAL, "HalfCheetah-v5", "default", MUJOCO, range(1, 4)),
    (CATEGORICAL, "Hopper-v5", "default", MUJOCO, range(1, 4)),
    (CATEGORICAL, "Walker2d-v5", "default", MUJOCO, range(1, 4)),
    (CATEGORICAL, "Ant-v5", "default", MUJOCO, range(1, 4)),
    (CATEGORICAL, "Swimmer-v5", "default", MUJOCO + " --gamma 0.9999", range(1, 4)),
    (CONTRIB, "CartPoleNoVel-v1", "zoo", "--total-timesteps 100000", range(1, 6)),
    (CONTRIB, "PendulumNoVel-v1", "zoo", "--total-timesteps 100000", range(1, 6)),
    (CONTRIB, "MountainCarContinuousNoVel-v0", "zoo", "--total-timesteps 300000", range(1, 6)),
    (SB3, "CartPole-v1", "default", "--total-timesteps 50000", range(1, 4)),
    (SB3, "Pendulum-v1", "default", "--total-timesteps 100000", range(1, 4)),
    (SB3, "Acrobot-v1", "default", "--total-timesteps 500000", range(1, 4)),
    (SB3, "LunarLander-v3", "default", "--total-timesteps 1000000", range(1, 4)),
    (SB3, "HalfCheetah-v5", "default", "--total-timesteps 1000000", range(1, 4)),
    (SB3, "Hopper-v5", "default", "--total-timesteps 1000000", range(1, 4)),
    (SB3, "Walker2d-v5", "default", "--total-timesteps 1000000", range(1, 4)),
    (SB3, "Ant-v5", "default", "--total-timesteps 1000000", range(1, 4)),
]


BOTH = {  # variant: flags; one thing differs from the row of the task in GRID, or from no_floor
    "no_floor": "",  # Pendulum-v1 without the entropy floor it has in GRID, like its other variants
    "single_critic": "--num-critics 1",
    "twin_min": "--twin-reduce min",
    "twin_mean": "--twin-reduce mean",
    "twin_min_quantile": "--twin-reduce min_quantile",
    "clip_mean_only": "--vf-clip mean_only",
    "no_popart": "--no-norm-returns",
    "raw_observations": "--no-norm-obs",
    "sr_lambda": "--value-target sr_lambda",
    "exchanged": "",  # the other script's value distribution, see compose.py
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
        "gamma_0.99": "--gamma 0.99",
        # loss u^2 / (4 kappa): with this vf_coef the usual 0.5 * 0.5 * mean squared error
        "scalar": "--num-quantiles 1 --kappa 10 --vf-coef 10",
    },
    CATEGORICAL: {
        "two_hot": "--target-encoding two_hot",
        "atoms_21": "--num-atoms 21",
        "atoms_101": "--num-atoms 101",
    },
}
ABLATIONS = [
    (script, task, variant, f"{flags} {own}", range(1, 6))
    for script, task, flags in (
        (LSTM, "CartPoleNoVel-v1", ""),
        (CATEGORICAL, "CartPole-v1", ""),
        (CATEGORICAL, "Pendulum-v1", PENDULUM),
    )
    for variant, own in (BOTH | OWN[script]).items()
    if variant not in (("twin_mean",) if task == "Pendulum-v1" else ("twin_min", "no_floor"))
]


def folder(script: str, task: str, variant: str) -> Path:
    """Where the runs of one cell of the grid are kept."""
    return RESULTS / script / task.split(":")[-1] / variant


def forget(module: ModuleType) -> None:
    """The control without memory: the LSTM state is zero ahead of every step, everywhere."""
    import torch

    unroll, step = module.unroll_lstm, module.Body.step

    def unroll_without_state(lstm, inputs, state, episode_start):
        zero = tuple(torch.zeros_like(s) for s in state)
        return unroll(lstm, inputs, zero, torch.ones_like(episode_start))

    module.unroll_lstm = unroll_without_state
    module.Body.step = lambda self, obs, state: step(self, obs, torch.zeros_like(state))


def run_ours(script: str, task: str, variant: str, flags: str, seed: int) -> tuple[list, dict]:
    """Train one seed: (step, return) of every episode, and what is kept beside it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sys.path.insert(0, str(HERE.parent))
    with tempfile.TemporaryDirectory() as top:
        if variant == "exchanged":
            sys.path.insert(0, top)
            compose = importlib.import_module("compose")
            script = compose.compose(Path(top))[script == CATEGORICAL].stem
        module = importlib.import_module(script)
        if variant == "no_memory":
            forget(module)
        line = ["--env-id", task, "--seed", str(seed), "--run-dir", top, *flags.split()]
        metrics = module.train(module.tyro.cli(module.Args, args=line))
        events = EventAccumulator(metrics["run_dir"], {"scalars": 0})
        events.Reload()
        points = [(p.step, round(p.value, 4)) for p in events.Scalars("charts/episodic_return")]
        present = [tag for tag in FOLLOWED if tag in metrics]
        followed = {tag: [p.value for p in events.Scalars(tag)] for tag in present}
        scores = [(p.step, round(p.value, 4)) for p in events.Scalars("eval/return_mean")]
        told = json.loads(Path(metrics["run_dir"], "args.json").read_text())
    told["args"]["run_dir"] = "runs"
    result = {k: round(v, 4) for k, v in metrics.items() if k.startswith(("eval/", "charts/SPS"))}
    over_run = {tag: {"mean": np.mean(v), "max": np.max(v)} for tag, v in followed.items()}
    return points, {"result": result, "evaluations": scores, "over_run": over_run, **told}


def run_peer(script: str, task: str, flags: str, seed: int) -> tuple[list, dict]:
    """SB3's PPO with its defaults or sb3-contrib's RecurrentPPO with the flags of the zoo.
    The environments are ours; evaluated like ours: 50 episodes, mode of the policy."""
    import sb3_contrib
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    points: list = []

    def watch(local: dict, _: dict) -> bool:
        ended = [info["episode"] for info in local["infos"] if "episode" in info]
        points.extend((model.num_timesteps, episode["r"]) for episode in ended)
        return True

    sys.path.insert(0, str(HERE.parent))
    ours = importlib.import_module(LSTM)
    torch.set_num_threads(1)
    steps, zoo = int(flags.split()[-1]), script == CONTRIB
    options = dict(ZOO[task]) if zoo else {}
    envs = make_vec_env(
        lambda: ours.make_env(ours.Args(env_id=task)), options.pop("n_envs", 1), seed
    )
    fresh = make_vec_env(lambda: ours.make_env(ours.Args(env_id=task)), 1, seed + 1_000_000)
    if zoo:
        for name in {"learning_rate", "clip_range"} & options.keys():
            if isinstance(options[name], str):  # "lin_x": x falls linearly to 0
                start = float(options[name][4:])
                options[name] = lambda remaining, start=start: start * remaining
        net = NET | options.pop("policy_kwargs", {})
        net["activation_fn"] = getattr(torch.nn, net["activation_fn"])
        envs = VecNormalize(envs, gamma=options["gamma"])
        model = sb3_contrib.RecurrentPPO(
            "MlpLstmPolicy", envs, seed=seed, policy_kwargs=net, **options
        )
    else:
        model = sb3.PPO("MlpPolicy", envs, seed=seed)
    model.learn(steps, watch)
    if zoo:
        fresh = VecNormalize(fresh, training=False, norm_reward=False)
        fresh.obs_rms = envs.obs_rms
    returns, _ = evaluate_policy(model, fresh, 50, return_episode_rewards=True)
    result = {"eval/return_mean": np.mean(returns), "eval/return_std": np.std(returns)}
    versions = {m.__name__: m.__version__ for m in (sb3, sb3_contrib, torch)}
    return points, {
        "result": result,
        "args": {"total_timesteps": steps, **(ZOO[task] | {"net": NET} if zoo else {})},
        "versions": versions,
    }


def run_one(script: str, task: str, variant: str, flags: str, seed: int) -> None:
    """Train one seed in this process and write its two files."""
    began = time.time()
    if script in (SB3, CONTRIB):
        points, told = run_peer(script, task, flags, seed)
    else:
        points, told = run_ours(script, task, variant, flags, seed)
    machine = {"cores": os.cpu_count(), "machine": platform.machine()}
    meta = {"wall_seconds": round(time.time() - began, 1), **machine, **told}
    path = folder(script, task, variant)
    path.mkdir(parents=True, exist_ok=True)
    (path / f"seed{seed}.json").write_text(json.dumps(meta, indent=1))
    with (path / f"seed{seed}.tmp").open("w", newline="") as file:
        csv.writer(file).writerows([("step", "return"), *points])
    (path / f"seed{seed}.tmp").rename(path / f"seed{seed}.csv")  # last: it marks the run as done


def run_missing(cells: list[tuple], only: list[str], seeds: list[int], processes: int) -> None:
    """Every run without a CSV; `only` names tasks, scripts or variants, all of them to match."""
    jobs = []
    for script, task, variant, flags, all_seeds in cells:
        for seed in all_seeds:
            wanted = all(any(w in part for part in (script, task, variant)) for w in only)
            wanted = wanted and (not seeds or seed in seeds)
            if wanted and not (folder(script, task, variant) / f"seed{seed}.csv").exists():
                jobs.append((script, task, variant, flags, str(seed)))

    jobs.sort(key=lambda job: int(job[4]))  # seed 1 of everything first

    def start(job: tuple[str, ...]) -> None:
        command = [sys.executable, __file__, "--one", json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True)
        last = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-2:]
        print(*job[1:3], "seed", job[4], "|", *last, flush=True)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(start, jobs))


def curve(path: Path, grid: np.ndarray) -> np.ndarray:
    """Mean return of the 20 episodes before each point of `grid`."""
    steps, returns = np.loadtxt(path, delimiter=",", skiprows=1).T
    ends = np.searchsorted(steps, grid, side="right")
    return np.array([returns[max(0, e - 20) : e].mean() if e else np.nan for e in ends])


def iqm(scores: np.ndarray) -> float:
    """Interquartile mean: of what is left without the lowest and the highest quarter."""
    cut = len(scores) // 4
    return float(np.sort(scores)[cut : len(scores) - cut].mean())


def interval(scores: np.ndarray) -> np.ndarray:
    """Bootstrap 95 % interval of the interquartile mean over seeds."""
    draws = np.random.default_rng(0).choice(scores, (10_000, len(scores)))
    return np.percentile([iqm(draw) for draw in draws], [2.5, 97.5])


def first_step(points: np.ndarray, threshold: float | None) -> float:
    """Step at which the mean of the last 20 training episodes, (step, return), reaches the
    threshold."""
    steps, returns = points.T
    if threshold is None or len(returns) < 20:
        return np.inf
    means = np.convolve(returns, np.ones(20) / 20, "valid")
    return steps[19 + (means >= threshold).argmax()] if (means >= threshold).any() else np.inf


def evaluated() -> str:
    """When the mode of the policy reaches the threshold, and whether it stays there."""
    threshold, first, stayed = THRESHOLDS["CartPoleNoVel-v1"], [], []
    for path in folder(LSTM, "CartPoleNoVel-v1", "evaluated").glob("seed*.json"):
        steps, scores = np.array(json.loads(path.read_text())["evaluations"]).T
        good = scores >= threshold
        first.append(steps[good.argmax()] if good.any() else np.inf)
        stayed += [*good[good.argmax() + 1 :]] if good.any() else []
    if not first:
        return "CartPoleNoVel-v1, evaluated on the way: no runs yet."
    return (
        f"CartPoleNoVel-v1, the mode of the policy evaluated every 5,120 steps (10 episodes, "
        f"{len(first)} seeds): {threshold} is first reached after {np.median(first):,.0f} steps "
        f"(median; {min(first):,.0f} to {max(first):,.0f}); of the later evaluations "
        f"{np.mean(stayed):.0%} are that good."
    )


def table(cells: list[tuple]) -> list[str]:
    """A line for each cell with results."""
    lines = [
        "| script | task | variant | steps | seeds | mean | IQM, 95 % interval | worst, best "
        "| steps to threshold | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for script, task, variant, _, _ in cells:
        where, name = folder(script, task, variant), task.split(":")[-1]
        runs = [json.loads(path.read_text()) for path in sorted(where.glob("seed*.json"))]
        if not runs:
            continue
        scores = np.array([r["result"]["eval/return_mean"] for r in runs])
        low, high = interval(scores)
        spread = f"{iqm(scores):.1f} ({low:.1f} to {high:.1f})" if len(runs) > 4 else "-"
        files = where.glob("seed*.csv")
        curves = [np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2) for file in files]
        needed = [first_step(points, THRESHOLDS.get(name)) for points in curves]
        reached = f"{np.median(needed):,.0f}" if np.isfinite(np.median(needed)) else "not reached"
        reached = reached if name in THRESHOLDS else "-"
        row = (script, name, variant, f"{runs[0]['args']['total_timesteps']:,}", len(runs))
        row += (f"{scores.mean():.1f}", spread)
        row += (f"{scores.min():.1f}, {scores.max():.1f}", reached)
        row += (f"{np.median([r['wall_seconds'] for r in runs]):.0f}",)
        lines.append("| " + " | ".join(str(x) for x in row) + " |")
    return lines


def mujoco() -> str:
    """Scores of the one MuJoCo line over CleanRL's and over the zoo's per-task tuned PPO."""
    over, like_for_like, means = [], [], {}
    for task, (cleanrl, zoo) in PUBLISHED.items():
        where = folder(CATEGORICAL, task, "default")
        runs = [json.loads(path.read_text())["result"] for path in where.glob("seed*.json")]
        scores = [run["eval/return_mean"] for run in runs]
        means[task] = np.mean(scores) / zoo
        if cleanrl:
            over += [score / cleanrl for score in scores]
            for path in where.glob("seed*.csv"):
                returns = np.loadtxt(path, delimiter=",", skiprows=1)[-100:, 1]
                like_for_like.append(returns.mean() / cleanrl)
    told = ", ".join(f"{task} {ratio:.2f}" for task, ratio in means.items())
    return (
        f"MuJoCo, one flag line: IQM of score over CleanRL's on the three tasks it reports "
        f"{iqm(np.array(over)):.2f} (of the last 100 training returns, as CleanRL reports: "
        f"{iqm(np.array(like_for_like)):.2f}); "
        f"mean of score over the zoo's {np.mean([*means.values()]):.2f} ({told})."
    )


def report() -> None:
    """README's table in results/learning.md, the ablations' beside it, and a figure of each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    compared = {cell[:2] for cell in ABLATIONS}
    base = [cell for cell in GRID if cell[:2] in compared and cell[2] == "default"]
    ablations = sorted([*base, *ABLATIONS], key=lambda cell: cell[:2])
    for name, cells in (("learning", GRID), ("ablations", ablations)):
        below = [evaluated(), mujoco()] if cells is GRID else []
        text = "\n\n".join(["\n".join(table(cells)), *below]) + "\n"
        (RESULTS / f"{name}.md").write_text(text)
        print(text)

    tasks = list(dict.fromkeys(cell[:2] for cell in ablations))
    figure, axes = plt.subplots(1, len(tasks), figsize=(12, 5), constrained_layout=True)
    for panel, (script, task) in zip(axes, tasks):
        for _, _, variant, _, _ in (cell for cell in ablations if cell[:2] == (script, task)):
            paths = folder(script, task, variant).glob("seed*.json")
            runs = [json.loads(path.read_text())["result"]["eval/return_mean"] for path in paths]
            panel.plot(runs, [variant] * len(runs), "o", color="C0", alpha=0.6)
        panel.invert_yaxis()
        kind = "recurrent, quantiles" if script == LSTM else "feed-forward, atoms"
        panel.set(title=f"{task}\n{kind}", xlabel="evaluation return, by seed")
    figure.savefig(RESULTS / "ablations.png", dpi=110)

    figure, axes = plt.subplots(figsize=(7, 3.6), constrained_layout=True)
    grid = np.arange(2000, 100_001, 1000)
    for variant, colour, label in (("default", "C0", "LSTM"), ("no_memory", "C3", "state zeroed")):
        paths = sorted(folder(LSTM, "CartPoleNoVel-v1", variant).glob("seed*.csv"))
        if not paths:
            continue
        curves = np.array([curve(p, grid) for p in paths])
        axes.plot(grid, curves.T, color=colour, lw=0.6, alpha=0.5)
        label = f"{label}, median of {len(paths)} seeds"
        axes.plot(grid, np.median(curves, 0), color=colour, lw=2.2, label=label)
    axes.axhline(500, color="0.6", lw=0.8, ls="--")
    axes.set(xlabel="environment steps", ylabel="training return", title="CartPoleNoVel-v1")
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(RESULTS / "learning.png", dpi=130)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="only rebuild tables and figure")
    parser.add_argument("--only", nargs="*", default=[], help="words, all to match")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="seeds to run")
    parser.add_argument("--ablations", action="store_true", help="run these instead of the grid")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        script, task, variant, flags, seed = json.loads(args.one)
        run_one(script, task, variant, flags, int(seed))
        return
    if not args.report:
        run_missing(ABLATIONS if args.ablations else GRID, args.only, args.seeds, args.processes)
    report()


if __name__ == "__main__":
    main()
