"""What stops a run: one message with what, where and what to try; the last checkpoint stays."""

from __future__ import annotations

import ast
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command import await_end, run_main, start, undisturbed, words
from conftest import ONE_SCRIPT, each_of, with_both_scripts
from helpers import make_run, prepare, roll, small_args
from probes import ENVIRONMENT_1

script = each_of(ONE_SCRIPT)  # but for what differs between them


@pytest.fixture(autouse=True)
def _undisturbed(tmp_path, monkeypatch):
    """No handler of signals outlives a test."""
    monkeypatch.chdir(tmp_path)
    with undisturbed():
        yield


def flags_for(script, tmp_path, env, **flags):
    """Flags of a tiny run that would last 5 iterations, with a checkpoint after each."""
    flags = {"total_timesteps": 240, "checkpoint_every": 1, **flags}
    return small_args(script, env, run_dir=str(tmp_path / "runs"), **flags)


def last_checkpoint(script, err, tmp_path, iterations):
    """The path is in the message, the file loads, and nothing in it is spoilt."""
    (path,) = (tmp_path / "runs").glob("*/checkpoint.pt")
    assert f"last checkpoint, of {iterations * 48} steps: {path}" in err
    agent, _ = script.load_agent(path)
    assert torch.load(path, weights_only=True)["global_step"] == iterations * 48
    assert all(x.isfinite().all() for x in agent.state_dict().values())


def check_fault(script, capsys, tmp_path, line, parts, iterations=2):
    """Exit code 1; the last lines on stderr are one error and its notes, with these parts."""
    code, _, err = run_main(script, capsys, line)
    assert code == 1, err
    lines = err.splitlines()
    message = " ".join(lines[max(i for i, x in enumerate(lines) if x[:1] != " ") - 1 :])
    for part in parts:
        assert re.search(part, message), (part, err)
    assert err.count("Traceback") == 1
    if iterations:
        last_checkpoint(script, err, tmp_path, iterations)


WHERE = ["after 96 steps", "environment 1", "step 5 of the rollout", "check the task"]
INSTANT = {
    "Observation": ["observation", "nan", "not finite", *WHERE],
    "Reward": ["reward", "inf", "not finite", *WHERE],
    "Error": ["RuntimeError", "the simulator broke", WHERE[0]],
}


@with_both_scripts
@pytest.mark.parametrize("kind", INSTANT)
def test_a_fault_of_the_task_stops_the_run(script, capsys, tmp_path, kind):
    """What failed, where, what to try; the checkpoint of the second iteration stays."""
    args = flags_for(script, tmp_path, f"Faulty{kind}")
    check_fault(script, capsys, tmp_path, words(args), INSTANT[kind])


@pytest.mark.slow
def test_a_fault_of_the_task_ends_the_process(script, tmp_path):
    """On the command line: exit code 1; the traceback leads into the task, the note comes last."""
    process = start(script, tmp_path, words(flags_for(script, tmp_path, "FaultyError")))
    assert await_end(process) == 1
    err = (tmp_path / "err").read_text()
    assert "probes.py" in err
    error, note = err.splitlines()[-2:]
    assert error == "RuntimeError: the simulator broke"
    assert note.startswith("after 96 steps; ")
    last_checkpoint(script, note, tmp_path, 2)


@with_both_scripts
def test_an_episode_that_opens_with_nan_stops_the_run(script, capsys, tmp_path):
    """Not only the observations of steps are looked at: none may reach the normalisers."""
    args = flags_for(script, tmp_path, "FaultyReset")
    parts = [
        "after 96 steps",
        "observation",
        "nan",
        "not finite",
        "environment 1",
        "check the task",
    ]
    check_fault(script, capsys, tmp_path, words(args), parts)


def test_a_run_that_opens_with_nan_stops_at_once(script, capsys, tmp_path):
    """The first reset is looked at like what follows: nobody acts on it, nothing is saved."""
    args = flags_for(script, tmp_path, "FaultyStart")
    parts = ["observation", "nan", "not finite", "environment 1, the first reset; check the task"]
    parts.append("after 0 steps; no checkpoint yet")
    check_fault(script, capsys, tmp_path, words(args), parts, iterations=0)
    assert not list((tmp_path / "runs").glob("*/checkpoint.pt"))


