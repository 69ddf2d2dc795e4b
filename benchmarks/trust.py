"""Do the critics know when not to be trusted? Robots are changed after training.

    python benchmarks/trust.py --report    # table and figure from the committed CSV alone
    python benchmarks/trust.py             # train what is missing as well

Gravity and friction change step by step, by MuJoCo's own parameters, or noise is added to what the
agent observes. At every level the mode of the policy plays EPISODES episodes, and the critics look
along. (They predict the policy that samples, on both sides of each comparison.) Three things are
looked at:

    return     The return of the episodes, undiscounted.
    low        The first decile of the discounted return that is predicted from a state.
    twins      The distance of the twins' values of a state.

The two signals are looked at in the first STEPS steps of an episode, but not in the last AHEAD
ahead of its end: who is falling already needs no warning. At the same step of unchanged episodes
there is a usual signal, and an episode's own is the mean distance from that.

A signal warns at a level where changed episodes look worse than unchanged ones: where the
probability that a changed episode has the worse signal (the area under the ROC curve) is at least
WARNS. The unchanged ones are EPISODES episodes that open otherwise, so that the unchanged robot
itself is a level like others: a signal that warns of it is of no use. The return has fallen where
it is below FALLEN of that of the unchanged robot in the same episodes, and by more than twice the
standard error of the difference, reckoned as of independent episodes. All these numbers were
written down ahead of the runs. One row of results/trust.csv is one level of one change of one run.

The rows that are kept are of an older preset `mujoco`. Training refuses to stand beside them: take
them out to train all runs anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import common
import numpy as np
from common import CATEGORICAL, RESULTS, Cell, Row, Run, Table

EPISODES = 30
STEPS = 100  # of an episode whose signals count: a warning that comes later comes too late
AHEAD = 20
WARNS = 0.9
FALLEN = 0.9
PLAYED, REFERENCE = 10_000, 20_000  # first seed of what is played; of the unchanged episodes
FLAGS = "--preset mujoco calibrated --compile --eval-episodes 0 --save-envs never"
TASKS = ("Hopper-v5", "HalfCheetah-v5")
CHANGES = {  # levels from the unchanged robot on
    "gravity": (1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0),  # times the usual one
    "friction": (1.0, 0.9, 0.8, 0.6, 0.4, 0.2, 0.1),  # times the usual one
    "noise": (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4),  # in deviations of each sensor
}
COLUMNS = (
    "task", "script", "variant", "seed", "change", "level", "return_mean", "return_std",
    "low_mean", "low_warns", "twins_mean", "twins_warns", "flags", *common.ORIGIN,
)  # fmt: skip
TABLE = Table(RESULTS / "trust.csv", COLUMNS, "\n", (*common.OF_A_RUN, "change", "level"))


class Seen(NamedTuple):
    """What was seen of E episodes. Steps that do not count are masked."""

    returns: np.ndarray  # (E,)
    low: np.ma.MaskedArray  # (E, STEPS)
    twins: np.ma.MaskedArray  # (E, STEPS)


# ------------------------------------------------------------------------------------------- runs
def change_robot(env: Any, change: str, level: float) -> None:
    """Change a robot that was just made."""
    model = env.unwrapped.model
    if change == "gravity":
        model.opt.gravity[2] *= level
    elif change == "friction":
        model.geom_friction[:, 0] *= level


def play(
    script: Any, agent: Any, args: Any, first: int, change: str = "", level: float = 0.0
) -> Seen:
    """Play episodes, the first with this seed, of a robot that is changed, or else as it is."""
    import torch

    env = script.make_env(args)
    change_robot(env, change, level)
    rng = np.random.default_rng(0)
    std = agent.obs_moments.std.numpy() * (level if change == "noise" else 0.0)
    returns = np.zeros(EPISODES)
    low, twins = (np.ma.masked_all((EPISODES, STEPS)) for _ in range(2))
    for episode in range(EPISODES):
        obs, _ = env.reset(seed=first + episode)
        looked = []
        steps = 0
        ended = False
        while not ended:
            obs = (obs + std * rng.standard_normal(obs.shape)).astype(np.float32)
            if len(looked) < STEPS:
                looked.append(obs)
            obs, reward, terminated, truncated, _ = env.step(agent.act(obs))
            returns[episode] += reward
            steps += 1
            ended = terminated or truncated
        counted = min(len(looked), max(1, steps - AHEAD))
        with torch.no_grad():
            batch, _ = agent.as_batch(np.stack(looked[:counted]))
            outputs = agent.value_outputs(batch)
            one, two = agent.value_dist.value(outputs)
            decile = agent.value_dist.quantile(agent.value_dist.reduce_twins(outputs), 0.1)
        low[episode, :counted] = decile.numpy()
        twins[episode, :counted] = (one - two).abs().numpy()
    env.close()
    return Seen(returns, low, twins)


def tells(changed: np.ma.MaskedArray, usual: np.ma.MaskedArray) -> float:
    """How well a signal, (E, STEPS) and worse where larger, tells changed episodes from usual ones:
    the `area` of each episode's mean distance from what is usual at the same step."""
    expected = usual.mean(axis=0)
    far, near = ((signal - expected).mean(axis=1).data for signal in (changed, usual))
    return area(far, near)


