"""Search flags: many runs of a script on this machine or on a cluster, by Ray Tune.

    python benchmarks/sweep.py distributional_ppo_lstm --env-id PendulumNoVel-v1 \\
        --vary learning_rate=loguniform:1e-4:1e-2 kappa=choice:0:0.05:1 --samples 20 --seeds 3
    python benchmarks/sweep.py distributional_ppo_categorical --preset mujoco --vary ...
    python benchmarks/sweep.py ... --search optuna --asha    # model the score, stop the worst
    python benchmarks/sweep.py ... --pbt --samples 8          # population based training
    python benchmarks/sweep.py ... --address HOST:6379        # on a Ray cluster, `ray start --head`
    python benchmarks/sweep.py --resume FOLDER                # go on after a kill
    python benchmarks/sweep.py --report FOLDER                # table and plot from its CSV alone

--vary takes flag=uniform:LOW:HIGH, flag=loguniform:LOW:HIGH, flag=randint:LOW:HIGH (both included)
or flag=choice:A:B:...; whatever this program does not know goes to the script. A sample is one
choice of the varied flags, trained with all seeds side by side. Its score, of which search and ASHA
(Li et al. 2018) want more, is the mean over seeds of the newest eval/return_mean or, as long as
there is none, of the last 100 training episodes. Every run tells it --reports times.

--pbt (Jaderberg et al. 2017): each sample is a member of a population. At every report, members of
the lowest quarter take weights and normalisers of one of the highest (--init-from; Adam starts
anew) and its flags, each perturbed or drawn afresh. The learning rate is not annealed, and a
schedule of the entropy bonus begins anew at every report. After --resume a scheduler has forgotten
what it knew of samples that had ended.

FOLDER (--out) holds the runs, samples.csv, a plot, and what Ray needs to go on; runs that were cut
short, and those that failed, go on from their checkpoints. A task of your own, module:id, lies in
the directory where the sweep was begun, or on PYTHONPATH. On a cluster all machines need this
checkout and FOLDER under the same path.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import common
import numpy as np
from common import CATEGORICAL, LSTM, Row, Table

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # tasks may read files where the sweep began

try:
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
    from ray.tune.search.basic_variant import BasicVariantGenerator
except ModuleNotFoundError:
    common.require("ray")
    raise
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SECONDS = 2  # between two looks at the runs of a sample
Config = dict[str, Any]  # value by varied flag
OURS = ("seed", "run_dir", "resume", "evaluate", "checkpoint_every")  # flags that a sweep sets
# What members of a population have in common, since they take each other's weights
COMMON = (
    "env_id", "masked_obs", "hidden_size", "lstm_hidden_size", "activation", "norm_obs",
    "num_critics", "value_from", "mean_output", "norm_returns", "num_quantiles", "num_atoms",
    "v_min", "v_max", "log_std_init",
)  # fmt: skip


# --------------------------------------------------------------------------------- what is searched
@dataclass(frozen=True)
class Sweep:
    """A sweep as its command line gave it; kept in sweep.json."""

    script: str
    flags: list[str]  # for every run
    vary: list[str]
    samples: int
    seeds: int
    reports: int
    search: str
    asha: bool
    pbt: bool
    out: str
    begun_in: str = ""  # the working directory, where a task of the user's own may lie

    @property
    def folder(self) -> Path:
        """Of everything that is kept."""
        return Path(self.out)

    def line(self, config: Config, *more: object) -> list[str]:
        """Command line of a run; the last of each flag counts."""
        return [*self.flags, *words(config), *map(str, more)]


def words(config: Config) -> list[str]:
    """Flags of the command line."""
    line = []
    for name, value in config.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            line += [f"--{flag}", str(value)]
    return line


def literal(text: str) -> Any:
    """A number or truth value where it is one, else the text."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def domain(text: str) -> tuple[str, str, list[Any]]:
    """Flag, kind and numbers of `flag=kind:number:number`. Raises ValueError."""
    name, _, rest = text.partition("=")
    kind, *values = rest.split(":")
    values = [literal(value) for value in values]
    if kind not in ("uniform", "loguniform", "randint", "choice") or not values:
        kinds = "flag=uniform:LOW:HIGH, =loguniform:, =randint: or =choice:A:B:..."
        raise ValueError(f"--vary {text}: write {kinds}")
    if kind != "choice":
        numbers = all(type(value) in (int, float) for value in values)
        if not numbers or len(values) != 2 or not values[0] < values[1]:
            raise ValueError(f"--vary {text}: {kind} takes two numbers, the lower one first")
        if kind == "loguniform" and values[0] <= 0:
            raise ValueError(f"--vary {text}: loguniform takes numbers above 0")
    return name.replace("-", "_"), kind, values


