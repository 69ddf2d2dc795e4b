"""One run in many processes, by torchrun: the same run, faults, signals, resuming."""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command import TESTS, await_end, await_file, words
from conftest import SCRIPTS
from helpers import make_run, prepare, small_args

BY_THE_CLOCK = ("time/", "charts/SPS")
ROUNDING = "policy/ratio_first_minibatch_error"
TASKS = {
    "discrete": {
        "env_id": "probes:Staggered-v0",
        "target_kl": 1e-4,
        "update_epochs": 4,
        "learning_rate": 1e-2,
    },
    "continuous": {"env_id": "Pendulum-v1", "num_steps": 75},
    "samples": {
        "env_id": "probes:Staggered-v0",
        "value_target": "sr_lambda",
        "cvar_weight": 0.5,
        "cvar_alpha": 0.3,  # the seven quantiles see it
    },
}


def flags_of(script, tmp_path, iterations=10, **flags):
    """Flags of a small run with one minibatch an epoch."""
    flags = {"learning_rate": 3e-3, "anneal_lr": False, "num_minibatches": 1} | flags
    flags = {"run_dir": str(tmp_path / "runs")} | flags
    args = small_args(script, "", total_timesteps=10**6, **flags)
    return small_args(script, "", **flags, total_timesteps=iterations * args.batch_size)


def torchrun(script, directory, processes, line, *options):
    """The script in so many processes; output goes to `out` and `err` of the directory."""
    directory.mkdir(exist_ok=True)
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    group = options or ("--standalone",)
    launch = [sys.executable, "-m", "torch.distributed.run", *group]
    with (directory / "out").open("w") as out, (directory / "err").open("w") as err:
        return subprocess.Popen(
            [*launch, f"--nproc-per-node={processes}", script.__file__, *line],
            stdout=out, stderr=err, cwd=directory, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def checkpoint(top):
    """Weights and last metrics of the only run below a directory."""
    (path,) = top.rglob("checkpoint.pt")
    saved = torch.load(path, weights_only=True)
    return saved["agent"], pickle.loads(saved["run"].numpy())


def check_equal(one, two):
    """Metrics within 1e-4, relative; weights and statistics, too."""
    (weights, run), (others, other_run) = one, two
    assert run["step"] == other_run["step"]
    assert run["recent_returns"] == pytest.approx(other_run["recent_returns"], rel=1e-4)
    assert run["logged"].keys() == other_run["logged"].keys()
    for tag, x in run["logged"].items():
        if not tag.startswith(BY_THE_CLOCK) and tag != ROUNDING:
            assert other_run["logged"][tag] == pytest.approx(x, rel=1e-4, abs=1e-5), tag
    for name, x in weights.items():
        assert torch.allclose(others[name], x, rtol=1e-4, atol=1e-4), name


CASES = [*itertools.product(SCRIPTS, TASKS, (2, 4))]
QUICK = pytest.param(*CASES[0])
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:]]


@pytest.mark.parametrize(("name", "task", "processes"), [QUICK, *SLOW])
def test_processes_give_what_one_gives(tmp_path, name, task, processes):
    """With one minibatch an epoch, ten iterations differ by rounding; time limits, a KL stop."""
    script = importlib.import_module(name)
    args = flags_of(script, tmp_path / "one", **TASKS[task])
    script.train(args)
    run_of_one = checkpoint(tmp_path / "one")
    if task == "discrete":
        assert run_of_one[1]["logged"]["policy/stopped_early"] == 1
    many = tmp_path / "many"
    process = torchrun(script, many, processes, words(replace(args, run_dir=str(many))))
    assert await_end(process, 120) == 0, (many / "err").read_text()
    check_equal(run_of_one, checkpoint(many))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_meet_the_first_after_each_episode(script, monkeypatch, rank):
    """Process 0 plays alone. All of them ask after each episode whether a signal has come, after
    the last one when the evaluation is logged."""
    met = []
    monkeypatch.setattr(script, "RANK", rank)
    monkeypatch.setattr(script, "average", lambda x: met.append(x) or x)
    monkeypatch.setattr(script, "play", lambda *given: iter([[1.0], [2.0], [3.0]]))
    monkeypatch.setattr(script, "summarise", lambda episodes, args, step: {"eval/return_mean": 2.0})
    found = {"eval/return_mean": 2.0}
    monkeypatch.setattr(script, "gather_objects", lambda thing: [found])
    args = SimpleNamespace(eval_episodes=3, eval_every=0, capture_video=False)
    run = SimpleNamespace(
        args=args, agent=None, directory=Path(), step=7, log=lambda *given: None, evaluated_at=0,
        eval_env=None, signals=[], total_steps=9, stops=lambda: script.Run.stops(run),
        evaluation_status=None, checkpoint_is_due=lambda: False, saved_step=None,
    )  # fmt: skip
    script.Run.evaluate(run)
    assert len(met) == 3
    assert run.evaluated_at == 7


