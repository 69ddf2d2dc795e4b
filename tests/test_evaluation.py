"""Evaluations: films, the best agent, samples of the policy; and a start from earlier weights."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from command import fill_the_disk, run_main, undisturbed, words
from conftest import ONE_SCRIPT, each_of, with_both_scripts
from helpers import make_agent, make_run, small_args
from probes import ActionReward, Filmed, Walk
from test_resume import (
    assert_same,
    contents,
    fail_at,
    flags_for,
    resumed,
    scalars,
    stopped,
    timeless,
)

script = each_of(ONE_SCRIPT)  # but for what differs between them


@pytest.fixture(autouse=True)
def _undisturbed(tmp_path, monkeypatch):
    """What a run leaves lands in the test's folder."""
    monkeypatch.chdir(tmp_path)
    with undisturbed():
        yield


# -------------------------------------------------------------------------------------------- films
def films(directory):
    """Paths below the run directory, in order."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.mp4"))


def test_films_of_every_evaluation(script, tmp_path):
    """The first 3 of 4 episodes of each, named by the step; they hold what was rendered."""
    iio = pytest.importorskip("imageio_ffmpeg", reason="comes with moviepy")
    flags = {"env_id": "probes:Filmed-v0", "eval_every": 1, "eval_episodes": 4}
    args = flags_for(script, tmp_path, 2, capture_video=True, **flags)
    directory = Path(script.train(args)["run_dir"])
    names = [f"rl-video-episode-{i}.mp4" for i in range(3)]
    expected = [f"videos/step-{step}/{name}" for step in (48, 96) for name in names]
    assert films(directory) == expected
    frames, seconds = iio.count_frames_and_secs(directory / expected[0])
    assert frames in (9, 10)  # the first observation and nine steps; encoders may drop one
    assert seconds == pytest.approx(1, abs=0.15)  # 10 frames per second

    for name in ("checkpoint", "best"):
        script.main(["--evaluate", f"{directory}/{name}.pt", "--eval-episodes", "1"])
    folders = [f"{name}_step-96_eval_episodes-1" for name in ("best", "checkpoint")]
    later = [f"videos/{folder}/{names[0]}" for folder in folders]
    assert films(directory) == [*later, *expected]


CHEETAH = "gymnasium.envs.mujoco.half_cheetah_v5:HalfCheetahEnv"
CAMERAS = [
    ({}, 0),
    ({"camera_id": 0}, 0),
    ({"default_camera_config": {"distance": 10.0}}, -1),
]


@pytest.mark.parametrize(
    ("task", "chosen", "camera"),
    [
        *(("HalfCheetah-v5", *case) for case in CAMERAS),
        ("InvertedPendulum-v5", {}, -1),
    ],
)
def test_films_follow_a_robot(script, monkeypatch, task, chosen, camera):
    """The camera "track", number 0 of a HalfCheetah; -1 is gymnasium's own. A camera that a
    registration chooses stays."""
    pytest.importorskip("moviepy", reason="films need it")
    pytest.importorskip("mujoco")
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

    def look(renderer, mode):
        seen.append(renderer.camera_id)
        return np.zeros((4, 4, 3), np.uint8)

    seen = []
    monkeypatch.setattr(MujocoRenderer, "render", look)
    if chosen:
        task = f"Own{min(chosen).title().replace('_', '')}-v0"
        gym.register(task, CHEETAH, kwargs=chosen)
    script.make_eval_env(script.Args(env_id=task, capture_video=True)).close()
    assert seen == [camera]


def test_a_policy_that_sees_images_keeps_its_camera(script, monkeypatch):
    """They are of the renderer that films. Through another camera it would see something else."""
    pytest.importorskip("moviepy", reason="films need it")
    pytest.importorskip("mujoco")
    from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

    def make(render_mode="rgb_array"):
        return gym.wrappers.AddRenderObservation(HalfCheetahEnv(render_mode=render_mode))

    def look(renderer, mode):
        seen.add(renderer.camera_id)
        return np.zeros((4, 4, 3), np.uint8)

    seen = set()
    monkeypatch.setattr(MujocoRenderer, "render", look)
    gym.register("Watched-v0", make)
    script.make_eval_env(script.Args(env_id="Watched-v0", capture_video=True)).close()
    assert seen == {-1}


@pytest.mark.slow
def test_films_change_no_bit_of_the_run(script, tmp_path):
    """Metrics, evaluations included, weights and RNGs."""
    pytest.importorskip("moviepy", reason="films need it")
    flags = {"env_id": "probes:Filmed-v0", "eval_every": 1}
    args = flags_for(script, tmp_path, 3, **flags)
    plain = script.train(args)
    filmed = script.train(replace(args, capture_video=True))
    assert_same(timeless(plain), timeless(filmed))
    assert_same(contents(plain["run_dir"]), contents(filmed["run_dir"]))


def raise_nothing_but_the_kind(env):
    """A renderer's error without a text."""
    raise RuntimeError


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("task", "missing", "named"),
    [
        ("Filmed", "moviepy", "moviepy"),
        ("Walk", None, "render_mode"),
        ("Filmed", "picture", "frames are of"),
        ("Filmed", "colour", "the shape (4, 6), not (height, width, 3)"),
        ("Filmed", "fps", "render_fps"),
        ("Filmed", "mode", "render_mode"),
        ("Filmed", "renderer", "RuntimeError()"),
    ],
)
def test_what_cannot_be_filmed_is_said_first(
    script, capsys, tmp_path, monkeypatch, task, missing, named, command
):
    """No moviepy, no render mode, no picture of bytes, no renderer: one line, nothing written."""
    if missing == "moviepy":
        monkeypatch.setitem(sys.modules, missing, None)
    else:
        pytest.importorskip("moviepy", reason="the other reasons come after it")
    if missing == "picture":
        monkeypatch.setattr(Filmed, "render", lambda env: None)
    elif missing == "colour":
        monkeypatch.setattr(Filmed, "render", lambda env: np.zeros((4, 6), np.uint8))
    elif missing == "fps":
        monkeypatch.setitem(Filmed.metadata, "render_fps", None)
    elif missing == "mode":
        monkeypatch.setattr(Filmed, "__init__", lambda env, render_mode=None: None)
    elif missing == "renderer":
        monkeypatch.setattr(Filmed, "render", raise_nothing_but_the_kind)
    line = ["--env-id", f"probes:{task}-v0", "--run-dir", "runs"]
    if command == "evaluate":
        args = flags_for(script, tmp_path, 1, env_id=f"probes:{task}-v0")
        line = ["--evaluate", script.train(args)["run_dir"]]
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run_main(script, capsys, [*line, "--capture-video"])
    assert code == 2
    assert err.startswith("error: --capture-video")
    assert named in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mistake_of_the_task_is_not_the_films(script, capsys):
    """Its own line, as without the film."""
    line = ["--env-id", "probes:Nothing-v0", "--capture-video"]
    code, _, err = run_main(script, capsys, line)
    assert code == 2
    assert err.startswith("error: --env-id probes:Nothing-v0: ")
    code, _, err = run_main(script, capsys, ["--env-id", "rude:Lost-v0", "--capture-video"])
    assert code == 1
    assert "RuntimeError: the map is lost" in err
    assert "moviepy" not in err.splitlines()[-1]