def space(vary: list[str]) -> Config:
    """Ray's search space."""
    found = {}
    for name, kind, values in map(domain, vary):
        if kind == "choice":
            found[name] = tune.choice(values)
        elif kind == "randint":
            found[name] = tune.randint(values[0], values[1] + 1)
        else:
            found[name] = getattr(tune, kind)(*values)
    return found


def args_of(script: ModuleType, line: list[str]) -> Any:
    """Flags of a run. Raises ValueError, in the script's own words."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return script.parse_args(line)
    except SystemExit:
        told = " ".join(re.sub("-{3,}|[─-╿]", " ", said.getvalue()).split())  # without its frame
        raise ValueError(told.split(" For full helptext")[0]) from None


def share(sweep: Sweep, config: Config) -> tuple[Any, int]:
    """Flags of a run, and its rollouts from one report to the next. Raises ValueError where the
    script does not take the flags, or a run would have too little to report."""
    args = args_of(common.load_script(sweep.script), sweep.line(config))
    every = args.num_iterations // sweep.reports
    if not every:
        given = f"with {shlex.join(words(config))} a run has {args.num_iterations} rollouts"
        text = f"--reports {sweep.reports}: {given}"
        raise ValueError(f"{text}; take fewer or raise --total-timesteps")
    if sweep.pbt and not args.eval_episodes:
        raise ValueError("--pbt: scores are those of evaluations; --eval-episodes must not be 0")
    return args, every


def alone(vary: list[str]) -> list[Config]:
    """Every end of a range and every choice by itself."""
    return [{name: value} for name, _, values in map(domain, vary) for value in values]


def check(sweep: Sweep) -> None:
    """Every end of a range and every choice, alone, beside the flags of all runs. Raises ValueError
    where one of them would not do."""
    script = script_of(sweep.script, sweep.begun_in)
    names = {field.name for field in fields(script.Args)}
    typed = {word.split("=")[0].removeprefix("--").replace("-", "_") for word in sweep.flags}
    for name in typed.intersection(OURS):
        raise ValueError(f"--{name.replace('_', '-')}: the sweep sets this flag; leave it out")

    args = args_of(script, sweep.flags)
    for text in sweep.vary:
        name, kind, _ = domain(text)
        if name not in names or name in (*OURS, "init_from", "preset"):
            raise ValueError(f"--vary {text}: {name} is no flag that can be varied")
        if sweep.pbt and name in COMMON:
            why = "members take each other's weights, so all must have the same"
            raise ValueError(f"--vary {text}: {why}")
        if type(getattr(args, name)) is int and kind in ("uniform", "loguniform"):
            raise ValueError(f"--vary {text}: takes whole numbers; write randint or choice")
    varied = [domain(text)[0] for text in sweep.vary]
    for name in varied:
        if varied.count(name) > 1:
            raise ValueError(f"--vary {name}: is given twice")
    for config in alone(sweep.vary):
        share(sweep, config)
    script.make_env(args).close()  # what is wrong with the task is told ahead of all runs


def script_of(name: str, begun_in: str) -> ModuleType:
    """The script, which finds tasks where the sweep was begun."""
    if begun_in and begun_in not in sys.path:
        sys.path.append(begun_in)
    return common.load_script(name)


# ------------------------------------------------------------------------------ one run, one sample
def train(name: str, line: list[str], folder: Path, begun_in: str = "") -> Config:
    """Train in `folder`, or take up the run that stands there."""
    script = script_of(name, begun_in)
    kept = [*folder.glob("*/checkpoint.pt")]
    if kept:
        args = script.parse_args(["--resume", str(kept[0].parent)])
    else:
        shutil.rmtree(folder, ignore_errors=True)  # of a run without a checkpoint
        args = args_of(script, [*line, "--run-dir", str(folder)])
    with contextlib.redirect_stdout(io.StringIO()):
        return script.train(args)


def tell(folder: Path, report: Config) -> None:
    """Keep a sample's report."""
    with (folder / "reports.jsonl").open("a") as file:
        file.write(json.dumps(report) + "\n")


