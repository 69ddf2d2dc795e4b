"""What aversion to risk buys on public tasks: robots that now and then pay for speed.

    python benchmarks/tails.py --tune      # tuning seeds: which weight, which penalty
    python benchmarks/tails.py             # reported seeds: run what is missing, report
    python benchmarks/tails.py --report    # tables and figure from the committed CSV alone
    python benchmarks/tails.py --only RiskyHopper averse --seeds 8001

The tasks are those of Urpi, Curi & Krause 2021 (arXiv:2102.05371), in benchmarks/envs.py. Each is
learnt neutrally, with an aversion to risk (the preset `averse`), and neutrally with a penalty that
is taken at every risky step for certain. The mode of the final policy then plays EPISODES fresh
episodes of the task without the penalty. One row of results/tails.csv is one run.

Chosen ahead of the reported runs, on tuning seeds 1000 and 1001: the weight of the CVaR advantage
and the penalty with the highest CVaR_0.1, each for all three tasks together, by the mean of
CVaR_0.1 over that of the neutral policy. The goal was written down ahead as well: CVaR_0.1 better
than the neutral policy's on all three tasks by more than its 95 % interval, for at most 15 % of the
neutral policy's mean.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from dataclasses import replace
from typing import Any

import common
import numpy as np
from common import CATEGORICAL, RESULTS, Cell, Row, Run, Table, half_width, welch
from envs import PENALTIES, RISKY

EPISODES = 200
NEUTRAL = "--preset mujoco --compile"
AVERSE = "--preset mujoco averse --compile"
WEIGHTS = (0.25, 0.5, 1.0)  # of the CVaR advantage
TUNING = range(1000, 1002)
REPORTED = range(8001, 8006)
CHOSEN = ("neutral", "averse 1.0", "penalty 3")  # the variants that are reported
MEASURED = ("mean", "std", "cvar_10", "cvar_5", "risky_share", "length")
COLUMNS = ("task", "script", "variant", "seed", "seconds", *MEASURED, *common.ORIGIN)
TABLE = Table(RESULTS / "tails.csv", COLUMNS, end="\n")


# ------------------------------------------------------------------------------------------- runs
def cells(tune: bool) -> list[Cell]:
    """Everything on tuning seeds, or what was chosen on reported ones."""
    variants = {"neutral": NEUTRAL}
    variants |= {f"averse {weight}": f"{AVERSE} --cvar-weight {weight}" for weight in WEIGHTS}
    variants |= {f"penalty {penalty}": NEUTRAL for penalty in PENALTIES}
    seeds = TUNING if tune else REPORTED
    return [
        Cell(task, CATEGORICAL, variant, flags, seeds)
        for task in RISKY
        for variant, flags in variants.items()
        if tune or variant in CHOSEN
    ]


def task_id(cell: Cell) -> str:
    """The id of the task that a cell trains on."""
    kind, _, number = cell.variant.partition(" ")
    penalty = f"Penalty{number}" if kind == "penalty" else ""
    return f"envs:{cell.task}{penalty}-v0"


def run_one(run: Run) -> dict[str, Any]:
    """Train, and play the task itself."""
    cell = run.cell
    script = common.load_script(cell.script)
    flags = f"{cell.flags} --eval-episodes 0 --save-envs never --checkpoint-every 0"
    with common.trained(script, task_id(cell), run.seed, flags) as done:
        agent, args = script.load_agent(done.directory)
    row = {**cell.setting._asdict(), "seed": run.seed, "seconds": done.seconds}
    args = replace(args, env_id=f"envs:{cell.task}-v0", eval_episodes=EPISODES)
    row |= measure(script, agent, args) | common.origin()
    return {name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()}


def measure(script: Any, agent: Any, args: Any) -> dict[str, float]:
    """Play the evaluation's episodes. Returns what is told of them."""
    import torch

    env = script.make_eval_env(args)
    with contextlib.redirect_stdout(io.StringIO()):
        episodes = [*script.play(env, agent, args)]
    returns = torch.tensor([sum(rewards) for rewards in episodes], dtype=torch.float64)
    steps = sum(map(len, episodes))
    risky = env.get_wrapper_attr("risky_steps")
    env.close()
    return {
        "mean": float(returns.mean()),
        "std": float(returns.std(correction=0)),
        "cvar_10": script.empirical_cvar(returns, 0.1),
        "cvar_5": script.empirical_cvar(returns, 0.05),
        "risky_share": risky / steps,
        "length": steps / len(episodes),
    }


