"""Risk-averse policies: the mean that is paid for a better tail. Runs what is missing, reports.

    python benchmarks/risk.py --report    # table and figure from the committed CSV alone
    python benchmarks/risk.py             # run what is missing as well
    python benchmarks/risk.py --only lottery categorical --seeds 8006 8007

Three tasks, each by the preset `averse` with cvar_weight 1, 0.5 (the preset's) and 0 (neutral). The
final policy plays 500 fresh episodes by its mode and 500 as it samples. One row of results/risk.csv
is one run; interrupted at any point, the next call continues. Reported seeds are 8006 to 8010;
where one of these is missing, older rows of seeds 1 to 5 stand (`common.standing`).
Rows of seeds 8001 to 8005 tell no flags and count no more: they had 51 atoms, and the preset has
201.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import common
import gymnasium as gym
import numpy as np
from common import CATEGORICAL, LSTM, RESULTS, Cell, Row, Run, Setting, Table
from gymnasium.spaces import Box, Discrete


# -------------------------------------------------------------------------------------------- tasks
class Lottery(gym.Env):
    """One step. Action 0 pays 0.9; action 1 pays 1.5, or -3.5 with probability 0.1: mean 1.0.

    CVaR_0.2 of action 1 is (0.1 * -3.5 + 0.1 * 1.5) / 0.2 = -1.
    """

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        """Nothing to see."""
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        """The prize."""
        prize = 0.9
        if action == 1:
            prize = -3.5 if self.np_random.random() < 0.1 else 1.5
        return np.ones(1, np.float32), prize, True, False, {}


class Road(gym.Env):
    """Twenty stretches of road; the action is the speed v in [0, 1] and pays v.

    The grip g, uniform in [0, 1], is seen ahead of each stretch. Up to v = 0.6 + 0.3 g all is safe;
    every tenth above adds 0.006 to the probability of a crash, which costs 10. Flat out is best in
    the mean (17.0: a crash in 26 % of the episodes), the safe speed in the tail (mean 15.0, of the
    worst tenth about 14.3).
    """

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        """Open an episode."""
        super().reset(seed=seed)
        self.t = 0
        self.grip = self.np_random.random()
        return np.full(1, self.grip, np.float32), {}

    def step(self, action):
        """Drive one stretch."""
        speed = (float(action[0]) + 1) / 2
        danger = 0.06 * max(0.0, speed - 0.6 - 0.3 * self.grip)
        reward = speed - 10 * (self.np_random.random() < danger)
        self.t += 1
        self.grip = self.np_random.random()
        seen = np.full(1, self.grip, np.float32)
        return seen, reward, self.t == 20, False, {}


SLIPPERY = {  # CliffWalking-v1
    "entry_point": "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv",
    "kwargs": {"is_slippery": True},
    "max_episode_steps": 200,
}
for name, spec in (
    ("lottery", {"entry_point": Lottery}),
    ("road", {"entry_point": Road}),
    ("cliff", SLIPPERY),
):
    if f"{name}-v0" not in gym.registry:
        gym.register(f"{name}-v0", **spec)

# ----------------------------------------------------------------------------------------- the grid
COMMON = "--preset averse --eval-episodes 500 --checkpoint-every 0 "
SEEDS = range(common.RENEWED + 5, common.RENEWED + 10)
TASKS = {
    "lottery": "--cvar-alpha 0.2 --total-timesteps 30000 --num-steps 64 --learning-rate 3e-3",
    "road": (
        "--total-timesteps 200000 --num-envs 16 --num-steps 128 --gamma 0.95 "
        "--num-minibatches 8 --gae-lambda 0.95 --log-std-init -1.5 --ent-coef 0"
    ),
    "cliff": (
        "--total-timesteps 200000 --num-envs 16 --num-steps 128 --gamma 0.995 "
        "--num-minibatches 8 --gae-lambda 0.95 --ent-coef 0.01"
    ),
}
VARIANTS = {"neutral": "--cvar-weight 0", "weight 0.5": "", "weight 1": "--cvar-weight 1"}
MEASURED = ("mean", "std", "cvar")  # of the returns of an evaluation
SAMPLED = tuple(f"sampled_{name}" for name in MEASURED)  # the same of the policy as it samples
SETTING = ("task", "script", "variant", "seed", "seconds")
COLUMNS = (*SETTING, *MEASURED, *SAMPLED, "risky", *common.ORIGIN, "flags")
TABLE = Table(RESULTS / "risk.csv", COLUMNS, once=common.OF_A_RUN)


def cells() -> list[Cell]:
    """The grid."""
    grid = []
    for task, flags in TASKS.items():
        for script in (CATEGORICAL, LSTM):
            width = "--seq-len 32 " if script == LSTM and task != "lottery" else ""
            for variant, own in VARIANTS.items():
                line = f"{COMMON}{width}{flags} {own}"
                grid.append(Cell(task, script, variant, line, SEEDS))
    return grid


def groups() -> dict[Setting, list[Row]]:
    """The rows that count, of each setting that has some.

    Those of today's scripts count as soon as all variants of a task and a script have them, so that
    no comparison mixes versions.
    """
    known = common.by_setting(TABLE.rows())
    found = {cell.setting: common.standing(cell, known.get(cell.setting, [])) for cell in cells()}
    older = {
        (setting.task, setting.script)
        for setting, rows in found.items()
        if not rows or any(int(row["seed"]) < common.RENEWED for row in rows)
    }
    for setting in found:
        if (setting.task, setting.script) in older:
            rows = known.get(setting, [])
            found[setting] = [row for row in rows if int(row["seed"]) < common.RENEWED]
    return {setting: rows for setting, rows in found.items() if rows}


# ------------------------------------------------------------------------------------- measurements
def second_action(agent: Any, first: np.ndarray) -> float:
    """Probability of the second of two actions at the first observation of an episode."""
    import torch

    obs = agent.normalize_obs(torch.as_tensor(first)[None])
    with torch.no_grad():
        if common.is_recurrent(agent):
            opens = torch.ones(1, 1, dtype=torch.bool)
            features = agent.actor_body(obs[None], agent.initial_state(1), opens)
            params = agent.policy_params(features)
        else:
            params = agent.policy_params(obs)
    return params.reshape(2).softmax(-1)[1].item()


def run_one(run: Run) -> dict[str, Any]:
    """Train, evaluate, and read the probability of the risky arm."""
    cell = run.cell
    origin = common.origin()
    script = common.load_script(cell.script)
    with common.trained(script, f"risk:{cell.task}-v0", run.seed, cell.flags) as done:
        agent, args = script.load_agent(done.directory)

    row = {**cell.setting._asdict(), "seed": run.seed, "seconds": done.seconds, **origin}
    row["flags"] = common.spelt_flags(cell)
    if cell.task == "lottery":
        row["risky"] = second_action(agent, np.ones(1, np.float32))
    row |= {name: done.metrics[f"eval/return_{name}"] for name in MEASURED}
    with contextlib.redirect_stdout(io.StringIO()):
        sampled = script.evaluate(agent, replace(args, eval_sampled=True))
    row |= {f"sampled_{name}": sampled[f"eval/return_{name}"] for name in MEASURED}
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}


# ------------------------------------------------------------------------------- the cliff's optima
Cost = Callable[[int, np.ndarray], np.ndarray]  # of an episode that ended after t steps, n falls


class Optimum(NamedTuple):
    """Over all policies of the slippery cliff."""

    mean: float  # the best one
    its_cvar: float  # of the policy that has it
    cvar: float  # the best one of any policy


@dataclass(frozen=True)
class Cliff:
    """Slippery CliffWalking as tables over (state, action, outcome)."""

    after: np.ndarray  # state that follows
    fell: np.ndarray  # whether it was a fall
    end: np.ndarray  # whether the goal was reached
    steps: int = 200  # time limit
    falls: int = 20  # more are counted as this many
    start: int = 36

    def least(self, cost: Cost, policy: list | None = None) -> tuple[float, list]:
        """Least expected cost of an episode over all policies, which may depend on what has
        happened before, or that of a policy; and its actions."""
        n = np.arange(self.falls + 1)
        later = np.tile(cost(self.steps, n), (48, 1))  # of what state and falls lead to
        # where an outcome finds its cost: that of the state that follows, or of an end
        falls = np.where(self.fell[..., None], np.minimum(n + 1, self.falls), n)
        found = np.where(self.end[..., None], 48, self.after[..., None]) * len(n) + falls
        actions = []
        for t in reversed(range(self.steps)):
            known = np.append(later, cost(t + 1, n))
            costs = known[found].mean(2)  # (48, 4, falls + 1)
            actions.insert(0, costs.argmin(1) if policy is None else policy[t])
            later = np.take_along_axis(costs, actions[0][:, None], 1)[:, 0]
        return later[self.start, 0], actions

    def cvar(self, alpha: float, policy: list | None = None) -> float:
        """Largest CVaR of the return -t - 99 n over all policies, or that of a policy: the largest
        value over nu of nu - E[max(nu - return, 0)] / alpha (Rockafellar & Uryasev 2000). Returns
        are integers, and one of them is the best nu."""

        def value(nu: int) -> float:
            def shortfall(t: int, n: np.ndarray) -> np.ndarray:
                return np.maximum(nu + t + 99 * n, 0.0)

            return nu - self.least(shortfall, policy)[0] / alpha

        return max(value(nu) for nu in range(-200, -60))


def slippery_cliff() -> Cliff:
    """The tables of gymnasium's task."""
    table = gym.make("CliffWalking-v1", is_slippery=True).unwrapped.P
    outcomes = np.array([[table[state][action] for action in range(4)] for state in range(48)])
    _, after, reward, end = np.moveaxis(outcomes, -1, 0)  # (48, 4, 3) each
    return Cliff(after.astype(int), reward == -100, end == 1)


