"""The numbers of README.md in this folder, each line made from the committed rows.

    python benchmarks/answers.py            # print every line that has a number, by section
    python benchmarks/answers.py --check    # say which of them the pages lack
    python benchmarks/answers.py --write    # put each where its page has the line most like it

Pages are README.md, and tuning.md and scaling.md for a few lines.

Sentences are templates here, and their numbers come from the files in results/: nothing is trained,
and a minute is enough. Intervals are of 95 %: of a mean by Student's t, of a difference of means by
Welch's, of what pools tasks by the stratified bootstrap of critics.py, whose seed is fixed. Ratios
of speeds have their lowest and highest repeat instead. What others have published is in
results/published.csv.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import calibration
import common
import critics
import learning
import numpy as np
import risk
import scaling
import speed
import truth
from common import CATEGORICAL, HERE, LSTM, QUANTILE, RESULTS, Row, Setting, Table
from learning import CONTRIB, SB3

PUBLISHED = Table(
    RESULTS / "published.csv",
    ("task", "source", "kind", "steps", "value", "spread", "note"),
    end="\n",
)
VERSIONS = Table(RESULTS / "versions.csv", ())
ZOO = "rl-baselines3-zoo"
LINKS = {
    ZOO: "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md",
    f"{ZOO}, recurrent PPO": "https://huggingface.co/sb3",
    "CleanRL": "https://docs.cleanrl.dev/rl-algorithms/ppo/",
    "XuanCe": "https://github.com/agi-brain/xuance",
    "Tianshou": "https://github.com/thu-ml/tianshou",
    "sb3-contrib": "https://sb3-contrib.readthedocs.io/en/master/modules/trpo.html",
    "gymnax-blines": "https://github.com/RobertTLange/gymnax-blines",
    "purejaxrl and CleanRL": "https://github.com/luchris429/purejaxrl",
}
FOUR = learning.ROBOTS[:4]
# Versions whose rows are older than the change that trains actor and critics apart
OLDER = set(
    "05a2e0e 0638f78 0c6db89 206e088 3225bcd 53c3ca7 56f7808 5dd7f7d 5f12089 6bb163d 7183ee1 "
    "727d41f 77bac21 7c79f30 81affa6 87fee18 939b861 93f71a4 9dce3c1 a688101 b13db0f b2499f7 "
    "b3e6820 b471efa bd9c57f d5b195a e4b91c8 eb6e91e fcee966 ff5f4c3".split()
)
JOINT = "4359cde"  # the last version of that kind
APART = {  # the version to compare with it, by task; the presets of today
    "CartPole-v1": "6fae19e",
    "CartPoleNoVel-v1": "6fae19e",
    "PendulumNoVel-v1": "6fae19e",
    "HalfCheetah-v5": "bcab7a2",
    "Hopper-v5": "bcab7a2",
}


# --------------------------------------------------------------------------------------- statistics
def student(freedom: float) -> float:
    """The quantile at 0.975 of Student's t. With t = sqrt(freedom) tan(a) the density of the angle
    is proportional to cos(a)^(freedom - 1)."""
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(np.interp(0.95, mass / mass[-1], angles))


def half_width(scores: np.ndarray) -> float:
    """Half of the interval of a mean over seeds."""
    return student(len(scores) - 1) * float(scores.std(ddof=1)) / math.sqrt(len(scores))


class Difference(NamedTuple):
    """Of two means, with its interval."""

    mean: float
    low: float
    high: float

    def told(self, digits: int = 0) -> str:
        """In words, with the sign."""
        return f"{self.mean:+.{digits}f} ({self.low:+.{digits}f} to {self.high:+.{digits}f})"


def welch(after: np.ndarray, before: np.ndarray) -> Difference:
    """Of the mean of `after` from that of `before`, spreads and numbers of seeds their own."""
    parts = [scores.var(ddof=1) / len(scores) for scores in (after, before)]
    mean = float(after.mean() - before.mean())
    error = sum(parts)
    if error == 0:
        return Difference(mean, mean, mean)
    terms = [part**2 / (len(s) - 1) for part, s in zip(parts, (after, before))]
    half = student(error**2 / sum(terms)) * math.sqrt(error)
    return Difference(mean, mean - half, mean + half)


def bare(told: str) -> str:
    """A figure and its interval without brackets, to stand in brackets."""
    return told.replace(" (", ", ").removesuffix(")")


# --------------------------------------------------------------------------------------------- rows
def scores(script: str, task: str, variant: str = "default") -> np.ndarray:
    """Final evaluations of the seeds of a cell of learning.py, in the order of the seeds."""
    return np.array(learning.scores_of(learning.cell_of(script, task, variant)))


def by_task(script: str, variant: str, seeds: slice = slice(None)) -> np.ndarray:
    """Final evaluations on the four robots with ten seeds, (seeds, tasks)."""
    return np.array([scores(script, task, variant)[seeds] for task in FOUR]).T


def published(task: str, source: str, kind: str = "PPO") -> Row | None:
    """What a project has published of a task, if anything."""
    return next(
        (
            row
            for row in PUBLISHED.rows()
            if (row["task"], row["source"], row["kind"]) == (task, source, kind)
        ),
        None,
    )


def versions_scores(version: str, task: str) -> dict[int, float]:
    """Final evaluations by tuning seed of a whole version of the scripts."""
    return {
        int(row["seed"]): float(row["return_mean"])
        for row in VERSIONS.rows()
        if (row["version"], row["task"]) == (version, task)
    }


def figure(value: float, size: float | None = None) -> str:
    """A return in few digits, as many as another one of that size has."""
    size = abs(value if size is None else size)
    return f"{value:.{0 if size >= 1000 else 1 if size > 10 else 2}f}"


def short_steps(steps: float) -> str:
    """100k or 1M."""
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps / 1e3:g}k"


def name_of(source: str) -> str:
    """A project as the tables call it."""
    return "zoo" if source == ZOO else source


# -------------------------------------------------------------------------------------------- tasks
class Line(NamedTuple):
    """One line of the table of tasks."""

    task: str  # as learning.py calls it
    script: str
    peer: str = SB3
    variant: str = "default"  # of the peer


LINES = [
    *[
        Line(task, LSTM, CONTRIB, "zoo")
        for task in ("CartPoleNoVel-v1", "PendulumNoVel-v1", "MountainCarContinuousNoVel-v0")
    ],
    *[
        Line(task, CATEGORICAL)
        for task in ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "LunarLander-v3")
    ],
    *[Line(task, CATEGORICAL) for task in (*learning.ROBOTS, "Swimmer-v5")],
    *[
        Line(f"envs:MinAtar/{game}-v1", CATEGORICAL, variant="same_flags")
        for game in learning.GAMES
    ],
]


def measured(script: str, task: str, variant: str = "default") -> str:
    """Mean, interval and number of seeds; "-" where nothing has run."""
    try:
        own = scores(script, task, variant)
    except StopIteration:  # no such cell
        return "-"
    size = abs(own).max()
    return f"{figure(own.mean(), size)} ± {figure(half_width(own), size)} ({len(own)})"


def known(row: Row | None, steps: int) -> str:
    """A published value, with its steps where they are others than ours."""
    if row is None:
        return "-"
    told = "" if int(row["steps"]) == steps else f" at {short_steps(int(row['steps']))}"
    return f"{row['value']}{told}"


def best(task: str, steps: int) -> str:
    """The highest published value of an on-policy method, not beyond 2M steps, and whose it is."""
    rows = [row for row in PUBLISHED.rows() if row["task"] == task]
    rows = [row for row in rows if int(row["steps"]) <= 2_000_000]
    if not rows:
        return "-"
    top = max(rows, key=lambda row: float(row["value"]))
    kind = " TRPO" if top["kind"] == "TRPO" else ""
    return f"{known(top, steps)}, {name_of(top['source'])}{kind}"


def tasks_table() -> list[str]:
    """Ours beside others, a line a task."""
    lines = common.markdown_head(
        "task, steps | ours | worst | one quantile critic | peer, run here | zoo | CleanRL "
        "| best published"
    )
    for task, script, peer, variant in LINES:
        cell = learning.cell_of(script, task, "default")
        name = learning.name_of(cell)
        steps = int(learning.rows_of(cell)[0]["steps"])
        own = scores(script, task)
        kind = "recurrent PPO" if script == LSTM else "PPO"
        columns = [
            f"{name}, {short_steps(steps)}",
            measured(script, task),
            figure(own.min(), abs(own).max()),
            measured(QUANTILE, task, "quantiles_single"),
            measured(peer, task, variant),
            known(published(name, ZOO, kind), steps),
            known(published(name, "CleanRL"), steps),
            best(name, steps),
        ]
        lines.append(common.markdown_row(columns))
    return lines


def sources() -> list[str]:
    """Whose the published values are and how they were measured, a line each."""
    told = {}
    for row in PUBLISHED.rows():
        told.setdefault((row["source"], row["kind"]), row["note"])
    lines = []
    for (source, kind), note in told.items():
        link = LINKS.get(f"{source}, {kind}") or LINKS[source]
        lines.append(f"* [{source}]({link}), {kind}: {note}.")
    return lines


def over(source: str, tasks: Iterable[str], of: Callable[[str], Iterable[float]]) -> np.ndarray:
    """Ratios of every seed to a project's published value, (seeds, tasks)."""
    columns = [np.array(of(task)) / float(published(task, source)["value"]) for task in tasks]
    fewest = min(map(len, columns))
    return np.array([column[:fewest] for column in columns]).T


