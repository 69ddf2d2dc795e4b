"""What aversion to risk buys on public tasks: robots that now and then pay for speed.

    python benchmarks/tails.py --tune --only neutral    # first: is there a tail?
    python benchmarks/tails.py --tune      # tuning seed: which weight, which penalty
    python benchmarks/tails.py             # reported seeds: run what is missing, report
    python benchmarks/tails.py --report    # tables and figure from the committed CSV alone
    python benchmarks/tails.py --only RareHopper averse --seeds 8001

The Risky tasks are those of Urpi, Curi & Krause 2021 (arXiv:2102.05371), in benchmarks/envs.py; the
Rare ones are the same with a fifth of the probability. Each is learnt with an aversion to risk (the
preset `averse`), neutrally (the same preset with a weight of 0 for the tail, so that nothing else
differs), and neutrally with a penalty that every risky step costs besides, for certain. The mode of
the final policy then plays EPISODES fresh episodes of the task without the penalty. One row of
results/tails.csv is one run.

Written down ahead of all runs:

    tasks      A task counts only if more than TAIL of the neutral policy's steps are risky: a
               policy that avoids risk by itself has no tail to buy. One neutral tuning run of each
               task comes first, to see that. Where there is none, nothing else runs.
    choice     On the tuning seed, the weight of the CVaR advantage and the penalty with the highest
               criterion, each for all tasks together: the mean over tasks that count of
               (CVaR_0.1 - that of the neutral policy) / |mean of the neutral policy|.
    goal       On every task that counts CVaR_0.1 better than the neutral policy's by more than its
               95 % interval, for at most PRICE of the neutral policy's mean.

No task of the paper counts: there a risky step costs more on average than speed gains. The Rare
tasks were added then, ahead of their own runs, and two things were cut to save time: a second
tuning seed, and reported runs of the plain preset `mujoco`.

The choice stands in this file, as CHOSEN. Reported seeds do not run until it is that of the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from dataclasses import replace
from typing import Any

import common
import numpy as np
from common import CATEGORICAL, RESULTS, Cell, Row, Run, Table, half_width, welch
from envs import PENALTIES, RARE, RISKY

EPISODES = 200
TASKS = (*RISKY, *RARE)
TAIL = 0.02  # share of risky steps
PRICE = 0.15
AVERSE = "--preset mujoco averse --compile"
NEUTRAL = f"{AVERSE} --cvar-weight 0"
AVERSIONS = {  # by the weight of the CVaR advantage
    f"averse {weight}": f"{AVERSE} --cvar-weight {weight}" for weight in (0.25, 0.5, 1.0)
}
PENALISED = {f"penalty {penalty}": NEUTRAL for penalty in PENALTIES}
VARIANTS = {"neutral": NEUTRAL, **AVERSIONS, **PENALISED}
TUNING = range(1000, 1001)
REPORTED = range(8001, 8006)
CHOSEN = ("averse 1.0", "penalty 3")  # one of each kind; a guess until the tuning rows exist
SHOWN = ("neutral", *CHOSEN)  # the variants that are reported
MEASURED = ("mean", "std", "cvar_10", "cvar_5", "risky_share", "length")
COLUMNS = ("task", "script", "variant", "seed", "seconds", *MEASURED, *common.ORIGIN)
TABLE = Table(RESULTS / "tails.csv", COLUMNS, end="\n")


# ------------------------------------------------------------------------------------------- runs
def cells(tune: bool) -> list[Cell]:
    """What is chosen from, on tuning seeds, or what is shown, on reported ones."""
    shown = VARIANTS if tune else SHOWN
    seeds = TUNING if tune else REPORTED
    return [
        Cell(task, CATEGORICAL, variant, flags, seeds)
        for task in TASKS
        for variant, flags in VARIANTS.items()
        if variant in shown
    ]


def missing(tune: bool, words: list[str], seeds: list[int]) -> list[Run]:
    """Runs that match and have no row, neutral ones first: of the cells' own seeds those that are
    named, or else all. A task whose neutral tuning run has no tail has no other run."""
    tuning = with_seeds(TABLE.rows(), TUNING)
    known = {row["task"] for row in tuning if row["variant"] == "neutral"}
    idle = known - set(tasks_with_tail(tuning))
    runs = TABLE.without_row(common.runs_of(cells(tune), words))
    runs = [run for run in runs if not seeds or run.seed in seeds]
    runs = [run for run in runs if run.cell.task not in idle]
    return sorted(runs, key=lambda run: (run.cell.variant != "neutral", run.seed))


def task_id(cell: Cell) -> str:
    """The id of the task that a cell trains on."""
    kind, _, number = cell.variant.partition(" ")
    penalty = f"Penalty{number}" if kind == "penalty" else ""
    return f"envs:{cell.task}{penalty}-v0"


def run_one(run: Run) -> dict[str, Any]:
    """Train, and play the task itself."""
    cell = run.cell
    origin = common.origin()
    script = common.load_script(cell.script)
    flags = f"{cell.flags} --eval-episodes 0 --save-envs never --checkpoint-every 0"
    with common.trained(script, task_id(cell), run.seed, flags) as done:
        agent, args = script.load_agent(done.directory)
    row = {**cell.setting._asdict(), "seed": run.seed, "seconds": done.seconds}
    args = replace(args, env_id=f"envs:{cell.task}-v0", eval_episodes=EPISODES)
    row |= measure(script, agent, args) | origin
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


# ----------------------------------------------------------------------------------------- choice
def tasks_with_tail(rows: list[Row]) -> list[str]:
    """The tasks that count: those with a neutral run, and a tail."""
    shares = {task: values(rows, task, "neutral", "risky_share") for task in TASKS}
    return [task for task, share in shares.items() if len(share) and share.mean() > TAIL]


def criterion(rows: list[Row], variant: str) -> float:
    """Tell what a variant is chosen by. It is nan where a task that counts has no row of it."""
    gains = []
    for task in tasks_with_tail(rows):
        tail, neutral = (values(rows, task, name, "cvar_10") for name in (variant, "neutral"))
        if not len(tail):
            return np.nan
        scale = abs(values(rows, task, "neutral", "mean").mean())
        gains.append((tail.mean() - neutral.mean()) / scale)
    return float(np.mean(gains)) if gains else np.nan


def choice_lines(rows: list[Row]) -> list[str]:
    """Tell which tasks count, and the criterion of what was tried."""
    counted = tasks_with_tail(rows)
    lines = [
        f"More than {TAIL:.0%} of the neutral policy's steps are risky on: "
        f"{', '.join(counted) or 'no task'}. There, the mean of (CVaR_0.1 - neutral's) / "
        "|neutral's mean|:",
        "",
    ]
    for variants in (AVERSIONS, PENALISED):
        told = [f"{variant} {criterion(rows, variant):+.3f}" for variant in variants]
        lines.append(f"* {', '.join(told)}")
    return lines


def objection(rows: list[Row]) -> str:
    """Say why rows of tuning runs do not support CHOSEN, in a line; it is empty where they do."""
    counted = tasks_with_tail(rows)
    for run in missing(tune=True, words=[], seeds=[]):
        return f"{run}: has no row yet, so that nothing is chosen; run tails.py --tune first"
    if not counted:
        return "no task has a tail, so that there is nothing to report"
    for variants in (AVERSIONS, PENALISED):
        best = max(variants, key=lambda variant: criterion(rows, variant))
        if best not in CHOSEN:
            return f"the tuning rows prefer {best}, and CHOSEN in tails.py has another one"
    return ""


# ----------------------------------------------------------------------------------------- report
def values(rows: list[Row], task: str, variant: str, column: str) -> np.ndarray:
    """What the runs of a cell measured."""
    found = [row for row in rows if (row["task"], row["variant"]) == (task, variant)]
    return np.array([float(row[column]) for row in found])


def told(x: np.ndarray) -> str:
    """A mean, with half of its interval where there is one."""
    return f"{x.mean():.0f} +- {half_width(x):.0f}" if len(x) > 1 else f"{x.mean():.0f}"


def lines_of(rows: list[Row]) -> list[str]:
    """One line for each task and variant. Whether the goal is met takes two runs of both."""
    lines = common.markdown_head(
        "task | variant | seeds | mean | CVaR_0.1 | CVaR_0.05 | share of risky steps "
        "| mean over neutral's | CVaR_0.1 minus neutral's (95 %) | goal"
    )
    for task in TASKS:
        for variant in dict.fromkeys(row["variant"] for row in rows):
            mean, *tails = (
                values(rows, task, variant, column) for column in ("mean", "cvar_10", "cvar_5")
            )
            if not len(mean):
                continue
            cells = [task, variant, len(mean), told(mean), *map(told, tails)]
            cells.append(f"{values(rows, task, variant, 'risky_share').mean():.1%}")
            neutral = values(rows, task, "neutral", "mean")
            if variant == "neutral" or not len(neutral):
                cells += ["", "", ""]
            else:
                change = (mean.mean() - neutral.mean()) / abs(neutral.mean())
                gain = welch(tails[0], values(rows, task, "neutral", "cvar_10"))
                met = "met" if gain.low > 0 and change >= -PRICE else "missed"
                judged = not np.isnan(gain.low)
                difference = gain.told() if judged else f"{gain.mean:+.0f}"
                cells += [f"{change:+.1%}", difference, met if judged else ""]
            lines.append(common.markdown_row(cells))
    return lines


def with_seeds(rows: list[Row], seeds: range) -> list[Row]:
    """The rows of these seeds."""
    return [row for row in rows if int(row["seed"]) in seeds]


def report() -> None:
    """Tables in results/tails.md and on stdout, the figure in results/tails.png."""
    rows = TABLE.rows()
    text = [f"{EPISODES} evaluation episodes a run; means over seeds +- half the 95 % interval."]
    for title, seeds in (("Reported seeds", REPORTED), ("The tuning seed", TUNING)):
        own = with_seeds(rows, seeds)
        if own:
            text += ["", f"{title}:", "", *lines_of(own)]
    tuning = with_seeds(rows, TUNING)
    if tuning:
        text += ["", *choice_lines(tuning)]
    text += ["", f"Commit of the scripts, machine: {common.origins(rows)}."]
    common.publish(RESULTS / "tails.md", text)
    draw(with_seeds(rows, REPORTED))


def draw(rows: list[Row]) -> None:
    """CVaR over mean, a panel a task, with arrows from the neutral policy."""
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    if not tasks:
        return
    figure, axes = common.pyplot().subplots(1, len(tasks), figsize=(3.6 * len(tasks), 3.4))
    axes = np.atleast_1d(axes)
    for number, (axis, task) in enumerate(zip(axes, tasks, strict=True)):
        middles = {}
        for color, variant in zip((common.PEER, common.OURS, common.FLOOR), SHOWN, strict=True):
            x = values(rows, task, variant, "mean")
            y = values(rows, task, variant, "cvar_10")
            if not len(x):
                continue
            middles[variant] = (x.mean(), y.mean())
            bars = {"xerr": half_width(x), "yerr": half_width(y), "fmt": "o"}
            axis.errorbar(x.mean(), y.mean(), color=color, label=variant, **bars)
        for variant in CHOSEN:
            if {variant, "neutral"} <= middles.keys():
                line = {"arrowstyle": "->", "color": "0.5"}
                axis.annotate("", middles[variant], middles["neutral"], arrowprops=line)
        axis.set(xlabel="mean return")
        common.letter(axis, number, task)
    axes[0].set_ylabel("mean of the worst tenth")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    common.save(figure, RESULTS / "tails.png")


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="what is tried, on tuning seeds")
    parser.add_argument("--report", action="store_true", help="only rebuild tables and figure")
    parser.add_argument("--only", nargs="*", default=[], help="words, all to match")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="some of the seeds")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    common.require("matplotlib")
    if not args.report:
        if not args.tune and (found := objection(with_seeds(TABLE.rows(), TUNING))):
            sys.exit(f"error: {found}")
        runs = missing(args.tune, args.only, args.seeds)
        TABLE.record(run_one, runs, args.processes)
    report()


if __name__ == "__main__":
    main()