def best_mean(cliff: Cliff, alpha: float = 0.1) -> tuple[float, float]:
    """The largest mean return of any policy, and the CVaR of the policy that has it."""
    cost, policy = cliff.least(lambda t, n: t + 99.0 * n)
    return -cost, cliff.cvar(alpha, policy)


def cliff_optima(alpha: float = 0.1) -> Optimum:
    """By a dynamic program over steps, states and falls; for the CVaR one for every nu."""
    cliff = slippery_cliff()
    return Optimum(*best_mean(cliff, alpha), cliff.cvar(alpha))


# ------------------------------------------------------------------------------------------- report
HEAD = """\
500 evaluation episodes of the policy's mode, and of the policy as it samples; means over seeds
+- 95 % interval. CVaR at 0.2 (lottery), 0.1. The draws of an evaluation depend on the seed alone,
so rows with the same seeds share their luck. In endless episodes the lottery's risky arm would have
a mean of 1.0 and a CVaR of -1.0.
"""
SHARING = {"5dd7f7d"}  # commits whose environments took consecutive seeds, from --seed on
SHARED = """\
In older rows runs with neighbouring seeds shared most random numbers of their environments in
training, so intervals are too narrow.
"""
SHOWN = ("mean", "cvar", "sampled_mean", "sampled_cvar")