def area(worse: np.ndarray, usual: np.ndarray) -> float:
    """The probability that one of `worse` is larger than one of `usual`. Ties count half."""
    pairs = worse[:, None] - usual
    return float((pairs > 0).mean() + 0.5 * (pairs == 0).mean())


def run_one(run: Run) -> list[dict[str, Any]]:
    """Train, and play every level of every change."""
    cell = run.cell
    origin = common.origin()
    script = common.load_script(cell.script)
    with common.trained(script, cell.task, run.seed, cell.flags) as done:
        agent, args = script.load_agent(done.directory)
    rows = []
    usual, unchanged = (play(script, agent, args, first) for first in (REFERENCE, PLAYED))
    for change, levels in CHANGES.items():
        changed = [play(script, agent, args, PLAYED, change, level) for level in levels[1:]]
        for level, seen in zip(levels, [unchanged, *changed], strict=True):
            row = {
                "change": change,
                "level": level,
                "return_mean": seen.returns.mean(),
                "return_std": seen.returns.std(),
                "low_mean": seen.low.mean(),
                "low_warns": tells(-seen.low, -usual.low),
                "twins_mean": seen.twins.mean(),
                "twins_warns": tells(seen.twins, usual.twins),
            }
            row = {name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()}
            same = {**cell.setting._asdict(), "seed": run.seed, "flags": common.spelt_flags(cell)}
            rows.append({**same, **row, **origin})
    return rows


def cells() -> list[Cell]:
    """Two tasks."""
    return [Cell(task, CATEGORICAL, "calibrated", FLAGS, range(8001, 8004)) for task in TASKS]


# ----------------------------------------------------------------------------------------- report
class Onset(NamedTuple):
    """The first level at which something happens, None if at none. 0 is the unchanged robot."""

    returns: int | None  # fall
    low: int | None  # warns
    twins: int | None  # warn


def onset(rows: list[Row]) -> Onset:
    """What happens when in the levels of one change of one run, which are in order."""

    def fallen(row: Row) -> bool:
        (usual, before), (mean, std) = (
            (float(one["return_mean"]), float(one["return_std"])) for one in (rows[0], row)
        )
        error = np.hypot(before, std) / EPISODES**0.5
        return usual - mean > max((1 - FALLEN) * abs(usual), 2 * error)

    def first(happens: list[bool]) -> int | None:
        return happens.index(True) if True in happens else None

    return Onset(
        first([fallen(row) for row in rows]),
        first([float(row["low_warns"]) >= WARNS for row in rows]),
        first([float(row["twins_warns"]) >= WARNS for row in rows]),
    )


def cases(rows: list[Row]) -> Iterator[tuple[str, str, str, list[Row]]]:
    """Task, change, seed, and the rows of each case."""
    for task in TASKS:
        for change in CHANGES:
            own = [row for row in rows if (row["task"], row["change"]) == (task, change)]
            for seed in sorted({row["seed"] for row in own}):
                yield task, change, seed, [row for row in own if row["seed"] == seed]


def in_time(warnings: list[int | None], falls: list[int | None]) -> list[int]:
    """By how many levels warnings come ahead of falls, where they come at that level or earlier. A
    signal that warns of the unchanged robot says nothing."""
    pairs = zip(warnings, falls, strict=True)
    return [fall - warned for warned, fall in pairs if warned and fall and warned <= fall]


def verdict(
    name: str, warnings: list[int | None], falls: list[int | None], robots: list[tuple[str, str]]
) -> str:
    """Tell how often a signal warns at the level of a fall or earlier, how much later than the fall
    it warns in the mean, how often in vain, and of how many unchanged robots.

    `robots` are the task and the seed of each case. Cases of one robot share its unchanged levels.
    """
    early = in_time(warnings, falls)
    pairs = [*zip(warnings, falls, strict=True)]
    vain = sum(bool(warned) for warned, fall in pairs if not fall)
    late = [warned - fall for warned, fall in pairs if warned and fall]
    levels = f", {np.mean(late):+.1f} levels after the fall in the mean of {len(late)}" * bool(late)
    calm = falls.count(None)
    false = {robot for robot, warned in zip(robots, warnings, strict=True) if warned == 0}
    return (
        f"The {name} warns at that level or earlier in {len(early)} of {len(falls) - calm} cases "
        f"of a fall{levels}; in {vain} of {calm} cases without a fall; "
        f"of {len(false)} of {len({*robots})} unchanged robots."
    )


