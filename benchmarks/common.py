"""What the programs of this folder share: settings, runs in processes, kept rows, reports."""

from __future__ import annotations

import atexit
import contextlib
import csv
import gzip
import importlib
import importlib.util
import io
import math
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
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_type_hints

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# The scripts set this ahead of NumPy, which reads it when it is imported. Here NumPy comes first.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import compose
import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LSTM = "distributional_ppo_lstm"
CATEGORICAL = "distributional_ppo_categorical"
LSTM_ATOMS, QUANTILE = "ppo_lstm_categorical", "ppo_quantile"  # the other two combinations
OWN_SCRIPTS = (LSTM, CATEGORICAL, LSTM_ATOMS, QUANTILE)
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


def is_recurrent(agent: Any) -> bool:
    """Tell whether an agent of a script remembers, so that its methods take and give a state."""
    return hasattr(agent, "initial_state")


@cache
def spelt_out(script: str, flags: str) -> str:
    """Flags with those of presets ahead of them, for versions of a script that know no presets.

    A later preset has its way over an earlier one, and typed flags over both, wherever they stand.
    Those of a preset that others leave without effect are left out: typed they would be refused.
    """
    typed = re.search(r"--preset((?: +(?!--)\S+)+)", flags)
    if typed is None:
        return flags
    module = load_script(script)
    merged: dict[str, Any] = {}
    for name in typed[1].split():
        merged |= module.PRESETS[name].flags
    idle = idle_flags(module, module.parse_args(flags.split()))
    words = []
    for flag, value in merged.items():
        if flag != "env_id" and flag not in idle:
            name = f"--{flag.replace('_', '-')}"
            words.append(name if value is True else f"{name} {value}")
    return " ".join([*words, *flags.replace(typed[0], "").split()])


def idle_flags(module: ModuleType, args: Any) -> set[str]:
    """The names of flags of a script that have no effect beside the others."""
    hints = get_type_hints(module.Args, include_extras=True)
    return {
        name
        for name, hint in hints.items()
        for extra in getattr(hint, "__metadata__", ())
        if isinstance(extra, module.IdleWhile) and extra.holds(args)
    }


def flag_parts(flags: str) -> frozenset[str]:
    """Flags with their values; of one given twice the last."""
    given = {part.split()[0]: part for part in re.split(r" (?=--)", flags) if part}
    return frozenset(given.values())


def flag_values(flags: str) -> dict[str, tuple[str | float, ...]]:
    """Values of flags by name, numbers as numbers, so that 1e-3 equals 0.001."""
    return {part.split()[0]: (*map(as_number, part.split()[1:]),) for part in flag_parts(flags)}


def as_number(word: str) -> str | float:
    """A word as a number if it is one."""
    try:
        return float(word)
    except ValueError:
        return word


def without(flags: str, name: str) -> str:
    """Flags without one of them, which others leave without effect: scripts refuse such flags."""
    parts = re.split(r" (?=--)", flags.strip())
    return " ".join(part for part in parts if part.split(" ")[0] != name)


def peer_network(script: ModuleType, args: Any) -> dict[str, Any]:
    """`policy_kwargs` of Stable-Baselines3: layers as the script's, an encoder each for actor and
    critic, a hidden layer ahead of the value; it sets all their weights its own way."""
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

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
        "activation_fn": script.ACTIVATIONS[args.activation],
        "log_std_init": args.log_std_init,  # of Gaussian actions
    }


Work = Callable[[Run], Any]  # what is done in a process of its own; a function of a module


class Refused(Exception):
    """A run is refused, as by a script where a package is missing. The words say what to do."""


OF_PROGRAMS = {"--env-id", "--seed", "--run-dir", "--resume", "--evaluate"}  # flags that they set


class Trained(NamedTuple):
    """A finished run; its directory lasts as long as the `with` block."""

    metrics: dict[str, Any]
    directory: Path
    seconds: float