def mean(ratios: np.ndarray) -> float:
    """Over seeds and tasks."""
    return float(ratios.mean())


def over_zoo() -> str:
    """The one MuJoCo line over the zoo's values, mean of four tasks."""
    ratios = over(ZOO, FOUR, lambda task: scores(CATEGORICAL, task))
    return critics.estimate(mean, ratios)


def over_cleanrl(of: Callable[[str], Iterable[float]]) -> str:
    """The same over CleanRL's on the three of the four that it reports: interquartile mean."""
    tasks = [task for task in FOUR if published(task, "CleanRL")]
    return critics.estimate(critics.iqm, over("CleanRL", tasks, of))


def last_returns(task: str) -> list[float]:
    """Training returns of the last twentieth of the steps of every seed of the default."""
    return learning.last_returns_of(learning.cell_of(CATEGORICAL, task, "default"))


def pairs(tasks: Iterable[str], script: str, peer: str, variant: str) -> dict[str, Difference]:
    """Ours minus the peer's mean of each task, with its interval."""
    return {
        critics.short(task): welch(scores(script, task), scores(peer, task, variant))
        for task in tasks
    }


def popgym() -> dict[str, Difference]:
    """Ours minus RecurrentPPO at equal wall time, by task."""
    tasks = [f"popgym:popgym-{name}-v0" for name in learning.POPGYM]
    return pairs(tasks, LSTM, CONTRIB, "equal_time")


def minatar() -> dict[str, Difference]:
    """Ours minus SB3's PPO at equal steps, by game."""
    tasks = [f"envs:MinAtar/{game}-v1" for game in learning.GAMES]
    return pairs(tasks, CATEGORICAL, SB3, "same_flags")


def won(differences: dict[str, Difference]) -> str:
    """On how many tasks the mean is at least the peer's."""
    return f"{sum(one.mean >= 0 for one in differences.values())} of {len(differences)}"


def clearly(differences: dict[str, Difference]) -> str:
    """On how many the interval of the difference lies above 0, and on how many below."""
    above = sum(one.low > 0 for one in differences.values())
    below = sum(one.high < 0 for one in differences.values())
    above, below = (count or "none" for count in (above, below))
    return f"the interval of the difference is above 0 on {above} and below it on {below}"


