"""Calibration: predicted return distributions against the truth. Runs what is missing, reports.

    python benchmarks/calibration.py             # run the missing cells and report
    python benchmarks/calibration.py --report    # table and figure from the committed CSV alone
    python benchmarks/calibration.py --only recommended gaussian --seeds 1 2
    python benchmarks/calibration.py --only Hopper lstm --seeds 10 11 --tune="--gae-lambda 1"

Five small Markov reward processes (the action does nothing) have return distributions that are
known: in closed form as a mixture of Gaussians, or by four million Monte Carlo returns. Each cell
trains one script on one of them and compares the distribution predicted at the start state with
the truth; beside every figure stands its representation floor, the same figure for the exact
quantiles at that K, or for the truth projected on the trained atoms. Real tasks compare predicted
quantiles along fresh episodes of the sampled policy with their discounted returns, time limits
lifted. Seed k trains with --seed 100 k: environments take consecutive seeds, and runs on
neighbouring ones would share most of their data. Flags were tuned on --seed 1000 and up; of the
real tasks these runs are in results/tuning_calibration.csv.

Recommended for calibration: --value-target sr_lambda --twin-reduce mean, with --kappa 0
--num-quantiles 51 or with --target-encoding two_hot. On the real tasks also 201 atoms, many
samples, few passes and a policy that stays noisy (REAL); `usual` are flags for a high return
(USUAL). Interrupted at any point, the next call continues: one row of results/calibration.csv is
one cell.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import sys
import tempfile
import time
from pathlib import Path
from statistics import NormalDist
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LSTM, CATEGORICAL = "distributional_ppo_lstm", "distributional_ppo_categorical"
FINE = 20_000  # levels at which quantile functions are compared
LEVELS = (np.arange(FINE) + 0.5) / FINE
SHOWN = slice(FINE // 80, FINE, FINE // 40)  # 40 of them, kept in the CSV for the figure


# ------------------------------------------------------------------------------ processes and truth
class Process(gym.Env):
    """One of PROCESSES. The observation is the step, plus 5 in the bad branch of `skewed`."""

    action_space, observation_space = Discrete(1), Discrete(11)  # no choice: only critics learn

    def __init__(self, name):
        self.name = name
        self.length, _, self.pay, _ = PROCESSES[name]

    def reset(self, *, seed=None, options=None):
        """Open an episode."""
        super().reset(seed=seed)
        self.t, self.good = 0, self.np_random.random() < 0.75
        return 0, {}

    def step(self, action):
        """Advance; the last of `length` steps terminates."""
        reward = self.pay(self.np_random, self.t, self.good)
        self.t += 1
        obs = self.t * (self.length > 0) + 5 * (self.name == "skewed" and not self.good)
        return obs, float(reward), self.t == self.length, False, {}


def spread(gamma: float, length: int) -> float:
    """Standard deviation of `length` discounted rewards of variance 1."""
    return float(np.sqrt(np.sum(gamma ** (2 * np.arange(length)))))


def mixture(*parts: tuple[float, float, float]) -> np.ndarray:
    """Quantile function at LEVELS of a mixture of Gaussians (weight, mean, std)."""
    values = []
    for weight, mean, std in parts:
        count = round(weight * FINE)
        normal = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
        values += [mean + std * x for x in normal]
    return np.sort(values)


def heavy(gamma: float) -> np.ndarray:
    """The same for five rewards of Student's t with 3 degrees of freedom, by Monte Carlo."""
    rewards = np.random.default_rng(0).standard_t(3, (5, 200 * FINE)) / 3**0.5
    return np.sort(gamma ** np.arange(5) @ rewards).reshape(FINE, -1).mean(1)


def branches(gamma: float) -> np.ndarray:
    """The same for the two branches of `skewed`: gamma times four rewards."""
    mean, std = (1 - gamma**4) / (1 - gamma), spread(gamma, 4)
    return mixture((0.75, gamma * mean, gamma * 0.5 * std), (0.25, -gamma * mean, gamma * std))


