"""One run in many processes: speed with one and two, and the cost of an all-reduce.

    python benchmarks/scaling.py               # measure what is missing, then report
    python benchmarks/scaling.py --slow        # what --async-envs gains for a slow simulator
    python benchmarks/scaling.py --report      # tables from results/scaling.csv (needs MuJoCo)

Speed: torchrun trains each cell with one and with two processes, which take turns, repeat by
repeat; steps of a rollout over the median time from one iteration's metrics to the next. "Apart":
two separate runs at a time, each with half of the environments: what the cores give at best.
A run of one process is held to a core (taskset, where it exists), or LSTMs would train in two
threads, which they do not in several processes. The rows of bd9c57f are older than those threads.
All-reduce: a float32 vector is averaged in 2 to 8 processes on this machine (gloo); median of 50.
One torch thread per process. With more processes than cores the cores are shared: times are then an
upper bound.

Efficiency at P processes is reckoned for an unchanged share of environments per process,
    T / (T + K A(P)),  a(P) = 2 (P - 1) latency + 2 (P - 1) / P bytes / bandwidth,
with T the time of an iteration in one process, K its minibatches, a(P) the cost of an all-reduce in
a ring, and A(P) the sum over the four of a minibatch: the actor's loss and KL, its gradient, the
critics' loss and their gradient (a fifth one, of the entropy, where it has a bonus or a floor). The
few others of an iteration and waiting for the slowest process are not in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import common
import numpy as np
from common import CATEGORICAL, HERE, LSTM, RESULTS, Row, Table

COLUMNS = ("kind", "cell", "processes", "repeat", "value", "commit", "cores", "machine")
TABLE = Table(RESULTS / "scaling.csv", COLUMNS, end="\n")
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)  # parameters
GROUPS = (2, 4, 8)  # processes of an all-reduce
WAYS = {"speed": ("1", "2", "apart"), "all-reduce": tuple(map(str, GROUPS))}  # of a repeat
REPEATS = 5


class Cell(NamedTuple):
    """A task, and how much of it."""

    script: str
    env_id: str
    num_envs: int
    iterations: int  # measured; the first, which warms up, comes on top

    @property
    def name(self) -> str:
        """In the CSV."""
        kind = "recurrent" if self.script == LSTM else "feed-forward"
        return f"{kind} {self.env_id} {self.num_envs}"


CELLS = [
    Cell(script, env_id, num_envs, iterations)
    for env_id, num_envs, iterations in (
        ("CartPole-v1", 16, 12),
        ("CartPole-v1", 64, 5),
        ("Humanoid-v5", 16, 5),
        ("Humanoid-v5", 64, 3),
    )
    for script in (CATEGORICAL, LSTM)
]


def torchrun(processes: int, *words: str, ahead: Sequence[str] = ()) -> str:
    """Output of a program in so many processes, with words ahead of its command."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*ahead, *launch, f"--nproc-per-node={processes}", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


def held(place: int) -> list[str]:
    """Words that hold a command to one of the usable cores; none where there is no taskset."""
    if shutil.which("taskset") is None:
        return []
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "--cpu-list", str(cores[place % len(cores)])]


def speed(cell: Cell, processes: int, place: int = 0) -> float:
    """Steps per second; a run of one process is held to the core at this place."""
    steps = cell.num_envs * 128
    total = steps * (cell.iterations + 1)
    flags = f"--env-id {cell.env_id} --num-envs {cell.num_envs} --num-steps 128 --eval-episodes 1"
    with tempfile.TemporaryDirectory() as top:
        line = [*flags.split(), "--total-timesteps", str(total), "--save-envs", "never"]
        words = [str(HERE.parent / f"{cell.script}.py"), *line, "--run-dir", top]
        torchrun(processes, *words, ahead=held(place) if processes == 1 else ())
        (directory,) = Path(top).iterdir()
        return steps / median(np.diff(times(directory)))


def apart(cell: Cell) -> float:
    """Steps per second of two runs at a time, each with half of the environments and a core."""
    half = cell._replace(num_envs=cell.num_envs // 2)
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(speed, [half, half], [1, 1], [0, 1]))


def speed_of_slow(how: str) -> float:
    """Steps per second of rollouts of 8 simulators of 1 ms a step, "sync" or "async".

    The time is that of rollouts alone: the rest of an iteration is the same both ways.
    """
    steps = 8 * 64
    flags = f"--env-id benchmarks.envs:Slow-v0 --total-timesteps {9 * steps} --eval-episodes 0"
    with tempfile.TemporaryDirectory() as top:
        line = [*flags.split(), "--save-envs", "never", "--run-dir", top]
        line += ["--async-envs"] * (how == "async")
        command = [sys.executable, str(HERE.parent / f"{CATEGORICAL}.py"), *line]
        subprocess.run(command, check=True, capture_output=True)
        (directory,) = Path(top).iterdir()
        rollouts = common.scalars(directory, ("time/rollout",))["time/rollout"]
        return steps / median(point.value for point in rollouts)