def behind(differences: dict[str, Difference]) -> str:
    """The tasks on which it is not."""
    names = [
        task.removesuffix("-v0").removesuffix("-v1")
        for task, one in differences.items()
        if one.mean < 0
    ]
    return " and ".join([", ".join(names[:-1]), *names[-1:]]) if len(names) > 1 else names[0]


def tasks_notes() -> list[str]:
    """What the table of tasks does not say, a line each."""
    novel = scores(LSTM, "CartPoleNoVel-v1")
    blind = scores(LSTM, "CartPoleNoVel-v1", "no_memory")
    steps = [
        int(row["steps"])
        for name in learning.POPGYM
        for row in learning.rows_of(
            learning.cell_of(CONTRIB, f"popgym:popgym-{name}-v0", "equal_time")
        )
    ]
    lander = scores(CATEGORICAL, "LunarLander-v3").mean()
    trained = np.mean(last_returns("LunarLander-v3"))
    games, quiz = minatar(), popgym()
    return [
        f"* **Memory is used.** With the LSTM's state zeroed at every step CartPoleNoVel-v1 ends "
        f"at {blind.mean():.1f} instead of {novel.mean():.1f}.",
        f"* **POPGym Easy**: on {won(quiz)} memory tasks the recurrent script has at least "
        f"sb3-contrib's mean with equal flags and wall time, in which sb3-contrib makes "
        f"{min(steps):,} to {max(steps):,} of our 500,000 steps ({clearly(quiz)}). "
        f"It is behind on {behind(quiz)}.",
        f"* **MinAtar**: on {won(games)} games the feed-forward script has at least the mean of "
        f"SB3's PPO with equal flags and steps ({clearly(games)}). It is "
        f"behind on {behind(games)}.",
        f"* **Training returns** are what CleanRL reports. Evaluations by the mode are "
        f"{over_cleanrl(lambda task: scores(CATEGORICAL, task))} times as much on its three tasks.",
        f"* **LunarLander-v3** lands by the mode ({lander:.1f}), but the entropy bonus keeps "
        f"training returns at {trained:.0f}. `--ent-coef-final 0` ends that "
        f"([tuning](tuning.md#other-tasks)).",
    ]


# ------------------------------------------------------------------------------------------ critics
class Contest(NamedTuple):
    """A row of critics.py beside its scalar rival."""

    family: str
    name: str
    told: str


CONTESTS = [
    Contest("recurrent", "32 quantiles", "recurrent tasks, twins of 32 quantiles"),
    Contest("MuJoCo", "HL-Gauss, twins", "MuJoCo, twins of 51 atoms (the default)"),
    Contest("MuJoCo", "51 quantiles, single", "MuJoCo, one critic of 51 quantiles"),
    Contest("MuJoCo, fresh seeds", "51 quantiles, single", "the same, fresh seeds"),
    Contest("MinAtar", "HL-Gauss, twins", "MinAtar, twins of 51 atoms (the default)"),
    Contest("MinAtar", "51 quantiles, twins", "MinAtar, twins of 51 quantiles"),
]


class Verdict(NamedTuple):
    """What a contest came to."""

    at_the_end: str  # probability of improvement
    over_the_run: str
    low: tuple[int, int]  # runs below 0.9 and runs, of the distributional critic
    rivals: tuple[int, int]
    fewer: str  # by how much the share of low runs is smaller


def verdict(contest: Contest) -> Verdict:
    """From the committed runs."""
    family = critics.FAMILIES[contest.family]
    rival = family.critics[contest.name].rival
    ends = critics.normalised(family, critics.raw_scores(family))
    runs = critics.normalised(family, critics.raw_scores(family, critics.over_the_run))

    def low(name: str) -> tuple[int, int]:
        return int((ends[name] < 0.9).sum()), ends[name].size

    mine, theirs = ends[contest.name], ends[rival]
    return Verdict(
        critics.estimate(critics.improvement, mine, theirs),
        critics.estimate(critics.improvement, runs[contest.name], runs[rival]),
        low(contest.name),
        low(rival),
        critics.estimate(critics.fewer_low, mine, theirs),
    )


def critics_table(verdicts: dict[Contest, Verdict]) -> list[str]:
    """Distributional beside scalar critics, a line a contest."""
    lines = common.markdown_head(
        "critic | better than a scalar one, at the end | over the run | low runs | scalar | "
        "share smaller by"
    )
    for contest, found in verdicts.items():
        low = [f"{count} of {runs}" for count, runs in (found.low, found.rivals)]
        columns = [contest.told, found.at_the_end, found.over_the_run, *low, found.fewer]
        lines.append(common.markdown_row(columns))
    return lines


def critics_notes(verdicts: dict[Contest, Verdict]) -> list[str]:
    """The verdict, and what speaks against it."""
    found = verdicts[CONTESTS[3]]
    pendulum = critics.FAMILIES["recurrent"].low["PendulumNoVel-v1"]
    return [
        f"A score of 1 is the scalar critic's mean on a task, and 0 a return of 0 ({pendulum} on "
        f"PendulumNoVel-v1, about a random policy's; -1 on POPGym, the lowest). A low run ends "
        f"below 0.9.",
        f"**Verdict: for the mean nothing is shown, and low runs are perhaps fewer.** One interval "
        f"on MuJoCo left 0.5 out. It was tried again on fresh seeds, where that interval alone was "
        f"to count, and came to {found.at_the_end}. The line at 0.9 was drawn after the first runs "
        f"had been seen.",
    ]


def over_default(seeds: slice) -> str:
    """Score of one quantile critic over the default's, mean of the ratios of four tasks."""

    def ratio(ours: np.ndarray, default: np.ndarray) -> float:
        return float((ours.mean(0) / default.mean(0)).mean())

    chosen = by_task(QUANTILE, "quantiles_single", seeds)
    return critics.estimate(ratio, chosen, by_task(CATEGORICAL, "default", seeds))