@pytest.mark.parametrize(("kind", "what"), [("Trial", "nan"), ("Prize", "reward inf")])
def test_an_evaluation_with_nan_is_no_result(script, capsys, tmp_path, kind, what):
    """Step 9 in all is step 1 of episode 1; the trained agent is saved. --evaluate alike."""
    args = flags_for(script, tmp_path, f"Faulty{kind}", checkpoint_every=0)
    parts = ["not finite", what, "step 1 of evaluation episode 1; check the task"]
    line = [*parts, "after 240 steps"]
    check_fault(script, capsys, tmp_path, words(args), line, iterations=5)
    (path,) = (tmp_path / "runs").glob("*/checkpoint.pt")
    check_fault(script, capsys, tmp_path, ["--evaluate", str(path)], parts, iterations=0)


def test_a_task_that_never_starts(script, capsys, tmp_path):
    """An environment that raises when it is first reset or, a mistake in the flags, when made."""
    args = flags_for(script, tmp_path, "FaultyOpening")
    parts = ["the simulator broke", "after 0 steps; no checkpoint yet"]
    check_fault(script, capsys, tmp_path, words(args), parts, iterations=0)
    line = ["--env-id", "probes:FaultyConstruction-v0"]
    code, _, err = run_main(script, capsys, line)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "--env-id probes:FaultyConstruction-v0: RuntimeError: the simulator broke (" in err


def test_a_fault_in_the_last_evaluation(script, capsys, tmp_path, monkeypatch):
    """The run is over and saved, environments are closed. --evaluate fails alike."""
    closed, close = [], script.Checked.close
    monkeypatch.setattr(script.Checked, "close", lambda env: closed.append(close(env)))
    args = flags_for(script, tmp_path, "FaultyEvaluation", checkpoint_every=0)
    parts = ["RuntimeError", "the simulator broke", "after 240 steps"]
    check_fault(script, capsys, tmp_path, words(args), parts, iterations=5)
    assert len(closed) >= args.num_envs
    (path,) = (tmp_path / "runs").glob("*/checkpoint.pt")
    line = ["--evaluate", str(path)]
    check_fault(script, capsys, tmp_path, line, parts[:2], iterations=0)


def poison(script, monkeypatch, iteration, act):
    """Do that to agent and optimizers ahead of the update of an iteration, counted from 0."""
    update, calls = script.update, []

    def update_poisoned(agent, optimizers, *rest):
        calls.append(agent)
        if len(calls) == iteration + 1:
            act(agent, optimizers)
        return update(agent, optimizers, *rest)

    monkeypatch.setattr(script, "update", update_poisoned)


REMEDY = ["not finite", "smaller --learning-rate", "after 96 steps"]
CRITICS_REMEDY = ["not finite", "smaller --critic-learning-rate", "after 96 steps"]


def test_a_step_that_is_too_large(script, monkeypatch, capsys, tmp_path):
    """A huge step of the actor in the third iteration: the minibatch after it is named.

    What is not finite there, the loss or its gradient, depends on the version of torch."""
    args = flags_for(script, tmp_path, "VectorBox")

    def leap(agent, optimizers):
        monkeypatch.setattr(script, "schedules", lambda args, progress: (1e30, 1e-3, 0.0))

    poison(script, monkeypatch, 2, leap)
    parts = ["minibatch 1 of the actor's update", *REMEDY]
    check_fault(script, capsys, tmp_path, words(args), parts)


@with_both_scripts
def test_a_weight_that_is_not_finite(script, monkeypatch, capsys, tmp_path):
    """The first minibatch sees it."""
    args = flags_for(script, tmp_path, "VectorBox")

    def spoil(agent, optimizers):
        agent.critic_heads[1][0].weight.data[0, 0] = torch.inf

    poison(script, monkeypatch, 2, spoil)
    parts = ["loss (inf|nan)", "minibatch 0 of the critics' update", *CRITICS_REMEDY]
    check_fault(script, capsys, tmp_path, words(args), parts)