# ----------------------------------------------------------------------------------------- report
def values(rows: list[Row], task: str, variant: str, column: str) -> np.ndarray:
    """What the runs of a cell measured."""
    found = [row for row in rows if (row["task"], row["variant"]) == (task, variant)]
    return np.array([float(row[column]) for row in found])


def lines_of(rows: list[Row]) -> list[str]:
    """One line for each task and variant."""
    lines = common.markdown_head(
        "task | variant | seeds | mean | CVaR_0.1 | CVaR_0.05 | share of risky steps "
        "| mean beside neutral | CVaR_0.1 beside neutral (95 %)"
    )
    for task in RISKY:
        for variant in dict.fromkeys(row["variant"] for row in rows):
            mean = values(rows, task, variant, "mean")
            neutral = values(rows, task, "neutral", "mean")
            if not len(mean):
                continue
            told = [task, variant, len(mean)]
            for column in ("mean", "cvar_10", "cvar_5"):
                x = values(rows, task, variant, column)
                told.append(f"{x.mean():.0f} +- {half_width(x):.0f}")
            told.append(f"{values(rows, task, variant, 'risky_share').mean():.1%}")
            if variant == "neutral" or not len(neutral):
                told += ["", ""]
            else:
                tails = [values(rows, task, name, "cvar_10") for name in (variant, "neutral")]
                told += [f"{mean.mean() / neutral.mean() - 1:+.0%}", welch(*tails).told()]
            lines.append(common.markdown_row(told))
    return lines


def report() -> None:
    """Tables in results/tails.md and on stdout, the figure in results/tails.png."""
    rows = TABLE.rows()
    text = [f"{EPISODES} evaluation episodes a run; means over seeds +- half the 95 % interval."]
    for title, seeds in (("Reported seeds", REPORTED), ("Tuning seeds", TUNING)):
        own = [row for row in rows if int(row["seed"]) in seeds]
        if own:
            text += ["", f"{title}: {seeds[0]} to {seeds[-1]}.", "", *lines_of(own)]
    text += ["", f"Commit of the scripts, machine: {common.origins(rows)}."]
    common.publish(RESULTS / "tails.md", text)
    draw([row for row in rows if int(row["seed"]) in REPORTED])


def draw(rows: list[Row]) -> None:
    """CVaR over mean, a panel a task, with arrows from the neutral policy."""
    if not rows:
        return
    figure, axes = common.pyplot().subplots(1, 3, figsize=(11, 3.6), constrained_layout=True)
    for axis, task in zip(axes, RISKY, strict=True):
        middles = {}
        for number, variant in enumerate(CHOSEN):
            x = values(rows, task, variant, "mean")
            y = values(rows, task, variant, "cvar_10")
            if not len(x):
                continue
            middles[variant] = (x.mean(), y.mean())
            bars = {"xerr": half_width(x), "yerr": half_width(y), "fmt": "o", "capsize": 3}
            axis.errorbar(x.mean(), y.mean(), color=f"C{number}", label=variant, **bars)
        for variant in middles.keys() - {"neutral"}:
            if "neutral" in middles:
                line = {"arrowstyle": "->", "color": "0.5"}
                axis.annotate("", middles[variant], middles["neutral"], arrowprops=line)
        axis.set(title=task, xlabel="mean return", ylabel="CVaR_0.1 of the return")
    axes[0].legend(frameon=False)
    common.save(figure, RESULTS / "tails.png")


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="every variant, on tuning seeds")
    parser.add_argument("--report", action="store_true", help="only rebuild tables and figure")
    parser.add_argument("--only", nargs="*", default=[], help="words, all to match")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="seeds to run")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    common.require("matplotlib")
    if not args.report:
        runs = common.runs_of(cells(args.tune), args.only, args.seeds)
        TABLE.record(run_one, TABLE.without_row(runs), args.processes)
    report()


if __name__ == "__main__":
    main()