def test_the_line_of_an_evaluation_worked_by_hand(script, capsys):
    """Returns of 0 and 4: a mean of 2, a population std of 2, and a worst half of 0."""
    args = small_args(script, "Walk", cvar_alpha=0.5)
    script.summarise([[0.0], [4.0]], args)
    told = "evaluation of 2 episodes: return 2.0 +- 2.0, CVaR_0.5 0.0"
    assert capsys.readouterr().out.startswith(told)


def test_an_evaluation_has_the_threads_that_are_asked_for(script, tmp_path, capsys):
    """And seeds, for tasks that draw while they are made."""
    directory = script.train(small_args(script, "Walk", run_dir=str(tmp_path)))["run_dir"]
    threads = torch.get_num_threads()
    drawn = []
    try:
        for _ in range(2):
            torch.set_num_threads(1)
            code, *_ = run_main(script, capsys, ["--evaluate", directory, "--torch-threads", "2"])
            assert code == 0
            assert torch.get_num_threads() == 2
            drawn.append((random.random(), np.random.random()))
    finally:
        torch.set_num_threads(threads)
    assert drawn[0] == drawn[1]


def test_checkpoints_of_a_gpu_are_read_without_one(script, tmp_path, monkeypatch):
    """Tensors go to the CPU, and nothing else than weights is read."""
    directory = script.train(small_args(script, "Walk", run_dir=str(tmp_path)))["run_dir"]
    load = torch.load
    asked = []

    def noted(*given, **options):
        asked.append(options)
        return load(*given, **options)

    monkeypatch.setattr(script.torch, "load", noted)
    script.load_agent(directory)
    assert asked == [{"map_location": "cpu", "weights_only": True}]


def test_evaluated_tasks_have_a_stream_of_their_own(script, monkeypatch):
    """The sixth one, which counts from 1: NumPy's seed sequence with the key (6, episode)."""
    run = make_run(script, "Walk", eval_episodes=2)
    seeds = []
    apart = script.generators_apart

    def noted(seed):
        seeds.append(seed)
        return apart(seed)

    monkeypatch.setattr(script, "generators_apart", noted)
    script.evaluate(run.agent, run.args)
    keys = [np.random.SeedSequence(run.args.seed, spawn_key=(6, episode)) for episode in range(2)]
    assert seeds == [int(key.generate_state(1, np.uint64)[0]) >> 32 for key in keys]


def test_a_film_needs_a_place(script, tmp_path, capsys, monkeypatch):
    """Someone else's run is evaluated, but not filmed into its folder."""
    directory = script.train(small_args(script, "Walk", run_dir=str(tmp_path)))["run_dir"]
    monkeypatch.setattr(script.os, "access", lambda path, mode: mode != os.W_OK)
    line = ["--evaluate", directory]
    code, _, err = run_main(script, capsys, [*line, "--capture-video"])
    assert code == 2
    assert err.startswith(f"error: --capture-video True: films go to {directory}, which cannot be")
    assert err.count("\n") == 1
    assert run_main(script, capsys, line)[0] == 0


def test_flags_without_effect_on_an_evaluation_are_refused(script, tmp_path, capsys):
    """They would change training alone, and none takes place."""
    directory = script.train(small_args(script, "Walk", run_dir=str(tmp_path)))["run_dir"]
    more = "--total-timesteps 960 --eval-every 3 --checkpoint-every 7 --save-envs never"
    code, _, err = run_main(script, capsys, ["--evaluate", directory, *more.split()])
    assert code == 2
    named = re.findall(r"--([\w-]+) \S+ \(the run has", err.split(": must be as in")[0])
    assert named == ["checkpoint-every", "eval-every", "save-envs", "total-timesteps"]
    assert run_main(script, capsys, ["--evaluate", directory, "--eval-sampled"])[0] == 0


