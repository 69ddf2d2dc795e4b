"""The predicted distribution of returns, as it is had from Python."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import act, is_recurrent, make_run, prepare, roll, small_args

LEVELS = (0.1, 0.25, 0.5, 0.9)


def predict(agent, obs, levels, state=None):
    """Quantiles, and the critics' state, or None."""
    if hasattr(agent, "initial_state"):
        return agent.predict_returns(obs, levels, state)
    return agent.predict_returns(obs, levels), None


def value(agent, obs, state=None):
    """V, and the critics' state, or None."""
    return agent.value(obs, state) if hasattr(agent, "initial_state") else (agent.value(obs), None)


def say_the_same(script, agent, numbers):
    """All critics give these numbers for every observation."""
    for head in agent.critic_heads:
        torch.nn.init.zeros_(head[-1].weight)
        head[-1].bias.data = torch.tensor(numbers, dtype=torch.float32)


def returns_of(agent, mean, std):
    """Statistics of returns with this mean and std."""
    moments = agent.value_dist.moments
    moments.mean = torch.tensor(mean, dtype=torch.float64)
    moments.var = torch.tensor(std, dtype=torch.float64).square()


def test_quantiles_of_a_known_distribution():
    """Five quantiles at 0.1, 0.3, ... 0.9 are -2, -1, 0, 1, 2 normalised, so 8 to 12 at mean 10 and
    std 1: level 0.1 is the first one, 0.5 the third, 0.25 three quarters of the way to the second.
    """
    import distributional_ppo_lstm as script

    args = small_args(script, "VectorBox", num_quantiles=5, value_from="distribution")
    agent = script.Agent(script.Box(-1, 1, (4,)), script.Discrete(2), args)
    say_the_same(script, agent, [-2.0, -1.0, 0.0, 1.0, 2.0])
    returns_of(agent, 10.0, 1.0)
    found, _ = agent.predict_returns(np.zeros(4), LEVELS)
    assert found == pytest.approx([8.0, 8.75, 10.0, 12.0], abs=1e-5)
    assert agent.value(np.zeros(4))[0] == pytest.approx(10.0, abs=1e-5)


def test_quantiles_of_known_atoms():
    """Five equally likely atoms from -2 to 2: each atom's mass is spread over a bin of width 1, so
    the distribution function is straight from -2.5 to 2.5. At mean 10 and std 2 level p is
    10 + 2 (5 p - 2.5)."""
    import distributional_ppo_categorical as script

    flags = {"num_atoms": 5, "v_min": -2.0, "v_max": 2.0, "value_from": "distribution"}
    args = small_args(script, "VectorBox", **flags)
    agent = script.Agent(script.Box(-1, 1, (4,)), script.Discrete(2), args)
    say_the_same(script, agent, [0.0] * 5)
    returns_of(agent, 10.0, 2.0)
    found = agent.predict_returns(np.zeros(4), LEVELS)
    assert found == pytest.approx([10 + 2 * (5 * p - 2.5) for p in LEVELS], abs=1e-5)
    assert agent.value(np.zeros(4)) == pytest.approx(10.0, abs=1e-5)


def test_step_by_step_is_what_the_rollout_was_valued_with(script):
    """In two environments, states go from step to step and are zero where an episode opens:
    the deciles of the log and V are those of one pass over the rollout."""
    run = make_run(script, "Staggered", num_envs=2)
    agent = run.agent
    rollout = roll(run)
    first = rollout.obs[0].numpy()
    length = 3 if not is_recurrent(script) else int((~rollout.episode_start[1:].any(1)).sum())
    length = max(1, min(length, 3))
    state = None
    opened = None
    if is_recurrent(script):
        opened = rollout.episode_start.numpy()
    found = []
    for t in range(length):
        if opened is not None and t and opened[t].any():
            break
        quantiles, after = predict(agent, rollout.obs[t].numpy(), LEVELS, state)
        v, again = value(agent, rollout.obs[t].numpy(), state)
        if is_recurrent(script):
            assert torch.equal(after, again)
        found.append((quantiles, v))
        state = after
    assert len(found) > 1
    obs = agent.normalize_obs(rollout.obs[: len(found)])
    with torch.no_grad():
        if is_recurrent(script):
            starts = rollout.episode_start[: len(found)]
            features = agent.critic_body(obs, agent.initial_state(len(first)), starts)
            outputs = agent.value_outputs(features)
        else:
            outputs = agent.value_outputs(obs)
        outputs = agent.value_dist.reduce_twins(outputs)
    for t, (quantiles, v) in enumerate(found):
        expected = [agent.value_dist.quantile(outputs[t], level) for level in LEVELS]
        assert quantiles == pytest.approx(torch.stack(expected, -1).numpy(), rel=1e-4)
        assert v == pytest.approx(agent.value_dist.value(outputs[t]).numpy(), rel=1e-4)
        assert quantiles.shape == (2, 4)
        assert v.shape == (2,)


