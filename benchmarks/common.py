"""What the programs of this folder share: settings, runs in processes, CSV rows, reports."""

from __future__ import annotations

import atexit
import contextlib
import csv
import fcntl
import importlib
import importlib.util
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import compose

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LSTM = "distributional_ppo_lstm"
CATEGORICAL = "distributional_ppo_categorical"
LSTM_ATOMS, QUANTILE = "ppo_lstm_categorical", "ppo_quantile"  # the other two combinations
Row = dict[str, str]  # of a CSV: text by column


# ----------------------------------------------------------------------------------------- settings
class Setting(NamedTuple):
    """What the rows of a table are told apart by."""

    task: str
    script: str
    variant: str

    @property
    def kind(self) -> str:
        """The script in one word."""
        return self.script.split("_")[-1]


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
@cache
def load_script(name: str) -> ModuleType:
    """A script of the folder above, or one that `compose` makes of them, as a module."""
    folder = str(HERE.parent)
    if name in (LSTM_ATOMS, QUANTILE):
        folder = tempfile.mkdtemp()  # of this process alone
        atexit.register(shutil.rmtree, folder)
        compose.compose(Path(folder))
    sys.path.insert(0, folder)
    return importlib.import_module(name)


def without(flags: str, name: str) -> str:
    """Flags without one of them, which others leave without effect: scripts refuse such flags."""
    parts = re.split(r" (?=--)", flags.strip())
    return " ".join(part for part in parts if part.split(" ")[0] != name)


def commit() -> str:
    """Of the repository."""
    return subprocess.getoutput(f"git -C '{HERE}' rev-parse HEAD")


def peer_network(script: ModuleType, args: Any) -> dict[str, Any]:
    """`policy_kwargs` of Stable-Baselines3: layers as the script's, an encoder each for actor and
    critic, a hidden layer ahead of the value; it sets all their weights its own way."""
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from torch import nn

    class Encoder(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            super().__init__(space, args.hidden_size)
            self.layers = script.make_encoder(space, args)

        def forward(self, obs: Any) -> Any:
            return self.layers(obs)

    return {
        "features_extractor_class": Encoder,
        "share_features_extractor": False,
        "net_arch": {"pi": [], "vf": [args.hidden_size]},
        "activation_fn": nn.ReLU,
    }


Work = Callable[[Run], Any]  # what is done in a process of its own; a function of a module


class Trained(NamedTuple):
    """A finished run; its directory lasts as long as the `with` block."""

    metrics: dict[str, Any]
    directory: Path
    seconds: float


@contextlib.contextmanager
def trained(script: ModuleType, task: str, seed: int, flags: str) -> Iterator[Trained]:
    """Train in a temporary run directory, without output. The last of each flag counts."""
    with tempfile.TemporaryDirectory() as top:
        line = ["--env-id", task, "--seed", str(seed), "--run-dir", top, *flags.split()]
        began = time.time()
        with contextlib.redirect_stdout(io.StringIO()):
            metrics = script.train(script.parse_args(line))
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
    curves = {}
    for tag in tags:
        curves[tag] = [Point(event.step, event.value) for event in events.Scalars(tag)]
    return curves


def runs_of(
    cells: Iterable[Cell], words: Iterable[str] = (), seeds: Iterable[int] = ()
) -> list[Run]:
    """Runs of the cells that match all words, with these seeds or else the cell's own."""
    chosen = [cell for cell in cells if cell.matches(words)]
    return [Run(cell, seed) for cell in chosen for seed in seeds or cell.seeds]


def run_alone(work: Work, run: Run) -> Any:
    """The work in a fresh process: no run sees what an earlier one left, or dies with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, run).result()


def run_all(work: Work, runs: Iterable[Run], processes: int) -> Iterator[tuple[Run, Any]]:
    """Each run in a process of its own, `processes` at a time: run and result as they end.

    A run that fails is told on the terminal and leaves nothing, so that the next call tries again.
    """
    with ThreadPoolExecutor(processes) as pool:
        futures = {pool.submit(run_alone, work, run): run for run in runs}
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


ORIGIN = ("commit", "machine")


def origin() -> dict[str, str]:
    """Where a row comes from: last commit of the scripts ("+": changed since then), machine."""
    git = ["git", "--no-optional-locks", "-C", str(HERE.parent)]
    scripts = ["--", f"{LSTM}.py", f"{CATEGORICAL}.py"]

    def ask(*words: str) -> str:
        command = [*git, *words, *scripts]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = "+" if ask("status", "--short") else ""
    told = machine()
    return {
        "commit": ask("log", "-1", "--format=%h") + changed,
        "machine": f"{told['cores']} cores {told['machine']}",
    }


# ---------------------------------------------------------------------------------------- CSV files
@dataclass(frozen=True)
class Table:
    """A CSV that grows row by row."""

    path: Path
    columns: Sequence[str]
    end: str = "\r\n"  # of a line

    def rows(self) -> list[Row]:
        """Those so far, none if there is no file."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def append(self, row: dict[str, Any]) -> None:
        """Write one row at the end, below a header if the file is new.

        Programs that append at the same time wait for each other.
        """
        with self.path.open("a", newline="") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until all is written and the file closed
            writer = csv.DictWriter(file, self.columns, lineterminator=self.end)
            if os.fstat(file.fileno()).st_size == 0:
                writer.writeheader()
            writer.writerow(row)

    def record(self, work: Work, runs: Iterable[Run], processes: int = 1) -> None:
        """Append and print the row that each run's work gives."""
        for _, row in run_all(work, runs, processes):
            self.append(row)
            print({name: str(value)[:60] for name, value in row.items()}, flush=True)

    def without_row(self, runs: Iterable[Run]) -> list[Run]:
        """The runs that have none, by setting and seed."""
        known = {(setting_of(row), row["seed"]) for row in self.rows()}
        return [run for run in runs if (run.cell.setting, str(run.seed)) not in known]


def setting_of(row: Row) -> Setting:
    """What the row was measured on."""
    return Setting(row["task"], row["script"], row["variant"])


def origins(rows: Iterable[Row], columns: Sequence[str] = ORIGIN) -> str:
    """Every commit and machine of the rows, in one line."""
    known = list(rows)
    told = [sorted({row[column] for row in known}) for column in columns]
    return "; ".join(", ".join(values) for values in told)


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


def require(*packages: str) -> None:
    """End the program with a line where a package is missing, ahead of hours of work."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        found = f"{', '.join(missing)} not installed"
        sys.exit(f"error: {found}; pip install -r {HERE.name}/requirements.txt")


def pyplot() -> ModuleType:
    """Matplotlib, for files alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