def test_an_evaluation_needs_no_folder_of_a_resume(script, tmp_path):
    """The flags of a resumed run name a folder that has been moved since."""
    run = script.train(flags_for(script, tmp_path, 1, env_id="probes:Walk-v0", eval_episodes=1))
    agent, args = script.load_agent(run["run_dir"])
    args = replace(args, resume=run["run_dir"])
    Path(run["run_dir"]).rename(tmp_path / "moved")
    assert script.evaluate(agent, args)["eval/return_mean"] == run["eval/return_mean"]


def test_a_renderer_that_breaks_later(script, capsys, tmp_path, monkeypatch):
    """In the first evaluation of two: a fault with the last checkpoint's name, which evaluates."""
    pytest.importorskip("moviepy", reason="films need it")
    render, calls = Filmed.render, []

    def break_later(env):
        calls.append(env)
        if len(calls) > 5:
            raise RuntimeError("the renderer broke")
        return render(env)

    monkeypatch.setattr(Filmed, "render", break_later)
    flags = {"env_id": "probes:Filmed-v0", "eval_every": 2, "checkpoint_every": 1}
    args = flags_for(script, tmp_path, 4, capture_video=True, **flags)
    code, _, err = run_main(script, capsys, words(args))
    assert code == 1
    (path,) = (tmp_path / "runs").glob("*/checkpoint.pt")
    assert "the renderer broke" in err
    done = 2 * args.batch_size
    told = f"after {done} steps; last checkpoint, of {done} steps: {path.relative_to(tmp_path)}"
    assert told in err.replace(f"{tmp_path}/", "")
    line = ["--evaluate", str(path), "--no-capture-video"]
    assert run_main(script, capsys, line)[0] == 0


# --------------------------------------------------------------------------------------- best agent
def scripted(script, monkeypatch, means):
    """Evaluations give these means, in turn."""
    rest = iter(means)
    monkeypatch.setattr(script, "summarise", lambda *_: {"eval/return_mean": next(rest)})


