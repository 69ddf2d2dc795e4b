"""Does --cuda pay? The scripts on a GPU, beside the same machine's CPU.

    python benchmarks/gpu.py             # measure what has no row; needs a GPU
    python benchmarks/gpu.py --report    # the table from the committed CSV alone

Each repeat of a piece of work is a process, in which the programs come one after the other:
--torch-threads 1, the default; --torch-threads 4; and --cuda. On the CPU LSTMs and convolutions
train actor and critics at once, so they use twice as many threads. More of them were not tried, so
a larger CPU might do better beside the GPU. A program trains for at least SECONDS after its first
iteration, which does not count. Speed is steps over seconds of rollouts, values and updates, as a
run logs them. One row of results/gpu.csv is one program in one repeat.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import common
from common import LSTM, RESULTS, Row, Table
from speed import GRID, Work

SECONDS = 4
PARTS = ("rollout", "values", "update")
PROGRAMS = {
    "one thread": {},
    "four threads": {"torch_threads": 4},
    "GPU": {"cuda": True},
}
WORK = {
    "CartPole-v1": GRID["cartpole"],
    "HalfCheetah-v5": GRID["cheetah-8x256"],
    "MinAtar Breakout": GRID["minatar"],
    "Atari Pong": GRID["pong"],
    "recurrent, LSTM 128": GRID["recurrent"],
    "recurrent, LSTM 512, 64 environments": Work(
        LSTM, {**GRID["recurrent"].flags, "num_envs": 64, "lstm_hidden_size": 512}
    ),
    "recurrent, Atari Pong": GRID["pong-recurrent"],
}
COLUMNS = ("work", "program", "repeat", "value", *PARTS, "gpu", "torch", *common.ORIGIN)
TABLE = Table(RESULTS / "gpu.csv", COLUMNS, end="\n")


def committed() -> list[Row]:
    """Rows of scripts as they were committed: "+" marks a script that had been changed since."""
    return [row for row in TABLE.rows() if not row["commit"].endswith("+")]


# ----------------------------------------------------------------------------------------- measure
def measure(work: Work, program: str, seconds: float) -> dict[str, float]:
    """Train for some seconds. Returns steps per second and the milliseconds of each part."""
    script = common.load_script(work.script)
    iterations = script.Run.iterations
    laps: list[dict[str, float]] = []

    def iterations_for_a_while(run: Any) -> Iterator[float]:
        for progress in iterations(run):
            yield progress
            laps.append({part: run.times[f"time/{part}"] for part in PARTS})
            if sum(sum(lap.values()) for lap in laps[1:]) >= seconds:
                return

    with tempfile.TemporaryDirectory() as top, contextlib.redirect_stdout(io.StringIO()):
        script.Run.iterations = iterations_for_a_while
        try:
            options = {"run_dir": top, "total_timesteps": 10**9, "save_envs": "never"}
            script.train(script.Args(**work.flags, **options, **PROGRAMS[program]))
        finally:
            script.Run.iterations = iterations

    parts = {part: sum(lap[part] for lap in laps[1:]) for part in PARTS}
    counted = len(laps) - 1
    milliseconds = {part: round(1e3 * spent / counted, 2) for part, spent in parts.items()}
    return {"value": round(counted * work.samples / sum(parts.values()), 1), **milliseconds}


def measure_all(name: str, repeat: int) -> None:
    """Measure and append what a repeat of this work lacks."""
    import torch

    same = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **common.origin()}
    keys = ("work", "program", "repeat", "gpu", "commit")
    known = {tuple(row[key] for key in keys) for row in committed()}
    for program in PROGRAMS:
        if (name, program, str(repeat), same["gpu"], same["commit"]) not in known:
            row = {"work": name, "program": program, "repeat": repeat}
            row |= measure(WORK[name], program, SECONDS) | same
            TABLE.append(row)
            print(row, flush=True)


# ------------------------------------------------------------------------------------------ report
def values(rows: list[Row], name: str, program: str, column: str = "value") -> list[float]:
    """What a program measured in the repeats that all programs have: one version on one GPU, with
    most repeats; the newest of several."""
    found: list[float] = []
    for origin in dict.fromkeys((row["gpu"], row["commit"]) for row in rows if row["work"] == name):
        own = {
            (row["program"], row["repeat"]): row
            for row in rows
            if row["work"] == name and (row["gpu"], row["commit"]) == origin
        }
        repeats = [
            repeat
            for repeat in sorted({repeat for _, repeat in own})
            if all((other, repeat) in own for other in PROGRAMS)
        ]
        if len(repeats) >= len(found):
            found = [float(own[program, repeat][column]) for repeat in repeats]
    return found


class Gain(NamedTuple):
    """How much faster the GPU is than the faster CPU, over the repeats of a kind of work."""

    middle: float
    low: float
    high: float

    def told(self) -> str:
        """In words."""
        return f"{self.middle:.1f} ({self.low:.1f} to {self.high:.1f})"


def gain_of(rows: list[Row], name: str) -> Gain:
    """The ratio of medians, and the lowest and highest ratio of a repeat."""
    *cpus, gpu = (values(rows, name, program) for program in PROGRAMS)
    faster = max(cpus, key=median)
    ratios = [one / two for one, two in zip(gpu, faster, strict=True)]
    return Gain(median(gpu) / median(faster), min(ratios), max(ratios))


def lines_of(rows: list[Row]) -> list[str]:
    """A line for each kind of work: the median speed of each program, and what the GPU gains."""
    gain = "GPU over the faster CPU (lowest to highest)"
    parts = " + ".join(PARTS)
    lines = common.markdown_head(
        f"work | {' | '.join(PROGRAMS)} | {gain} | ms on the GPU: {parts} | repeats"
    )
    for name in WORK:
        found = [values(rows, name, program) for program in PROGRAMS]
        if all(found):
            speeds = [f"{median(own):,.0f}" for own in found]
            spent = [median(values(rows, name, "GPU", part)) for part in PARTS]
            milliseconds = " + ".join(f"{part:.0f}" for part in spent)
            told = gain_of(rows, name).told()
            lines.append(common.markdown_row([name, *speeds, told, milliseconds, len(found[-1])]))
    return lines


def report() -> None:
    """The table in results/gpu.md and on stdout."""
    rows = committed()
    origins = common.origins(rows, ("gpu", *common.ORIGIN, "torch"))
    title = (
        "Steps per second, medians, with one and four torch threads (LSTMs and convolutions use "
        "twice as many, since actor and critics train at once), and on the GPU of that machine."
    )
    common.publish(RESULTS / "gpu.md", [title, "", *lines_of(rows), "", f"{origins}."])


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="only rebuild the table")
    parser.add_argument("--repeats", type=int, default=3, help="of every kind of work")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure_all(args.child[0], int(args.child[1]))
        return
    if not args.report:
        import torch

        if not torch.cuda.is_available():
            sys.exit("error: torch sees no GPU; --report needs none")
        for repeat in range(args.repeats):
            for name in WORK:
                words = [sys.executable, str(Path(__file__)), "--child", name, str(repeat)]
                subprocess.run(words, check=False)  # the next call repeats what failed
    report()


if __name__ == "__main__":
    main()