def disaster(gamma: float) -> np.ndarray:
    """The same for two values."""
    total = (1 - gamma**5) / (1 - gamma)
    return mixture((0.02, total - 20 * gamma**4, 0.0), (0.98, total, 0.0))


# steps (0: never ends), gamma, reward given RNG, step and branch, quantile function given gamma
PROCESSES = {
    # five rewards N(0, 1)
    "gaussian": (5, 0.95, lambda rng, t, good: rng.normal(),
                 lambda g: mixture((1.0, 0.0, spread(g, 5)))),
    # step 0 leads to a good branch (probability 0.75), four rewards N(1, 0.5), or one of N(-1, 1)
    "skewed": (5, 0.95, lambda rng, t, good: (t > 0) * rng.normal(*((1, 0.5) if good else (-1, 1))),
               branches),
    # rewards N(1, 1) for ever in a single state, cut every five steps: the cut is no death
    "time_limit": (0, 0.8, lambda rng, t, good: rng.normal(1, 1),
                   lambda g: mixture((1.0, 1 / (1 - g), (1 - g * g) ** -0.5))),
    # five rewards of infinite fourth moment and variance 1
    "heavy_tail": (5, 0.95, lambda rng, t, good: rng.standard_t(3) / 3**0.5, heavy),
    # five rewards of 1, the last one 20 less with probability 0.02
    "disaster": (5, 0.95, lambda rng, t, good: 1 - 20 * (t == 4 and rng.random() < 0.02), disaster),
}  # fmt: skip
JUDGED = ("gaussian", "skewed", "time_limit")  # the others are reported without a goal
for name in PROCESSES:
    if f"{name}-v0" not in gym.registry:
        limit = 5 if name == "time_limit" else None
        gym.register(f"{name}-v0", Process, max_episode_steps=limit, kwargs={"name": name})

# ----------------------------------------------------------------------------------------- the grid
RECOMMENDED = {
    LSTM: "--value-target sr_lambda --kappa 0 --num-quantiles 51 --twin-reduce mean",
    CATEGORICAL: "--value-target sr_lambda --target-encoding two_hot --twin-reduce mean",
}
BASE = (  # large minibatches and few passes: the estimate averages over most of the run's episodes
    "--num-envs 16 --num-steps 160 --total-timesteps 204800 --num-minibatches 4 --gae-lambda 0.95 "
    "--hidden-size 32 --ent-coef 0 --eval-episodes 1 --checkpoint-every 0 "
)
OWN = {
    LSTM: "--lstm-hidden-size 16 --seq-len 40 --update-epochs 2 --learning-rate 3e-3 ",
    CATEGORICAL: "--update-epochs 1 --learning-rate 2e-3 ",
}
PENDULUM = "--gamma 0.9 --gae-lambda 0.95 --num-steps 200 --num-minibatches 8 --ent-coef 0 "
HOPPER = (
    "--total-timesteps 500000 --gamma 0.99 --gae-lambda 0.95 --num-steps 256 --num-minibatches 8 "
    "--learning-rate 5e-4 --ent-coef 0 "
)
USUAL = {"CartPoleNoVel-v1": "", "Pendulum-v1": PENDULUM, "Hopper-v5": HOPPER}
MANY = "--num-envs 32 --update-epochs 4 --ent-coef 0.3 --ent-coef-final 0.3 --total-timesteps "
REAL = {  # a policy without noise has returns without a distribution
    "CartPoleNoVel-v1": f"{MANY}500000 --gae-lambda 0.98 ",
    "Pendulum-v1": f"{PENDULUM}{MANY}1000000 ",
    "Hopper-v5": f"{HOPPER}--update-epochs 4 --ent-coef 0.01 --ent-coef-final 0.01 "
    "--gae-lambda 0.98 ",
}
ATOMS = " --num-atoms 201"
UNITS = " --no-norm-returns --v-min -20 --v-max 480"  # moving statistics move what atoms mean
REDUCE = {"min": "--twin-reduce min", "mean": "--twin-reduce mean", "single": "--num-critics 1"}
FIGURES = ("w1", "std", "cvar05", "cvar25", "decile")  # each with its floor
FIELDS = (
    "task", "script", "variant", "seed", "seconds", "mean", *FIGURES,
    *(f"{figure}_floor" for figure in FIGURES), "coverage", "bias", "spread", "predicted", "curve",
)  # fmt: skip
TUNED = (
    "task", "script", "seed", "seconds", "coverage", "bias", "spread", "predicted", "episodes",
    "flags",
)  # fmt: skip
EPISODES = 256  # of a real task, scored
Cell = tuple[str, str, str, str, range]  # task, script, variant, flags, seeds