@pytest.mark.parametrize(
    ("means", "best"), [((3, 5, 5, 4), 3), ((-9, -3, -2, -1), 4), ((7, 1, 2, 3), 1)]
)
def test_the_best_agent_is_kept(script, tmp_path, monkeypatch, capsys, means, best):
    """The latest of the best evaluations, the last one among them; the end says which it was."""
    args = flags_for(script, tmp_path, 4, env_id="probes:Walk-v0", eval_every=1)
    weights, evaluate = {}, script.Run.evaluate

    def note(run):
        state = run.agent.state_dict()
        weights[run.step // args.batch_size] = {k: v.clone() for k, v in state.items()}
        evaluate(run)

    monkeypatch.setattr(script.Run, "evaluate", note)
    scripted(script, monkeypatch, means)
    directory = Path(script.train(args)["run_dir"])
    saved = torch.load(directory / "best.pt", weights_only=True)
    assert saved["global_step"] == best * args.batch_size
    assert_same(saved["agent"], type(saved["agent"])(weights[best]))
    line = f"return {max(means):.1f} after {best * args.batch_size:,} steps, {directory}/best.pt"
    assert line in capsys.readouterr().out
    assert torch.load(directory / "checkpoint.pt")["global_step"] == 4 * args.batch_size
    assert sorted(path.name for path in directory.glob("*.pt")) == ["best.pt", "checkpoint.pt"]


def test_without_evaluations_in_between_there_is_no_best_agent(script, tmp_path, capsys):
    """One evaluation is no choice."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = Path(script.train(args)["run_dir"])
    assert [path.name for path in directory.glob("*.pt")] == ["checkpoint.pt"]
    assert "best" not in capsys.readouterr().out


@with_both_scripts
def test_the_best_agent_scores_what_its_line_says(script, tmp_path, capsys):
    """By --evaluate and by load_agent."""
    args = flags_for(script, tmp_path, 4, env_id="probes:Walk-v0", eval_every=1)
    directory = script.train(args)["run_dir"]
    out = capsys.readouterr().out
    best = out.split("best evaluation: ")[1].split(" after")[0]
    assert out.count(f"episodes: {best} ") >= 1
    code, again, _ = run_main(script, capsys, ["--evaluate", f"{directory}/best.pt"])
    assert code == 0
    assert f"episodes: {best} " in again
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    agent, stored = script.load_agent(f"{directory}/best.pt")
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])  # a program may draw from them
    assert before[1:] == after[1:]
    mean = script.evaluate(agent, stored)["eval/return_mean"]
    assert f"return {mean:.1f}" == best


def test_a_resumed_run_remembers_its_best_agent(script, tmp_path, monkeypatch, capsys):
    """What comes after the resume is not better: the file stays, the last line names it."""
    args = flags_for(script, tmp_path, 4, env_id="probes:Walk-v0", eval_every=1)
    scripted(script, monkeypatch, (1, 9, 3, 4))
    directory = stopped(script, monkeypatch, args, 3)
    before = (directory / "best.pt").read_bytes()
    capsys.readouterr()
    resumed(script, monkeypatch, directory)
    assert (directory / "best.pt").read_bytes() == before
    assert f"return 9.0 after {2 * args.batch_size} steps" in capsys.readouterr().out


def test_a_full_disk_leaves_the_best_agent_before(script, tmp_path, monkeypatch, capsys):
    """In the middle of the second best.pt: exit code 1, the first one stays whole."""
    args = flags_for(script, tmp_path, 4, env_id="probes:Walk-v0", eval_every=1)
    scripted(script, monkeypatch, (1, 2, 3, 4))
    with monkeypatch.context() as patch:
        fill_the_disk(patch, 2, "best.pt.tmp")
        code, _, err = run_main(script, capsys, words(args))
    assert code == 1
    assert "No space left" in err
    (path,) = (tmp_path / "runs").glob("*/best.pt")
    assert torch.load(path, weights_only=True)["global_step"] == args.batch_size


def test_an_evaluation_needs_episodes(script):
    """Those of a run without evaluations are 0."""
    run = make_run(script, "Walk", eval_episodes=0)
    with pytest.raises(script.UsageError, match=r"^--eval-episodes 0: must be at least 1"):
        script.evaluate(run.agent, run.args)


# ----------------------------------------------------------------------------------- sampled policy
def test_an_evaluation_by_samples(script):
    """Other actions than the mode's, the same ones each time, and the run's RNG stands still."""
    run = make_run(script, "Walk", eval_episodes=8)
    state = torch.get_rng_state()
    mode, sampled, again = (
        script.evaluate(run.agent, replace(run.args, eval_sampled=flag))
        for flag in (False, True, True)
    )
    assert sampled == again
    assert sampled["eval/return_mean"] != mode["eval/return_mean"]
    assert torch.equal(torch.get_rng_state(), state)
    other = script.evaluate(run.agent, replace(run.args, eval_sampled=True, seed=2))
    assert other != sampled


@with_both_scripts
@pytest.mark.parametrize("seeds", [False, True])
def test_a_task_leaves_the_noise_of_an_evaluation_alone(script, monkeypatch, seeds):
    """It may draw from torch's generator, or seed it with the same number in each reset: the policy
    draws the noise that it would have drawn, another one in each episode."""
    run = make_run(script, "Walk", eval_episodes=4, eval_sampled=True)
    env = script.make_eval_env(run.args)
    plain = list(script.play(env, run.agent, run.args))
    reset = Walk.reset

    def rude(self, **options):
        torch.manual_seed(7) if seeds else torch.rand(4)
        return reset(self, **options)

    monkeypatch.setattr(Walk, "reset", rude)
    assert list(script.play(env, run.agent, run.args)) == plain


@with_both_scripts
def test_samples_have_the_return_of_the_policy(script):
    """One arm of +-1 has the odds e: its mode always takes it, samples the other one too. The mean
    is tanh(1 / 2) = 0.46."""
    run = make_run(script, "ActionReward", eval_episodes=20)
    with torch.no_grad():
        run.agent.actor_head.weight.zero_()
        run.agent.actor_head.bias.copy_(torch.tensor([0.0, 1.0]))
    assert script.evaluate(run.agent, run.args)["eval/return_mean"] == 1
    args = replace(run.args, eval_sampled=True, eval_episodes=400)
    mean = script.evaluate(run.agent, args)["eval/return_mean"]
    assert mean == pytest.approx(np.tanh(0.5), abs=0.15)  # 3 standard errors of 1 / 20


def test_samples_in_between_change_nothing_else(script, tmp_path):
    """The run draws from its own RNG."""
    args = flags_for(script, tmp_path, 3, env_id="probes:Walk-v0")
    plain = script.train(args)
    sampled = script.train(replace(args, eval_sampled=True, eval_every=1))
    plain, sampled = (
        {tag: x for tag, x in timeless(run).items() if not tag.startswith("eval/")}
        for run in (plain, sampled)
    )
    assert_same(plain, sampled)


def test_how_to_evaluate_may_change_later(script, tmp_path, capsys):
    """--evaluate with samples, of a run that was evaluated by its mode; and --resume."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    directory = script.train(args)["run_dir"]
    agent, stored = script.load_agent(directory)
    mean = script.evaluate(agent, replace(stored, eval_sampled=True))["eval/return_mean"]
    code, out, _ = run_main(script, capsys, ["--evaluate", directory, "--eval-sampled"])
    assert code == 0
    assert f"return {mean:.1f} " in out
    longer = ["--total-timesteps", str(2 * args.batch_size)]
    line = ["--resume", directory, "--eval-sampled", "--eval-every", "1", *longer]
    assert run_main(script, capsys, line)[0] == 0


def test_flags_of_another_version_are_named(script, tmp_path, capsys):
    """In one line, for each of the three commands that read a checkpoint."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    path = Path(script.train(args)["run_dir"]) / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)
    flags = saved["args"] | {"vf_coef": 0.5}
    del flags["critic_learning_rate"]
    torch.save(saved | {"args": flags}, path)
    for command in ("--resume", "--evaluate", "--init-from"):
        code, _, err = run_main(script, capsys, [command, str(path.parent)])
        assert code == 2
        assert err.count("\n") == 1
        assert "another version of the script wrote it; use the copy in the run's directory" in err
        assert "(it lacks critic_learning_rate; unknown here is vf_coef)" in err


# -------------------------------------------------------------------------------- earlier weights
@with_both_scripts
def test_a_run_starts_from_earlier_weights(script, tmp_path, monkeypatch):
    """All weights and normalisers of the checkpoint; flags, steps and optimizers are its own, and
    so is the running std of the advantages, which keeps to the size that Adam remembers."""
    first = flags_for(script, tmp_path, 3, env_id="probes:Walk-v0", eval_every=1, norm_adv_memory=5)
    earlier = Path(script.train(first)["run_dir"])
    for path in (earlier, earlier / "checkpoint.pt", earlier / "best.pt"):
        flags = {"env_id": "probes:Walk-v0", "init_from": str(path), "learning_rate": 1e-12}
        args = flags_for(script, tmp_path, 1, seed=5, max_grad_norm=0.1, **flags)
        seen, collect = [], script.collect_rollout

        def note(envs, agent, *rest, seen=seen, collect=collect):
            seen.append({name: x.clone() for name, x in agent.state_dict().items()})
            return collect(envs, agent, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(script, "collect_rollout", note)
            done = Path(script.train(args)["run_dir"])
        agent, _ = script.load_agent(path)
        assert_same(seen[0], dict(agent.state_dict()) | {"adv_moments.count": torch.tensor(0.0)})
        assert seen[0]["obs_moments.count"] > 0
        assert seen[0]["value_dist.moments.count"] > 0
        assert contents(done)["step"] == args.batch_size
        after, stored = script.load_agent(done)
        assert (stored.seed, stored.max_grad_norm, stored.init_from) == (5, 0.1, str(path))
        old = dict(agent.named_parameters())
        for name, p in after.named_parameters():  # Adam hardly moves them, PopArt the heads
            if not name.startswith("critic_heads"):
                assert torch.allclose(p, old[name], atol=1e-8), name


def test_weights_may_be_of_another_number_of_processes(script, tmp_path, monkeypatch):
    """Four environments are not shared out to three processes, but their weights are the same."""
    flags = {"env_id": "probes:Walk-v0", "num_envs": 6, "num_minibatches": 1}
    earlier = script.train(small_args(script, "", **flags | {"num_envs": 4}, run_dir=str(tmp_path)))
    args = small_args(script, "", **flags, init_from=earlier["run_dir"])
    agent = make_agent(script, args)
    monkeypatch.setattr(script, "WORLD_SIZE", 3)
    monkeypatch.setattr(script, "gather_objects", lambda thing: [thing] * 3)
    script.take_weights(agent, args, Path())
    monkeypatch.undo()
    trained, _ = script.load_agent(earlier["run_dir"])
    theirs = dict(trained.state_dict()) | {"adv_moments.count": torch.tensor(0.0)}
    assert_same(dict(agent.state_dict()), theirs)


@with_both_scripts
def test_a_policy_that_is_not_trained_acts_as_before(script, tmp_path):
    """A run of the critics alone: not a bit of what the actor says moves, since statistics of
    observations stay, too. From scratch the first rollout sets these, and no other one."""
    flags = {"env_id": "probes:Walk-v0"}
    earlier = script.train(flags_for(script, tmp_path, 2, **flags))["run_dir"]
    flags |= {"learning_rate": 0.0, "critic_learning_rate": 1e-2}
    args = flags_for(script, tmp_path, 2, seed=5, init_from=earlier, **flags)
    before, after = (
        script.load_agent(path)[0] for path in (earlier, script.train(args)["run_dir"])
    )
    assert_same(dict(after.obs_moments.state_dict()), dict(before.obs_moments.state_dict()))
    obs = np.random.default_rng(0).normal(size=(50, *before.observation_space.shape))
    obs = obs.astype(before.observation_space.dtype)
    acted, act_again = (agent.numpy_policy for agent in (before, after))
    if hasattr(before, "initial_state"):
        state = before.initial_state(50).numpy()
        one, two = acted()(obs, state)[0], act_again()(obs, state)[0]
    else:
        one, two = acted()(obs), act_again()(obs)
    assert np.array_equal(one, two)
    fresh = script.train(flags_for(script, tmp_path, 3, **flags))["run_dir"]
    assert script.load_agent(fresh)[0].obs_moments.count == args.batch_size


def test_weights_of_another_task_and_discount_are_told(script, tmp_path, capsys):
    """Two robots may have the same spaces, and critics alone learn whatever they are given."""
    args = small_args(script, "Walk", run_dir=str(tmp_path), total_timesteps=48)
    first = script.train(args)["run_dir"]
    capsys.readouterr()
    script.train(replace(args, init_from=first))
    assert f"starts from the weights of {first}\n" in capsys.readouterr().out
    other = {"env_id": "probes:Filmed-v0", "gamma": 0.5, "value_target": "sr_lambda"}
    script.train(replace(args, init_from=first, dist_coef=0.5, **other))
    told = "--env-id probes:Walk-v0, --gamma 0.99, --value-target lambda_return, --dist-coef 1.0"
    told = f"starts from the weights of {first}, which were trained with {told}\n"
    assert told in capsys.readouterr().out


def test_what_is_trained_goes_on_from_those_weights(script, tmp_path):
    """Training moves them away from where they were, a little."""
    first = flags_for(script, tmp_path, 3, env_id="probes:Walk-v0")
    earlier = script.train(first)["run_dir"]
    flags = {"env_id": "probes:Walk-v0", "init_from": earlier, "learning_rate": 1e-4}
    later = script.train(flags_for(script, tmp_path, 1, **flags))["run_dir"]
    old, _ = script.load_agent(earlier)
    new, _ = script.load_agent(later)
    for (name, p), q in zip(old.actor_body.named_parameters(), new.actor_body.parameters()):
        distance = (p - q).abs().max()
        assert 0 < distance < 1e-3, name


def test_a_run_that_started_so_resumes_without_the_earlier_one(script, tmp_path, monkeypatch):
    """Its checkpoint has all it needs; the flag stays on record."""
    first = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    earlier = Path(script.train(first)["run_dir"])
    args = flags_for(script, tmp_path, 4, env_id="probes:Walk-v0", init_from=str(earlier))
    whole = script.train(args)
    directory = stopped(script, monkeypatch, args, 2)
    (earlier / "checkpoint.pt").unlink()
    again = resumed(script, monkeypatch, directory)
    assert_same(timeless(again), timeless(whole))
    assert scalars(directory).keys() == scalars(whole["run_dir"]).keys()


def refusal(script, tmp_path, capsys, flags):
    """What is said where a run with these flags is to start from one without."""
    first = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    earlier = script.train(first)["run_dir"]
    flags = {"env_id": "probes:Walk-v0", "init_from": earlier} | flags
    args = flags_for(script, tmp_path, 1, **flags)
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run_main(script, capsys, words(args))
    assert code == 2
    assert err.startswith(f"error: --init-from {earlier}: ")
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    return err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"hidden_size": 7}, "(6, 1) there, (7, 1) by these flags"),
        ({"env_id": "probes:Memory-v0"}, "(1,) there, (3,) by these flags"),
        ({"num_critics": 1}, " there, None by these flags"),
        ({"value_from": "distribution"}, "value_from is mean_head there, distribution by these"),
        # of the same shapes, but with another meaning
        ({"activation": "tanh"}, "activation is relu there, tanh by these flags"),
        ({"norm_obs": False}, "norm_obs is True there, False by these flags"),
        ({"norm_returns": False}, "norm_returns is True there, False by these flags"),
    ],
)
def test_weights_that_differ_are_named(script, tmp_path, capsys, flags, named):
    """One line with the flag, the run, the parameter; nothing is written."""
    assert named in refusal(script, tmp_path, capsys, flags)


def test_weights_know_nothing_of_entries_that_were_hidden(script, tmp_path, capsys):
    """Their statistics have no spread, so that whatever they show would be clipped to 10. Further
    entries may be hidden, and the same ones."""
    flags = {"env_id": "CartPole-v1", "num_envs": 2}
    first = flags_for(script, tmp_path, 1, masked_obs=(1, 3), **flags)
    earlier = script.train(first)["run_dir"]
    args = replace(first, init_from=earlier)
    code, _, err = run_main(script, capsys, words(replace(args, masked_obs=(3,))))
    assert code == 2
    assert err.endswith(
        "has no statistics of entries [1], which it did not see; hide them as well by "
        "--masked-obs\n"
    )
    further = replace(args, masked_obs=(2,), env_id="CartPoleNoVel-v1")
    code, *_ = run_main(script, capsys, words(further))
    assert code == 0
    [done] = {*map(str, (tmp_path / "runs").iterdir())} - {earlier}
    agent = script.load_agent(done)[0]
    rows, _ = script.make_env(further).reset(seed=1)
    assert agent.normalize_obs(torch.tensor(rows))[[1, 2, 3]].tolist() == [0, 0, 0]


def test_entries_that_were_hidden_may_be_shown_without_statistics(script, tmp_path, capsys):
    """`--no-norm-obs` has none that could be wrong."""
    flags = {"env_id": "CartPole-v1", "num_envs": 2, "norm_obs": False}
    first = flags_for(script, tmp_path, 1, masked_obs=(1, 3), **flags)
    args = replace(first, init_from=script.train(first)["run_dir"], masked_obs=())
    assert run_main(script, capsys, words(args))[0] == 0


def test_another_source_of_v_is_named(script, tmp_path, capsys):
    """One quantile or atom more takes the place of V's own output, so that shapes are the same."""
    name = "num_atoms" if script.__name__.endswith("categorical") else "num_quantiles"
    more = getattr(flags_for(script, tmp_path, 1), name) + 1
    err = refusal(script, tmp_path, capsys, {"value_from": "distribution", name: more})
    assert "value_from is mean_head there, distribution by these flags" in err


def test_another_support_is_named(tmp_path, capsys):
    """The same logits on other atoms are another distribution."""
    import distributional_ppo_categorical as script

    named = "v_max is 5.0 there, 7.0 by these flags"
    assert named in refusal(script, tmp_path, capsys, {"v_max": 7.0})


def test_another_use_of_the_mean_output_is_named(tmp_path, capsys):
    """V was the mean of the atoms plus a tenth of it, and would be the output itself. Where V comes
    from the distribution alone, the flag has no effect."""
    import distributional_ppo_categorical as script

    named = "mean_output is correction there, value by these flags"
    assert named in refusal(script, tmp_path, capsys, {"mean_output": "value"})

    flags = {"value_from": "distribution", "env_id": "probes:Walk-v0"}
    first = flags_for(script, tmp_path / "distribution", 1, **flags)
    args = replace(first, init_from=script.train(first)["run_dir"], mean_output="value")
    assert script.train(args)["run_dir"] != args.init_from


class Choosing(Walk):
    """The same walk by other actions, all of which serve."""

    action_space = gym.spaces.Discrete(6)

    def pay(self, action):
        """Nothing."""
        return 0.0


@with_both_scripts
def test_actions_that_mean_something_else_are_refused(script, tmp_path, capsys):
    """Six choices are as many numbers as two and three, or as three and two."""
    parts = {
        "Discrete": Choosing.action_space,
        "TwoThree": gym.spaces.MultiDiscrete([2, 3]),
        "ThreeTwo": gym.spaces.MultiDiscrete([3, 2]),
    }
    for name, space in parts.items():
        kind = type(name, (Choosing,), {"action_space": space})
        gym.register(f"Choosing{name}-v0", kind, max_episode_steps=5)
    first = flags_for(script, tmp_path, 1, env_id="ChoosingTwoThree-v0")
    directory = script.train(first)["run_dir"]
    for name in ("Discrete", "ThreeTwo"):
        args = replace(first, env_id=f"Choosing{name}-v0", init_from=directory)
        with pytest.raises(
            script.UsageError, match="an action is 2 parts with 2, 3 choices there, "
        ):
            script.train(args)

    saved = torch.load(f"{directory}/checkpoint.pt", weights_only=True)
    other = make_agent(script, replace(first, env_id="ChoosingThreeTwo-v0"))
    with pytest.raises(script.UsageError, match="an action was 2 parts with 2, 3 choices, and is"):
        script.load_weights(other, saved, "Mine-v0")
    del saved["actions"]  # as an earlier version has it
    script.load_weights(other, saved, "Mine-v0")


def test_a_task_that_changed_since_is_not_taken_for_another_script(
    script, tmp_path, capsys, monkeypatch
):
    """Its observations have one more entry than when the run was trained."""
    directory = script.train(flags_for(script, tmp_path, 1, env_id="probes:Walk-v0"))["run_dir"]
    make_env = script.make_env

    def wider(args, **options):
        env = make_env(args, **options)
        space = gym.spaces.Box(-1, 1, (env.observation_space.shape[0] + 1,), np.float32)
        return gym.wrappers.TransformObservation(env, lambda obs: np.append(obs, obs[:1]), space)

    monkeypatch.setattr(script, "make_env", wider)
    code, _, err = run_main(script, capsys, ["--evaluate", directory])
    assert code == 2
    assert (
        "its weights do not fit this script and the task's spaces; one of them has changed" in err
    )
    assert "of this script" not in err
    assert err.count("\n") == 1


def test_only_a_new_run_starts_from_others(script, tmp_path, capsys):
    """With --resume and --evaluate it is refused by name."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    directory = script.train(args)["run_dir"]
    for command in ("--resume", "--evaluate"):
        code, _, err = run_main(script, capsys, [command, directory, "--init-from", directory])
        assert code == 2
        assert err.startswith(f"error: --init-from {directory} (the run has )")


def test_a_run_of_another_version_is_refused_in_one_line(script, tmp_path, capsys, monkeypatch):
    """Its optimizer had another number of parameters; the remedy is named."""
    args = flags_for(script, tmp_path, 3, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    saved = torch.load(directory / "checkpoint.pt", weights_only=True)
    kept = pickle.loads(saved["run"].numpy())
    kept["optimizers"][0]["param_groups"][0]["params"].append(1)
    torch.save(saved | {"run": pickle.dumps(kept)}, directory / "checkpoint.pt")
    code, _, err = run_main(script, capsys, ["--resume", str(directory)])
    assert code == 2
    assert err.startswith(f"error: --resume {directory}: ")
    assert "--init-from" in err
    assert err.count("\n") == 1


def test_a_checkpoint_knows_of_the_best_agent_at_once(script, tmp_path, monkeypatch):
    """A run that breaks in its third evaluation, without a checkpoint of its own accord."""
    flags = {"env_id": "probes:Walk-v0", "eval_every": 1, "checkpoint_every": 0}
    args = flags_for(script, tmp_path, 5, **flags)
    scripted(script, monkeypatch, (5, 3))
    monkeypatch.setattr(script, "play", fail_at(script.play, 3))
    with pytest.raises(OSError, match="Input"):
        script.train(args)
    [path] = (tmp_path / "runs").glob("*/checkpoint.pt")
    kept = pickle.loads(torch.load(path, weights_only=True)["run"].numpy())
    assert kept["step"] == kept["best_step"] == args.batch_size


def test_an_evaluation_repeats_whatever_a_task_draws_from(script, tmp_path, capsys):
    """Here from NumPy's global generator. Another seed plays other episodes, and is kept."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Filmed-v0")
    directory, told = script.train(args)["run_dir"], []
    for global_seed, words_of_seed in ((1, ()), (2, ()), (2, ("--seed", "7"))):
        np.random.seed(global_seed)
        assert run_main(script, capsys, ["--evaluate", directory, *words_of_seed])[0] == 0
        newest = max(Path(directory, "evaluations").iterdir(), key=lambda x: x.stat().st_mtime_ns)
        told.append(json.loads(newest.read_text()))
    assert told[0] == told[1]
    assert told[0]["eval/return_mean"] != told[2]["eval/return_mean"]
    assert [one["seed"] for one in told] == [args.seed, args.seed, 7]


def test_nothing_is_filmed_without_a_folder(script):
    """`evaluate` has none of its own, and then opens no camera either."""
    run = make_run(script, "Walk")  # nobody can film it
    args = replace(run.args, eval_episodes=1)
    args.capture_video = True
    assert script.evaluate(run.agent, args)["eval/length_mean"] > 0


def test_no_checkpoint_knows_of_a_best_agent_that_is_not_written(
    script, tmp_path, monkeypatch, capsys
):
    """The disk is full in the middle of the second best.pt."""
    args = flags_for(script, tmp_path, 4, env_id="probes:Walk-v0", eval_every=1)
    scripted(script, monkeypatch, (1, 2, 3, 4))
    with monkeypatch.context() as patch:
        fill_the_disk(patch, 2, "best.pt.tmp")
        assert run_main(script, capsys, words(args))[0] == 1
    [path] = (tmp_path / "runs").glob("*/checkpoint.pt")
    assert contents(path.parent)["run"]["best_step"] == args.batch_size


def test_every_weight_counts_where_machines_compare_files(script, monkeypatch):
    """Another number in any tensor is another file."""
    args = small_args(script, "Walk")
    held = make_agent(script, args).state_dict()
    seen = []
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    monkeypatch.setattr(script, "gather_objects", lambda thing: seen.append(thing) or [thing])
    for other in ({}, *({name: x + 1} for name, x in held.items())):
        script.require_one_file(args, "resume", {"agent": held | other})
    assert len({*seen}) == len(held) + 1


def test_an_evaluation_repeats_what_a_task_draws_from_torch(script, monkeypatch):
    """Wherever the program's generator stands."""
    run = make_run(script, "Walk", eval_episodes=3)
    pay = Walk.pay
    monkeypatch.setattr(Walk, "pay", lambda *x: pay(*x) + float(torch.rand(())))
    env, found = script.make_eval_env(run.args), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(list(script.play(env, run.agent, run.args)))
    assert found[0] == found[1]


def test_an_evaluation_goes_by_its_own_seed(script, monkeypatch):
    """Not by the seed that the agent was trained with. Episodes are reset by it, the policy draws
    its noise by it, and so do tasks: here other numbers in each episode."""
    run = make_run(script, "ActionReward", eval_sampled=True, eval_episodes=40)
    with torch.no_grad():
        run.agent.actor_head.weight.zero_()
        run.agent.actor_head.bias.zero_()
    resets, drawn = [], []
    reset = ActionReward.reset

    def note(env, **options):
        resets.append(options["seed"])
        drawn.append((random.random(), np.random.random(), float(torch.rand(()))))
        return reset(env, **options)

    monkeypatch.setattr(ActionReward, "reset", note)
    env, played = script.make_eval_env(run.args), []
    for seed in (1, 2, 2):
        played.append(list(script.play(env, run.agent, replace(run.args, seed=seed))))
    for seed, first in ((1, 0), (2, 40), (2, 80)):
        expected = [script.derived_seed(seed, "evaluations", i, bits=31) for i in range(40)]
        assert resets[first : first + 40] == expected
    assert played[0] != played[1] == played[2]  # the reward is that of the action alone
    assert drawn[40:80] == drawn[80:]
    for numbers in zip(*drawn[:80]):
        assert len({*numbers}) == 80


def test_an_evaluation_leaves_all_generators_where_they_were(script, monkeypatch):
    """Whatever the task draws or seeds, and also where the caller stops on the way."""
    run = make_run(script, "Walk", eval_episodes=3)
    reset = Walk.reset

    def seed_all(env, **options):
        for set_seed in (random.seed, np.random.seed, torch.manual_seed):
            set_seed(7)
        return reset(env, **options)

    monkeypatch.setattr(Walk, "reset", seed_all)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for _ in script.play(script.make_eval_env(run.args), run.agent, run.args):
        assert_same((random.getstate(), np.random.get_state()), before[:2])
        assert torch.equal(torch.get_rng_state(), before[2])
        break
    script.evaluate(run.agent, run.args)
    assert_same((random.getstate(), np.random.get_state()), before[:2])


def test_a_task_that_seeds_numpy_trains_the_same_with_evaluations(script, tmp_path, monkeypatch):
    """Or each rollout behind an evaluation would have the same numbers."""
    reset, pay = Walk.reset, Walk.pay

    def seeding(env, **options):
        if options.get("seed") is not None:
            np.random.seed(options["seed"] % 2**32)
        return reset(env, **options)

    monkeypatch.setattr(Walk, "reset", seeding)
    monkeypatch.setattr(Walk, "pay", lambda *x: pay(*x) + np.random.random())
    args = flags_for(script, tmp_path, 3, env_id="probes:Walk-v0")
    runs = [timeless(script.train(replace(args, eval_every=every))) for every in (0, 1)]
    own = [{tag: x for tag, x in run.items() if not tag.startswith("eval/")} for run in runs]
    assert_same(*own)


def test_a_run_without_evaluations_has_none_on_the_way(script, tmp_path):
    """Though `eval_every` asks for them, from Python or as a resume changes flags."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0", eval_every=1, eval_episodes=0)
    metrics = script.train(args)
    assert not [tag for tag in metrics if tag.startswith("eval/")]
    assert metrics["charts/SPS"] > 0


def test_a_signal_in_the_last_evaluation_of_many(script, tmp_path, monkeypatch):
    """A resume plays it again, and the checkpoint then knows that it is done."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0", eval_every=1)
    scripted(script, monkeypatch, (9, 1))
    play, evaluations = script.play, []

    def interrupt(*inputs):
        evaluations.append(inputs)
        for rewards in play(*inputs):
            if len(evaluations) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield rewards

    monkeypatch.setattr(script, "play", interrupt)
    with pytest.raises(KeyboardInterrupt):
        script.train(args)
    [path] = (tmp_path / "runs").glob("*/checkpoint.pt")
    scripted(script, monkeypatch, (1,))
    resumed(script, monkeypatch, path.parent)
    assert contents(path.parent)["run"]["evaluated_at"] == 2 * args.batch_size