@contextlib.contextmanager
def trained(script: ModuleType, task: str, seed: int, flags: str) -> Iterator[Trained]:
    """Train in a temporary run directory, without output. The last of each flag counts.

    Raises `Refused` for a flag that would make it another run than its row says.
    """
    words = {word.split("=")[0].replace("_", "-") for word in flags.split()}
    for name in OF_PROGRAMS & words:
        raise Refused(f"{name}: the program sets this flag; name tasks, and seeds by --seeds")
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
    """Runs of the cells that match all words, with all of a cell's seeds or those that are named.

    A seed that a cell has not is none of its runs: reports count every row of a setting.
    """
    named = set(seeds)
    chosen = [cell for cell in cells if cell.matches(words)]
    return [Run(cell, seed) for cell in chosen for seed in cell.seeds if not named or seed in named]


def with_words(work: Work, run: Run) -> Any:
    """The work, and its fault as words: an exception of a script cannot be sent to a process that
    has not imported the script."""
    try:
        return work(run)
    except Exception as error:
        if type(error).__name__ == "UsageError":  # of the script that the run has imported
            raise Refused(str(error)) from None
        raise RuntimeError(traceback.format_exc()) from None


def run_alone(work: Work, run: Run) -> Any:
    """The work in a fresh process: no run sees what an earlier one left, or dies with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(with_words, work, run).result()


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
                    if isinstance(error, Refused):
                        print(f"error: {error}", file=sys.stderr)
                    else:
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
    """Where a row comes from: last commit of the scripts ("+": changed since then), machine.

    Ask ahead of a run: the scripts may be changed while it lasts.
    """
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
def once_a_version(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Read a file again only when its time or its size has changed. No file has no rows."""

    @lru_cache(maxsize=16)
    def read_version(path: Path, changed: int, size: int) -> Any:
        return read(path)

    def read_now(path: Path) -> Any:
        if not path.exists():
            return read(Path(os.devnull))
        found = path.stat()
        return read_version(path, found.st_mtime_ns, found.st_size)

    return read_now


@once_a_version
def rows_of_file(path: Path) -> list[Row]:
    """The rows of a CSV file, compressed or not."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


@once_a_version
def groups_of_file(path: Path) -> dict[Setting, list[Row]]:
    """The rows of each setting, in the order of their seeds."""
    return by_setting(sorted(rows_of_file(path), key=lambda row: int(row["seed"])))


@dataclass(frozen=True)
class Table:
    """A CSV that grows row by row."""

    path: Path
    columns: Sequence[str]
    end: str = "\r\n"  # of a line
    once: Sequence[str] = ()  # columns that tell rows apart: what is there is not written again

    def rows(self) -> list[Row]:
        """Those so far, none if there is no file."""
        return [dict(row) for row in rows_of_file(self.path)]

    def append(self, *rows: dict[str, Any]) -> None:
        """Write rows at the end, all at once, below a header if the file is new.

        Programs that append at the same time wait for each other. If both have made the same run,
        the first row of it stays. Raises ValueError for a file with other columns.
        """
        with self.path.open("a+", newline="") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)  # until all is written and the file closed
            file.seek(0)
            old = file.read()
            added = io.StringIO()
            last = old[old.rfind("\n") + 1 :]  # what has no end of a line
            if last and len(next(csv.reader([last]))) == len(self.columns):
                added.write(self.end)
            elif last:  # a kill has left a part of a row
                old = old.removesuffix(last)
                file.truncate(len(old.encode()))
            writer = csv.DictWriter(added, self.columns, lineterminator=self.end)
            if not old:
                writer.writeheader()
            elif (header := old.splitlines()[0]) != ",".join(self.columns):
                raise ValueError(f"{self.path} has the columns {header}")
            if self.once and old:
                standing = csv.DictReader(io.StringIO(old))
                known = {tuple(row[name] for name in self.once) for row in standing}
                rows = [
                    row for row in rows if tuple(str(row[name]) for name in self.once) not in known
                ]
            writer.writerows(rows)
            file.write(added.getvalue())  # in one piece

    def record(self, work: Work, runs: Iterable[Run], processes: int = 1) -> None:
        """Append and print the row, or the rows, that each run's work gives."""
        runs = list(runs)
        if not runs:
            print("no run is missing of what matches")
        for _, found in run_all(work, runs, processes):
            rows = found if isinstance(found, list) else [found]
            self.append(*rows)
            for row in rows:
                print({name: str(value)[:60] for name, value in row.items()}, flush=True)

    def without_row(self, runs: Iterable[Run]) -> list[Run]:
        """The runs that have none, by setting and seed."""
        known = {(setting_of(row), row["seed"]) for row in self.rows()}
        return [run for run in runs if (run.cell.setting, str(run.seed)) not in known]