@pytest.mark.parametrize("minibatch", [0, 3])
def test_a_gradient_that_is_not_finite(script, monkeypatch, capsys, tmp_path, minibatch):
    """Its minibatch is named, not what came of it in the next one."""
    args = flags_for(script, tmp_path, "VectorBox")

    def spoil(agent, optimizers):
        seen = []

        def explode(gradient):
            seen.append(gradient)
            return gradient * (torch.inf if len(seen) == minibatch + 1 else 1)

        agent.actor_head.bias.register_hook(explode)

    poison(script, monkeypatch, 2, spoil)
    parts = [
        f"loss [-0-9.]+, gradient (inf|nan) of minibatch {minibatch} of the actor's update",
        *REMEDY,
    ]
    check_fault(script, capsys, tmp_path, words(args), parts)


def test_a_finite_update_raises_nothing(script):
    """No false alarm."""
    run = make_run(script, "VectorBox")
    batch = prepare(run)
    metrics = script.update(run.agent, run.optimizers, batch, run.args, 0.5)
    assert all(np.isfinite(float(torch.as_tensor(x).sum())) for x in metrics.values())


def test_an_infinite_divergence_is_no_fault(script):
    """An action whose probability rounds to 0: loss, gradient and agent are finite."""
    run = make_run(script, "VectorDiscrete", norm_adv=False)
    batch = prepare(run)
    with torch.no_grad():
        run.agent.actor_head.bias[0] += 300
    metrics = script.update(run.agent, run.optimizers, batch, run.args, 0.5)
    assert metrics["policy/kl_exact"] > 100
    assert all(p.isfinite().all() for p in run.agent.parameters())


def test_ratios_are_told_up_to_e_to_the_20(script):
    """Where an action that was taken is e^100 times as likely now."""
    run = make_run(script, "VectorDiscrete", learning_rate=0.0, critic_learning_rate=0.001)
    batch = prepare(run)
    batch = batch._replace(log_probs=batch.log_probs - 100)
    metrics = script.update(run.agent, run.optimizers, batch, run.args, 0.5)
    assert metrics["policy/ratio_mean"] == pytest.approx(np.exp(20), rel=1e-4)


def test_a_fault_ahead_of_the_first_checkpoint(script, capsys, tmp_path):
    """There is none to name, and the message says so."""
    args = flags_for(script, tmp_path, "FaultyError", checkpoint_every=0)
    parts = ["after 96 steps", "the simulator broke", "no checkpoint yet"]
    check_fault(script, capsys, tmp_path, words(args), parts, iterations=0)


def test_a_fault_that_is_gone_does_not_spoil_the_resume(script, monkeypatch, capsys, tmp_path):
    """Whatever happened, the run goes on from its last checkpoint as if it had not."""
    args = flags_for(script, tmp_path, "VectorBox")
    with monkeypatch.context() as patch:
        poison(script, patch, 2, lambda agent, optimizers: agent.actor_head.bias.data.mul_(1e39))
        assert run_main(script, capsys, words(args))[0] == 1
    (directory,) = (tmp_path / "runs").iterdir()
    assert run_main(script, capsys, ["--resume", str(directory)])[0] == 0
    whole = script.train(args)["run_dir"]
    one, two = (script.load_agent(path)[0].state_dict() for path in (directory, whole))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_an_unwritable_run_dir_costs_one_line(script, monkeypatch, capsys, tmp_path):
    """A file in the way, or no permission: exit code 2 ahead of any training."""
    steps = []
    monkeypatch.setattr(script, "collect_rollout", lambda *_: steps.append(1))
    (tmp_path / "file").write_text("")
    args = flags_for(script, tmp_path, "VectorBox")
    line = ["--run-dir", str(tmp_path / "file")]
    code, _, err = run_main(script, capsys, words(args) + line)
    assert code == 2
    for part in ("--run-dir", str(tmp_path / "file"), "File exists", "choose another"):
        assert part in err

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        code, _, err = run_main(script, capsys, words(args))
    assert code == 2
    for part in ("--run-dir", str(tmp_path / "runs"), "Permission denied", "choose another"):
        assert part in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
    assert steps == []
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_at_the_start_costs_one_line(script, monkeypatch, capsys, tmp_path):
    """The directory can be made, its files cannot be written."""

    def refuse(path, *args, **kwargs):
        raise OSError(28, "No space left on device", str(path))

    args = flags_for(script, tmp_path, "VectorBox")
    with monkeypatch.context() as patch:
        patch.setattr(script, "replace_file", refuse)
        code, _, err = run_main(script, capsys, words(args))
    assert code == 2
    assert "No space left" in err


