"""What the programs of this folder share: settings, runs in processes, CSV rows, reports."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LSTM = "distributional_ppo_lstm"
CATEGORICAL = "distributional_ppo_categorical"
Row = dict[str, str]  # of a CSV: text by column


# ----------------------------------------------------------------------------------------- settings
class Setting(NamedTuple):
    """What the rows of a table are told apart by."""

    task: str
    script: str
    variant: str


@dataclass(frozen=True)
class Cell:
    """One cell of a benchmark's grid: what is trained, how, and with which seeds."""

    task: str  # gymnasium id, or the benchmark's own name of one
    script: str  # module name
    variant: str
    flags: str  # beyond task and seed
    seeds: Sequence[int]

    @property
    def setting(self) -> Setting:
        """The cell without flags and seeds."""
        return Setting(self.task, self.script, self.variant)

    def matches(self, words: Iterable[str]) -> bool:
        """Each word is a part of the task, of the script or of the variant."""
        return all(any(word in part for part in self.setting) for word in words)


class Run(NamedTuple):
    """One seed of a cell."""

    cell: Cell
    seed: int

    def __str__(self) -> str:
        return f"{self.cell.task} {self.cell.script} {self.cell.variant} seed {self.seed}"


# --------------------------------------------------------------------------------------------- runs
def load_script(name: str) -> ModuleType:
    """A script of the folder above, as a module."""
    folder = str(HERE.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


class Trained(NamedTuple):
    """A finished run; its directory lasts as long as the `with` block."""

    metrics: dict[str, Any]
    directory: Path
    seconds: float


@contextlib.contextmanager
def trained(script: ModuleType, task: str, seed: int, flags: Sequence[str]) -> Iterator[Trained]:
    """Train in a temporary run directory, without output. The last of each flag counts."""
    with tempfile.TemporaryDirectory() as top:
        line = ["--env-id", task, "--seed", str(seed), "--run-dir", top, *flags]
        began = time.time()
        with contextlib.redirect_stdout(io.StringIO()):
            metrics = script.train(script.tyro.cli(script.Args, args=line))
        yield Trained(metrics, Path(metrics["run_dir"]), round(time.time() - began, 1))


class Point(NamedTuple):
    """One value of a metric."""

    step: int
    value: float


def scalars(directory: Path, tags: Iterable[str]) -> dict[str, list[Point]]:
    """Every value of these metrics in the events of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), {"scalars": 0})
    events.Reload()
    return {tag: [Point(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def missing_runs(
    cells: Iterable[Cell], words: Sequence[str], seeds: Sequence[int], done: Callable[[Run], bool]
) -> list[Run]:
    """Runs of the cells that match all words, with these seeds or else the cell's own, that are
    not done."""
    chosen = [cell for cell in cells if cell.matches(words)]
    runs = [Run(cell, seed) for cell in chosen for seed in seeds or cell.seeds]
    return [run for run in runs if not done(run)]


def run_all(
    work: Callable[[Run], Any], runs: Sequence[Run], processes: int
) -> Iterator[tuple[Run, Any]]:
    """Each run in a fresh process, `processes` at a time: run and result in the order they end.

    A run that fails is told on the terminal and leaves nothing, so that the next call tries again.
    """
    with ProcessPoolExecutor(processes, max_tasks_per_child=1) as pool:
        futures = {pool.submit(work, run): run for run in runs}
        try:
            for future in as_completed(futures):
                run = futures[future]
                if error := future.exception():
                    traceback.print_exception(error)
                    print(f"{run}: failed, nothing is kept of it", file=sys.stderr, flush=True)
                else:
                    yield run, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def machine() -> dict[str, Any]:
    """Class of the machine, without its name."""
    return {"cores": os.cpu_count(), "machine": platform.machine()}


# ---------------------------------------------------------------------------------------- CSV files
def read_rows(path: Path) -> list[Row]:
    """Rows of a CSV, none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, columns: Sequence[str], row: dict[str, Any], end: str = "\r\n") -> None:
    """One row at the end of a CSV, below a header if the file is new; `end` of its lines."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator=end)
        if new:
            writer.writeheader()
        writer.writerow(row)


def setting_of(row: Row) -> Setting:
    """What the row was measured on."""
    return Setting(row["task"], row["script"], row["variant"])


def by_setting(rows: Iterable[Row]) -> dict[Setting, list[Row]]:
    """Rows of each setting, in their order."""
    groups: dict[Setting, list[Row]] = {}
    for row in rows:
        groups.setdefault(setting_of(row), []).append(row)
    return groups


# ------------------------------------------------------------------------------------------ reports
def markdown_row(cells: Iterable[object]) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown_head(names: str, rule: str = "---") -> list[str]:
    """The two lines above a table: names, with " | " between them, and the rule."""
    columns = names.split(" | ")
    return [markdown_row(columns), "|" + f"{rule}|" * len(columns)]


def publish(path: Path, lines: Iterable[str]) -> None:
    """Write a report and print it."""
    text = "\n".join(lines)
    path.write_text(text + "\n")
    print(text + "\n")


def pyplot() -> ModuleType:
    """Matplotlib, for files alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
