"""Sweeps over flags on Ray Tune, on this machine; run where `benchmarks/requirements.txt` is."""

from __future__ import annotations

import csv
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import await_end
from conftest import ONE_SCRIPT

pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
SCRIPT = "distributional_ppo_categorical"
SMALL = "--env-id CartPole-v1 --total-timesteps 4096 --eval-episodes 2"


def sweep(directory, line):
    """A sweep in a process of its own; output goes to `out` and `err` of the directory."""
    command = [sys.executable, str(ROOT / "benchmarks" / "sweep.py"), *line.split()]
    with (directory / "out").open("a") as out, (directory / "err").open("a") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)


def rows(folder):
    """Of the sweep's CSV."""
    with (folder / "samples.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"{SCRIPT} --vary gamma=choice:0.9:1.5", "--gamma 1.5"),
        (f"{SCRIPT} --vary gamma=uniform:0.9:2", "--gamma 2"),
        (f"{SCRIPT} --vary gama=choice:0.9", "gama is no flag"),
        (f"{SCRIPT} --vary gamma=0.9", "write flag=uniform:LOW:HIGH"),
        (f"{SCRIPT} --vary gamma=uniform:1:0.5", "the lower one first"),
        (f"{SCRIPT} --vary gamma=choice:0.9 --num-envs 0", "--num-envs 0"),
        (f"{SCRIPT} --vary gamma=choice:0.9 --pbt --samples 2", "--pbt takes at least 4"),
        ("--resume nowhere", "nowhere: holds no sweep.json"),
        (f"{SCRIPT} --vary gamma=choice:0.9 --env-id nowhere:Mine-v0", "No module named 'nowhere'"),
    ],
)
@pytest.mark.slow
def test_wrong_flags_end_in_one_line_before_ray_starts(tmp_path, line, told):
    """And nothing is written."""
    process = sweep(tmp_path, f"{line} --out {tmp_path / 'kept'}")
    assert await_end(process, 60) != 0
    text = (tmp_path / "err").read_text()
    assert told in text
    assert "Traceback" not in text
    assert not (tmp_path / "kept").exists()


def a_sweep(program, vary, flags="", **other):
    """A sweep that has not begun."""
    given = {"samples": 4, "seeds": 1, "reports": 2, "search": "random", "asha": False}
    line = [*SMALL.split(), *flags.split()]
    return program.Sweep(SCRIPT, line, [*vary], out="", **given | {"pbt": False} | other)


@pytest.mark.parametrize(
    ("vary", "flags", "pbt", "told"),
    [
        (["hidden_size=uniform:32:128"], "", False, "takes whole numbers; write randint"),
        (["hidden_size=choice:32:64"], "", True, "members take each other's weights"),
        (["gamma=choice:0.9"], "--seed 7", False, "--seed: the sweep sets this flag"),
        (["gamma=choice:0.9"], "--run_dir=here", False, "--run-dir: the sweep sets this flag"),
        (["gamma=choice:0.9", "gamma=choice:1"], "", False, "--vary gamma: is given twice"),
        (["preset=choice:pendulum"], "", False, "preset is no flag that can be varied"),
    ],
)
def test_what_would_fail_later_is_refused(vary, flags, pbt, told):
    """Ahead of all runs: every sample would fail, or a typed flag would have no effect."""
    program = importlib.import_module("sweep")
    with pytest.raises(ValueError, match=re.escape(told)):
        program.check(a_sweep(program, vary, flags, pbt=pbt))
    program.check(a_sweep(program, ["hidden_size=choice:32:64"]))


def test_a_cause_is_the_line_that_names_it():
    """Notes come last in a traceback. The module goes."""
    program = importlib.import_module("sweep")
    text = (
        "Traceback ...\n  x = 1\ndistributional_ppo_lstm.NotFinite: loss nan\nafter 9 steps; no\n"
    )
    assert program.cause_of(text) == "NotFinite: loss nan"
    assert program.cause_of("a\nValueError: --gamma 2: a.b\n") == "ValueError: --gamma 2: a.b"
    assert program.cause_of("killed\n") == "killed"


