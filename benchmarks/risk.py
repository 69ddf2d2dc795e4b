"""Risk-averse policies: the mean that is paid for a better tail. Runs what is missing, reports.

    python benchmarks/risk.py             # run the missing runs and report
    python benchmarks/risk.py --report    # table and figure from the committed CSV alone
    python benchmarks/risk.py --only lottery categorical --seeds 1 2

Three tasks, each neutral and with cvar_weight 0.5 and 1; the mode of the final policy plays 500
fresh episodes. One row of results/risk.csv is one run; interrupted at any point, the next call
continues. Reported seeds are 1 to 5. Rows with a limit are of commit e34ea96, whose --cvar-limit
and --cvar-dual-lr constrained the CVaR of episode returns; they are reported, no longer run.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import importlib
import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LSTM, CATEGORICAL = "distributional_ppo_lstm", "distributional_ppo_categorical"


class Lottery(gym.Env):
    """One step. Action 0 pays 0.9; action 1 pays 1.5, or -3.5 with probability 0.1: mean 1.0.

    CVaR_0.2 of action 1 is (0.1 * -3.5 + 0.1 * 1.5) / 0.2 = -1.
    """

    observation_space, action_space = Box(0, 1, (1,), np.float32), Discrete(2)

    def reset(self, *, seed=None, options=None):
        """Nothing to see."""
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        """The prize."""
        prize = (-3.5 if self.np_random.random() < 0.1 else 1.5) if action == 1 else 0.9
        return np.ones(1, np.float32), prize, True, False, {}


class Road(gym.Env):
    """Twenty stretches of road; the action is the speed v in [0, 1] and pays v.

    The grip g, uniform in [0, 1], is seen ahead of each stretch. Up to v = 0.6 + 0.3 g all is safe;
    every tenth above adds 0.006 to the probability of a crash, which costs 10. Flat out is best in
    the mean (17.0: a crash in 26 % of the episodes), the safe speed in the tail (15.0 for sure).
    """

    observation_space, action_space = Box(0, 1, (1,), np.float32), Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        """Open an episode."""
        super().reset(seed=seed)
        self.t, self.grip = 0, self.np_random.random()
        return np.full(1, self.grip, np.float32), {}

    def step(self, action):
        """Drive one stretch."""
        speed = (float(action[0]) + 1) / 2
        danger = 0.06 * max(0.0, speed - 0.6 - 0.3 * self.grip)
        reward = speed - 10 * (self.np_random.random() < danger)
        self.t, self.grip = self.t + 1, self.np_random.random()
        return np.full(1, self.grip, np.float32), reward, self.t == 20, False, {}


CLIFF = "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv"
SLIPPERY = {"entry_point": CLIFF, "kwargs": {"is_slippery": True}, "max_episode_steps": 200}
for name, spec in (
    ("lottery", {"entry_point": Lottery}),
    ("road", {"entry_point": Road}),
    ("cliff", SLIPPERY),  # CliffWalking-v1
):
    if f"{name}-v0" not in gym.registry:
        gym.register(f"{name}-v0", **spec)

# ----------------------------------------------------------------------------------------- the grid
COMMON = "--value-target sr_lambda --twin-reduce mean --eval-episodes 500 --checkpoint-every 0 "
KIND = {LSTM: "--kappa 0 --num-quantiles 51 ", CATEGORICAL: "--target-encoding two_hot "}
TASKS = {
    "lottery": "--cvar-alpha 0.2 --total-timesteps 30000 --num-steps 64 --learning-rate 3e-3",
    "road": (
        "--cvar-alpha 0.1 --total-timesteps 200000 --num-envs 16 --num-steps 128 --gamma 0.95 "
        "--num-minibatches 8 --gae-lambda 0.95 --log-std-init -1.5 --ent-coef 0"
    ),
    "cliff": (
        "--cvar-alpha 0.1 --total-timesteps 200000 --num-envs 16 --num-steps 128 --gamma 0.995 "
        "--num-minibatches 8 --gae-lambda 0.95 --ent-coef 0.01"
    ),
}
VARIANTS = {"neutral": "", "weight 0.5": "--cvar-weight 0.5", "weight 1": "--cvar-weight 1"}
FIELDS = (  # dual: of the rows with a limit
    "task", "script", "variant", "seed", "seconds", "mean", "std", "cvar", "sampled_mean",
    "sampled_std", "sampled_cvar", "dual", "risky",
)  # fmt: skip


def cells() -> list[tuple[str, str, str, str, range]]:
    """Task, script, variant, flags, seeds."""
    grid = []
    for task, flags in TASKS.items():
        for script in (CATEGORICAL, LSTM):
            width = "--seq-len 32 " if script == LSTM and task != "lottery" else ""
            for variant, own in VARIANTS.items():
                line = f"{COMMON}{KIND[script]}{width}{flags} {own}"
                grid.append((task, script, variant, line, range(1, 6)))
    return grid


def run_one(task: str, script: str, variant: str, flags: str, seed: int) -> dict[str, Any]:
    """Train, evaluate, and read the probability of the risky arm."""
    import torch

    module = importlib.import_module(script)
    with tempfile.TemporaryDirectory() as top, contextlib.redirect_stdout(io.StringIO()):
        line = ["--env-id", f"risk:{task}-v0", "--seed", str(seed), "--run-dir", top]
        began = time.time()
        metrics = module.train(module.tyro.cli(module.Args, args=[*line, *flags.split()]))
        seconds = round(time.time() - began, 1)
        agent, args = module.load_agent(metrics["run_dir"])
    row = {"task": task, "script": script, "variant": variant, "seed": seed, "seconds": seconds}
    if task == "lottery":
        params, _ = agent.policy(torch.ones(1, 1), agent.initial_state(1))
        row["risky"] = params[0, 0].softmax(-1)[1].item()
    row |= {key: metrics[f"eval/return_{key}"] for key in ("mean", "std", "cvar")}
    agent.act = functools.partial(agent.act, deterministic=False)
    with contextlib.redirect_stdout(io.StringIO()):
        sampled = module.evaluate(agent, args)
    row |= {f"sampled_{key}": sampled[f"eval/return_{key}"] for key in ("mean", "std", "cvar")}
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}


def read_rows() -> list[dict[str, str]]:
    """Rows of the CSV, if there is one."""
    path = RESULTS / "risk.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


def run_missing(only: list[str], seeds: list[int]) -> None:
    """Every run without a row; `only` names tasks, scripts or variants, all of them to match."""
    sys.path.insert(0, str(HERE.parent))
    done = {(r["task"], r["script"], r["variant"], r["seed"]) for r in read_rows()}
    path = RESULTS / "risk.csv"
    for task, script, variant, flags, all_seeds in cells():
        for seed in seeds or all_seeds:
            wanted = all(any(w in part for part in (task, script, variant)) for w in only)
            if not wanted or (task, script, variant, str(seed)) in done:
                continue
            row = run_one(task, script, variant, flags, seed)
            new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                if new:
                    writer.writeheader()
                writer.writerow(row)
            print(row, flush=True)


# ------------------------------------------------------------------------------------------- report
def cliff_optima(alpha: float = 0.1, steps: int = 200, falls: int = 20) -> tuple[float, ...]:
    """Best mean on slippery CliffWalking, the CVaR of that policy, and the best CVaR of any policy.

    The return after t steps and n falls is -t - 99 n, and CVaR_alpha the largest value over nu of
    nu - E[max(nu - return, 0)] / alpha (Rockafellar & Uryasev 2000): for every nu a dynamic program
    over steps, states and falls, so that a policy may depend on what has happened before.
    """
    table = gym.make("CliffWalking-v1", is_slippery=True).unwrapped.P
    moves = np.array([[[m[1:] for m in table[s][a]] for a in range(4)] for s in range(48)])
    after, fell, end = moves[..., 0].astype(int), moves[..., 1] == -100, moves[..., 2] == 1
    n = np.arange(falls + 1)
    more = np.minimum(n + 1, falls)

    def least(cost, policy=None):
        """Least expected cost(t, n) of an episode, or that of a policy, and the actions."""
        later, actions = np.tile(cost(steps, n), (48, 1)), []
        for t in reversed(range(steps)):
            walk = np.where(end[..., None], cost(t + 1, n), later[after])
            fall = np.where(end[..., None], cost(t + 1, more), later[:, more][after])
            costs = np.where(fell[..., None], fall, walk).mean(2)  # (48, 4, falls + 1)
            actions.insert(0, costs.argmin(1) if policy is None else policy[t])
            later = np.take_along_axis(costs, actions[0][:, None], 1)[:, 0]
        return later[36, 0], actions  # 36 is the start

    def shortfall(nu):
        return lambda t, n: np.maximum(nu + t + 99 * n, 0.0)

    def tail(policy=None):
        """Largest CVaR."""
        return max(nu - least(shortfall(nu), policy)[0] / alpha for nu in range(-200, -60, 2))

    mean, policy = least(lambda t, n: t + 99.0 * n)
    return -mean, tail(policy), tail()


def interval(values: list[float]) -> tuple[float, float]:
    """Mean over seeds and half its 95 % interval (Student's t)."""
    t = (0, 12.71, 4.30, 3.18, 2.78)[min(len(values), 5) - 1]
    half = t * np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return float(np.mean(values)), float(half)


def report() -> None:
    """Table in results/risk.md and on stdout, the figure in results/risk.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in read_rows():
        groups.setdefault((row["task"], row["script"], row["variant"]), []).append(row)
    lines = [
        "500 evaluation episodes of the policy's mode, and of the policy as it samples (on which a",
        "limit acted, see risk.py); means over seeds +- 95 % interval. CVaR at 0.2 (lottery), 0.1.",
        "",
        "| task | script | variant | seeds | mean | CVaR | sampled: mean | CVaR | P(risky arm) |",
        "|" + "---|" * 9,
    ]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), constrained_layout=True)
    panels = dict(zip(("road", "cliff"), axes))
    place = {name: i for i, name in enumerate((*TASKS, CATEGORICAL, LSTM, *VARIANTS))}
    order = sorted(groups, key=lambda cell: [(place.get(part, 99), part) for part in cell])
    for task, script, variant in order:
        rows = groups[task, script, variant]
        keys = ("mean", "cvar", "sampled_mean", "sampled_cvar")
        facts = {k: interval([float(r[k]) for r in rows]) for k in keys}
        cells_ = [f"{mean:.2f} +- {half:.2f}" for mean, half in facts.values()]
        risky = [float(r["risky"]) for r in rows if r["risky"]]
        told = f"{min(risky):.3f} to {max(risky):.3f}" if risky else ""
        kind = script.split("_")[-1]
        lines.append("| " + " | ".join((task, kind, variant, str(len(rows)), *cells_, told)) + " |")
        if task in panels and "slow" not in variant:  # these are in the table alone
            same = [cell[2] for cell in order if cell[:2] == (task, script)]
            colour = f"C{same.index(variant)}"
            (x, dx), (y, dy) = facts["mean"], facts["cvar"]
            marker = "s" if script == LSTM else "o"
            panels[task].errorbar(
                x, y, dy, dx, marker, color=colour, label=f"{variant}, {kind}", capsize=2
            )
    mean, its_tail, best_tail = cliff_optima()
    panels["cliff"].plot(mean, its_tail, "*", color="black", label="best mean, best CVaR")
    lines += [
        "",
        f"Cliff, by dynamic programming: best mean {mean:.1f}, CVaR of that policy {its_tail:.1f}, "
        f"best CVaR of any policy {best_tail:.1f}.",
    ]
    for task, panel in panels.items():
        panel.set(title=task, xlabel="mean return", ylabel="CVaR at 0.1")
        if panel.has_data():
            panel.legend(frameon=False, fontsize=7)
    text = "\n".join(lines) + "\n"
    (RESULTS / "risk.md").write_text(text)
    print(text)
    figure.savefig(RESULTS / "risk.png", dpi=130)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="only rebuild table and figure")
    parser.add_argument("--only", nargs="*", default=[], help="tasks, scripts, variants to run")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="seeds to run")
    args = parser.parse_args()
    if not args.report:
        run_missing(args.only, args.seeds)
    report()


if __name__ == "__main__":
    main()