def mujoco_lines() -> list[str]:
    """Which settings to take."""
    singles = {
        task: welch(scores(QUANTILE, task, "quantiles_single"), scores(CATEGORICAL, task))
        for task in FOUR
    }
    told = ", ".join(f"{task} {one.told()}" for task, one in singles.items())
    return [
        f"* **One critic of 51 quantiles** is the same flags with another distribution. The means "
        f"of ten seeds each differ from the default's by: {told}.",
        f"* **It was chosen** among eight critics on seeds 1 to 5. On seeds 6 to 10 alone its "
        f"score is {over_default(slice(5, None))} times the default's.",
    ]


# -------------------------------------------------------------------------------------------- speed
class Cell(NamedTuple):
    """A line of the table of speed."""

    name: str  # of speed.py
    mine: str  # program
    peer: str  # "" is SB3's PPO or RecurrentPPO with as many threads as suit it
    told: str


CELLS = [
    Cell("recurrent", "ours", "", "recurrent, 8 environments, LSTM 128"),
    Cell("recurrent", "ours-1core", "sb3-1core", "the same on one core"),
    Cell("recurrent-episodes20", "ours", "", "episodes of 20 steps"),
    Cell("cartpole", "ours", "", "feed-forward, CartPole-v1"),
    Cell("cheetah-8x256", "ours", "", "HalfCheetah-v5, 8 environments"),
    Cell("cheetah-8x256", "compiled", "", "the same with `--compile`"),
    Cell("cheetah-8x256", "ours", "cleanrl", "without it, beside CleanRL"),
    Cell("cheetah-1x2048", "compiled", "", "1 environment, with `--compile`"),
    Cell("minatar", "ours", "", "MinAtar Breakout, convolutions"),
    Cell("pong", "ours", "", "Pong, 84 x 84 x 4"),
    Cell("pong-recurrent", "ours", "", "Pong, recurrent"),
]


def picked() -> dict[str, speed.Programs]:
    """Rows of each cell's newest version, one torch thread."""
    return speed.pick(Table(RESULTS / "speed.csv", speed.COLUMNS).rows(), "1")


class Pace(NamedTuple):
    """Steps per second of ours and of a peer."""

    ours: float
    peer: float
    ratio: str  # with the lowest and highest of a repeat
    repeats: int
    versions: set[str]


def pace(cell: Cell) -> Pace:
    """Of one line."""
    rows = picked()[cell.name]
    peer = cell.peer or speed.peer(rows)
    ratio = speed.compare(rows, peer, cell.mine).replace(", ", " to ")
    mine = rows[cell.mine]
    commits = {row["commit"] for row in mine}
    return Pace(speed.middle(mine), speed.middle(rows[peer]), ratio, len(mine), commits)


def speed_table() -> list[str]:
    """Steps per second beside peers, a line a cell."""
    lines = common.markdown_head("work | ours | peer | ratio | repeats | older")
    for cell in CELLS:
        found = pace(cell)
        older = "yes" if found.versions & OLDER else "no"
        speeds = [f"{found.ours:,.0f}", f"{found.peer:,.0f}"]
        columns = [cell.told, *speeds, found.ratio, found.repeats, older]
        lines.append(common.markdown_row(columns))
    return lines


def slow() -> str:
    """What --async-envs gains for slow simulators, by the newest rows."""
    rows = [row for row in scaling.TABLE.rows() if row["kind"] == "slow"]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    ways = [scaling.values(rows, rows[0]["cell"], way) for way in ("async", "sync")]
    return scaling.ratio(ways[0] / ways[1]).replace(", ", " to ")


def speed_notes() -> list[str]:
    """What the table of speed does not say, a line each."""
    cells = picked()
    waits = {line[1].split(",")[0]: line for line in speed.waiting_lines()}
    ours, theirs = waits[LSTM], waits[CONTRIB]
    memory = {
        cell: [speed.middle(cells[cell][program], "peak_mb") for program in ("ours", "sb3")]
        for cell in speed.GRID
    }
    gaps = {cell: mine - peer for cell, (mine, peer) in memory.items()}
    most = max(gaps, key=gaps.get)
    compiled = [
        speed.compare(cells[cell], "ours", "compiled").replace(", ", " to ")
        for cell in ("cheetah-1x2048", "cheetah-8x256", "minatar")
    ]
    return [
        f"* **To a solved task.** The median recurrent run has learnt CartPoleNoVel-v1 after "
        f"{ours[2]} steps and {ours[3]} seconds, sb3-contrib's with the zoo's flags after "
        f"{theirs[2]} steps and {theirs[3]} seconds.",
        f"* **`--compile`** makes the feed-forward script {compiled[0]} and {compiled[1]} times as "
        f"fast on HalfCheetah-v5 with one and eight environments, and {compiled[2]} times on "
        f"MinAtar, whose convolutions it cannot help.",
        f"* **Slow simulators.** With `--async-envs` eight environments of 1 ms a step run "
        f"{slow()} times as fast on two cores.",
        f"* **Memory.** The peak is below the peer's in {sum(gap < 0 for gap in gaps.values())} of "
        f"{len(gaps)} cells; the largest excess is {gaps[most]:.0f} MB ({most}).",
    ]


def kept_memory() -> list[str]:
    """What keeping freed memory gains with many environments; a line of scaling.md."""
    cells = picked()["growth-num_envs-256"]
    speeds = [f"{speed.middle(cells[program]):,.0f}" for program in ("kept", "ours")]
    return [
        f"* With hundreds of environments glibc gives memory back after every large tensor and "
        f"gets it again. With `MALLOC_MMAP_THRESHOLD_=1000000000 "
        f"MALLOC_TRIM_THRESHOLD_=1000000000` ahead of the command 256 environments run at "
        f"{speeds[0]} instead of {speeds[1]} steps a second."
    ]


