"""What a distributional critic buys: critics compared on the same tasks, by their own flags alone.

    python benchmarks/critics.py --report                   # table and figure from committed files
    python benchmarks/critics.py --only value_single Ant    # trains rows that are missing

Feed-forward on MuJoCo: HL-Gauss, two-hot, 51 quantiles, scalar, each with twins (their minimum) and
with a single critic; on MinAtar HL-Gauss, 51 quantiles, scalar, with twins. Recurrent: quantiles,
atoms, scalar, with twins. The one difference that seeds 1 to 5 showed on MuJoCo, a single critic of
51 quantiles ahead of a single scalar one, is tried again on seeds 6 to 10. Quantiles in the
feed-forward script and atoms in the recurrent one are those of `compose.py`. The scalar critic is
the quantile script with a single quantile and --kappa 10, whose loss is u^2 / (4 kappa) for errors
below ten standard deviations; V is that output. Adam is blind to the factor but for its epsilon,
and --max-grad-norm is not: gradients 40 times smaller than those of u^2 are clipped less often,
and nobody has measured what that does.

All families but one are of earlier versions, which trained actor and critics together. Their
scalar critics had --vf-coef 10 as well, so their loss was u^2 / 4. No run is added to them, since
today's update would be mixed in.

"MuJoCo, today's scripts" has four critics on four robots, five seeds each. Its scalar critic is
V as an output of its own, trained by half its squared error, so that the loss has the size that
PPO's has. That is `--dist-coef 0`. When its rows were made there was no such flag, and the script's
loss was replaced, with the same numbers to the last bit. Said ahead of the runs: a distributional
critic gains if the interval of its probability of improvement at the end, over the scalar critic of
as many heads, lies above one half, and loses if it lies below. The family is told once all its runs
are there.

"MuJoCo, the script beside itself" asks the same of the feed-forward script alone: its own critics
beside those with `--dist-coef 0`, which changes nothing else. The rule is the same, said ahead of
the runs.

The two do not agree: their five seeds say "likely worse" of the one and leave the other undecided.
So both are asked again on the five seeds that follow, in families that end with "second five". Said
ahead of these runs: each is judged alone, by the same rule. What the first five said counts as
found again only if the second five say it too. The pages then tell the ten seeds together, and the
second five alone. (Single critics have five seeds.)

Runs are kept as `learning.py` keeps them, and those of the defaults are the same. Two scores of a
run: its final evaluation, and the mean of its training returns over all steps. Both count as
(score - low) / (mean of the reference - low): 1 is what the scalar critic gets, on MuJoCo the
single one, else the twins. Reported as Agarwal et al. 2021 ask: interquartile mean over tasks and
seeds, probability of improvement over the scalar critic of as many heads, 95 % intervals by
bootstrap stratified by task; and, ours, the scalar critic's share of runs that end below 0.9 minus
the row's. Intervals take the reference's mean as known, although it comes from as few seeds;
the probability of improvement does not depend on it. The figure has the first two of the final
evaluation. (Their library, rliable 1.2.0, does not import beside pandas 3.)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import common
import learning
import numpy as np
from common import CATEGORICAL, LSTM, LSTM_ATOMS, QUANTILE, RESULTS, Cell, Row

SCALAR = "--num-quantiles 1 --kappa 10 --value-from distribution"  # of the older families
ALONE = " --num-quantiles 1 --dist-coef 0"  # V alone; a script has at least one quantile
TODAY = "MuJoCo, today's scripts"
ONE_FLAG = "MuJoCo, the script beside itself"
SECOND = ", second five"  # what the name of a family that asks again ends with
REPEATS = 10_000  # of the bootstrap
KNOWN = "(reference's mean as known)"  # by an interval


class Critic(NamedTuple):
    """One row of a family: how a script is run to have it."""

    script: str
    variant: str  # in the rows of its runs
    flags: str
    rival: str  # the row of the scalar critic with as many heads
    at_most: int | None = None  # of the family's seeds, the first ones


class Family(NamedTuple):
    """Tasks on which the same critics are compared."""

    tasks: dict[str, str]  # with their flags
    low: dict[str, float]  # return that counts as 0; 0 if a task is not named
    critics: dict[str, Critic]
    reference: str  # the row whose mean counts as 1
    seeds: range  # of older runs, or of today's, from RENEWED on


def feed_forward() -> dict[str, Critic]:
    """Four critics, twins and single."""
    rows = {}
    for heads, flags in (("twins", ""), ("single", " --num-critics 1")):
        rival = f"scalar, {heads}"
        default = "default" if heads == "twins" else "single_critic"
        rows |= {
            f"HL-Gauss, {heads}": Critic(CATEGORICAL, default, flags, rival),
            f"two-hot, {heads}": Critic(
                CATEGORICAL, f"two_hot_{heads}", f" --target-encoding two_hot{flags}", rival
            ),
            f"51 quantiles, {heads}": Critic(
                QUANTILE, f"quantiles_{heads}", f" --num-quantiles 51{flags}", rival
            ),
            rival: Critic(QUANTILE, f"scalar_{heads}", f" {SCALAR}{flags}", ""),
        }
    return rows


RECURRENT = {
    "32 quantiles": Critic(LSTM, "default", "", "scalar"),
    "51 atoms, HL-Gauss": Critic(LSTM_ATOMS, "default", "", "scalar"),
    "scalar": Critic(LSTM, "scalar_twins", f" {SCALAR}", ""),
}
AGAIN = ("51 quantiles, single", "scalar, single")  # on fresh seeds
MINATAR = ("HL-Gauss, twins", "51 quantiles, twins", "scalar, twins")  # ten minutes a run
POPGYM = ("RepeatPreviousEasy", "AutoencodeEasy", "VelocityOnlyCartpoleEasy")
FAMILIES = {
    "MuJoCo": Family(
        tasks={task: learning.MUJOCO for task in learning.ROBOTS[:4]},
        low={},
        critics=feed_forward(),
        reference="scalar, single",
        seeds=range(1, 6),
    ),
    "MuJoCo, fresh seeds": Family(
        tasks={task: learning.MUJOCO for task in learning.ROBOTS[:4]},
        low={},
        critics={name: feed_forward()[name] for name in AGAIN},
        reference="scalar, single",
        seeds=range(6, 11),
    ),
    TODAY: Family(
        tasks={task: learning.MUJOCO for task in learning.ROBOTS[:4]},
        low={},
        critics={
            "HL-Gauss, twins": Critic(CATEGORICAL, "default", "", "scalar, twins"),
            "scalar, twins": Critic(QUANTILE, "value_twins", ALONE, ""),
            "51 quantiles, single": Critic(
                QUANTILE, "today_quantiles_single", learning.SINGLE, "scalar, single", 5
            ),
            "scalar, single": Critic(QUANTILE, "value_single", f"{ALONE} --num-critics 1", "", 5),
        },
        reference="scalar, single",
        seeds=learning.NEW_TEN,
    ),
    ONE_FLAG: Family(
        tasks={task: learning.MUJOCO for task in learning.ROBOTS[:4]},
        low={},
        critics={
            "HL-Gauss, twins": Critic(CATEGORICAL, "default", "", "V alone, twins"),
            "V alone, twins": Critic(CATEGORICAL, "dist_coef_0", " --dist-coef 0", ""),
        },
        reference="V alone, twins",
        seeds=learning.NEW_TEN,
    ),
    "MinAtar": Family(
        tasks={f"envs:MinAtar/{game}-v1": learning.MINATAR for game in learning.GAMES},
        low={},
        critics={name: feed_forward()[name] for name in MINATAR},
        reference="scalar, twins",
        seeds=range(1, 6),
    ),
    "recurrent": Family(
        tasks={
            "PendulumNoVel-v1": learning.PENDULUM_NOVEL,
            "CartPoleNoVel-v1": "",
            **{f"popgym:popgym-{name}-v0": learning.MEMORY for name in POPGYM},
        },
        # about a random policy's; the bound of popgym's returns
        low={"PendulumNoVel-v1": -1200, **{f"popgym:popgym-{name}-v0": -1 for name in POPGYM}},
        critics=RECURRENT,
        reference="scalar",
        seeds=range(1, 11),
    ),
}


def asked_again(title: str, *names: str) -> Family:
    """The family with some of its critics and the last five of its ten seeds."""
    family = FAMILIES[title]
    critics = {name: family.critics[name] for name in names}
    return family._replace(critics=critics, seeds=family.seeds[5:], reference=names[-1])


FAMILIES[TODAY + SECOND] = asked_again(TODAY, "HL-Gauss, twins", "scalar, twins")
FAMILIES[ONE_FLAG + SECOND] = asked_again(ONE_FLAG, "HL-Gauss, twins", "V alone, twins")
OF_TODAY = (TODAY, ONE_FLAG, TODAY + SECOND, ONE_FLAG + SECOND)


def cell_of(family: Family, critic: Critic, task: str) -> Cell:
    """The runs of one row on one task."""
    flags = family.tasks[task] + critic.flags
    seeds = family.seeds[: critic.at_most]
    if seeds.start >= common.RENEWED:
        later = common.first_seed(critic.script, task) - common.RENEWED
        seeds = range(seeds.start + later, seeds.stop + later)
    return Cell(task, critic.script, critic.variant, flags, seeds)


def cells_of(family: Family) -> list[Cell]:
    """The whole grid of a family."""
    return [
        cell_of(family, critic, task) for task in family.tasks for critic in family.critics.values()
    ]


def told() -> dict[str, Family]:
    """The families that a report tells: the older ones, and those of today that are complete."""

    def is_complete(family: Family) -> bool:
        return all(len(rows_of(cell)) == len(cell.seeds) for cell in cells_of(family))

    return {
        title: family
        for title, family in FAMILIES.items()
        if title not in OF_TODAY or is_complete(family)
    }


# ------------------------------------------------------------------------------------------- report
def rows_of(cell: Cell) -> list[Row]:
    """The row of each of the cell's seeds that have run, in their order."""
    return [row for row in learning.rows_of(cell) if int(row["seed"]) in cell.seeds]