def cells() -> list[Cell]:
    """The grid, what is judged first."""
    small, real, grid = [], [], []
    for task, (_, gamma, _, _) in PROCESSES.items():
        start = f"{BASE}--gamma {gamma} "
        for script in (CATEGORICAL, LSTM):
            flags = start + OWN[script]
            seeds = range(1, 4 if task in JUDGED else 2)
            small.append((task, script, "recommended", flags + RECOMMENDED[script], seeds))
            if script == CATEGORICAL:
                small.append((task, script, "201 atoms", small[-1][3] + ATOMS, seeds))
            for target in ("lambda_return", "sr_lambda"):
                for kind in (0, 0.1, 1) if script == LSTM else ("two_hot", "hl_gauss"):
                    for number in (21, 32, 51):
                        kappa = f"--kappa {kind} --num-quantiles {number}"
                        encoding = f"--target-encoding {kind} --num-atoms {number}"
                        own = kappa if script == LSTM else encoding
                        told = f"kappa {kind}" if script == LSTM else kind
                        line = f"{flags}--value-target {target} --twin-reduce mean {own}"
                        grid.append((task, script, f"{target}, {told}, K {number}", line, [1]))
    for task, flags in REAL.items():
        for script in (LSTM, CATEGORICAL):
            own = RECOMMENDED[script] + " --eval-episodes 10"
            own += " --seq-len 32" if task == "Hopper-v5" and script == LSTM else ""
            real.append((task, script, "mean, usual", USUAL[task] + own, range(1, 4)))
            if script == CATEGORICAL:
                own += ATOMS + (UNITS if task == "Hopper-v5" else "")
            for name, reduce in REDUCE.items():
                real.append((task, script, name, f"{flags}{own} {reduce}", range(1, 4)))
    return [*small, *sorted(grid, key=lambda cell: "K 32" not in cell[2]), *real]