def report() -> None:
    """A table in results/trust.md, and a verdict; the figure in results/trust.png."""
    rows = TABLE.rows()
    lines = [
        f"A robot is changed level by level: gravity and friction in times of the usual, noise in "
        f"standard deviations of each sensor. The return has fallen where it is below {FALLEN} of "
        f"the unchanged robot's, and by more than twice the standard error of the difference. A "
        f"signal warns where a changed episode has the worse one, beside an unchanged episode, "
        f"with a probability of at least {WARNS} (the area under the ROC curve). A signal that is "
        f"better than usual does not warn.",
        "",
        *common.markdown_head(
            "task | change | seed | return falls at | low decile warns at | twins warn at"
        ),
    ]
    onsets = []
    robots = []
    for task, change, seed, own in cases(rows):
        found = onset(own)
        onsets.append(found)
        robots.append((task, seed))
        levels = ["never" if at is None else f"{float(own[at]['level']):g}" for at in found]
        lines.append(common.markdown_row([task, change, seed, *levels]))
    falls, low, twins = ([one[at] for one in onsets] for at in range(3))
    lines += ["", verdict("low decile", low, falls, robots)]
    lines += ["", verdict("twins' disagreement", twins, falls, robots)]
    lines += ["", f"Commit of the scripts, machine: {common.origins(rows)}."]
    flags = " or ".join(f"`{flags}`" for flags in sorted({row["flags"] for row in rows}))
    lines += ["", f"Flags: {flags}."]
    common.publish(RESULTS / "trust.md", lines)
    if rows:
        draw(rows)


def draw(rows: list[Row]) -> None:
    """When the return falls and when the signals warn: a panel for each task and change, a line of
    marks for each seed."""
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    size = (len(tasks), len(CHANGES))
    options = {"figsize": (common.WIDTH, 1.5 * len(tasks) + 0.7), "squeeze": False}
    figure, axes = common.pyplot().subplots(*size, **options)
    marks = (  # what happens, and by how much a mark stands below its line
        ("the return falls", {"color": common.INK, "marker": "|", "ms": 18, "mew": 2}, 0.0),
        ("the first decile warns", {"color": common.OURS, "marker": "o"}, 0.15),
        ("the distance of the twins warns", {"color": common.PEER, "marker": "D"}, -0.15),
    )
    lines = dict.fromkeys(axes.flat, 0)
    for task, change, _, own in cases(rows):
        axis = axes[tasks.index(task)][[*CHANGES].index(change)]
        lines[axis] += 1
        axis.axhline(lines[axis], color="0.9", lw=0.8, zorder=0)
        for at, (label, style, below) in zip(onset(own), marks):
            x = len(own) if at is None else at
            axis.plot(x, lines[axis] + below, ls="none", label=label, **style)
        names = [*(f"{float(row['level']):g}" for row in own), "never"]
        axis.set_xticks(range(len(names)), names, fontsize=7)
        axis.set_xlim(-0.5, len(own) + 0.5)
        axis.set_xlabel("standard deviation" if change == "noise" else f"times its {change}")
    for number, axis in enumerate(axes.flat):
        task, change = tasks[number // len(CHANGES)], [*CHANGES][number % len(CHANGES)]
        common.letter(axis, number, f"{task}, {change}")
        axis.set_ylim(lines[axis] + 0.6, 0.4)
        axis.set_yticks(range(1, lines[axis] + 1), [])
        axis.grid(visible=False)
    for row_of_axes in axes:
        row_of_axes[0].set_ylabel("one run a line")
    handles, labels = axes[0][0].get_legend_handles_labels()
    title = "A warning is in time on its black mark or left of it, and false where that is at never"
    figure.legend(handles[:3], labels[:3], loc="outside lower center", ncols=3, title=title)
    common.save(figure, RESULTS / "trust.png")


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="only rebuild table and figure")
    parser.add_argument("--only", nargs="*", default=[], help="words, all to match")
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=[], help="of the reported seeds these alone"
    )
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    common.require("matplotlib")
    if not args.report:
        common.require("mujoco")
        try:
            common.refuse_other_flags(TABLE.rows(), cells())
        except ValueError as error:
            parser.error(str(error))
        runs = TABLE.without_row(common.runs_of(cells(), args.only))
        runs = [run for run in runs if not args.seeds or run.seed in args.seeds]
        for run, rows in common.run_all(run_one, runs, args.processes):
            TABLE.append(*rows)  # all or none: a run with a row counts as done
            print(run, "done", flush=True)
    report()


if __name__ == "__main__":
    main()