def at_the_end(cell: Cell) -> list[float]:
    """Final evaluations."""
    return learning.numbers(rows_of(cell), "return_mean")


def over_the_run(cell: Cell) -> list[float]:
    """Training returns, means over all steps: larger where a run learns sooner or ends higher."""
    return learning.numbers(rows_of(cell), "mean_over_run")


def raw_scores(
    family: Family, measure: Callable[[Cell], list[float]] = at_the_end
) -> dict[str, np.ndarray]:
    """Scores of every row, (seeds, tasks): as many seeds as all tasks of it have; rows without runs
    on all tasks are left out."""
    rows = {}
    for name, critic in family.critics.items():
        columns = [measure(cell_of(family, critic, task)) for task in family.tasks]
        fewest = min(map(len, columns))
        if fewest:
            rows[name] = np.array([column[:fewest] for column in columns]).T
    return rows


def normalised(family: Family, raw: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scores of which 0 is `low` and 1 the reference's mean, of each task."""
    low = np.array([family.low.get(task, 0) for task in family.tasks])
    high = raw[family.reference].mean(0)
    return {name: (scores - low) / (high - low) for name, scores in raw.items()}


# The figures below take scores of shape (..., seeds, tasks) and give one number of each.
def iqm(scores: np.ndarray) -> np.ndarray:
    """Interquartile mean of all runs on all tasks."""
    return learning.iqm(scores.reshape(*scores.shape[:-2], -1))


def improvement(scores: np.ndarray, rival: np.ndarray) -> np.ndarray:
    """Probability that a run has more than one of the rival's on the same task, mean over tasks;
    ties count half. The rival may have another number of seeds."""
    mine, theirs = scores[..., :, None, :], rival[..., None, :, :]
    return ((mine > theirs) + 0.5 * (mine == theirs)).mean((-3, -2, -1))


def resampled(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Many samples of as many seeds, drawn with replacement in each task by itself, (REPEATS,
    seeds, tasks)."""
    rows = rng.integers(len(scores), size=(REPEATS, *scores.shape))
    return scores[rows, np.arange(scores.shape[1])]


class Estimate(NamedTuple):
    """It is a figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def estimate(function: Callable[..., np.ndarray], *samples: np.ndarray) -> Estimate:
    """Return a figure of one sample or two, with its 95 % interval, stratified by task."""
    rng = np.random.default_rng(0)
    draws = function(*(resampled(scores, rng) for scores in samples))
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(float(function(*samples)), float(low), float(high))


def fewer_low(scores: np.ndarray, rival: np.ndarray) -> Estimate:
    """By how much the share of runs that end below 0.9 is smaller than the rival's."""
    low, rivals = ((int((own < 0.9).sum()), own.size) for own in (scores, rival))
    return Estimate(*common.difference_of_shares(low, rivals))


def beside(
    function: Callable[..., np.ndarray], scores: dict[str, np.ndarray], name: str, family: Family
) -> Estimate | None:
    """A figure of a row beside its scalar rival, with its interval; nothing for the rival."""
    rival = scores.get(family.critics[name].rival)
    return None if rival is None else estimate(function, scores[name], rival)


def short(task: str) -> str:
    """A task without the modules that register it."""
    return task.split(":")[-1].split("/")[-1].removeprefix("popgym-")


def brief(score: float) -> str:
    """A return in few digits."""
    return f"{score:.0f}" if abs(score) > 100 else f"{score:.2f}"


def table(title: str, family: Family) -> list[str]:
    """A line for every critic that has run on all tasks of a family."""
    raw = raw_scores(family)
    ends = normalised(family, raw)
    measured = (ends, normalised(family, raw_scores(family, over_the_run)))
    lines = common.markdown_head(
        f"{title} | seeds | {' | '.join(map(short, family.tasks))} | IQM at the end {KNOWN} "
        f"| better than scalar | IQM over the run {KNOWN} | better than scalar "
        f"| ends below 0.9 | fewer by {KNOWN} | commits"
    )
    for name in raw:
        means = map(brief, raw[name].mean(0))
        figures = []
        for scores in measured:
            figures.append(estimate(iqm, scores[name]))
            figures.append(beside(improvement, scores, name, family) or "-")
        figures.append(f"{(ends[name] < 0.9).sum()} of {ends[name].size}")
        rival = ends.get(family.critics[name].rival)
        figures.append("-" if rival is None else fewer_low(ends[name], rival))
        cells = [cell_of(family, family.critics[name], task) for task in family.tasks]
        figures.append(common.origins([row for cell in cells for row in rows_of(cell)], ["commit"]))
        lines.append(common.markdown_row([name, len(raw[name]), *means, *figures]))
    return lines


def published(title: str, family: Family) -> list[str]:
    """Every critic on MuJoCo beside published scores."""
    lines = [f"{title}, beside published scores:", ""]
    for name, scores in raw_scores(family).items():
        told = learning.over_published(dict(zip(family.tasks, scores.T.tolist())))
        lines.append(f"* {name}: {told}")
    return lines


def lost(title: str, family: Family) -> list[str]:
    """The returns at the end that count as less than 0.9, of every critic."""
    raw = raw_scores(family)
    lines = [f"{title}, below 0.9 at the end:", ""]
    for name, scores in normalised(family, raw).items():
        told = []
        for task, returns, column in zip(family.tasks, raw[name].T, scores.T):
            low = " ".join(map(brief, returns[column < 0.9]))
            told += [f"{short(task)} {low}"] if low else []
        lines.append(f"* {name}: {'; '.join(told) or 'none'}")
    return lines


# of the figure, from above
ORDER = ("recurrent", TODAY, ONE_FLAG, "MuJoCo", "MuJoCo, fresh seeds", "MinAtar")


class Line(NamedTuple):
    """One line of the forest is a family's head, or a critic with its figures."""

    text: str
    head: bool = False
    default: bool = False  # of its script
    end: Estimate | None = None
    better: Estimate | None = None


def forest_lines(title: str, family: Family) -> list[Line]:
    """Return the head of a family and a line for every critic that has run on all its tasks."""
    scores = normalised(family, raw_scores(family))
    seeds = " and ".join(str(n) for n in sorted({len(own) for own in scores.values()}))
    lines = [Line(f"{title}: {len(family.tasks)} tasks, {seeds} seeds", head=True)]
    for name, own in scores.items():
        critic = family.critics[name]
        better = beside(improvement, scores, name, family)
        default = critic.variant == "default" and critic.script in (LSTM, CATEGORICAL)
        lines.append(Line(name, False, default, estimate(iqm, own), better))
    return lines


def draw_estimate(panel: Any, place: int, line: Line, shown: Estimate) -> None:
    """Draw a point with its interval, and write both at the right edge."""
    colour = common.OURS if line.better else common.FLOOR
    fill = colour if line.default or not line.better else "white"
    panel.plot((shown.low, shown.high), (place, place), "|-", color=colour, ms=6)
    panel.plot(shown.value, place, "o", color=colour, mfc=fill, ms=5)
    at_edge = panel.get_yaxis_transform()
    panel.text(1.02, place, str(shown), transform=at_edge, va="center", fontsize=6.5)


def draw(families: dict[str, Family]) -> None:
    """Draw what each critic reaches at the end, and its probability to be better than the scalar
    one. A critic has a line, with 95 % intervals."""
    plt = common.pyplot()
    names = sorted(families, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    lines = [line for name in names for line in forest_lines(name, families[name])]
    size = (common.WIDTH, 0.21 * len(lines) + 1.3)
    figure, (ends, better) = plt.subplots(1, 2, figsize=size, sharey=True)
    for place, line in enumerate(lines):
        if line.head:
            for panel in (ends, better):
                panel.axhspan(place - 0.5, place + 0.5, color="#F3F3F3", lw=0)
            continue
        draw_estimate(ends, place, line, line.end)
        if line.better:
            draw_estimate(better, place, line, line.better)
    for panel, middle in ((ends, 1), (better, 0.5)):
        panel.axvline(middle, color=common.INK, lw=0.8, ls="--", zorder=1)
        panel.grid(axis="y", visible=False)
        panel.tick_params(axis="y", length=0)
    common.letter(ends, 0, "interquartile mean of the final scores")
    common.letter(better, 1, "probability of a better end than the scalar critic")
    ends.set(xlabel="score; 1: mean of the reference, a scalar critic")
    better.set(xlabel="probability of improvement; 0.5: a tie", xlim=(0, 1))
    ends.set_yticks(range(len(lines)), [line.text for line in lines])
    ends.set_ylim(len(lines) - 0.4, -0.6)
    for label, line in zip(ends.get_yticklabels(), lines):
        label.set_fontweight("bold" if line.head else "normal")
    looks = (
        {"mfc": common.OURS, "color": common.OURS, "label": "distributional, the script's default"},
        {"mfc": "white", "color": common.OURS, "label": "distributional, other"},
        {"mfc": common.FLOOR, "color": common.FLOOR, "label": "scalar"},
    )
    handles = [plt.Line2D([], [], marker="o", **look) for look in looks]
    title = f"Bars: 95 % intervals, bootstrap over seeds by task {KNOWN}. "
    newer = [str(names.index(name) + 1) for name in OF_TODAY if name in families]
    others = f" but those of group{'s' * (len(newer) > 1)} {' and '.join(newer)}" if newer else ""
    title += f"Twins, single: two critics or one. All runs{others} are older ones"
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3, title=title, title_fontsize=7.5
    )
    common.save(figure, RESULTS / "critics.png")


HEAD = """\
Each table is a family of critics on the tasks that it names. Below a task's name stands the mean
return at the end. A score is (return - low) / (reference - low), where the reference is the mean of
a scalar critic; 1 is as good as that one. The columns:

* IQM at the end: the interquartile mean of the scores of all runs on all tasks, of their final
  evaluations.
* IQM over the run: the same of the mean of all training returns, so that fast learning counts.
* Better than scalar: the probability that a run has the higher score than one of the scalar critic
  with as many heads. A tie is 0.5.
* Ends below 0.9: runs whose final score is below 0.9. The lists below a table tell their returns.
* Fewer by: the scalar critic's share of such runs minus the row's. Above 0 fewer runs are lost.

Brackets are 95 % intervals. Those of the IQM and of "fewer by" take the reference's mean as known.
"""


def report() -> None:
    """Tables in results/critics.md and on the terminal, the figure in results/critics.png."""
    lines = [HEAD]
    for title, family in told().items():
        lines += [*table(title, family), "", *lost(title, family), ""]
        if title.startswith("MuJoCo"):
            lines += [*published(title, family), ""]
    common.publish(RESULTS / "critics.md", lines[:-1])
    draw({title: family for title, family in told().items() if not title.endswith(SECOND)})


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="only rebuild table and figure")
    parser.add_argument("--only", nargs="*", default=[], help="words, all to match")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="seeds to run")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    common.require("matplotlib")
    if not args.report:
        try:
            cells = [cell for title in OF_TODAY for cell in cells_of(FAMILIES[title])]
            runs = learning.missing(list(dict.fromkeys(cells)), args.only, args.seeds)
        except ValueError as error:
            parser.error(str(error))
        learning.run_missing(runs, args.processes)
    report()


if __name__ == "__main__":
    main()