# ------------------------------------------------------------------------------------- measurements
def measure(module: ModuleType, agent: Any, args: Any, truth: np.ndarray) -> dict[str, Any]:
    """Figures of the prediction at the start state, and of the floor: errors relative to the truth.

    w1: Wasserstein-1 distance over the std; std: relative error; cvar: error over the distance of
    the true CVaR from the mean (no division by a CVaR near 0); decile: largest error of coverage.
    """
    import torch

    env, dist = module.make_env(args), agent.dist
    obs = agent.normalize_obs(torch.as_tensor(env.reset(seed=0)[0])[None, None])
    with torch.no_grad():
        outputs = agent.critic(obs, agent.initial_state(1), torch.ones(1, 1, dtype=torch.bool))
        outputs = dist.reduce_twins(outputs)[0].double()  # (1, K)
    if module.__name__ == LSTM:
        taus = (np.arange(outputs.shape[1]) + 0.5) / outputs.shape[1]
        both = [dist.moments.denormalize(outputs), torch.tensor(np.quantile(truth, taus))[None]]
        curves = [extend(taus, x[0].sort().values.numpy()) for x in both]
        tails = [[float(module.cvar(x, alpha)) for alpha in (0.05, 0.25)] for x in both]
    else:
        atoms = dist.moments.denormalize(dist.support.double())
        width = atoms[1] - atoms[0]
        edges = torch.cat((atoms[:1] - width, atoms)) + width / 2
        mass = torch.full((1, FINE), 1 / FINE, dtype=torch.float64)
        floor = module.project_categorical(mass, torch.tensor(truth)[None], atoms)
        both = [outputs.softmax(-1), floor]
        curves = [np.interp(LEVELS, np.append(0, x[0].cumsum(0)), edges) for x in both]
        tails = [[float(module.cvar_categorical(x, atoms, a)) for a in (0.05, 0.25)] for x in both]
    result = {"mean": (curves[0].mean() - truth.mean()) / truth.std()}
    for end, curve, tail in zip(("", "_floor"), curves, tails):
        result[f"w1{end}"] = np.abs(curve - truth).mean() / truth.std()
        result[f"std{end}"] = curve.std() / truth.std() - 1
        for alpha, value in zip((0.05, 0.25), tail):
            true = truth[: int(alpha * FINE)].mean()
            result[f"cvar{100 * alpha:02.0f}{end}"] = (value - true) / (truth.mean() - true)
        nominal = np.arange(1, 10) / 10
        place = np.interp(nominal, LEVELS, curve)  # of tied returns any share may be below
        low, high = (np.searchsorted(truth, place + e) / FINE for e in (-1e-3, 1e-3))
        result[f"decile{end}"] = np.maximum(low - nominal, nominal - high).clip(min=0).max()
    shown = " ".join(f"{x:.4g}" for x in curves[0][SHOWN])
    return {k: round(float(v), 5) for k, v in result.items()} | {"curve": shown}


def exact(task: str) -> np.ndarray:
    """True quantile function at LEVELS."""
    _, gamma, _, quantiles = PROCESSES[task]
    return quantiles(gamma)