def test_a_run_that_cannot_be_written_to_is_not_resumed(script, monkeypatch, capsys, tmp_path):
    """One line; flags and source of the old start stay as they were."""
    args = flags_for(script, tmp_path, "VectorBox")
    directory = Path(script.train(args)["run_dir"])
    before = {path: path.read_bytes() for path in directory.iterdir()}
    line = ["--resume", str(directory), "--total-timesteps", str(2 * args.total_timesteps)]

    def refuse(path, content):
        raise OSError(30, "Read-only file system", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(script, "replace_file", refuse)
        code, _, err = run_main(script, capsys, line)
    assert code == 2
    assert err.startswith(f"error: --resume {directory}: [Errno 30] Read-only file system")
    assert err.endswith("the run was not resumed\n")
    assert {path: path.read_bytes() for path in directory.iterdir()} == before

    def refuse_log(path, **options):
        raise OSError(30, "Read-only file system", path)

    with monkeypatch.context() as patch:
        patch.setattr(script, "SummaryWriter", refuse_log)
        code, _, err = run_main(script, capsys, line)
    assert code == 2
    assert err.startswith(f"error: {directory}: [Errno 30] Read-only file system")
    assert err.endswith("no log can be written\n")
    assert run_main(script, capsys, line)[0] == 0


def test_a_start_that_failed_leaves_no_lock(script, monkeypatch, tmp_path):
    """Also where its fault is kept, as a notebook does, and with it all that it refers to."""
    args = flags_for(script, tmp_path, "VectorBox")
    directory = script.train(args)["run_dir"]
    longer = replace(args, resume=directory, total_timesteps=2 * args.total_timesteps)
    with monkeypatch.context() as patch:
        patch.setattr(script, "SummaryWriter", None)
        with pytest.raises(TypeError) as kept:
            script.start(longer)
    run, *_ = script.start(longer)
    with undisturbed(), run:
        assert run.step == args.total_timesteps
    assert kept.value.__traceback__ is not None


def test_a_start_that_failed_closes_all_environments(script, monkeypatch, tmp_path):
    """Those that were made, one of them for evaluations, and those that took their places."""
    args = flags_for(script, tmp_path, "VectorBox")
    longer = replace(args, resume=script.train(args)["run_dir"], total_timesteps=10**4)
    closed, close = [], script.close_quietly
    monkeypatch.setattr(script, "close_quietly", lambda env: closed.append(env) or close(env))
    monkeypatch.setattr(script, "SummaryWriter", None)
    with pytest.raises(TypeError):
        script.start(longer)
    assert len({*map(id, closed)}) >= 2 + args.num_envs * (args.save_envs == "always")


def test_a_finished_run_keeps_its_origin(script, monkeypatch, capsys, tmp_path):
    """A later commit that only looks at it did not make its numbers."""
    directory = Path(script.train(flags_for(script, tmp_path, "VectorBox"))["run_dir"])
    before = (directory / "args.json").read_bytes()
    monkeypatch.setattr(script, "commit_of", lambda folder: "another")
    assert run_main(script, capsys, ["--resume", str(directory)])[0] == 0
    assert (directory / "args.json").read_bytes() == before


def test_a_log_that_cannot_be_closed_hides_no_fault(script, monkeypatch, tmp_path):
    """The disk is full: the fault with its note is what is raised, and environments are closed."""
    run, _, _, envs = script.start(flags_for(script, tmp_path, "VectorBox"))
    closed = []
    monkeypatch.setattr(script, "close_quietly", closed.append)

    def refuse():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.writer, "close", refuse)
    with pytest.raises(RuntimeError, match="the fault") as caught, run:
        raise RuntimeError("the fault")
    assert "no checkpoint yet" in caught.value.__notes__[0]
    assert envs in closed
    with pytest.raises(OSError, match="No space"), run:
        pass