class Estimate(NamedTuple):
    """Over seeds."""

    mean: float
    half: float  # of the 95 % interval


def estimate(rows: list[Row], column: str) -> Estimate:
    """Mean over seeds and half its 95 % interval (Student's t), which is nan of one seed."""
    values = np.array([float(row[column]) for row in rows])
    return Estimate(float(values.mean()), common.half_width(values))


def line(setting: Setting, rows: list[Row]) -> str:
    """One row of the table."""
    estimates = [estimate(rows, column) for column in SHOWN]
    figures = [f"{mean:.2f} +- {half:.2f}" for mean, half in estimates]
    tails = [float(row["cvar"]) for row in rows]
    seeds = f"{min(tails):.1f} to {max(tails):.1f}"
    risky = [float(row["risky"]) for row in rows if row["risky"]]
    told = f"{min(risky):.3f} to {max(risky):.3f}" if risky else ""
    names = (setting.task, setting.kind, setting.variant)
    version = "today's" if int(rows[0]["seed"]) >= common.RENEWED else "older"
    return common.markdown_row([*names, version, len(rows), *figures, seeds, told])


TITLES = {  # of the panels, with what is at stake
    "lottery": "Lottery: 0.9 for sure,\nor a gamble of mean 1 and a bad tail",
    "road": "Road: driving fast pays,\na crash costs ten",
    "cliff": "Slippery CliffWalking: a short way\nalong the edge, or a detour",
}
POLICIES = {  # variants with their colours and words
    "neutral": (common.FLOOR, "neutral: maximises the mean"),
    "weight 0.5": (common.SKY, "averse: half mean, half CVaR (--cvar-weight 0.5)"),
    "weight 1": (common.OURS, "averse: CVaR alone (--cvar-weight 1)"),
}
MARKERS = {  # with their sizes: one is seen around the other where both are at the same place
    CATEGORICAL: ("o", 7, "feed-forward, atoms"),
    LSTM: ("s", 4, "recurrent, quantiles"),
}