def test_the_entropy_floor_holds_for_all_processes_together(script, monkeypatch):
    """This process has a mean entropy of 0.35, the other one has 0.69: with 0.52 in the mean they
    are above a floor of 0.5, and so nothing is paid. The gradient is that of the own rows."""
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    monkeypatch.setattr(script, "average", lambda x: (x.detach() + 0.69) / 2)
    entropy = torch.tensor([0.3, 0.4], requires_grad=True)
    whole = script.with_common_mean(entropy)
    assert float(whole.mean()) == pytest.approx(0.52)
    assert float(script.entropy_loss(whole, 0.0, 0.5, 1.0)) == 0
    loss = script.entropy_loss(whole, 0.0, 0.6, 1.0)
    assert float(loss) == pytest.approx(0.08)
    loss.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.5, -0.5])


def test_the_actor_pays_for_the_entropy_of_all_processes(script, monkeypatch):
    """The loss takes what `with_common_mean` gives: 0 here, 0.5 below the floor."""
    run = make_run(script, "VectorDiscrete", min_entropy=0.5, min_entropy_penalty=1.0)
    batch = prepare(run)
    plain, *_ = script.policy_loss(
        run.agent, batch, replace(run.args, min_entropy_penalty=0.0), 0.0
    )
    monkeypatch.setattr(script, "with_common_mean", torch.zeros_like)
    loss, *_ = script.policy_loss(run.agent, batch, run.args, 0.0)
    assert float(loss) == pytest.approx(float(plain) + 0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("fault", "message", "told"),
    [
        (RuntimeError, "CUDA out of memory", False),
        (RuntimeError, "[gloo/transport] Connection closed", True),
        (torch.distributed.DistBackendError, "NCCL communicator was aborted", True),
    ],
)
def test_only_a_broken_connection_is_told_as_another_process_s_end(
    script, monkeypatch, fault, message, told
):
    """A fault of this process is told as what it is."""
    monkeypatch.setattr(script.distributed, "is_initialized", lambda: True)

    def call():
        raise fault(message)

    expected = script.OtherProcessEnded if told else fault
    with pytest.raises(RuntimeError) as caught:
        script.exchange(call)
    assert type(caught.value) is expected


@pytest.mark.parametrize("fault", ["DistNetworkError", "DistStoreError"])
def test_processes_that_do_not_find_each_other_are_told(script, monkeypatch, fault):
    """The port is taken, say. That is no traceback."""

    def fail(backend):
        raise getattr(script.distributed, fault)("the port is in use")

    monkeypatch.setattr(script.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(script.distributed, "init_process_group", fail)
    with pytest.raises(script.OtherProcessEnded, match="the port is in use"):
        script.exchange(lambda: None)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(["--help"], marks=pytest.mark.slow),
        pytest.param(["--gamma", "2"], marks=pytest.mark.slow),
        pytest.param(["--nonsense"], marks=pytest.mark.slow),
    ],
)
def test_help_and_a_wrong_flag_get_one_answer(tmp_path, line):
    """Every process parses the flags, and the first one speaks."""
    import distributional_ppo_categorical as script

    process = torchrun(script, tmp_path, 2, line)
    code = await_end(process, 60)
    assert (code == 0) == (line == ["--help"])
    text = (tmp_path / "out").read_text() + (tmp_path / "err").read_text()
    told = {"--help": "--num-envs INT", "--gamma": "error: --gamma 2.0", "--nonsense": "nonsense"}
    assert text.count(told[line[0]]) == 1