def test_the_log_std_goes_from_a_line_however_it_is_spelt():
    """With a value apart or joined, with dashes or not."""
    program = importlib.import_module("sweep")
    line = "--gamma 0.9 --log-std-init -0.5 --log_std_init=1 --seed 3".split()
    assert program.without_log_std(line) == ["--gamma", "0.9", "--seed", "3"]


def test_a_sweep_is_run_by_one_process_at_a_time(tmp_path):
    """The second one ends in one line."""
    program = importlib.import_module("sweep")
    first = program.lock(tmp_path)
    first.__enter__()
    with pytest.raises(SystemExit, match="is running already"), program.lock(tmp_path):
        pass
    first.__exit__(None, None, None)
    with program.lock(tmp_path):
        pass


def test_a_part_of_a_gpu_is_of_one_gpu(monkeypatch):
    """Three runs on two GPUs: two share one. Four runs on two cores have half a core each."""
    program = importlib.import_module("sweep")
    monkeypatch.setattr(program.ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 2.0})
    for seeds, cpu, gpu in ((1, 1, 1), (2, 1, 1), (3, 0.666, 0.5), (4, 0.5, 0.5), (5, 0.4, 0.333)):
        found = program.needs(a_sweep(program, ["gamma=choice:0.9"], "--cuda", seeds=seeds))
        assert found == {"CPU": cpu, "GPU": gpu}


def test_samples_are_numbered_with_and_without_numbers_in_their_ids():
    """Those of random search carry theirs, in any order; a search that models the score draws eight
    digits, and there the order counts."""
    program = importlib.import_module("sweep")

    def numbers(*names):
        found = [SimpleNamespace(path=f"/runs/{name}") for name in names]
        return [(number, Path(one.path).name) for number, one in program.numbered(found)]

    known = [(2, "ab12_00002"), (10, "ab12_00010")]
    assert numbers("ab12_00010", "ab12_00002") == known
    assert numbers("c75bfe1b", "12345678") == [(0, "c75bfe1b"), (1, "12345678")]


@pytest.mark.parametrize("script", ONE_SCRIPT)
def test_a_run_of_a_sample_is_trained_and_taken_up(tmp_path, script):
    """Flags as the script reads them; the second call goes on with the run that stands there, and
    its progress is read from what it wrote."""
    program = importlib.import_module("sweep")
    small = "--num-envs 4 --num-steps 16 --total-timesteps 128 --eval-episodes 2 --seed 3"
    small += " --save-envs never"
    line = ["--env-id", "CartPole-v1", *small.split(), *program.words({"norm_obs": False})]
    args = program.args_of(importlib.import_module(script), line)
    assert (args.seed, args.norm_obs, args.num_iterations) == (3, False, 2)
    first = program.train(script, line, tmp_path / "seed3")
    again = program.train(script, line, tmp_path / "seed3")
    assert again["run_dir"] == first["run_dir"]
    progress = program.Progress(tmp_path / "seed3")
    assert progress.steps() == 128
    assert progress.score(128) == pytest.approx(first["eval/return_mean"])


@pytest.mark.parametrize("script", ["distributional_ppo_lstm", SCRIPT])
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--gamma 1.5", "--gamma 1.5: must be finite and in [0, 1]"),
        ("--gamma x", "could not convert string to float: 'x'"),
        ("--gama 1", "Unrecognized options: --gama"),
        ("--num-critics 1 --twin-reduce mean", "--twin-reduce mean: has no effect"),
    ],
)
def test_flags_are_refused_in_the_words_of_the_script(script, line, told):
    """On one line, without the frame that tyro draws."""
    program = importlib.import_module("sweep")
    with pytest.raises(ValueError, match=re.escape(told)) as found:
        program.args_of(importlib.import_module(script), line.split())
    assert not re.search("[\n─│╭]|---", str(found.value))
    assert "helptext," not in str(found.value)