def scaling_line() -> list[str]:
    """What two processes gain."""
    rows = [row for row in scaling.TABLE.rows() if row["kind"] != "slow"]
    rows = scaling.newest(rows[-1]["commit"])
    told = {}
    for cell in scaling.CELLS:
        one, two = (scaling.values(rows, cell.name, how) for how in (1, 2))
        told[cell.name] = scaling.ratio(two / one).replace(", ", " to ")
    return [
        f"`torchrun` shares the environments of one run out over processes. Two of them on two "
        f"cores are {told['feed-forward Humanoid-v5 64']} times as fast as one with 64 Humanoids "
        f"and "
        f"{told['feed-forward CartPole-v1 16']} times with 16 CartPoles: it pays where the "
        f"simulator is what a run waits for. [Scaling](scaling.md) has the other cells and the "
        f"cost of an all-reduce."
    ]


# --------------------------------------------------------------------------------------------- risk
WEIGHTS = {
    "neutral": "`--cvar-weight 0`",
    "weight 0.5": "`--cvar-weight 0.5`",
    "weight 1": "`--cvar-weight 1`",
}


def risky(task: str, script: str, variant: str, column: str) -> str:
    """Mean over seeds and half of its interval."""
    rows = common.by_setting(risk.TABLE.rows())[Setting(task, script, variant)]
    middle, half = risk.estimate(rows, column)
    return f"{middle:.1f} ± {half:.1f}"


def risk_table() -> list[str]:
    """The price of a tail on the road."""
    lines = common.markdown_head(
        "the road | feed-forward: mean | worst tenth | recurrent: mean | worst tenth"
    )
    for variant, flag in WEIGHTS.items():
        columns = [
            risky("road", script, variant, column)
            for script in (CATEGORICAL, LSTM)
            for column in ("mean", "cvar")
        ]
        lines.append(common.markdown_row([flag, *columns]))
    return lines


def risk_notes() -> list[str]:
    """Lottery and cliff."""
    groups = common.by_setting(risk.TABLE.rows())

    def chances(variant: str) -> list[float]:
        return [
            float(row["risky"])
            for script in (CATEGORICAL, LSTM)
            for row in groups[Setting("lottery", script, variant)]
        ]

    tails = [
        [risky("cliff", script, variant, "cvar") for variant in ("neutral", "weight 1")]
        for script in (CATEGORICAL, LSTM)
    ]
    best = risk.cliff_optima()
    return [
        f"* **A lottery of one step.** Neutral policies take the risky arm with a probability of "
        f"at least {min(chances('neutral')):.3f}, those with `--cvar-weight 0.5` of at most "
        f"{max(chances('weight 0.5')):.3f}.",
        f"* **A slippery cliff.** By dynamic programming the best mean ({best.mean:.1f}) comes "
        f"with the best tail ({best.its_cvar:.1f}). `--cvar-weight 1` worsens the worst tenth from "
        f"{tails[0][0]} to {tails[0][1]} (feed-forward) and from {tails[1][0]} to {tails[1][1]} "
        f"(recurrent), since policies then wait at the start.",
    ]


# -------------------------------------------------------------------------------------- calibration
REAL = tuple(calibration.REAL)


def coverage(task: str, script: str, variant: str) -> np.ndarray:
    """Error of the deciles' coverage of each seed."""
    rows = common.by_setting(calibration.TABLE.rows())[Setting(task, script, variant)]
    return np.array([float(row["coverage"]) for row in rows])


def within(errors: np.ndarray) -> str:
    """Mean error, and how many seeds have at most 0.05."""
    return f"{errors.mean():.3f} ({(errors <= 0.05).sum()} of {len(errors)})"


def calibration_table() -> list[str]:
    """Real tasks, calibrated flags beside those for a high return."""
    lines = common.markdown_head(
        "error of coverage | recurrent, calibrated | high return | feed-forward, calibrated "
        "| high return"
    )
    for task in REAL:
        columns = [
            within(coverage(task, script, variant))
            for script in (LSTM, CATEGORICAL)
            for variant in ("mean", "mean, usual")
        ]
        lines.append(common.markdown_row([task, *columns]))
    return lines


def chains() -> list[Row]:
    """Runs with the recommended flags on the processes whose distribution is known and judged."""
    return [
        row
        for row in calibration.TABLE.rows()
        if row["variant"] == "recommended"
        and row["task"] in calibration.PROCESSES
        and calibration.PROCESSES[row["task"]].judged
    ]


def largest(column: str) -> float:
    """The largest error in size of any of these runs, percent."""
    return 100 * max(abs(float(row[column])) for row in chains())


def real_errors(variant: str) -> np.ndarray:
    """Mean error of each script on each real task."""
    return np.array(
        [coverage(task, script, variant).mean() for task in REAL for script in (LSTM, CATEGORICAL)]
    )


def calibration_notes() -> list[str]:
    """Known distributions, kappa, the picture."""
    groups = common.by_setting(calibration.TABLE.rows())

    coarse = [
        100 * float(row["w1"])
        for setting, rows in groups.items()
        for row in rows
        if setting.script == LSTM
        and setting.task in calibration.PROCESSES
        and calibration.PROCESSES[setting.task].judged
        and ", kappa 1, " in setting.variant
    ]
    passed = sum(map(calibration.reached, chains()))
    inspected = (RESULTS / "inspect.txt").read_text()
    inside = float(re.search(r"between deciles 1 and 9 (\S+),", inspected)[1])
    off = float(re.search(r"decile error (\S+)", inspected)[1])
    disaster = [
        100 * float(row["cvar05"])
        for row in calibration.TABLE.rows()
        if (row["task"], row["variant"]) == ("disaster", "recommended")
    ]
    return [
        f"* **Known distributions.** {passed} of {len(chains())} runs with `--preset calibrated` "
        f"match those of three small processes: none is further away than {largest('w1'):.1f} % of "
        f"the standard deviation (Wasserstein distance), and no standard deviation is off by more "
        f"than {largest('std'):.1f} %. With `--kappa 1` quantiles are {min(coarse):.0f} to "
        f"{max(coarse):.0f} % away.",
        f"* **A rare disaster is too much.** Where one episode in fifty costs 20, the mean of the "
        f"worst twentieth is {min(disaster):.0f} and {max(disaster):.0f} % too close to the mean "
        f"of all.",
        f"* **A picture of one run** on Hopper-v5: {100 * inside:.0f} % of the returns lie between "
        f"the first decile and the ninth, where 80 % would be right, and deciles are off by "
        f"{off:.2f} on average ([its numbers](results/inspect.txt)).",
    ]