@pytest.mark.slow
def test_environments_are_shared_out_evenly(tmp_path):
    """Once, in one line: the number of environments is a multiple of that of the processes."""
    import distributional_ppo_lstm as script

    line = ["--num-envs", "3", "--run-dir", str(tmp_path / "runs")]
    process = torchrun(script, tmp_path, 2, line)
    assert await_end(process) != 0
    text = (tmp_path / "err").read_text()
    assert text.count("--num-envs 3: must be a multiple of the 2 processes") == 1
    assert not (tmp_path / "runs").exists()


def ranks(process):
    """Process ids of the script's two processes, in the order of their ranks."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may just have ended
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            if parent == process.pid:
                variables = path.with_name("environ").read_bytes().decode().split("\0")
                found |= {v: int(path.parent.name) for v in variables if v.startswith("RANK=")}
    return [found["RANK=0"], found["RANK=1"]]


def long_run(script, tmp_path, **flags):
    """Two processes that would train for long, and their first checkpoint."""
    flags = {"env_id": "probes:Walk-v0", "checkpoint_every": 1} | flags
    args = flags_of(script, tmp_path, iterations=100_000, **flags)
    process = torchrun(script, tmp_path, 2, words(args))
    path = await_file(process, tmp_path, "runs/*/checkpoint.pt")
    return process, path


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run(tmp_path, rank):
    """All end soon, with a code and the last checkpoint's name, which goes on in two processes."""
    import distributional_ppo_categorical as script

    process, path = long_run(script, tmp_path)
    os.kill(ranks(process)[rank], signal.SIGKILL)
    assert await_end(process, 60) != 0
    text = (tmp_path / "err").read_text()
    assert text.count("error: another process of the run ended") == rank  # rank 0 tells it
    assert f'{script.__name__}.py", line' not in text  # no traceback of ours
    saved = torch.load(path, weights_only=True)
    steps = saved["global_step"] + 96
    line = ["--resume", str(path.parent), "--total-timesteps", str(10**8)]
    again = torchrun(script, tmp_path / "again", 2, line)
    while torch.load(path, weights_only=True)["global_step"] < steps:
        assert again.poll() is None, (tmp_path / "again" / "err").read_text()
        time.sleep(0.2)
    again.terminate()
    assert await_end(again, 60) != 0
    assert "afresh" not in (tmp_path / "again" / "out").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["Error", "Observation"])
def test_a_fault_in_one_process_ends_the_run(tmp_path, fault):
    """Environment 1 is the second process's: its traceback, and the first one's line."""
    import distributional_ppo_lstm as script

    args = flags_of(script, tmp_path, num_envs=2, env_id=f"probes:Faulty{fault}-v0")
    process = torchrun(script, tmp_path, 2, words(args))
    assert await_end(process, 60) != 0
    text = (tmp_path / "err").read_text()
    told = "the simulator broke" if fault == "Error" else "not finite: observation"
    assert text.count(f"RuntimeError: {told}") == 1
    assert len(re.findall("error: another process of the run ended.*; after 48 steps", text)) == 1


@pytest.mark.slow
def test_sigterm_ends_all_processes_with_a_checkpoint(tmp_path):
    """At the same iteration, as it does one process. A batch system sends it to all, and the
    launcher hands it on, so that the script's processes get it twice."""
    import distributional_ppo_categorical as script

    process, path = long_run(script, tmp_path, checkpoint_every=100)
    for pid in (*ranks(process), process.pid):
        os.kill(pid, signal.SIGTERM)
    assert await_end(process, 60) != 0
    text = (tmp_path / "err").read_text()
    step = torch.load(path, weights_only=True)["global_step"]
    assert text.count(f"stopped after {step:,} steps; continue with --resume") == 1