@pytest.mark.slow
def test_a_failed_sample_is_a_row_and_a_killed_sweep_goes_on(tmp_path):
    """One hidden size is beyond all memory and fails, the other one is the best."""
    folder = tmp_path / "kept"
    vary = "--vary hidden_size=choice:8:99999999 --samples 6 --seeds 2 --reports 2"
    process = sweep(tmp_path, f"{SCRIPT} {SMALL} {vary} --out {folder}")
    while not [*folder.glob("runs/*/seed1000/*/checkpoint.pt")]:
        assert process.poll() is None, (tmp_path / "err").read_text()
        time.sleep(0.5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    process = sweep(tmp_path, f"--resume {folder}")
    assert await_end(process, 500) == 0, (tmp_path / "err").read_text()
    found = rows(folder)
    failed = {row["sample"] for row in found if row["error"]}
    trained = {row["sample"] for row in found if row["steps"] == "4096"}
    assert {row["hidden_size"] for row in found if row["error"]} == {"99999999"}
    assert len(failed) + len(trained) == 6
    assert not failed & trained
    assert all(len(row["returns"].split()) == 2 for row in found if not row["error"])
    text = (tmp_path / "out").read_text()
    assert "the best again: python distributional_ppo_categorical.py" in text
    assert "--hidden-size 8" in text
    assert (folder / "sweep.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_sweep_whose_hours_are_over_goes_on(tmp_path):
    """Three seconds are over before a sample has told anything; all are trained later."""
    folder = tmp_path / "kept"
    vary = "--vary gamma=choice:0.9:0.99 --samples 2 --reports 2"
    process = sweep(tmp_path, f"{SCRIPT} {SMALL} {vary} --out {folder} --max-hours {3 / 3600}")
    await_end(process, 200)
    assert f"--resume {folder}" in (tmp_path / "out").read_text()
    process = sweep(tmp_path, f"--resume {folder}")
    assert await_end(process, 200) == 0, (tmp_path / "err").read_text()
    assert [row["report"] for row in rows(folder)] == ["1", "2", "1", "2"]


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.1:9", "refused"), ("nowhere", "must be local, auto or HOST:PORT")],
)
def test_a_cluster_that_is_not_there_costs_one_line(address, said, monkeypatch, tmp_path):
    """Nothing listens on the port for discarded data."""
    line = ["sweep.py", "distributional_ppo_lstm", "--vary", "gamma=choice:0.5:0.9"]
    line += ["--address", address, "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit, match=rf"^error: --address {address}: .*{said}"):
        importlib.import_module("sweep").main()
    assert not (tmp_path / "out").exists()


def test_a_sweep_takes_the_presets_of_its_script(monkeypatch, tmp_path):
    """They reach the script like all flags that the program does not know."""
    line = ["sweep.py", "distributional_ppo_lstm", "--preset", "pendulum_novel", "averse"]
    line += ["--vary", "gamma=choice:0.5:0.9", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", line)
    program = importlib.import_module("sweep")
    found, _ = program.parse()
    args = program.args_of(program.common.load_script(found.script), found.flags)
    assert args.preset == ("pendulum_novel", "averse")
    assert (args.env_id, args.cvar_weight) == ("PendulumNoVel-v1", 0.5)


def test_a_sweep_tells_no_more_often_than_its_runs_have_rollouts(monkeypatch, tmp_path):
    """Ten reports by default; four rollouts have four. What is typed stays."""
    program = importlib.import_module("sweep")
    line = ["sweep.py", SCRIPT, *SMALL.split(), "--vary", "gamma=choice:0.5:0.9"]
    for more, reports in (
        (["--num-steps", "128"], 4),
        (["--total-timesteps", "51200"], 10),
        (["--reports", "3"], 3),
        (["--gae-lambda", "2"], 10),  # `check` tells of the flag
    ):
        monkeypatch.setattr(sys, "argv", [*line, *more, "--out", str(tmp_path / "out")])
        assert program.parse()[0].reports == reports


def test_samples_keep_their_numbers(tmp_path):
    """Ray lists those that were taken up in another order."""
    program = importlib.import_module("sweep")
    out = SimpleNamespace(folder=tmp_path, vary=["gamma=choice:0.5:0.9"])
    results = []
    for number in (2, 0, 1):
        folder = tmp_path / "runs" / f"abc_0000{number}"
        folder.mkdir(parents=True)
        program.tell(folder, {"gamma": number, "steps": 1, "score": 0.0, "returns": "0"})
        results.append(SimpleNamespace(path=str(tmp_path / "ray" / folder.name), error=None))
    program.record(out, results)
    assert [(row["sample"], row["gamma"]) for row in rows(tmp_path)] == [*zip("012", "012")]


def kept_sweep(folder, vary, **more):
    """A sweep without its rows, and the program."""
    program = importlib.import_module("sweep")
    same = {"script": SCRIPT, "flags": [], "samples": 4, "seeds": 1, "reports": 2}
    same |= {"search": "random", "asha": False, "pbt": False}
    return program, program.Sweep(vary=vary, out=str(folder), **(same | more))


def test_the_best_is_one_that_told_all_reports_whatever_its_rollouts(tmp_path, capsys):
    """Larger rollouts leave fewer steps to the last report. The first sample was stopped early,
    the last one failed; rows of sweeps before reports had numbers count."""
    vary = ["num_envs=choice:4:8", "gamma=choice:0.5:0.9"]
    program, sweep = kept_sweep(tmp_path, vary)
    rows = program.table(sweep)
    for sample, num_envs, steps, score in (
        (0, 4, (4096,), 99),
        (1, 4, (2048, 4096), 1),
        (2, 8, (2000, 4000), 2),
        (3, 8, (2000, 4000), 0),
    ):
        for number, step in enumerate(steps, 1):
            told = {"sample": sample, "num_envs": num_envs, "gamma": 0.9, "steps": step}
            report = {"report": number} if sample < 2 else {}
            rows.append(told | report | {"score": score, "returns": score})
    rows.append({"sample": 3, "num_envs": 8, "gamma": 0.9, "error": "OSError: no space"})
    assert [one.rows[0]["sample"] for one in program.outcomes(sweep)] == ["2", "1", "0", "3"]

    program.report(sweep)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[-1] for line in lines[1:]] == [
        " |",
        " |",
        "stopped early |",
        "OSError: no space |",
    ]


def test_a_report_is_told_once(tmp_path):
    """A member that takes the weights of one that is ahead or behind leaves out a report or tells
    it again; equal steps are no sign of that."""
    program = importlib.import_module("sweep")
    for number, steps in ((1, 10), (2, 20), (2, 15), (4, 20)):
        program.tell(tmp_path, {"report": number, "steps": steps})
    told = [(report["report"], report["steps"]) for report in program.told(tmp_path)]
    assert told == [(1, 10), (2, 15), (4, 20)]


def test_a_limit_of_hours_is_a_ctrl_c():
    """It comes once, and only as long as the block lasts."""
    program = importlib.import_module("sweep")
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append("Ctrl-C"))
    try:
        with program.limit(0.05 / 3600):
            end = time.time() + 10
            while not came and time.time() < end:
                time.sleep(0.05)
        with program.limit(5 / 3600):
            pass
        with program.limit(0):
            time.sleep(0.6)
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == ["Ctrl-C"]


SHORT = "--env-id CartPole-v1 --total-timesteps 4096 --num-steps 128 --num-envs".split()


def test_reports_are_checked_for_every_value_that_is_varied(tmp_path):
    """Rollouts of 16 environments are twice and not four times in the run; what no sample takes
    does not count."""
    program, sweep = kept_sweep(tmp_path, ["num_envs=choice:4:16"], flags=[*SHORT, "4"], reports=4)
    told = "--reports 4: with --num-envs 16 a run has 2 rollouts"
    with pytest.raises(ValueError, match=told):
        program.check(sweep)
    assert program.usual_reports(SCRIPT, sweep.flags, sweep.vary) == 2
    program.check(replace(sweep, reports=2))
    program.check(replace(sweep, flags=[*SHORT, "16"], vary=["num_envs=choice:4:8"]))


def trial(kind, sweep, config):
    """A sample or member outside of Ray."""
    found = object.__new__(kind)
    found.config, found._iteration = config, 0
    found._trial_info = SimpleNamespace(trial_id="abc_00003")
    found.setup(config, sweep)
    return found


@pytest.mark.parametrize("kind", ["Sample", "Member"])
def test_a_combination_with_too_few_rollouts_fails_in_one_line(tmp_path, kind):
    """Alone each value does. A sample fails in its first step, when Ray knows its flags."""
    vary = ["num_envs=choice:4:8", "num_steps=choice:64:256"]
    program, sweep = kept_sweep(tmp_path, vary, flags=[*SHORT, "4"], reports=4)
    program.check(sweep)
    one = trial(getattr(program, kind), sweep, {"num_envs": 8, "num_steps": 256})
    with pytest.raises(ValueError, match="with --num-envs 8 --num-steps 256 a run has 2 rollouts"):
        one.step()
    one.cleanup()


def test_a_member_counts_the_steps_of_its_own_rollouts(tmp_path, monkeypatch):
    """Two rollouts of 12 environments, one a report."""
    program, sweep = kept_sweep(tmp_path, ["num_envs=choice:4:12"], flags=[*SHORT, "4"], pbt=True)
    lines = []

    def train(script, line, folder, begun_in):
        lines.append(line)
        folder.mkdir(parents=True)
        return {"run_dir": str(folder / "run"), "eval/return_mean": 1.0}

    monkeypatch.setattr(program, "train", train)
    report = trial(program.Member, sweep, {"num_envs": 12}).step()
    assert (report["report"], report["steps"], report["done"]) == (1, 12 * 128, False)
    assert lines[0][lines[0].index("--seed") :][2:4] == ["--total-timesteps", str(12 * 128)]


@pytest.mark.parametrize("pbt", [True, False])
def test_words_and_truth_values_are_drawn(tmp_path, pbt, capsys):
    """Side by side, those of samples and those of members, which change on the way."""
    vary = ["norm_obs=choice:true:false", "twin_reduce=choice:min:mean", "gamma=choice:0.5:0.9"]
    program, sweep = kept_sweep(tmp_path, vary, pbt=pbt)
    rows = program.table(sweep)
    for sample, values in enumerate([(True, False), (False, False), (True, True)]):
        for number, value in enumerate(values, 1):
            config = {"norm_obs": value, "twin_reduce": "min" if value else "mean", "gamma": 0.9}
            told = {"sample": sample, "report": number, "steps": 10 * number, "parent": -1}
            rows.append(told | config | {"score": sample, "returns": sample, "weights": "x"})
    program.report(sweep)
    told = capsys.readouterr().out
    assert "--norm-obs --twin-reduce min --gamma 0.9" in told
    assert (tmp_path / "sweep.png").stat().st_size > 5_000


def test_a_population_needs_evaluations(tmp_path):
    """Whether all runs or one value of a varied flag lacks them. Samples take training episodes."""
    program, sweep = kept_sweep(tmp_path, ["gamma=choice:0.5:0.9"], flags=["--eval-episodes", "0"])
    program.check(sweep)
    varied = replace(sweep, flags=[], vary=["eval_episodes=choice:0:5"])
    for one in (sweep, varied):
        with pytest.raises(ValueError, match="--pbt: scores are those of evaluations"):
            program.check(replace(one, pbt=True))