# -------------------------------------------------------------------------------------------- truth
VALUES = [
    (CATEGORICAL, "default", "an output of its own, feed-forward (default)"),
    (LSTM, "default", "the same, recurrent (default)"),
    (LSTM, "scalar", "a scalar critic"),
    (LSTM, "distribution", "the mean of quantiles"),
    (CATEGORICAL, "distribution", "the mean of HL-Gauss atoms"),
    (CATEGORICAL, "two_hot wide", "two-hot atoms up to 20 standard deviations"),
]


def over_truth(task: str, script: str, variant: str) -> str:
    """Value over the truth with half of its interval."""
    rows = common.by_setting(truth.TABLE.rows())[Setting(task, script, variant)]
    return truth.over_truth(rows).split(" (")[0].replace("+-", "±")


def truth_table() -> list[str]:
    """V over the truth for rare rewards."""
    chances = [f"{chance:.0%}".replace("%", " %") for chance in truth.CHANCES.values()]
    lines = common.markdown_head(f"V is | {' | '.join(chances)}")
    for script, variant, told in VALUES:
        columns = [over_truth(task, script, variant) for task in truth.CHANCES]
        lines.append(common.markdown_row([told, *columns]))
    return lines


def preferring(script: str, *variants: str) -> tuple[int, int]:
    """Runs that take the bad arm with more than one half, and runs."""
    groups = common.by_setting(truth.TABLE.rows())
    bad = [
        float(row["bad"])
        for variant in variants
        for row in groups[Setting("bad-arm", script, variant)]
    ]
    return sum(chance > 0.5 for chance in bad), len(bad)


def arms() -> dict[str, str]:
    """Runs that prefer the bad arm, of how many."""
    from_mean = [
        preferring(LSTM, "distribution", "kappa 1"),
        preferring(CATEGORICAL, "distribution", "two_hot"),
    ]
    default = [preferring(LSTM, "default"), preferring(CATEGORICAL, "default")]
    return {
        name: f"{sum(x for x, _ in counts)} of {sum(n for _, n in counts)}"
        for name, counts in (
            ("default", default),
            ("mean", from_mean),
            ("peer", [preferring(SB3, "default")]),
        )
    }


def highest_bad() -> float:
    """The largest probability of the bad arm of any default run."""
    rows = common.by_setting(truth.TABLE.rows())
    settings = [Setting("bad-arm", script, "default") for script in (LSTM, CATEGORICAL)]
    return max(float(row["bad"]) for setting in settings for row in rows[setting])


def truth_notes() -> list[str]:
    """The arms and other units."""
    found = arms()
    units = [
        float(row["mean"]) for row in truth.TABLE.rows() if row["task"].split("-")[0] in truth.UNITS
    ]
    return [
        f"* **A bad arm** pays 1 or, one time in a hundred, -150, and the good one 0.5, twenty "
        f"steps later. {found['default']} runs with the defaults prefer the bad one, and the "
        f"largest probability of it is {highest_bad():.2f}. With V from the distribution "
        f"{found['mean']} prefer it, and of SB3's PPO {found['peer']}.",
        f"* **Other units.** With rewards or observations multiplied by 1e-8 to 1e18 "
        f"{sum(mean == 500 for mean in units)} of {len(units)} CartPole-v1 runs of 25,600 steps "
        f"end at 500; the others are of one seed, which has {min(units):.0f} in the task's own "
        f"units, too.",
    ]


# ------------------------------------------------------------------------------------------- method
def older_rows() -> dict[str, tuple[int, int]]:
    """Rows of our scripts that are older than the change, and rows, by file."""
    counts = {}
    for name in ("runs", "risk", "calibration", "truth"):
        rows = [row for row in Table(RESULTS / f"{name}.csv", ()).rows() if row["commit"]]
        counts[name] = (sum(row["commit"] in OLDER for row in rows), len(rows))
    return counts


def changes() -> str:
    """What the change did to the means on tuning seeds, task by task."""
    told = []
    for task, version in APART.items():
        before, after = versions_scores(JOINT, task), versions_scores(version, task)
        both = sorted(before.keys() & after.keys())
        old, new = (np.array([found[seed] for seed in both]) for found in (before, after))
        digits = 0 if abs(old).max() >= 1000 else 1
        told.append(f"{task} {welch(new, old).told(digits)}")
    return ", ".join(told)


def method_notes() -> list[str]:
    """The machine, what counts as learnt, and which rows are old."""
    told = ", ".join(
        f"{count} of {rows} in {name}.csv" for name, (count, rows) in older_rows().items()
    )
    machines = {(row["cores"], row["machine"]) for row in learning.ARCHIVE.table.rows()}
    [(cores, machine)] = machines
    bounds: dict[int, list[str]] = {}
    for task, bound in learning.THRESHOLDS.items():
        bounds.setdefault(bound, []).append(task)
    learnt = "; ".join(f"{bound} on {', '.join(tasks)}" for bound, tasks in bounds.items())
    return [
        f"* **Machine.** {cores} shared CPU cores ({machine}), two runs at a time, one torch "
        f"thread a run. Times are upper bounds.",
        f"* **Learnt** means that the mean of {common.SMOOTHED} training returns has reached "
        f"{learnt}.",
        f"* **Older rows.** Actor and critics now have a loss, an optimizer and a gradient norm "
        f"each, and before they shared them. Rows of our scripts from before that change: {told}. "
        f"The table of [speed](#speed) marks its own. What the change does to returns is not "
        f"settled. On tuning seeds the means moved by: {changes()}.",
    ]