@pytest.mark.slow
def test_many_processes_resume_exactly(script, tmp_path):
    """Ten iterations in two processes equal five, and five after a resume, to the last bit."""
    flags = {"env_id": "probes:Walk-v0", "num_minibatches": 2, "ent_coef": 0.0}  # no schedule
    runs = {}
    for name, iterations in (("whole", 10), ("half", 5)):
        top = tmp_path / name
        args = flags_of(script, top, iterations, **flags)
        process = torchrun(script, top, 2, words(args))
        assert await_end(process) == 0, (top / "err").read_text()
        runs[name] = checkpoint(top)
    (path,) = top.rglob("checkpoint.pt")
    line = ["--resume", str(path.parent), "--total-timesteps", str(2 * args.total_timesteps)]
    assert await_end(torchrun(script, top, 2, line)) == 0, (top / "err").read_text()
    (weights, run), (others, other_run) = runs["whole"], checkpoint(top)
    assert all(torch.equal(x, others[name]) for name, x in weights.items())
    assert run["recent_returns"] == other_run["recent_returns"]


@pytest.mark.slow
def test_another_number_of_processes_opens_new_episodes(script, tmp_path):
    """And says so."""
    args = flags_of(script, tmp_path, 3, env_id="probes:Walk-v0")
    assert await_end(torchrun(script, tmp_path, 2, words(args))) == 0
    (path,) = tmp_path.rglob("checkpoint.pt")
    line = ["--resume", str(path.parent), "--total-timesteps", str(2 * args.total_timesteps)]
    assert await_end(torchrun(script, tmp_path, 1, line)) == 0, (tmp_path / "err").read_text()
    assert "episodes start afresh" in (tmp_path / "out").read_text()
    assert checkpoint(tmp_path)[1]["step"] == 2 * args.total_timesteps


@pytest.mark.slow
def test_two_nodes_train_cartpole(tmp_path):
    """Two launchers on this machine meet at a port and share one run."""
    import distributional_ppo_categorical as script

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    group = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}")
    line = ["--run-dir", str(tmp_path / "runs"), "--learning-rate", "0.002"]
    nodes = [torchrun(script, tmp_path / name, 1, line, *group) for name in ("one", "two")]
    codes = [await_end(node, 300) for node in nodes]
    assert codes == [0, 0], (tmp_path / "one" / "err").read_text()
    _, run = checkpoint(tmp_path)
    assert run["logged"]["eval/return_mean"] >= 475


@pytest.mark.parametrize(("gpu", "backend"), [(False, "gloo"), (True, "cpu:gloo,cuda:nccl")])
def test_the_others_wait_for_days(script, monkeypatch, gpu, backend):
    """On the CPU alone. A GPU counts where it is used. The group ends ahead of a pause."""
    begun, asked, at_exit = [], [], []
    gloo = SimpleNamespace(_set_default_timeout=asked.append)
    world = SimpleNamespace(_get_backend={torch.device("cpu"): gloo}.get)
    own = script.distributed
    monkeypatch.setattr(own, "is_initialized", lambda: False)
    monkeypatch.setattr(own, "init_process_group", lambda *given: begun.append(given))
    monkeypatch.setattr(own, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script.atexit, "register", lambda *given: at_exit.append(given[0]))
    script.exchange(lambda: None)
    assert begun == [(backend,)]
    assert asked[0] >= timedelta(days=1)
    assert at_exit == [time.sleep, own.destroy_process_group]  # they are called in reverse


def test_the_largest_divergence_is_that_of_all_processes(script, monkeypatch):
    """0.1 and 0.5 here, 0.5 and 0.1 in the other process: 0.3 in the mean of each minibatch."""
    monkeypatch.setattr(script, "average", lambda x: torch.full_like(x, 0.3))
    actor = [
        {"policy/kl_exact": torch.tensor(kl), "policy/log_ratio": torch.zeros(4)}
        for kl in (0.1, 0.5)
    ]
    critic = [{"value/loss": torch.tensor(1.0)}] * 2
    args = small_args(script, "Walk")
    metrics = script.describe_update(actor, critic, [1.0, 1.0], [1.0, 1.0], args)
    assert metrics["policy/kl_max"] == pytest.approx(0.3)