def refuse_other_flags(
    rows: Iterable[Row], cells: Iterable[Cell], spell: Callable[[Cell], str] | None = None
) -> None:
    """Raise ValueError for a row of a cell's seeds whose flags are not those of the cell, as where
    a preset has changed since: it would pass as done. Older rows that tell no flags pass.

    `spell` gives the flags of a cell with those of presets spelt out.
    """
    known = by_setting(rows)
    for cell in cells:
        wanted = (spell or spelt_flags)(cell)
        for row in known.get(cell.setting, []):
            seed = int(row["seed"])
            if seed not in cell.seeds or (not row["flags"] and seed < RENEWED):
                continue
            if flag_values(row["flags"]) != flag_values(wanted):
                told = f"{cell.task}, seed {row['seed']}: {row['flags']}, not {wanted}"
                raise ValueError(f"{told}; take such rows out to train anew")


def spelt_flags(cell: Cell) -> str:
    """The flags of a cell, those of presets spelt out, since they may change."""
    return spelt_out(cell.script, " ".join(cell.flags.split()))


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


def standing(cell: Cell, rows: list[Row]) -> list[Row]:
    """The rows of a cell's runs that count.

    Runs that were made anew with newer scripts have newer seeds, see RENEWED. A cell that wants
    them has the rows of its own seeds as soon as the first five of these have run, or all if it has
    fewer. Until then it has the rows that it had before: those of the seeds from RENEWED up if
    there were such, or else all older rows, whatever their seeds are. So has a cell without seeds.
    One of older seeds has the rows of its seeds.
    """
    own = [row for row in rows if int(row["seed"]) in cell.seeds]
    complete = {int(row["seed"]) for row in own} >= {*cell.seeds[:5]}
    if cell.seeds and (complete or min(cell.seeds) < RENEWED):
        return own
    if cell.seeds and min(cell.seeds) >= RENEWED_AGAIN:
        return standing(before_renewed_again(cell), rows)
    return [row for row in rows if int(row["seed"]) < RENEWED]


def before_renewed_again(cell: Cell) -> Cell:
    """A cell of seeds from RENEWED_AGAIN up, with those that it had before."""
    seeds = [seed - (RENEWED_AGAIN - RENEWED) for seed in cell.seeds]
    return replace(cell, seeds=seeds)


def first_seed(script: str, task: str) -> int:
    """The first of the seeds whose runs are of today's scripts and presets."""
    of_preset_mujoco = script == CATEGORICAL and task.endswith("-v5")
    return RENEWED_AGAIN if of_preset_mujoco else RENEWED


def is_older(row: Row) -> bool:
    """Tell whether the row of a reported run of ours is of an older script or preset."""
    first = first_seed(row["script"], row["task"])
    return row["commit"] in OLDER or int(row["seed"]) < first == RENEWED_AGAIN


# --------------------------------------------------------------------------- runs and their curves
SMOOTHED = 20  # training episodes in the mean that is compared with a threshold
BINS = 100  # of a curve
FOLLOWED = ("norm/return_std", "norm/value_shift", "value/outside_support")  # metrics of the update


def over_run(tag: str, kind: str) -> str:
    """The column that has the mean or the largest value of a metric over all iterations."""
    return f"{tag.replace('/', '_')}_{kind}"