def test_a_mistake_of_a_task_that_was_read_back_costs_one_line(
    script, monkeypatch, capsys, tmp_path
):
    """Its class travelled in the checkpoint, and is another one than that of the script."""
    foreign = type("UsageError", (ValueError,), {})

    def spoil(agent, optimizers):
        raise foreign("--env-id mine: observation has the shape (1,)")

    poison(script, monkeypatch, 2, spoil)
    code, _, err = run_main(script, capsys, words(flags_for(script, tmp_path, "VectorBox")))
    assert code == 2
    assert err.splitlines()[-1].startswith(
        "error: --env-id mine: observation has the shape (1,); after"
    )


@pytest.mark.parametrize("numbered", [True, False])
def test_a_mistake_in_one_process_alone_is_told_by_it(script, monkeypatch, capsys, numbered):
    """With its number. A run adds how far it came, which does not tell who has met the mistake."""

    def fail(args):
        error = script.UsageError("--env-id mine: its reward must be a number")
        if numbered:
            script.of_this_process(error)
        error.add_note("after 48 steps")
        raise error

    waited = []
    for name, value in (("WORLD_SIZE", 2), ("RANK", 1), ("LOCAL_RANK", 1), ("train", fail)):
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "parse_args", lambda argv: SimpleNamespace(evaluate=""))
    monkeypatch.setattr(script.time, "sleep", waited.append)
    code, _, err = run_main(script, capsys, [])
    assert code == 2
    assert waited == ([] if numbered else [5])
    assert err.startswith("error: --env-id mine: its reward must be a number; ")
    assert err.count("; in process 1") == err.count("; after 48 steps") == err.count("\n") == 1


def test_a_mistake_that_the_first_process_does_not_meet_is_told(script, monkeypatch, capsys):
    """As where a task can be open once. The launcher has five seconds to end this process where the
    first one meets the mistake, too."""

    def fail(args):
        raise script.UsageError("--env-id mine: the port is taken")

    waited = []
    for name, value in (("WORLD_SIZE", 2), ("RANK", 1), ("LOCAL_RANK", 1), ("train", fail)):
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "parse_args", lambda argv: SimpleNamespace(evaluate=""))
    monkeypatch.setattr(script.time, "sleep", waited.append)
    code, _, err = run_main(script, capsys, [])
    assert code == 2
    assert waited == [5]
    assert err == "error: --env-id mine: the port is taken; in process 1\n"


def test_runs_of_the_same_second_do_not_share_a_directory(script, monkeypatch, tmp_path):
    """The same flags at once: as many directories; one that exists already is never taken."""
    args = flags_for(script, tmp_path, "VectorBox")
    paths = {script.make_run_dir(args) for _ in range(5)}
    assert len(paths) == 5
    mkdir = Path.mkdir
    lost = []

    def lose_the_race(path, *args, **kwargs):
        if len(lost) < 2 and path.parent == tmp_path / "runs" and path not in paths:
            lost.append(path)
            mkdir(path)  # another run was faster
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", lose_the_race)
    path = script.make_run_dir(args)
    assert path not in paths | {*lost}
    assert (path / "args.json").exists()
    assert len(lost) == 2
    assert not any(list(taken.iterdir()) for taken in lost)