def extend(taus: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The piecewise linear quantile function of `cvar`, linear beyond both ends, at LEVELS."""
    left = np.clip(np.searchsorted(taus, LEVELS) - 1, 0, len(taus) - 2)
    share = (LEVELS - taus[left]) / (taus[left + 1] - taus[left])
    return points[left] + share * (points[left + 1] - points[left])


def measure_real(module: ModuleType, agent: Any, args: Any) -> dict[str, float]:
    """Mean absolute error of the coverage of the predicted deciles, bias and spread of the value.

    The sampled policy plays on beyond time limits until rewards no longer count (gamma^k < 1e-5);
    only steps within the limit are scored. Over the std of all returns: `bias`, mean of V - return;
    `spread`, std of return - V; `predicted`, mean std of the predicted distributions.
    """
    import torch

    envs = module.make_envs(args, EPISODES)
    for env in envs.envs:
        while not isinstance(env, gym.wrappers.TimeLimit):
            env = env.env
        scored, env._max_episode_steps = env.spec.max_episode_steps, 10**9
    obs, _ = envs.reset(seed=2_000_000 + 10 * args.seed)  # none shared by runs
    torch.manual_seed(args.seed)
    state, alive, rows = agent.initial_state(EPISODES), np.ones(EPISODES, bool), []
    for _ in range(scored + int(np.log(1e-5) / np.log(args.gamma))):
        action, state = agent.act(obs, state, deterministic=False)
        seen = obs.copy()
        obs, reward, terminated, _, _ = envs.step(action)
        rows.append((seen, alive, reward * alive))
        alive = alive & ~terminated
        if not alive.any():
            break
    envs.close()
    seen, alive, returns = (np.array(x) for x in zip(*rows))
    for t in reversed(range(len(returns) - 1)):
        returns[t] += args.gamma * returns[t + 1]
    with torch.no_grad():
        inputs = agent.normalize_obs(torch.as_tensor(seen[:scored]))
        start = torch.zeros(inputs.shape[:2], dtype=torch.bool)
        start[0] = True
        outputs = agent.dist.reduce_twins(
            agent.critic(inputs, agent.initial_state(EPISODES), start)
        )
        if module.__name__ == LSTM:
            z, facts, quantile = agent.dist.moments.denormalize(outputs), (), module.value_at_risk
        else:
            facts = (agent.dist.moments.denormalize(agent.dist.support),)
            z, quantile = outputs.softmax(-1), module.categorical_quantile
        mask, truth, errors = alive[:scored], returns[:scored], []
        for level in np.arange(1, 10) / 10:
            below = truth < quantile(z, *facts, float(level)).numpy()
            errors.append(abs(below[mask].mean() - level))
        error = (agent.dist.mean(outputs).numpy() - truth)[mask]
        predicted = agent.dist.describe(outputs)["std"].numpy()[mask]
    facts = {"bias": error.mean(), "spread": error.std(), "predicted": predicted.mean()}
    result = {key: round(float(x / truth[mask].std()), 4) for key, x in facts.items()}
    return {"coverage": round(float(np.mean(errors)), 4), **result}


def run_one(cell: Cell, seed: int) -> dict[str, Any]:
    """Train and measure one cell."""
    task, script, variant, flags, _ = cell
    module = importlib.import_module(script)
    env_id = f"calibration:{task}-v0" if task in PROCESSES else task
    with tempfile.TemporaryDirectory() as top, contextlib.redirect_stdout(io.StringIO()):
        line = ["--env-id", env_id, "--seed", str(100 * seed), "--run-dir", top]
        began = time.time()
        metrics = module.train(
            module.tyro.cli(module.Args, args=line + flags.split())  # the last of each flag counts
        )
        seconds = round(time.time() - began, 1)
        agent, args = module.load_agent(metrics["run_dir"])
    row = {"task": task, "script": script, "variant": variant, "seed": seed, "seconds": seconds}
    if task in REAL:
        return row | measure_real(module, agent, args)
    return row | measure(module, agent, args, exact(task))


def read_rows() -> list[dict[str, str]]:
    """Rows of the CSV, if there is one."""
    path = RESULTS / "calibration.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


def append(name: str, fields: tuple[str, ...], row: dict[str, Any]) -> None:
    """One row at the end of a CSV."""
    path = RESULTS / name
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if new:
            writer.writeheader()
        writer.writerow(row)
    print({k: v for k, v in row.items() if k != "curve"}, flush=True)


def chosen(only: list[str]) -> list[Cell]:
    """Cells whose task, script and variant match all words of `only`, each word any of them."""
    return [c for c in cells() if all(any(word in part for part in c[:3]) for word in only)]


def run_missing(only: list[str], seeds: list[int]) -> None:
    """Every chosen cell without a row."""
    done = {(r["task"], r["script"], r["variant"], r["seed"]) for r in read_rows()}
    for cell in chosen(only):
        for seed in seeds or cell[4]:
            if (*cell[:3], str(seed)) not in done:
                append("calibration.csv", FIELDS, run_one(cell, seed))


def tune(only: list[str], seeds: list[int], extra: str) -> None:
    """The chosen real tasks with the flags `extra` added."""
    for task, script, variant, flags, _ in chosen(only):
        for seed in seeds if variant == "mean" else []:
            row = run_one((task, script, variant, f"{flags} {extra}", range(0)), seed)
            row |= {"episodes": EPISODES, "flags": f"{flags} {extra}"}
            append("tuning_calibration.csv", TUNED, {key: row[key] for key in TUNED})


# ------------------------------------------------------------------------------------------- report
def reached(row: dict[str, float]) -> bool:
    """The goals of the judged processes."""
    near = row["w1"] <= row["w1_floor"] + 0.03 and abs(row["std"]) <= 0.05
    return near and abs(row["cvar05"]) <= 0.08 and row["decile"] <= row["decile_floor"] + 0.02


def report() -> None:
    """Tables in results/calibration.md and on stdout, the figure in results/calibration.png."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    order = {cell[:3]: i for i, cell in enumerate(cells())}
    for row in read_rows():
        groups.setdefault((row["task"], row["script"], row["variant"]), []).append(row)
    small = [
        "Errors at the start state, percent, with the representation floor in brackets; means of",
        "absolute errors over seeds, of signed ones for std and CVaR. Seeds that reach all goals.",
        "",
        "| process | script | flags | W1 / std | std | CVaR 0.05 | CVaR 0.25 | deciles | reached |",
        "|" + "---|" * 9,
    ]
    real = [
        "Real tasks: mean error of the coverage of the deciles; bias of the value, spread of the",
        "returns around it and predicted standard deviation, over the std of all returns; means",
        "over seeds. Seeds whose coverage error is at most 0.05.",
        "",
        "| task | script | critics | coverage error | bias | spread | predicted | reached |",
        "|" + "---|" * 8,
    ]
    for key in sorted(groups, key=lambda k: (list({**PROCESSES, **REAL}).index(k[0]), order[k])):
        task, script, variant = key[0], key[1].split("_")[-1], key[2]
        if task in REAL:
            names = ("coverage", "bias", "spread", "predicted")
            facts = (f"{np.mean([float(r[x]) for r in groups[key]]):.3f}" for x in names)
            passed = sum(float(row["coverage"]) <= 0.05 for row in groups[key])
            count = f"{passed} of {len(groups[key])}"
            real.append("| " + " | ".join((task, script, variant, *facts, count)) + " |")
            continue
        rows = [{k: float(r[k]) for f in FIGURES for k in (f, f"{f}_floor")} for r in groups[key]]
        figures = []
        for figure in FIGURES:
            sign = "+" if figure in ("std", "cvar05", "cvar25") else ""
            mean, floor = (100 * np.mean([r[x] for r in rows]) for x in (figure, f"{figure}_floor"))
            figures.append(f"{mean:{sign}.1f} ({floor:{sign}.1f})")
        passed = f"{sum(map(reached, rows))} of {len(rows)}" if task in JUDGED else "no goal"
        small.append("| " + " | ".join((task, script, variant, *figures, passed)) + " |")
    text = "\n".join((*small, "", *real)) + "\n"
    (RESULTS / "calibration.md").write_text(text)
    print(text)
    draw(groups)


def draw(groups: dict[tuple[str, ...], list[dict[str, str]]]) -> None:
    """Predicted quantile functions over the truth, a panel for each process."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 5, figsize=(14, 3.6), constrained_layout=True)
    shown = (
        (LSTM, "recommended", "C0", "quantiles, recommended flags"),
        (CATEGORICAL, "recommended", "C2", "categorical, recommended flags"),
        (LSTM, "sr_lambda, kappa 1, K 32", "C1", "quantiles, kappa 1"),
        (LSTM, "lambda_return, kappa 0, K 32", "C3", "quantiles, lambda_return"),
    )
    for panel, task in zip(axes, PROCESSES):
        panel.plot(LEVELS[SHOWN], exact(task)[SHOWN], color="0.75", lw=6, label="truth")
        for script, variant, colour, label in shown:
            for row in groups.get((task, script, variant), [])[:1]:
                curve = np.array(row["curve"].split(), float)
                panel.plot(LEVELS[SHOWN], curve, color=colour, lw=1.5, label=label)
        panel.set(title=task.replace("_", " "), xlabel="probability of a smaller return")
    axes[0].set_ylabel("discounted return")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(RESULTS / "calibration.png", dpi=130)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="only rebuild tables and figure")
    parser.add_argument("--only", nargs="*", default=[], help="tasks, scripts, parts of variants")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="seeds to run")
    parser.add_argument("--tune", help="flags to add to those of real tasks; give --seeds 10 ...")
    args = parser.parse_args()
    sys.path.insert(0, str(HERE.parent))
    if args.tune is not None:
        if min(args.seeds, default=0) < 10:
            parser.error(f"--tune: --seeds {args.seeds} must be 10 and up; others are reported")
        tune(args.only, args.seeds, args.tune)
        return
    if not args.report:
        run_missing(args.only, args.seeds)
    report()


if __name__ == "__main__":
    main()