RUN_COLUMNS = (
    "script",
    "task",
    "variant",
    "flags",  # beyond task and seed, as the script takes them at `commit`
    "seed",
    "steps",
    "return_mean",  # of the final evaluation, as are the next three
    "return_std",
    "return_cvar",
    "length_mean",
    "mean_over_run",  # of the training returns, over all steps
    "steps_to_threshold",  # of the training returns: inf if never, empty without a threshold
    "last_returns",  # mean training return of the last twentieth of the steps
    "seconds",  # from start to end
    "steps_per_second",  # of training, evaluations apart
    "cores",
    "machine",
    "commit",
    "versions",
    *(over_run(tag, kind) for tag in FOLLOWED for kind in ("mean", "max")),
)
# Versions whose rows are older than the change that trains actor and critics apart
OLDER = set(
    "05a2e0e 0638f78 0c6db89 206e088 3225bcd 53c3ca7 56f7808 5dd7f7d 5f12089 6bb163d 7183ee1 "
    "727d41f 77bac21 7c79f30 81affa6 87fee18 939b861 93f71a4 9dce3c1 a688101 b13db0f b2499f7 "
    "b3e6820 b471efa bd9c57f d5b195a e4b91c8 eb6e91e fcee966 ff5f4c3".split()
)
JOINT = "4359cde"  # the last version of that kind
# First seeds of reported runs that replace older ones, see `standing`. From 8001 on actor and
# critics train apart. From 8101 on the preset `mujoco` has --mean-output value.
RENEWED = 8001
RENEWED_AGAIN = 8101
OF_A_RUN = ("script", "task", "variant", "seed")  # what tells runs apart
CURVE_COLUMNS = (*OF_A_RUN, "step", "return", "episodes", "last_20")  # the fields of Bin


class Bin(NamedTuple):
    """A hundredth of a run's steps."""

    step: int  # its last one
    mean: float  # return of the training episodes that ended in it
    episodes: int
    last_20: float  # mean return of the last 20 episodes up to its end, from this bin or before


