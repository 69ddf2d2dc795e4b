"""Atari games by the protocol of Machado et al. 2018: what is seen, paid and when it ends."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from command import run_main
from conftest import ONE_SCRIPT, each_of
from helpers import make_agent, make_run, roll, small_args

script = each_of(ONE_SCRIPT)  # but for what differs between them

pytest.importorskip("ale_py", reason="Atari games need ale-py")
pytest.importorskip("cv2", reason="their preprocessing needs opencv-python-headless")
PACMAN = {"env_id": "ale_py:ALE/MsPacman-v5", "num_steps": 24, "num_envs": 2}


def test_the_protocol(script):
    """Sticky actions of 0.25, four frames a step and in a stack, lost lives go on, 30 minutes."""
    env = script.make_env(small_args(script, "", **PACMAN))
    obs, _ = env.reset(seed=1)
    assert obs.shape == (4, 84, 84)
    assert obs.dtype == np.uint8
    ale = env.unwrapped.ale
    assert ale.getFloat("repeat_action_probability") == 0.25
    assert env.spec.max_episode_steps == 108_000  # frames of 1/60 s; each step is four of them
    before = ale.getFrameNumber()
    env.step(0)
    assert ale.getFrameNumber() - before == 4
    few = script.make_env(small_args(script, "", **PACMAN), max_episode_steps=80)
    assert few.spec.max_episode_steps == 80  # the caller's own
    few.close()
    lives = {ale.lives()}
    ended = False
    while not ended:
        obs, _, ended, _, _ = env.step(3)
        lives.add(ale.lives())
    assert lives == {0, 1, 2, 3}
    assert not (obs[0] == obs[3]).all()


def test_rewards_are_clipped_for_learning_alone(script, monkeypatch):
    """A dot pays 10 points: 1 in the rollout, 10 in the episode's return. The policy is random,
    without its slow convolutions."""
    run = make_run(script, "", num_minibatches=1, **PACMAN | {"num_envs": 1})
    outputs = np.zeros((1, run.agent.action_dist.num_outputs), np.float32)

    def policy(obs, *state):
        return (outputs, *state) if state else outputs

    monkeypatch.setattr(run.agent, "numpy_policy", lambda: policy)
    returns, total = [], 0.0
    while not returns:
        rollout = roll(run)
        assert set(rollout.rewards.unique().tolist()) <= {0.0, 1.0}
        total += float(rollout.rewards.sum())
        returns += [episode[1] for episode in rollout.episodes]
    assert total > 5
    assert returns[0] >= 60
    assert returns[0] % 10 == 0


@pytest.mark.slow
def test_an_evaluation_reports_what_was_paid(script):
    """In points."""
    args = small_args(script, "", eval_episodes=1, **PACMAN)
    assert script.evaluate(make_agent(script, args), args)["eval/return_mean"] >= 60


@pytest.mark.slow
def test_a_game_trains(script, tmp_path):
    """From images of bytes to finite metrics; without a copy of the emulator a resume says so."""
    flags = {"total_timesteps": 96, "eval_episodes": 1, "run_dir": str(tmp_path)}
    metrics = script.train(small_args(script, "", **PACMAN, **flags))
    assert all(np.isfinite(v) for k, v in metrics.items() if k != "run_dir")
    assert metrics["grad/critic"] > 0


@pytest.mark.parametrize("name", ["PongNoFrameskip-v4", "Pong-v4", "Pong-v0"])
def test_an_old_id_is_refused_with_the_one_to_use(script, capsys, name):
    """It would train on raw single frames, silently."""
    code, _, err = run_main(script, capsys, ["--env-id", f"ale_py:{name}"])
    assert code == 2
    assert err.count("\n") == 1
    assert "use ale_py:ALE/Pong-v5" in err


def test_an_id_without_its_module_is_told_the_whole_one(script, capsys, monkeypatch):
    """gymnasium asks whether the package is installed; what helps is the module ahead of the id."""
    for name in [name for name in gym.registry if name.startswith("ALE/")]:
        monkeypatch.delitem(gym.registry, name)
    code, _, err = run_main(script, capsys, ["--env-id", "ALE/Pong-v5"])
    assert code == 2
    assert "Use ale_py:ALE/Pong-v5" in err
    assert "pip install ale-py" in err


def test_episodes_begin_without_no_ops(script):
    """Sticky actions take their place (Machado et al. 2018)."""
    layer = script.make_env(small_args(script, "", **PACMAN))
    while not isinstance(layer, gym.wrappers.AtariPreprocessing):
        layer = layer.env
    assert layer.noop_max == 0


def test_old_ids_are_told_their_new_name_ahead_of_an_import(script):
    """Where ale_py is not imported, gymnasium does not know them. A module has tasks of its own."""
    unknown = gym.error.NameNotFound("Environment `PongNoFrameskip` doesn't exist.")
    args = small_args(script, "Walk")
    for env_id, told in (
        ("PongNoFrameskip-v4", "Use ale_py:ALE/Pong-v5, after pip install ale-py"),
        ("Other-v4", "A task of your own is named module:id"),
    ):
        args.env_id = env_id
        assert told in script.advice(unknown, args)
    args.env_id = "mine:DoomNoFrameskip-v0"
    assert script.advice(RuntimeError(), args) == ""


@pytest.mark.parametrize("kind", ["NoFrameskip", "Deterministic", ""])
def test_old_ids_are_told_their_new_name(script, kind):
    """ale_py has no BreakoutDeterministic-v5."""
    spec = gym.envs.registration.EnvSpec(f"Breakout{kind}-v4", entry_point="ale_py.env:AtariEnv")
    args = small_args(script, "Walk")
    args.env_id = f"ale_py:Breakout{kind}-v4"
    with pytest.raises(script.UsageError, match="use ale_py:ALE/Breakout-v5"):
        script.refuse_other_atari(SimpleNamespace(unwrapped=SimpleNamespace(spec=spec)), args)


@pytest.mark.parametrize("module", ["mine:", ""])
def test_a_registration_of_one_s_own_is_told_the_name_that_works(script, monkeypatch, module):
    """There is no ALE/HardPong-v5 of ale_py."""
    kwargs = {"game": "pong", "difficulty": 1}
    gym.register("HardPong-v0", entry_point="ale_py.env:AtariEnv", kwargs=kwargs)
    env = SimpleNamespace(unwrapped=SimpleNamespace(spec=gym.registry["HardPong-v0"]))
    args = small_args(script, "Walk")
    args.env_id = f"{module}HardPong-v0"
    told = f"register it as ALE/HardPong-v0, and name it {module or 'module:'}ALE/HardPong-v0"
    with pytest.raises(script.UsageError, match=told):
        script.refuse_other_atari(env, args)


def test_packages_are_named_where_they_are_missing(script, monkeypatch):
    """A name that ale_py does not know is no reason to install it."""
    args = small_args(script, "Walk")
    args.env_id = "ale_py:ALE/Pongg-v5"
    assert script.advice(RuntimeError(), args) == ""
    monkeypatch.setattr(script, "find_spec", lambda name: None if name == "cv2" else name)
    assert (
        script.advice(RuntimeError(), args) == " Needed: pip install ale-py opencv-python-headless"
    )