def origin() -> dict[str, object]:
    """Where a row comes from: commit of the scripts, machine."""
    return {"commit": common.origin()["commit"], **common.machine()}


def measure_slow(repeats: int) -> None:
    """Both ways turn by turn, as often as is missing for this commit of the scripts, and the
    ratio."""
    same, cell = origin(), "8 simulators of 1 ms"
    kept = {"kind": "slow", "cell": cell, "commit": same["commit"]}.items()
    rows = [row for row in TABLE.rows() if not row["commit"].endswith("+")]
    known = {row["repeat"] for row in rows if kept <= row.items()}
    for repeat in range(repeats):
        if str(repeat) not in known:
            found = {how: round(float(speed_of_slow(how)), 2) for how in ("sync", "async")}
            row = {"kind": "slow", "cell": cell, "repeat": repeat} | same
            TABLE.append(*(row | {"processes": how, "value": x} for how, x in found.items()))
            print(found, f"ratio {found['async'] / found['sync']:.2f}", flush=True)
    rows = [row for row in TABLE.rows() if kept <= row.items()]
    gained = ratio(values(rows, cell, "async") / values(rows, cell, "sync"))
    print(f"8 simulators of 1 ms a step, --async-envs: {gained} times as fast")


def times(directory: Path) -> list[float]:
    """Wall time of the metrics of each iteration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), {"scalars": 0})
    events.Reload()
    return [event.wall_time for event in events.Scalars("charts/SPS")]


def child() -> None:
    """Milliseconds of one all-reduce by number of parameters; process 0 prints them."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found = {}
    for size in SIZES:
        vector = torch.ones(size)
        calls = []
        for _ in range(50):
            began = time.perf_counter()
            distributed.all_reduce(vector)
            vector /= distributed.get_world_size()
            calls.append(time.perf_counter() - began)
        found[size] = 1000 * median(calls)
    if distributed.get_rank() == 0:
        print(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def measure(repeats: int) -> None:
    """Rows that are missing for this commit of the scripts."""
    same = origin()
    known = {
        (row["cell"], row["processes"], row["repeat"])
        for row in of_commit(same["commit"])
        if not row["commit"].endswith("+")  # of a tree that may have changed since
    }
    for repeat in range(repeats):
        for cell, processes in itertools.product(CELLS, (1, 2, "apart")):
            if (cell.name, str(processes), str(repeat)) not in known:
                found = apart(cell) if processes == "apart" else speed(cell, processes)
                row = {"kind": "speed", "cell": cell.name, "value": round(float(found), 2)}
                TABLE.append(row | {"processes": processes, "repeat": repeat} | same)
                print(row, processes, flush=True)
        for processes in GROUPS:
            if any((str(size), str(processes), str(repeat)) not in known for size in SIZES):
                found = json.loads(torchrun(processes, __file__, "--child"))
                for size, value in found.items():
                    row = {"kind": "all-reduce", "cell": size, "value": round(value, 4)}
                    TABLE.append(row | {"processes": processes, "repeat": repeat} | same)
                print(processes, found, flush=True)


# ------------------------------------------------------------------------------------------ reports
class Link(NamedTuple):
    """What an all-reduce in a ring costs."""

    latency: float  # seconds of a message
    bandwidth: float  # bytes per second

    def seconds(self, numbers: int, processes: int) -> float:
        """Of one all-reduce."""
        share = (processes - 1) / processes
        return 2 * (processes - 1) * self.latency + 2 * share * 4 * numbers / self.bandwidth


def of_commit(commit: str) -> list[Row]:
    """Rows of a commit, all but those of slow simulators."""
    return [row for row in TABLE.rows() if row["commit"] == commit and row["kind"] != "slow"]


def newest(commit: str) -> list[Row]:
    """Rows of a commit, repeat by repeat; without repeats of a cell that were cut short."""
    groups: dict[tuple, dict[str, Row]] = {}
    for row in of_commit(commit):
        group = groups.setdefault((row["kind"], row["cell"], int(row["repeat"])), {})
        group[row["processes"]] = row
    whole = [groups[key] for key in sorted(groups) if groups[key].keys() >= set(WAYS[key[0]])]
    return [row for group in whole for row in group.values()]


def values(rows: list[Row], cell: object, processes: object) -> np.ndarray:
    """Of all repeats."""
    wanted = (str(cell), str(processes))
    return np.array([float(r["value"]) for r in rows if (r["cell"], r["processes"]) == wanted])


def ratio(ratios: np.ndarray) -> str:
    """Median, lowest and highest."""
    return f"{np.median(ratios):.2f} ({ratios.min():.2f}, {ratios.max():.2f})"


def measured_link(rows: list[Row]) -> Link:
    """Least squares over the sizes with two processes, relative errors."""
    seconds = np.array([np.median(values(rows, size, 2)) / 1000 for size in SIZES])
    terms = np.array([(2, 4 * size) for size in SIZES]) / seconds[:, None]
    latency, per_byte = np.linalg.lstsq(terms, np.ones(len(SIZES)), rcond=None)[0]
    return Link(max(latency, 0), 1 / per_byte)


def exchanged(agent: Any) -> list[int]:
    """How many numbers each all-reduce of a minibatch averages: loss and KL of the actor, its
    gradient, the loss of the critics and their gradient."""
    actor, critics = (sum(p.numel() for p in part) for part in agent.parts())
    return [2, actor, 1, critics]


def demand(cell: Cell) -> tuple[int, list[int]]:
    """Minibatches of an iteration, and the numbers in each all-reduce of one."""
    script = common.load_script(cell.script)
    flags = ["--env-id", cell.env_id, "--num-envs", str(cell.num_envs), "--num-steps", "128"]
    args = script.parse_args(flags)
    agent = script.make_agent(script.make_envs(args), args)
    return args.update_epochs * args.num_minibatches, exchanged(agent)


def efficiency_line(cell: Cell, rows: list[Row], link: Link) -> list[object]:
    """Efficiency at 8, 64 and 512 processes, and where it falls below 70 %."""
    count, sizes = demand(cell)
    seconds = cell.num_envs * 128 / median(values(rows, cell.name, 1))

    def efficiency(processes: int) -> float:
        exchange = sum(link.seconds(size, processes) for size in sizes)
        return seconds / (seconds + count * exchange)

    at = [f"{efficiency(processes):.0%}" for processes in (8, 64, 512)]
    below = next((p for p in range(2, 100_000) if efficiency(p) < 0.7), "never")
    numbers = ", ".join(f"{size:,}" for size in sizes)
    return [cell.name, f"{seconds:.2f}", count, numbers, *at, below]


def report() -> None:
    """Print all tables of the newest commit, as far as it has been measured."""
    last = [row for row in TABLE.rows() if row["kind"] != "slow"][-1]
    rows = newest(last["commit"])
    print(f"Commit {last['commit']}, {last['cores']} cores, {last['machine']}.\n")
    names = "cell | 1 process, steps/s | 2 processes | ratio (lowest, highest) | two runs apart"
    print(*common.markdown_head(names), sep="\n")
    cells = [cell for cell in CELLS if len(values(rows, cell.name, 1))]
    for cell in cells:
        one, two, separate = (values(rows, cell.name, how) for how in WAYS["speed"])
        speeds = [f"{np.median(one):,.0f}", f"{np.median(two):,.0f}"]
        print(common.markdown_row([cell.name, *speeds, ratio(two / one), ratio(separate / one)]))

    heads = " | ".join(f"{processes} processes, ms" for processes in GROUPS)
    print("", *common.markdown_head(f"parameters | {heads}"), sep="\n")
    sizes = [size for size in SIZES if len(values(rows, size, GROUPS[0]))]
    for size in sizes:
        times = [f"{np.median(values(rows, size, processes)):.2f}" for processes in GROUPS]
        print(common.markdown_row([f"{size:,}", *times]))

    names = "cell | s per iteration | minibatches | numbers in the all-reduces of each"
    names += " | 8 | 64 | 512 | below 70 % at"
    links = {"a network of 50 us, 1.25 GB/s": Link(5e-5, 1.25e9)}
    if sizes == [*SIZES]:
        link = measured_link(rows)
        told = f"{1e6 * link.latency:.0f} us, {link.bandwidth / 1e9:.1f} GB/s"
        links = {f"this machine ({told})": link} | links
    for title, link in links.items():
        print(f"\nEfficiency, reckoned for {title}:\n")
        print(*common.markdown_head(names), sep="\n")
        for cell in cells:
            print(common.markdown_row(efficiency_line(cell, rows, link)))


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--report", action="store_true", help="only print the tables")
    parser.add_argument("--slow", action="store_true", help="measure slow simulators alone")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return
    if args.slow:
        measure_slow(args.repeats)
        return
    if not args.report:
        measure(args.repeats)
    report()


if __name__ == "__main__":
    main()