# ------------------------------------------------------------------------------------------ answers
def low_told(found: Verdict) -> str:
    """Low runs beside the rival's."""
    return " beside ".join(f"{low} of {runs}" for low, runs in (found.low, found.rivals))


def low_cheetahs() -> tuple[int, int]:
    """Default runs of HalfCheetah-v5 below 4,000, and runs."""
    cheetah = scores(CATEGORICAL, "HalfCheetah-v5")
    return int((cheetah < 4000).sum()), len(cheetah)


def answers(verdicts: dict[Contest, Verdict]) -> list[str]:
    """The eight bullets at the top."""
    recurrent, _, _, fresh, _, games = verdicts.values()
    named = {(cell.name, cell.mine, cell.peer): pace(cell) for cell in CELLS}
    lstm, one_core = named["recurrent", "ours", ""], named["recurrent", "ours-1core", "sb3-1core"]
    cheetah, breakout = named["cheetah-1x2048", "compiled", ""], named["minatar", "ours", ""]
    novel = pairs([line.task for line in LINES[:3]], LSTM, CONTRIB, "zoo")
    zoo, cleanrl = over_zoo(), over_cleanrl(last_returns)
    calm, noisy = real_errors("mean"), real_errors("mean, usual")
    chain = sum(map(calibration.reached, chains()))
    worst = {
        name: min(scores(script, "HalfCheetah-v5", name))
        for script, name in ((QUANTILE, "quantiles_single"), (CATEGORICAL, "default"))
    }
    few, many = low_cheetahs()
    grid = scores(LSTM, "envs:MiniGrid-MemoryS7-Image-v0")
    swimmer = scores(CATEGORICAL, "Swimmer-v5")
    rare = [over_truth("rare-1", LSTM, variant) for variant in ("default", "distribution")]
    tail = {
        (column, variant): risky("road", CATEGORICAL, variant, column)
        for column in ("mean", "cvar")
        for variant in ("neutral", "weight 1")
    }
    return [
        f"* **Is a distributional critic worth it for the return?** For the mean nothing is shown: "
        f"a run ends above one with a scalar critic with probability {fresh.at_the_end} on fresh "
        f"seeds of MuJoCo and {recurrent.at_the_end} on recurrent tasks. Runs below 0.9 of the "
        f"scalar critic's mean are perhaps fewer: {low_told(fresh)} (a share smaller by "
        f"{bare(fresh.fewer)}) and {low_told(recurrent)} ({bare(recurrent.fewer)}), but "
        f"{low_told(games)} on MinAtar ({bare(games.fewer)}). "
        f"[Details](#what-the-distribution-buys)",
        f"* **Does it buy a better tail?** On a road where speed rarely ends in a crash, "
        f"`--cvar-weight 1` lifts the mean of the worst tenth of episodes from "
        f"{tail['cvar', 'neutral']} to {tail['cvar', 'weight 1']} and lowers the mean of all from "
        f"{tail['mean', 'neutral']} to {tail['mean', 'weight 1']}. On a slippery cliff, where "
        f"there is nothing to gain, it makes both worse. [Details](#risk)",
        f"* **Is the predicted distribution calibrated?** On request: {chain} of "
        f"{len(chains())} runs match known distributions, and on real tasks the coverage of "
        f"deciles is off by {calm.min():.3f} to {np.sort(calm)[-2]:.3f} in five cases of six and "
        f"by {calm.max():.3f} in the last. Flags for a high return leave {noisy.min():.3f} to "
        f"{noisy.max():.3f}. [Details](#calibration)",
        f"* **How good are the scripts beside others?** One line of flags scores {zoo} times what "
        f"the zoo's PPO does on four MuJoCo tasks, each tuned there, and has {cleanrl} times "
        f"CleanRL's training returns on three. The recurrent script is ahead of sb3-contrib's "
        f"tuned one by {novel['CartPoleNoVel-v1'].told(1)} on CartPoleNoVel-v1 and by "
        f"{novel['PendulumNoVel-v1'].told(1)} on PendulumNoVel-v1. [Details](#tasks)",
        f"* **How fast are they?** The recurrent script makes {lstm.ours:,.0f} steps a second on "
        f"two cores, {lstm.ratio} times as many as sb3-contrib, and {one_core.ratio} times as many "
        f"on one. The feed-forward one is {breakout.ratio} times as fast as SB3's PPO on MinAtar "
        f"and, compiled, {cheetah.ratio} times on HalfCheetah-v5. [Details](#speed)",
        f"* **What does the value get right?** A reward with a chance of 1 % is valued at "
        f"{rare[0]} times the truth, where the mean of quantiles has {rare[1]}. "
        f"{arms()['default']} runs prefer an arm that looks good but for a rare disaster; of "
        f"SB3's PPO {arms()['peer']} do. [Details](#truth)",
        f"* **Which settings for MuJoCo?** `--preset mujoco` is one line for all robots. One "
        f"critic of 51 quantiles in its place scores {over_default(slice(None))} times as much; "
        f"its worst HalfCheetah-v5 run has {worst['quantiles_single']:.0f} instead of "
        f"{worst['default']:.0f}, but it is behind on Ant-v5. [Details](#settings-for-mujoco)",
        f"* **What failed?** MiniGrid's memory task stays at {grid.mean():.2f} "
        f"({grid.min():.2f} to {grid.max():.2f}), where a guess has about 0.5. {few} of {many} "
        f"HalfCheetah-v5 runs end below 4,000, and Swimmer-v5 has {swimmer.mean():.0f} "
        f"({swimmer.min():.0f} to {swimmer.max():.0f}) beside the zoo's "
        f"{float(published('Swimmer-v5', ZOO)['value']):.0f}. [Details](#what-failed)",
    ]