def smoothed(points: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Mean return of the 20 episodes, (step, return), before each step of `grid`."""
    steps, returns = points.T
    ends = np.searchsorted(steps, grid, side="right")
    windows = [returns[max(0, end - SMOOTHED) : end] for end in ends]
    return np.array([window.mean() if len(window) else np.nan for window in windows])


def thinned(points: np.ndarray, steps: int) -> list[Bin]:
    """Training episodes, (step, return), in a hundred bins of as many steps each.

    A bin in which no episode ends is left out. Weighted by their episodes the bins have the mean of
    all episodes.
    """
    if not len(points):
        return []
    last = max(steps, int(points[-1, 0]))  # Stable-Baselines3 ends a rollout beyond its steps
    grid = last * np.arange(1, BINS + 1) // BINS
    ends = np.searchsorted(points[:, 0], grid, side="right")
    bins = []
    for step, begin, end, latest in zip(grid, [0, *ends], ends, smoothed(points, grid)):
        if end > begin:
            mean = points[begin:end, 1].mean()
            bins.append(Bin(int(step), float(mean), int(end - begin), float(latest)))
    return bins


@dataclass(frozen=True)
class Archive:
    """The runs in a folder: runs.csv has a row a run, curves.csv.gz a hundred bins a run."""

    folder: Path

    @property
    def table(self) -> Table:
        """A row a run."""
        return Table(self.folder / "runs.csv", RUN_COLUMNS, end="\n")

    @property
    def curves(self) -> Path:
        """The compressed CSV with the bins of all runs."""
        return self.folder / "curves.csv.gz"

    def rows_of(self, cell: Cell) -> list[Row]:
        """The rows of a cell's runs that count, in the order of their seeds."""
        return standing(cell, groups_of_file(self.table.path).get(cell.setting, []))

    def curve_rows(self) -> list[Row]:
        """All bins of all runs, as text."""
        return rows_of_file(self.curves)

    def curves_of(self, cell: Cell) -> list[list[Bin]]:
        """The bins of each of a cell's runs, in the order of their seeds."""
        runs: dict[int, list[Bin]] = {int(row["seed"]): [] for row in self.rows_of(cell)}
        for row in groups_of_file(self.curves).get(cell.setting, []):
            mean, latest = float(row["return"]), float(row["last_20"])
            one = Bin(int(row["step"]), mean, int(row["episodes"]), latest)
            if (seed := int(row["seed"])) in runs:
                runs[seed].append(one)
        return list(runs.values())

    def keep(self, row: dict[str, Any], bins: Iterable[Bin]) -> None:
        """Put a run, its row and its curve, into the two files."""
        same = {column: row[column] for column in OF_A_RUN}
        curve = []
        for step, mean, episodes, latest in bins:
            figures = {"return": f"{mean:.6g}", "episodes": episodes, "last_20": f"{latest:.6g}"}
            curve.append(same | {"step": step} | figures)
        self.merge([row], curve)

    def merge(self, rows: Iterable[dict[str, Any]], curve_rows: Iterable[dict[str, Any]]) -> None:
        """Put runs into the two files: each in place of one with its setting and seed, or at the
        end.

        This alone writes the files. Programs that call it at the same time wait for each other, and
        each reads what the others have written. Files are exchanged as a whole, so that whoever
        reads meanwhile finds the old or the new one. The rows come last: a run with a row has a
        curve.
        """
        rows, curve_rows = list(rows), list(curve_rows)
        with (self.folder / "runs.lock").open("a") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            curves = csv_bytes(CURVE_COLUMNS, merged(self.curve_rows(), curve_rows))
            exchange(self.curves, gzip.compress(curves, mtime=0))
            runs = csv_bytes(RUN_COLUMNS, merged(self.table.rows(), rows))
            exchange(self.table.path, runs)


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of runs, or of their bins: the new ones instead of the old ones of the same runs."""

    def run_of(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[column]) for column in OF_A_RUN)

    by_run: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for rows in (old, new):
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(run_of(row), []).append(row)
        by_run |= groups
    return [row for rows in by_run.values() for row in rows]


def csv_bytes(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> bytes:
    """A CSV with a header, as it lies in a file."""
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def exchange(path: Path, content: bytes) -> None:
    """Put a file in the place of another, at once."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(content)
    unfinished.replace(path)


# --------------------------------------------------------------------------------------- statistics
@cache
def student(freedom: float) -> float:
    """The quantile at 0.975 of Student's t. With t = sqrt(freedom) tan(a) the density of the angle
    is proportional to cos(a)^(freedom - 1)."""
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(np.interp(0.95, mass / mass[-1], angles))


def half_width(scores: np.ndarray) -> float:
    """Half of the 95 % interval of a mean over seeds; nan for fewer than two."""
    seeds = len(scores)
    if seeds < 2:
        return math.nan
    return student(seeds - 1) * float(np.std(scores, ddof=1)) / math.sqrt(seeds)


class Difference(NamedTuple):
    """Of two means, with its 95 % interval."""

    mean: float
    low: float
    high: float

    def told(self, digits: int = 0) -> str:
        """In words, with the sign; the mean alone where there are no bounds. A bound that would be
        rounded to 0 has one more digit: on which side of 0 it lies is the point."""
        if math.isnan(self.low):
            return f"{self.mean:+.{digits}f}"
        if any(bound != 0 == round(bound, digits) for bound in (self.low, self.high)):
            digits += 1
        return f"{self.mean:+.{digits}f} ({self.low:+.{digits}f} to {self.high:+.{digits}f})"

    @property
    def verdict(self) -> str:
        """Of the former of the two in a word."""
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "undecided"

    @property
    def clear(self) -> bool:
        """Whether the interval is further from a tie than half its width."""
        return max(self.low, -self.high) > (self.high - self.low) / 2


def welch(after: np.ndarray, before: np.ndarray) -> Difference:
    """Of the mean of `after` from that of `before`, spreads and numbers of seeds their own; without
    bounds where one of both has fewer than two seeds, or where no seed differs from another of its
    side: then nothing tells how much they might."""
    mean = float(after.mean() - before.mean())
    if min(len(after), len(before)) < 2:
        return Difference(mean, math.nan, math.nan)
    parts = [scores.var(ddof=1) / len(scores) for scores in (after, before)]
    error = sum(parts)
    if error == 0:
        return Difference(mean, math.nan, math.nan)
    terms = [part**2 / (len(s) - 1) for part, s in zip(parts, (after, before))]
    half = student(error**2 / sum(terms)) * math.sqrt(error)
    return Difference(mean, mean - half, mean + half)


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    z = 1.96
    middle = (hits + z**2 / 2) / (count + z**2)
    half = z / (count + z**2) * math.sqrt(hits * (count - hits) / count + z**2 / 4)
    return max(middle - half, 0), min(middle + half, 1)


def share(hits: int, count: int) -> str:
    """Hits of so many, and the 95 % interval of their share."""
    low, high = wilson(hits, count)
    return f"{hits} of {count} ({100 * low:.0f} to {100 * high:.0f} %)"


def difference_of_shares(one: tuple[int, int], two: tuple[int, int]) -> tuple[float, float, float]:
    """By how much the second share is larger, with its 95 % interval (Newcombe 1998, method 10).

    Each share is given by hits and count. A bootstrap would take a share of 0 for certain.
    """
    (p, p_low, p_high), (q, q_low, q_high) = ((x / n, *wilson(x, n)) for x, n in (one, two))
    low = q - p - math.hypot(q - q_low, p_high - p)
    high = q - p + math.hypot(q_high - q, p - p_low)
    return q - p, low, high


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
        names = " ".join(missing).replace("_", "-").replace("ray", "'ray[tune]'")
        everything = f"pip install -r {HERE.name}/requirements.txt for all programs"
        sys.exit(f"error: {', '.join(missing)} not installed; pip install {names}, or {everything}")


# ------------------------------------------------------------------------------------------ figures
# Okabe and Ito's colours, which the colour-blind tell apart
OURS, PEER, FLOOR = "#0072B2", "#D55E00", "#7F7F7F"
SKY, GREEN, GOLD, PINK = "#56B4E9", "#009E73", "#E69F00", "#CC79A7"
INK = "#222222"  # text, medians, references
STYLE = {
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",  # opaque: READMEs are read on dark pages, too
    "savefig.dpi": 200,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#666666",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2,
}
WIDTH = 9  # inches of a figure, which READMEs show about 900 pixels wide


def pyplot() -> ModuleType:
    """Return matplotlib, which draws into files alone and in the style of all figures."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    colours = [OURS, PEER, GREEN, PINK, GOLD, SKY, FLOOR]
    matplotlib.rcParams |= STYLE | {"axes.prop_cycle": matplotlib.cycler(color=colours)}
    return matplotlib.pyplot


def letter(panel: Any, number: int, title: str = "", **options: Any) -> None:
    """Title a panel with its letter: (a) is number 0."""
    panel.set_title(f"$\\bf{{({chr(ord('a') + number)})}}$ {title}".rstrip(), **options)


def save(figure: Any, path: Path) -> None:
    """Write a figure as a PNG of 256 colours, a third of the size that matplotlib writes."""
    from PIL import Image

    file = io.BytesIO()
    figure.savefig(file, format="png")
    pyplot().close(figure)
    picture = Image.open(file).convert("RGB")
    quantised = picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    quantised.save(path, optimize=True)


def brief_count(count: float, _: int = 0) -> str:
    """Return how an axis tells a number of steps: 500k, 1.5M."""
    for unit, sign in ((1e6, "M"), (1e3, "k")):
        if abs(count) >= unit:
            return f"{count / unit:g}{sign}"
    return f"{count:g}"


def title_of(task: str) -> str:
    """Return a task as a reader knows it, without the module that registers it."""
    name = task.split(":")[-1].split("/")[-1].removeprefix("popgym-")
    if task.split(":")[0] in ("popgym", "envs"):
        return name.rpartition("-v")[0].removesuffix("Easy")
    return re.sub(r"(Continuous)?NoVel-v\d", ", no velocities", name)