def told(folder: Path) -> list[Config]:
    """A sample's reports; of those told again, after a kill or by other weights, the last ones."""
    path = folder / "reports.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    reports = map(json.loads, lines)
    return [*{report.get("report", report["steps"]): report for report in reports}.values()]


class Progress:
    """What a run in `folder` has reached."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: EventAccumulator | None = None

    def steps(self) -> int:
        """At its last checkpoint, ahead of which all events are written."""
        import torch

        for path in self.folder.glob("*/checkpoint.pt"):
            return torch.load(path, map_location="cpu", weights_only=True)["global_step"]
        return 0

    def score(self, until: int) -> float:
        """The newest evaluation, or the mean of the last 100 episodes, up to a step."""
        if self.events is None:
            (directory,) = self.folder.iterdir()
            self.events = EventAccumulator(str(directory), {"scalars": 0})
        self.events.Reload()
        for tag, number in (("eval/return_mean", 1), ("charts/episodic_return", 100)):
            if tag in self.events.Tags()["scalars"]:
                points = [event.value for event in self.events.Scalars(tag) if event.step <= until]
                if points:
                    return float(np.mean(points[-number:]))
        return -math.inf


class Sample(tune.Trainable):
    """One choice of flags: a task of Ray for every seed. A step lasts until all have got to the
    next report; what was told before a kill is told again at once."""

    def setup(self, config: Config, sweep: Sweep) -> None:
        """Nothing runs so far."""
        self.sweep = sweep
        self.folder = sweep.folder / "runs" / self.trial_id
        self.runs, self.tasks = [], []

    def start(self) -> None:
        """Start all seeds. Part of the first step: Ray keeps no flags of a sample whose set-up
        failed, and combinations of flags may be refused here."""
        sweep = self.sweep
        args, every = share(sweep, self.config)
        self.report_steps = every * args.batch_size
        self.last_step = args.num_iterations * args.batch_size
        cpus, gpus = needs(sweep)["CPU"], needs(sweep).get("GPU", 0)
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_calls=1, max_retries=0)(train)
        for seed in range(1000, 1000 + sweep.seeds):  # tuning seeds: reported ones are others
            folder = self.folder / f"seed{seed}"
            line = sweep.line(self.config, "--seed", seed, "--checkpoint-every", every)
            self.runs.append(Progress(folder))
            self.tasks.append(task.remote(sweep.script, line, folder, sweep.begun_in))

    def step(self) -> Config:
        """Score at the next report."""
        if not self.tasks:
            self.start()
        number = self.iteration + 1
        last = number == self.sweep.reports
        until = self.last_step if last else number * self.report_steps
        while True:
            done, running = ray.wait(self.tasks, num_returns=len(self.tasks), timeout=SECONDS)
            ray.get(done)  # raises what a run raised
            reached = not last and all(run.steps() >= until for run in self.runs)
            if reached or not running:
                break
        returns = [run.score(until) for run in self.runs]
        text = " ".join(f"{x:.4f}" for x in returns)
        score = float(np.mean(returns))
        report = {"report": number, "score": score, "returns": text, "steps": until}
        tell(self.folder, self.config | report)
        return report | {"done": last}

    def cleanup(self) -> None:
        """End the runs of a sample that was stopped."""
        for task in self.tasks:
            ray.cancel(task, force=True)


class Member(tune.Trainable):
    """A member of a population; a step trains it for one interval."""

    def setup(self, config: Config, sweep: Sweep) -> None:
        """Nothing learnt so far."""
        self.sweep, self.steps = sweep, 0
        self.parent = -1  # number of the member whose weights the next interval begins with
        self.folder = sweep.folder / "runs" / self.trial_id
        self.weights: Path | None = None

    def step(self) -> Config:
        """Score after the next interval, and whose weights it began with."""
        args, every = share(self.sweep, self.config)
        steps = every * args.batch_size
        seed = 1000 + (number_of(self.trial_id) + 100 * self.iteration) % 7000  # tuning seeds
        line = self.sweep.line(self.config, "--seed", seed, "--total-timesteps", steps)
        line += ["--no-anneal-lr"]
        if self.weights:
            line = [*without_log_std(line), "--init-from", str(self.weights)]
        folder = self.folder / f"interval{self.iteration + 1}"
        shutil.rmtree(folder, ignore_errors=True)  # of a member that was killed
        metrics = train(self.sweep.script, line, folder, self.sweep.begun_in)

        self.weights = Path(metrics["run_dir"], "checkpoint.pt")
        self.steps += steps
        parent, self.parent = self.parent, number_of(self.trial_id)
        score = metrics["eval/return_mean"]
        number = self.iteration + 1
        report = {"report": number, "score": score, "returns": f"{score:.4f}", "steps": self.steps}
        weights = self.weights.relative_to(self.sweep.folder)
        more = {"parent": parent, "weights": str(weights)}
        tell(self.folder, self.config | report | more)
        return report | {"done": number == self.sweep.reports}

    def save_checkpoint(self, directory: str) -> None:
        """Weights, and whose they are."""
        shutil.copy(self.weights, directory)
        facts = {"parent": self.parent, "steps": self.steps}
        Path(directory, "member.json").write_text(json.dumps(facts))

    def load_checkpoint(self, directory: str) -> None:
        """Of this member, or of the one it is to follow."""
        facts = json.loads(Path(directory, "member.json").read_text())
        self.parent, self.steps = facts["parent"], facts["steps"]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.weights = self.folder / "start.pt"
        shutil.copy(Path(directory, "checkpoint.pt"), self.weights)


def without_log_std(line: list[str]) -> list[str]:
    """A command line without --log-std-init, which has no effect beside weights."""
    kept = []
    skips = False  # the value that stands behind the flag
    for word in line:
        flag = word.split("=")[0].replace("_", "-")
        if not skips and flag != "--log-std-init":
            kept.append(word)
        skips = flag == "--log-std-init" and "=" not in word
    return kept


def needs(sweep: Sweep) -> dict[str, float]:
    """What Ray keeps free for a run: a core, or a part of one where there are fewer cores than runs
    side by side; with --cuda likewise a GPU. A part of a GPU is of one GPU."""
    runs = sweep.samples if sweep.pbt else sweep.seeds
    found = ray.cluster_resources()
    shares = {"CPU": min(1, math.floor(1000 * found["CPU"] / runs) / 1000)}
    if "--cuda" in sweep.flags:
        shares["GPU"] = math.floor(1000 / math.ceil(runs / found["GPU"])) / 1000
    return shares


def number_of(trial_id: str) -> int:
    """Of a sample or member, from 0; also from its folder."""
    return int(trial_id.split("_")[-1])


def numbered(results: Iterable[Any]) -> list[tuple[int, Any]]:
    """Results with the numbers of their samples: those in their ids. A search that models the score
    gives ids without numbers; there it is the order in which samples were made."""
    found = [*results]
    if all("_" in Path(one.path).name for one in found):
        return sorted([(number_of(one.path), one) for one in found], key=lambda pair: pair[0])
    return [*enumerate(found)]


# ---------------------------------------------------------------------------------------- the sweep
def scheduler(sweep: Sweep) -> Any:
    """Who may go on, and with what; None: all to their ends."""
    if sweep.pbt:
        return PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=1,
            hyperparam_mutations=mutations(sweep.vary),
            custom_explore_fn=partial(within, sweep.vary),
        )
    if sweep.asha:
        return ASHAScheduler(max_t=sweep.reports, grace_period=1, reduction_factor=3)
    return None


def mutations(vary: list[str]) -> Config:
    """What a member may turn to: a range's values, perturbed, or a neighbour in a list."""
    lists = {name: values for name, kind, values in map(domain, vary) if kind == "choice"}
    return space(vary) | lists