def failed() -> list[str]:
    """What did not work, a line each."""
    novel = scores(LSTM, "CartPoleNoVel-v1")
    few, many = low_cheetahs()
    cheetah = np.sort(scores(CATEGORICAL, "HalfCheetah-v5"))
    grid = scores(LSTM, "envs:MiniGrid-MemoryS7-Image-v0")
    games = minatar()
    atoms = coverage("Pendulum-v1", CATEGORICAL, "mean")
    pendulum = scores(LSTM, "PendulumNoVel-v1")
    return [
        f"* **A good policy can be lost.** {(novel < 475).sum()} of {len(novel)} CartPoleNoVel-v1 "
        f"runs end below 475, the worst at {novel.min():.1f}.",
        f"* **HalfCheetah-v5** has {few} of {many} runs in a low optimum "
        f"({', '.join(f'{score:.0f}' for score in cheetah[:few])}); the zoo's one run has "
        f"{published('HalfCheetah-v5', ZOO)['value']}.",
        f"* **MiniGrid-MemoryS7** is not learnt in 500,000 steps ({grid.mean():.2f}), and "
        f"PendulumNoVel-v1 has runs as low as {pendulum.min():.0f} that no other setting mended "
        f"([tuning](tuning.md#the-entropy-floor)).",
        f"* **MinAtar** is no better than SB3's PPO with the same flags ({won(games)} games).",
        f"* **Atoms on Pendulum-v1** are not calibrated: the best of {len(atoms)} runs is off by "
        f"{atoms.min():.3f}.",
    ]


def sections() -> dict[str, list[str]]:
    """Every line of README.md that has a number, by section."""
    verdicts = {contest: verdict(contest) for contest in CONTESTS}
    return {
        "Answers": answers(verdicts),
        "Tasks": [*tasks_table(), "", *sources(), "", *tasks_notes()],
        "Settings for MuJoCo": mujoco_lines(),
        "What the distribution buys": [*critics_table(verdicts), "", *critics_notes(verdicts)],
        "Speed": [*speed_table(), "", *speed_notes()],
        "Scaling": scaling_line(),
        "Risk": [*risk_table(), "", *risk_notes()],
        "Calibration": [*calibration_table(), "", *calibration_notes()],
        "Truth": [*truth_table(), "", *truth_notes()],
        "How to read the numbers": method_notes(),
        "What failed": failed(),
    }


# -------------------------------------------------------------------------------------- other pages
def kind_of(script: str) -> str:
    """The networks of a script in a word."""
    return "recurrent" if script == LSTM else "feed-forward"


def preset_table() -> list[str]:
    """The flags of each task's preset."""
    lines = common.markdown_head("preset | script | flags")
    for script, names in (
        (LSTM, ("pendulum_novel", "mountaincar_novel", "memory")),
        (CATEGORICAL, ("pendulum", "acrobot", "lunarlander", "mujoco", "minatar")),
    ):
        for name in names:
            flags = common.spelt_out(script, f"--preset {name}")
            lines.append(common.markdown_row([f"`{name}`", kind_of(script), f"`{flags}`"]))
    return lines


def calibrated_table() -> list[str]:
    """The flags with which real tasks are calibrated; of a flag given twice the last."""
    lines = common.markdown_head("task | script | flags")
    for cell in calibration.real_cells():
        if cell.variant == "mean":
            flags = {part.split()[0]: part for part in re.split(r" +(?=--)", cell.flags.strip())}
            told = " ".join(flags.values())
            lines.append(common.markdown_row([cell.task, kind_of(cell.script), f"`{told}`"]))
    return lines


def pages() -> dict[str, dict[str, list[str]]]:
    """What is made here of each page, by section."""
    return {
        "README.md": sections(),
        "tuning.md": {"Chosen flags": preset_table(), "Calibration": calibrated_table()},
        "scaling.md": {"Many environments in one process": kept_memory()},
    }


def lines_of(found: dict[str, list[str]]) -> list[str]:
    """All of them, rules of tables left out."""
    return [line for lines in found.values() for line in lines if set(line) - set("|-: ")]


# ------------------------------------------------------------------------------------ check, write
def missing(lines: Iterable[str], text: str) -> list[str]:
    """Lines that the text has not."""
    known = set(text.splitlines())
    return [line for line in lines if line not in known]


def renewed(lines: list[str], text: str) -> str:
    """The text with every missing line in the place of the one most like it: by its words, of
    those that are not made here."""
    told = text.splitlines()
    for line in missing(lines, text):
        others = [other for other in told if other not in lines and other.startswith(line[:1])]
        nearest = difflib.get_close_matches(line, others, 1, 0.6)
        if nearest:
            told[told.index(nearest[0])] = line
    return "\n".join(told) + "\n"


def main() -> None:
    """Parse; print, check or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only name lines that pages lack")
    parser.add_argument("--write", action="store_true", help="renew the lines of the pages")
    args = parser.parse_args()
    lacking = []
    for page, found in pages().items():
        path = HERE / page
        lines = lines_of(found)
        if args.write:
            path.write_text(renewed(lines, path.read_text()))
        if args.write or args.check:
            lacking += [f"{page}: {line}" for line in missing(lines, path.read_text())]
            continue
        for title, own in found.items():
            print(f"## {title}", "", *own, "", sep="\n")
    if args.write or args.check:
        print(*lacking, f"{len(lacking)} lines are missing", sep="\n")
        sys.exit(bool(lacking))


if __name__ == "__main__":
    main()