def draw_policies(panel: Any, task: str, groups: dict[Setting, list[Row]]) -> None:
    """Draw CVaR over mean of one task. Arrows lead from each neutral policy to its averse ones."""
    for script, (marker, size, _) in MARKERS.items():
        places = {}
        for variant, (colour, _) in POLICIES.items():
            rows = groups.get(Setting(task, script, variant))
            if rows is None:
                continue
            mean, cvar = estimate(rows, "mean"), estimate(rows, "cvar")
            places[variant] = (mean.mean, cvar.mean)
            look = {"color": colour, "ms": size, "mec": "white", "mew": 0.7}
            bars = {"elinewidth": 1, "capsize": 0, "zorder": 3}
            panel.errorbar(*places[variant], cvar.half, mean.half, marker, **look, **bars)
        for variant, place in places.items():
            if variant != "neutral" and "neutral" in places:
                arrow = {"arrowstyle": "->", "color": POLICIES[variant][0], "lw": 0.9}
                arrow |= {"shrinkA": 4, "shrinkB": 4, "connectionstyle": "arc3,rad=0.12"}
                panel.annotate("", place, places["neutral"], arrowprops=arrow)
    panel.margins(0.12)


def draw(groups: dict[Setting, list[Row]], optimum: Optimum) -> None:
    """Draw CVaR over mean; each task has a panel, the cliff's with what it allows at best."""
    plt = common.pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(common.WIDTH, 3.7))
    for number, (panel, task) in enumerate(zip(axes, TITLES)):
        draw_policies(panel, task, groups)
        common.letter(panel, number, TITLES[task])
        level = "0.2" if task == "lottery" else "0.1"
        panel.set(xlabel="mean return", ylabel=f"CVaR$_{{{level}}}$ of the return")
    axes[-1].plot(optimum.mean, optimum.cvar, "*", color=common.INK, ms=8, zorder=4)
    handles = [
        plt.Line2D([], [], marker="D", ls="", color=colour, label=words)
        for colour, words in POLICIES.values()
    ]
    for script, (marker, size, words) in MARKERS.items():
        older = {
            setting.task
            for setting, rows in groups.items()
            if setting.script == script and any(int(row["seed"]) < common.RENEWED for row in rows)
        }
        panels = ", ".join(f"({chr(97 + i)})" for i, task in enumerate(TITLES) if task in older)
        if panels:
            words += f" (older version in {panels})"
        look = {"marker": marker, "ms": size, "color": common.INK, "label": words}
        handles.append(plt.Line2D([], [], ls="", **look))
    best = "(c): best mean and best CVaR possible"
    handles.append(plt.Line2D([], [], marker="*", ls="", color=common.INK, ms=8, label=best))
    title = (
        "Means over five seeds with 95 % intervals; arrows from the neutral policy. CVaR: mean of "
        "the worst fifth (a) or tenth (b, c) of the episodes"
    )
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2, title=title, title_fontsize=7.5
    )
    common.save(figure, RESULTS / "risk.png")


def report() -> None:
    """Table in results/risk.md and on stdout, the figure in results/risk.png."""
    found = groups()
    rows = [row for own in found.values() for row in own]
    optimum = cliff_optima()
    names = (
        "task | script | variant | version | seeds | mean | CVaR | sampled: mean | CVaR "
        "| CVaR by seed | P(risky arm)"
    )
    head = HEAD + SHARED if any(row["commit"] in SHARING for row in rows) else HEAD
    lines = [head, *common.markdown_head(names)]
    lines += [line(setting, own) for setting, own in found.items()]
    lines += [
        "",
        f"Cliff, by dynamic programming: best mean {optimum.mean:.1f}, "
        f"CVaR of that policy {optimum.its_cvar:.1f}, "
        f"best CVaR of any policy {optimum.cvar:.1f}.",
        "",
        f"Commit of the scripts, machine: {common.origins(rows)}.",
    ]
    common.publish(RESULTS / "risk.md", lines)
    draw(found, optimum)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="only rebuild table and figure")
    parser.add_argument("--only", nargs="*", default=[], help="tasks, scripts, variants to run")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="some of the seeds")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    common.require("matplotlib")
    if not args.report:
        try:
            common.refuse_other_flags(TABLE.rows(), cells())
        except ValueError as error:
            parser.error(str(error))
        runs = common.runs_of(cells(), args.only, args.seeds)
        TABLE.record(run_one, TABLE.without_row(runs), args.processes)
    report()


if __name__ == "__main__":
    main()