def within(vary: list[str], config: Config) -> Config:
    """The nearest values inside of the ranges: perturbing by a factor may leave them."""
    for name, kind, values in map(domain, vary):
        if kind != "choice":
            config[name] = min(max(config[name], values[0]), values[1])
    return config


def searcher(sweep: Sweep) -> Any:
    """Who proposes samples."""
    if sweep.search == "optuna":
        from ray.tune.search.optuna import OptunaSearch

        return OptunaSearch(seed=0)
    return BasicVariantGenerator(random_state=0)


@contextlib.contextmanager
def limit(hours: float) -> Iterator[None]:
    """Send a Ctrl-C to this process after so many hours, unless the block has ended; 0: never."""
    timer = threading.Timer(3600 * hours, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    if hours:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run(sweep: Sweep, hours: float) -> bool:
    """Run what is missing and write samples.csv. Tells whether all samples have come to their end.

    Ray takes the first Ctrl-C, keeps what is needed to go on, and returns. A limit of hours is a
    Ctrl-C as well: a time budget of Ray would end the samples for good.
    """
    trainable = tune.with_parameters(Member if sweep.pbt else Sample, sweep=sweep)
    bundles = [needs(sweep)] if sweep.pbt else [{}, *[needs(sweep)] * sweep.seeds]
    trainable = tune.with_resources(trainable, tune.PlacementGroupFactory(bundles))
    path = str(sweep.folder / "ray")
    if tune.Tuner.can_restore(path):
        tuner = tune.Tuner.restore(
            path, trainable, param_space=space(sweep.vary), restart_errored=True
        )
    else:
        tuner = tune.Tuner(
            trainable,
            param_space=space(sweep.vary),
            tune_config=tune.TuneConfig(
                metric="score",
                mode="max",
                num_samples=sweep.samples,
                search_alg=searcher(sweep),
                scheduler=scheduler(sweep),
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(
                name="ray",
                storage_path=str(sweep.folder.resolve()),
                checkpoint_config=tune.CheckpointConfig(
                    checkpoint_frequency=int(sweep.pbt), checkpoint_at_end=False
                ),
                verbose=1,
            ),
        )
    with limit(hours):
        results = tuner.fit()
    record(sweep, results)
    ended = [one for one in results if one.error or (one.metrics or {}).get("done")]
    return len(ended) == sweep.samples


def table(sweep: Sweep) -> Table:
    """Every report of every sample."""
    flags = [name for name, *_ in map(domain, sweep.vary)]
    columns = ["sample", *flags, "report", "steps", "score", "returns"]
    columns += ["parent", "weights", "error"]
    return Table(sweep.folder / "samples.csv", columns, end="\n")


def record(sweep: Sweep, results: tune.ResultGrid) -> None:
    """Write every report of every sample, and what ended those that failed.

    A sample keeps its number when the sweep goes on after a stop.
    """
    rows = table(sweep)
    rows.path.unlink(missing_ok=True)
    for number, result in numbered(results):
        sample = {"sample": number}
        for report in told(sweep.folder / "runs" / Path(result.path).name):
            rows.append(sample | report)
        if result.error:
            cause = cause_of(str(result.error))
            config = json.loads(Path(result.path, "params.json").read_text())
            rows.append(sample | config | {"error": cause})


def cause_of(traceback: str) -> str:
    """The line of a traceback that names the error, without its module. Notes may follow it."""
    lines = traceback.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|NotFinite)\b", line)]
    return re.sub(r"^[\w.]*\.(?=\w)", "", (named or lines)[-1])


# --------------------------------------------------------------------------------------- the report
@dataclass(frozen=True)
class Outcome:
    """What became of a sample."""

    rows: list[Row]  # its reports in their order, and its failure

    @property
    def told(self) -> list[Row]:
        """Its reports."""
        return [row for row in self.rows if not row["error"]]

    @property
    def reports(self) -> int:
        """Number of the last report. A member counts on from that whose weights it took."""
        numbers = [row.get("report") or number for number, row in enumerate(self.told, 1)]
        return int(numbers[-1]) if numbers else 0

    @property
    def steps(self) -> int:
        """Trained until the last report."""
        return max((int(row["steps"]) for row in self.told), default=0)

    @property
    def returns(self) -> np.ndarray:
        """Of each seed at the last report."""
        return np.array(self.told[-1]["returns"].split() if self.told else ["nan"], float)

    @property
    def mean(self) -> float:
        """Of them."""
        return self.returns.mean()

    @property
    def error(self) -> str:
        """What ended it, empty if nothing did."""
        return self.rows[-1]["error"]


def outcomes(sweep: Sweep) -> list[Outcome]:
    """Of all samples, the best of those that told most reports first."""
    groups: dict[str, list[Row]] = {}
    for row in table(sweep).rows():
        groups.setdefault(row["sample"], []).append(row)
    found = [Outcome(rows) for rows in groups.values()]
    return sorted(found, key=lambda one: (not one.error, one.reports, one.mean), reverse=True)


def shown(text: str) -> str:
    """A flag's value in four digits, where it is a number."""
    value = literal(text)
    return f"{value:.4g}" if isinstance(value, float) else text


def interval(returns: np.ndarray) -> str:
    """95 % interval of the mean over seeds, by Student's t; nothing for one seed."""
    if len(returns) == 1:
        return ""
    half = common.half_width(returns)
    return f"{returns.mean() - half:.1f} to {returns.mean() + half:.1f}"


def report(sweep: Sweep) -> None:
    """Print the table, the lineage of a population and the command of the best; draw the plot."""
    found = outcomes(sweep)
    flags = [name for name, *_ in map(domain, sweep.vary)]
    names = ["sample", *flags, "steps", "mean", "worst seed", "95 % interval", "ended by"]
    print(*common.markdown_head(" | ".join(names)), sep="\n")
    for one in found:
        row = one.rows[-1]
        cells = [row["sample"], *[shown(row[name]) for name in flags], one.steps]
        cells += [f"{one.mean:.1f}", f"{one.returns.min():.1f}", interval(one.returns)]
        early = "" if one.reports == sweep.reports else "stopped early"
        print(common.markdown_row([*cells, one.error[:60] or early]))
    for one in found:
        if len(one.error) > 60:
            print(f"sample {one.rows[-1]['sample']} failed: {one.error}")
    if sweep.pbt:
        for one in found:
            print(f"weights of member {one.rows[0]['sample']}: {lineage(one)}")

    if not any(one.told for one in found):
        sys.exit("error: no sample told a score; see the errors above")
    plot(sweep, found)
    best = found[0].told[-1]
    config = {name: literal(best[name]) for name in flags}
    script = shlex.quote(os.path.relpath(common.HERE.parent / f"{sweep.script}.py"))
    print(f"watch it by tensorboard --logdir {shlex.quote(str(sweep.folder / 'runs'))}")
    if sweep.pbt:
        weights = shlex.quote(str(sweep.folder / best["weights"]))
        print(f"the best agent: python {script} --evaluate {weights}")
        print(f"its flags at the end: {shlex.join(words(config))}")
    else:
        print(f"the best again: python {script} {shlex.join(sweep.line(config))}")


def lineage(member: Outcome) -> str:
    """Whose weights each interval began with, where they were another's."""
    own = member.rows[0]["sample"]
    taken = [row for row in member.told if row["parent"] not in ("-1", own)]
    text = ", ".join(f"member {row['parent']}'s to step {row['steps']}" for row in taken)
    return f"took {text}" if text else "its own throughout"


def plot(sweep: Sweep, found: list[Outcome]) -> None:
    """Returns over each varied flag or, of a population, score and flags over steps."""
    scales = {name: scale_of(kind, values) for name, kind, values in map(domain, sweep.vary)}
    panels = {"score": "linear"} | scales if sweep.pbt else scales
    size = (common.WIDTH, 3)
    figure, axes = common.pyplot().subplots(1, len(panels), figsize=size, squeeze=False)
    for number, (axis, (name, scale)) in enumerate(zip(axes[0], panels.items())):
        draw = partial(draw_member if sweep.pbt else draw_sample, axis, name, scale)
        for one in reversed(found):  # the best last, on top
            if one.told:
                colour = common.GOLD if one is found[0] else common.OURS
                draw(one, colour, one.reports == sweep.reports)
        common.letter(axis, number)
    title = f"{sweep.script}: {len(found)} samples, the best in orange; pale: stopped early"
    figure.suptitle(title, fontsize=8)
    common.save(figure, sweep.folder / "sweep.png")
    print(f"plot: {sweep.folder / 'sweep.png'}")


def scale_of(kind: str, values: list[Any]) -> str:
    """Of the axis of a flag; "words" stand side by side."""
    if kind == "choice" and not all(type(value) in (int, float) for value in values):
        return "words"
    return "log" if kind == "loguniform" else "linear"


def place(text: str, scale: str) -> float | str:
    """Where a value of the CSV is on such an axis."""
    return str(literal(text)) if scale == "words" else float(text)


def draw_sample(axis: Any, name: str, scale: str, one: Outcome, color: str, whole: bool) -> None:
    """Mean return and those of the seeds over a flag; pale where it was stopped early."""
    x = place(one.told[-1][name], scale)
    if scale != "words":
        axis.set_xscale(scale)
        axis.xaxis.set_minor_formatter("")
    axis.scatter([x] * len(one.returns), one.returns, s=8, color=color, alpha=0.3)
    axis.scatter(x, one.mean, s=40, color=color, alpha=1 if whole else 0.3)
    axis.set(xlabel=name, ylabel="return: means, seeds (small)")


def draw_member(axis: Any, name: str, scale: str, one: Outcome, color: str, whole: bool) -> None:
    """Score, or a flag, over the steps; pale where it was stopped early."""
    x = [int(row["steps"]) for row in one.told]
    y = [place(row[name], scale) for row in one.told]
    axis.plot(x, y, color=color, marker=".", alpha=1 if whole else 0.3)
    if scale != "words":
        axis.set_yscale(scale)
    axis.set(xlabel="steps", ylabel=name)


# ----------------------------------------------------------------------------------------- terminal
def parse() -> tuple[Sweep, argparse.Namespace]:
    """The sweep, and how it is to be run."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    stem = lambda text: text.removesuffix(".py")  # noqa: E731
    parser.add_argument("script", nargs="?", choices=[LSTM, CATEGORICAL], type=stem)
    parser.add_argument("--vary", nargs="+", action="extend", default=[], metavar="FLAG=KIND:...")
    parser.add_argument("--samples", type=int, default=10, help="default: 10")
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="number of them for every sample, from 1000 up; default: 1",
    )
    reports = "scores told by a run; default: 10, or one for each of fewer rollouts"
    parser.add_argument("--reports", type=int, help=reports)
    parser.add_argument("--search", choices=["random", "optuna"], default="random")
    parser.add_argument("--asha", action="store_true", help="stop the worst early")
    parser.add_argument("--pbt", action="store_true", help="population based training")
    hours = "end as by Ctrl-C after so many, --resume goes on; default: 0, no limit"
    parser.add_argument("--max-hours", type=float, default=0, help=hours)
    parser.add_argument("--address", default="local", help="of a Ray cluster; default: local")
    parser.add_argument("--out", default="", help="default: runs/sweep__SCRIPT__TIME")
    parser.add_argument("--resume", default="", metavar="FOLDER", help="go on with a sweep")
    parser.add_argument("--report", default="", metavar="FOLDER", help="table and plot, no runs")
    given, flags = parser.parse_known_args()
    kept = given.resume or given.report
    if kept:
        path = Path(kept, "sweep.json")
        if not path.exists():
            parser.error(f"{kept}: holds no sweep.json; name the folder of a sweep")
        if given.script or given.vary or flags:
            parser.error(f"{kept}: goes on with flags of its own; leave out others")
        return Sweep(**json.loads(path.read_text()), out=str(path.resolve().parent)), given

    if not given.script or not given.vary:
        parser.error("name a script, and flags to --vary")
    if given.reports is None:
        given.reports = usual_reports(given.script, flags, given.vary)
    if min(given.samples, given.seeds, given.reports) < 1:
        parser.error("--samples, --seeds and --reports must be at least 1")
    other = given.asha or given.search != "random" or given.seeds > 1
    if given.pbt and (other or given.samples < 4):
        parser.error("--pbt takes at least 4 --samples, each with one seed, no --asha, no --search")
    out = given.out or f"runs/sweep__{given.script}__{time.strftime('%Y%m%d-%H%M%S')}"
    names = ("vary", "samples", "seeds", "reports", "search", "asha", "pbt")
    chosen = {name: getattr(given, name) for name in names}
    places = {"out": str(Path(out).resolve()), "begun_in": str(Path.cwd())}
    return Sweep(given.script, flags, **places, **chosen), given


def usual_reports(name: str, flags: list[str], vary: list[str]) -> int:
    """Ten, or as many as a run has rollouts. `check` tells of flags that the script refuses."""
    with contextlib.suppress(ValueError):
        script = common.load_script(name)
        runs = [args_of(script, [*flags, *words(config)]) for config in alone(vary)]
        return min(10, *(args.num_iterations for args in runs))
    return 10


def knock(address: str) -> None:
    """Raise OSError or ValueError where nothing listens: Ray itself would try for minutes."""
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("must be local, auto or HOST:PORT")
    socket.create_connection((host, int(port)), timeout=10).close()


def keep(sweep: Sweep) -> None:
    """Write sweep.json, all but where it lies."""
    sweep.folder.mkdir(parents=True)
    kept = {name: value for name, value in asdict(sweep).items() if name != "out"}
    (sweep.folder / "sweep.json").write_text(json.dumps(kept, indent=1))


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a sweep's folder: two processes would spoil each other's runs."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        sys.exit(f"error: --resume {folder}: this sweep is running already; stop that first")
    finally:
        os.close(descriptor)


def main() -> None:
    """Check, run or go on, report."""
    sweep, given = parse()
    common.require("matplotlib", *(["optuna"] if sweep.search == "optuna" else []))
    if not given.report:
        try:
            check(sweep)
        except ValueError as error:
            sys.exit(f"error: {error}")
        if sweep.folder.exists() and not given.resume:
            sys.exit(f"error: --out {sweep.folder}: exists; --resume it or name another folder")
        try:
            knock(given.address)
            ray.init(address=given.address, log_to_driver=False, include_dashboard=False)
        except (OSError, ValueError) as error:
            sys.exit(f"error: --address {given.address}: {error}; is `ray start --head` running?")
        if not given.resume:
            keep(sweep)
        with lock(sweep.folder):
            ended = run(sweep, given.max_hours)
    try:
        report(sweep)
    finally:  # also where no sample has told a score yet
        if not given.report and not ended:
            program, folder = (
                shlex.quote(str(x)) for x in (Path(__file__).resolve(), sweep.folder)
            )
            print(f"go on by python {program} --resume {folder}")
    if not given.report and not ended and not given.max_hours:
        sys.exit(130)  # Ctrl-C


if __name__ == "__main__":
    main()