def test_one_observation_or_many(script):
    """The axis of rows goes where there is one alone; quantiles ascend."""
    run = make_run(script, "VectorBox")
    rows = run.rollout if hasattr(run, "rollout") else prepare(run) and run.rollout
    rows = rows.obs[0].numpy()
    many, _ = predict(run.agent, rows, LEVELS)
    one, _ = predict(run.agent, rows[1], LEVELS)
    assert many.shape == (4, 4)
    assert one == pytest.approx(many[1], rel=1e-5)
    assert (np.diff(many) >= 0).all()
    assert value(run.agent, rows[1])[0] == pytest.approx(value(run.agent, rows)[0][1], rel=1e-5)


def test_views_of_any_kind_are_taken(script):
    """Rows in reverse order, and big-endian ones, as `act` takes them too."""
    run = make_run(script, "VectorBox")
    rows = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)
    expected = value(run.agent, rows)[0]
    assert value(run.agent, rows[::-1])[0] == pytest.approx(expected[::-1], rel=1e-5)
    assert value(run.agent, rows.astype(">f4"))[0] == pytest.approx(expected, rel=1e-5)
    assert predict(run.agent, np.flip(rows, 1), LEVELS)[0].shape == (4, 4)


@pytest.mark.parametrize("levels", [(0.001, 1.0), [0.5, 1], np.array([0.1])])
def test_levels_may_be_at_the_ends_and_in_any_array(script, levels):
    """0.001 and 1 are levels. A list and an array are as good as a tuple."""
    agent = make_run(script, "VectorBox").agent
    found, _ = predict(agent, np.zeros(4), levels)
    assert found.shape == (len(levels),)
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    "levels", [(0.5, 1.2), (0.0,), (-0.1,), (), ("a",), (None,), ((0.1, 0.5),)]
)
def test_levels_are_shares(script, levels):
    """A level beyond [0.001, 1] is refused, and so are none at all and what is no number; so is an
    observation of another shape."""
    agent = make_run(script, "VectorBox").agent
    with pytest.raises(ValueError, match="levels"):
        predict(agent, np.zeros(4), levels)
    with pytest.raises(ValueError, match="has the shape"):
        predict(agent, np.zeros(5), (0.5,))
    with pytest.raises(ValueError, match="has the shape"):
        value(agent, np.zeros(5))


def test_critics_of_v_alone_predict_no_returns(script):
    """V they do predict."""
    flags = {} if is_recurrent(script) else {"mean_output": "value"}
    agent = make_run(script, "VectorBox", dist_coef=0, **flags).agent
    with pytest.raises(ValueError, match="trained with --dist-coef 0, the critics know V alone"):
        predict(agent, np.zeros(4), (0.1, 0.9))
    assert np.isfinite(value(agent, np.zeros(4))[0])


def test_images_may_be_views(script):
    """`act` takes flipped bytes, whose strides are negative, as it takes their copy."""
    run = make_run(script, "QuadrantUint8First")
    rng = np.random.default_rng(1)
    shape = run.envs.single_observation_space.shape
    rows = rng.integers(0, 256, (4, *shape)).astype(np.uint8)
    expected = act(run.agent, rows)[0]
    assert (act(run.agent, rows[::-1])[0][::-1] == expected).all()
    flipped = np.flip(rows, 2)
    assert (act(run.agent, flipped)[0] == act(run.agent, flipped.copy())[0]).all()


def test_what_is_no_number_is_refused(script):
    """With ValueError, as `act` says."""
    agent = make_run(script, "VectorBox").agent
    for wrong in (np.array(["a"] * 4), np.array([None] * 4)):
        with pytest.raises(ValueError, match="has no numbers"):
            act(agent, wrong)
    rows = np.array([[1, 2.5, 0, 1]])
    assert (act(agent, rows.astype(object))[0] == act(agent, rows)[0]).all()


def test_what_is_hidden_stays_hidden_from_python(script):
    """A robot's program gives whole observations. The networks have never seen velocities, whose
    statistics have a variance of 0, so these must not count."""
    args = small_args(script, "Walk")
    args = replace(args, env_id="CartPoleNoVel-v1", masked_obs=(2,))
    env = script.make_env(args)
    agent = script.Agent(env.observation_space, env.action_space, args)
    hidden = [1, 2, 3]  # the velocities, and what was masked
    agent.obs_moments.var[hidden] = 0
    agent.obs_moments.count += 10
    whole = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    shown = whole.copy()
    shown[:, hidden] = 0
    for ask in (predict, value):
        inputs = (LEVELS,) if ask is predict else ()
        assert np.array_equal(ask(agent, whole, *inputs)[0], ask(agent, shown, *inputs)[0])
    first, second = (act(agent, obs)[0] for obs in (whole, shown))
    assert np.array_equal(first, second)
    see = env.get_wrapper_attr("see")
    assert np.array_equal(see(whole[0]), shown[0])
    whole[:, hidden] = np.nan  # as where that sensor is broken
    assert np.array_equal(act(agent, whole)[0], first)