@with_both_scripts
def test_an_opening_observation_is_looked_at_before_anyone_acts_on_it(script):
    """The environment must not see the actions that follow from NaN."""
    run = make_run(script, "FaultyReset", num_envs=2)
    run.envs.envs[1].unwrapped.seed = ENVIRONMENT_1
    seen, step = [], run.envs.step

    def look(actions):
        result = step(actions)
        seen.append(bool(np.isnan(result[0]).any()))
        return result

    run.envs.step = look
    roll(run)
    roll(run)
    with pytest.raises(RuntimeError, match=r"not finite.*environment 1"):
        roll(run)
    assert seen == [False] * 27 + [True]  # found in the step that brought it


# ----------------------------------------------------------------------------- who speaks, and when
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["NotFinite", "OtherProcessEnded"])
def test_one_process_tells_what_all_have_found(script, monkeypatch, capsys, kind, rank):
    """All end with exit code 1."""

    def fail(args):
        raise getattr(script, kind)("it is lost")

    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("train", fail)):
        monkeypatch.setattr(script, name, value)
    code, _, err = run_main(script, capsys, [])
    assert code == 1
    assert ("it is lost" in err) == (rank == 0)


def test_only_the_first_process_answers(script, monkeypatch, capsys):
    """Help and wrong flags are alike in all of them."""
    monkeypatch.setattr(script, "RANK", 1)
    assert run_main(script, capsys, ["--help"]) == (0, "", "")
    assert run_main(script, capsys, ["--nonsense"]) == (2, "", "")


def test_help_that_nobody_reads(script, monkeypatch, capsys):
    """It ends well."""

    def fail(argv):
        raise BrokenPipeError

    monkeypatch.setattr(script, "parse_args", fail)
    assert run_main(script, capsys, ["--help"]) == (0, "", "")