def test_a_film_that_fails_costs_no_training(script, tmp_path, monkeypatch):
    """Ctrl-C ends the program that writes films, too. The checkpoint is of the same step, and a
    resume begins with the evaluation."""
    flags = {"env_id": "probes:Filmed-v0", "eval_every": 1, "checkpoint_every": 0}
    args = flags_for(script, tmp_path, 2, capture_video=True, eval_episodes=1, **flags)
    with monkeypatch.context() as patch:
        patch.setattr(script, "play", fail_at(script.play, 1))
        with pytest.raises(OSError, match="Input"):
            script.train(args)
    [path] = (tmp_path / "runs").glob("*/checkpoint.pt")
    kept = pickle.loads(torch.load(path, weights_only=True)["run"].numpy())
    assert (kept["step"], kept["evaluated_at"]) == (args.batch_size, None)
    resumed(script, monkeypatch, path.parent)
    assert len(films(path.parent)) == 2  # of two evaluations


def test_play_films_nothing_without_a_folder(script, tmp_path):
    """Nor into a folder called None."""
    run = make_run(script, "Walk", env_id="probes:Filmed-v0", eval_episodes=1)
    run.args.capture_video = True
    list(script.play(script.make_eval_env(run.args), run.agent, run.args))
    assert not list(tmp_path.rglob("*.mp4"))