def test_modules_are_looked_for_in_the_working_directory(script, monkeypatch):
    """Python itself looks beside the script."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != os.getcwd()])
    monkeypatch.setattr(script, "train", lambda args: None)
    script.main([])
    assert sys.path[-1] == os.getcwd()  # behind all others: its modules hide none of theirs


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"RANK": "1", "LOCAL_RANK": "1"}, [1, 0, 0]),
        ({"RANK": "", "WORLD_SIZE": ""}, [1, 0, 0]),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}, [4, 3, 1]),
        ({"WORLD_SIZE": "0"}, [1, 0, 0]),
        ({"WORLD_SIZE": "all"}, [1, 0, 0]),
    ],
)
def test_a_rank_counts_under_a_launcher_alone(script, environ, found):
    """Some schedulers set RANK for one process."""
    names = ["WORLD_SIZE", "RANK", "LOCAL_RANK"]
    lines = [
        node
        for node in ast.parse(Path(script.__file__).read_text()).body
        if (isinstance(node, ast.Assign) and node.targets[0].id in names)
        or (isinstance(node, ast.FunctionDef) and node.name == "launched")
    ]
    scope = {"os": SimpleNamespace(environ=environ)}
    exec(compile(ast.Module(lines, []), "", "exec"), scope)
    assert [scope[name] for name in names] == found


def test_one_process_evaluates_for_all(script, monkeypatch, tmp_path):
    """The others have nothing to do."""
    directory = script.train(flags_for(script, tmp_path, "VectorBox"))["run_dir"]
    monkeypatch.setattr(script, "RANK", 1)
    monkeypatch.setattr(script, "evaluate_stored", None)
    script.main(["--evaluate", directory])


def test_what_is_trained_is_saved_ahead_of_the_last_evaluation(script, capsys, tmp_path):
    """Also where it is one of those that come every so often."""
    flags = {"checkpoint_every": 0, "eval_every": 5}
    args = flags_for(script, tmp_path, "FaultyEvaluation", **flags)
    parts = ["the simulator broke", "after 240 steps"]
    check_fault(script, capsys, tmp_path, words(args), parts, iterations=5)


@pytest.mark.parametrize(
    ("local", "joined", "tells"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_processes_that_did_not_meet_are_told_of(script, monkeypatch, capsys, local, joined, tells):
    """By the first process of each machine: the first of all may wait for them in silence. Once
    they have met, that one tells."""

    def fail(args):
        raise script.OtherProcessEnded("another process cannot be reached (timeout)")

    monkeypatch.setattr(script.distributed, "is_initialized", lambda: joined)
    for name, value in (("WORLD_SIZE", 4), ("RANK", 2), ("LOCAL_RANK", local), ("train", fail)):
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "parse_args", lambda argv: SimpleNamespace(evaluate=""))
    code, _, err = run_main(script, capsys, [])
    assert code == 1
    assert err == "error: another process cannot be reached (timeout)\n" * tells


def test_a_working_directory_that_is_gone_costs_one_line(script, monkeypatch, capsys):
    """It was deleted while the shell stood in it."""

    def refuse():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(script.os, "getcwd", refuse)
    with pytest.raises(SystemExit) as caught:
        script.main(["--help"])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("error: the working directory is gone (")
    assert told.count("\n") == 1


def test_what_is_due_is_saved_ahead_of_any_evaluation(script, capsys, tmp_path):
    """The task breaks in the evaluation after the second iteration, where a checkpoint is due."""
    flags = {"checkpoint_every": 2, "eval_every": 2}
    args = flags_for(script, tmp_path, "FaultyEvaluation", **flags)
    check_fault(script, capsys, tmp_path, words(args), ["the simulator broke"], iterations=2)


def test_output_is_flushed_whatever_happened(script):
    """The last statement of the script, run as a program."""

    def end(argv):
        done.append("main")
        raise SystemExit(3)

    done, last = [], ast.parse(Path(script.__file__).read_text()).body[-1]
    scope = {"__name__": "__main__", "__file__": "", "sys": sys, "main": end}
    scope["flush_output"] = lambda: done.append("flush")
    with pytest.raises(SystemExit, match="3"):
        exec(compile(ast.Module([last], []), "", "exec"), scope)
    assert done == ["main", "flush"]
    del scope["__file__"]  # pasted into a notebook, whose own flags are none of ours
    exec(compile(ast.Module([last], []), "", "exec"), scope)
    assert done == ["main", "flush"]


@pytest.mark.parametrize("rank", [0, 2])
def test_the_first_process_of_a_machine_tells_at_once(script, monkeypatch, capsys, rank):
    """Of either of two machines, and without its number."""

    def fail(args):
        raise script.UsageError("--env-id mine: the port is taken")

    waited = []
    for name, value in (("WORLD_SIZE", 4), ("RANK", rank), ("LOCAL_RANK", 0), ("train", fail)):
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "parse_args", lambda argv: SimpleNamespace(evaluate=""))
    monkeypatch.setattr(script.time, "sleep", waited.append)
    code, _, err = run_main(script, capsys, [])
    assert (code, waited) == (2, [])
    assert err == "error: --env-id mine: the port is taken\n"


def test_a_value_error_is_a_fault_and_no_mistake(script, monkeypatch, capsys, tmp_path):
    """Only what `Checked` says in other processes is turned back."""

    def spoil(agent, optimizers):
        raise ValueError("math domain error")

    poison(script, monkeypatch, 2, spoil)
    line = words(flags_for(script, tmp_path, "VectorBox"))
    check_fault(script, capsys, tmp_path, line, ["ValueError: math domain error", "after 96 steps"])


def test_each_warning_is_printed_once(script, tmp_path, capsys, monkeypatch):
    """One of the atoms hides none that tells of a bug, neither in an iteration nor afterwards."""
    prepare_batch, update = script.prepare_batch, script.update

    def prepare(*given):
        batch, metrics = prepare_batch(*given)
        return batch, metrics | {"warning/of_the_batch": "first"}

    def train(*given):
        late = {"warning/of_the_update": "second"} if given[-1] > 0 else {}
        return update(*given) | late

    monkeypatch.setattr(script, "prepare_batch", prepare)
    monkeypatch.setattr(script, "update", train)
    script.train(flags_for(script, tmp_path, "Walk"))
    said = "".join(capsys.readouterr())
    assert said.count("warning: first\n") == said.count("warning: second\n") == 1
