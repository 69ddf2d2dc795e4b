"""Images: what counts as one, how it reaches the networks, what it costs, and that it is learnt."""

from __future__ import annotations

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SCRIPTS
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from helpers import act, make_agent, make_run, prepare, roll, small_args
from probes import Pixels
from test_probes import learn

BYTES = {"low": 0, "high": 255, "dtype": np.uint8}


LAST, FIRST = 2, 0


@pytest.mark.parametrize(
    ("space", "axis"),
    [
        (Box(shape=(84, 84, 3), **BYTES), LAST),
        (Box(shape=(4, 84, 84), **BYTES), FIRST),
        (Box(shape=(84, 84), **BYTES), LAST),  # one, which is missing
        (Box(0, 1, (10, 10, 4), bool), LAST),
        (Box(-1, 1, (4, 6), np.float32), None),  # a table of numbers
        (Box(0, 1, (12, 12, 1), np.float32), LAST),
        (Box(-1, 1, (3, 3, 1), np.float64), LAST),
        (Box(0, 9, (5, 5, 2), np.int64), LAST),
        (Box(0, 65_535, (12, 12), np.uint16), None),
        (Box(0, 65_535, (12, 12, 3), np.uint16), LAST),
        (Box(0, 65_536, (12, 12, 3), np.int32), None),  # numbers, no pixels
        (Box(-np.inf, np.inf, (12, 12), np.float32), None),  # vectors in a stack: no bounds
        (Box(-3e38, 3e38, (12, 12, 3), np.float32), None),  # would be scaled by 1e-39
        (Box(np.zeros((4, 4, 4)), np.tile([1.0, 2, 3, 4], (4, 4, 1))), None),  # not alike
        (Box(0, 0, (12, 12, 3), np.float32), None),
        (Box(0, np.inf, (12, 12, 3), np.float32), None),
        (Box(shape=(4, 2), **BYTES), None),  # too narrow for a kernel of 3 x 3
        (Box(shape=(9, 2, 2), **BYTES), None),
        (Box(shape=(84, 2, 3), **BYTES), None),
        (Box(shape=(3, 2, 84), **BYTES), None),
        (Box(shape=(144,), **BYTES), None),
        (Box(0, 1, (2, 4, 12, 12), np.float32), None),
        (Box(-np.inf, 1, (12, 12, 3), np.float32), None),
        (Discrete(5), None),
        (MultiBinary((12, 12)), None),
        (Dict(a=Box(shape=(84, 84, 3), **BYTES)), None),
    ],
)
def test_what_an_image_is(script, space, axis):
    """Bytes in two or three dimensions, or numbers bounded alike in three, with sides of 3."""
    assert script.channel_axis(space) == axis


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((84, 84, 3), (3, 84, 84)),  # channels last
        ((210, 160, 3), (3, 210, 160)),
        ((3, 64, 96), (3, 64, 96)),  # channels first
        ((4, 84, 84), (4, 84, 84)),
        ((10, 10, 10), (10, 10, 10)),  # cannot be told: last, as gymnasium's images have them
        ((10, 10, 20), (20, 10, 10)),  # more channels than pixels in a row
        ((20, 10, 10), (20, 10, 10)),
    ],
)
def test_channels_come_first(script, monkeypatch, shape, seen):
    """The number k of a pixel (row, column, channel) in memory is found where it belongs."""
    monkeypatch.setitem(gym.registry, "Pixels-v0", gym.envs.registration.EnvSpec(
        "Pixels-v0", Pixels, kwargs={"shape": shape, "dtype": "float32", "high": 65_535},
    ))  # fmt: skip
    env = script.make_env(small_args(script, "", env_id="Pixels-v0"))
    obs, _ = env.reset(seed=0)
    assert obs.shape == env.observation_space.shape == seen
    whole = (*shape, 1)[:3]
    first = seen == whole and shape != (10, 10, 10)
    a, b, c = (size - 1 for size in whole)
    for place in [(0, 0, 0), (0, 1, c), (a, 1, c), (a, b, 0)]:
        number = np.ravel_multi_index(place, whole)
        assert obs[place if first else (place[2], *place[:2])] == number


@pytest.mark.parametrize(
    ("dtype", "high", "seen"),
    [
        ("uint8", 255, np.uint8),
        ("bool", 1, np.uint8),
        ("float64", 99, np.float32),
        ("int64", 1000, np.float32),  # not cut to bytes
    ],
)
def test_bytes_stay_bytes(script, monkeypatch, dtype, high, seen):
    """One byte a pixel where that holds it, else float32."""
    monkeypatch.setitem(gym.registry, "Pixels-v0", gym.envs.registration.EnvSpec(
        "Pixels-v0", Pixels, kwargs={"shape": (7, 6, 2), "dtype": dtype, "high": high},
    ))  # fmt: skip
    env = script.make_env(small_args(script, "", env_id="Pixels-v0"))
    obs, _ = env.reset(seed=0)
    assert obs.dtype == env.observation_space.dtype == seen
    assert obs.max() == (1 if dtype == "bool" else 83)


def test_a_vector_of_bytes_is_a_vector(script, monkeypatch):
    """A game's memory, 128 bytes, is no image: floats of any size, alone or in a Dict."""
    monkeypatch.setitem(gym.registry, "Pixels-v0", gym.envs.registration.EnvSpec(
        "Pixels-v0", Pixels, kwargs={"shape": (128,)},
    ))  # fmt: skip
    env = script.make_env(small_args(script, "", env_id="Pixels-v0"))
    obs, _ = env.reset(seed=0)
    assert obs.tolist() == [*range(128)]
    assert env.observation_space == Box(-np.inf, np.inf, (128,), np.float32)
    assert script.unfit_part(Dict(ram=Box(shape=(128,), **BYTES))) == ""


def convolve(image, weight, bias, stride):
    """Slow float64 reference: relu of the layer, (C, H, W) -> (F, H', W')."""
    size = weight.shape[-1]
    rows = range(0, image.shape[1] - size + 1, stride)
    columns = range(0, image.shape[2] - size + 1, stride)
    out = np.array([
        [[(image[:, i : i + size, j : j + size] * f).sum() for j in columns] for i in rows]
        for f in weight
    ])  # fmt: skip
    return np.maximum(out + bias[:, None, None], 0)


@pytest.mark.parametrize(
    ("shape", "high", "strides", "num_features"),
    [
        ((2, 5, 7), 1, (1,), 16 * 3 * 5),
        ((1, 36, 40), 255, (4, 2, 1), 64),  # 36 x 40: 8 x 9, 3 x 3, 1 x 1
        ((1, 10, 40), 255, (1,), 16 * 8 * 38),  # the shorter side decides
    ],
)
def test_convolutions_are_those_of_the_papers(script, shape, high, strides, num_features):
    """Every layer against sums by hand; the pixels are divided by their bound."""
    space = Box(0, high, shape, np.uint8)
    module = script.Convolutions(space, torch.nn.ReLU)
    space.seed(0)
    images = np.stack([space.sample() for _ in range(2)])
    features = module(torch.as_tensor(images))
    assert module.num_features == num_features
    weights = dict(module.named_parameters())
    assert [w.shape[0] for w in weights.values() if w.dim() == 4] == (
        [16] if len(strides) == 1 else [32, 64, 64]
    )
    for image, feature in zip(images, features):
        x = image / high
        for i, stride in enumerate(strides):
            weight, bias = (weights[f"layers.{2 * i}.{n}"] for n in ("weight", "bias"))
            x = convolve(x, weight.detach().numpy(), bias.detach().numpy(), stride)
        np.testing.assert_allclose(feature.detach(), x.ravel(), rtol=1e-4, atol=1e-5)


def test_the_layers_of_mnih_have_3136_features(script):
    """64 maps of 7 x 7 from 84 x 84; Young & Tian's 16 of 8 x 8 from 10 x 10."""
    for shape, features in (((4, 84, 84), 3136), ((4, 10, 10), 1024)):
        module = script.Convolutions(Box(shape=shape, **BYTES), torch.nn.ReLU)
        assert module.num_features == features


def test_many_images_are_seen_like_one(script):
    """Leading axes stay, and parts of a large batch do not mix."""
    module = script.Convolutions(Box(shape=(2, 5, 5), **BYTES), torch.nn.Tanh)
    images = torch.randint(256, (130, 4, 2, 5, 5), dtype=torch.uint8)
    features = module(images)
    assert features.shape == (130, 4, 144)
    for t, i in ((0, 0), (63, 3), (64, 0), (129, 3)):
        assert torch.allclose(features[t, i], module(images[t, i][None])[0], atol=1e-6)


def test_images_stay_bytes_in_rollout_and_batch(script):
    """A byte a pixel for s_t and s'_t each, and as much in the batch; no moments are taken."""
    run = make_run(script, "QuadrantUint8Last", num_steps=12, num_envs=4)
    batch = prepare(run)
    pixels = 12 * 4 * 2 * 12 * 12
    for x in (run.rollout.obs, run.rollout.next_obs, batch.obs):
        assert x.dtype == torch.uint8
        assert x.numel() == x.numel() * x.element_size() == pixels
    assert set(run.rollout.obs.unique().tolist()) == {0, 255}
    assert torch.equal(run.agent.normalize_obs(run.rollout.obs), run.rollout.obs)
    assert run.agent.obs_moments.mean.dim() == 0


def test_statistics_of_images_are_never_taken(script, tmp_path):
    """Whatever --norm-obs says: pixels have a bound."""
    for norm_obs in (True, False):
        flags = {"norm_obs": norm_obs, "run_dir": str(tmp_path)}
        metrics = script.train(small_args(script, "QuadrantUint8First", **flags))
        agent, _ = script.load_agent(metrics["run_dir"])
        assert agent.obs_moments.count == 0


def test_rollouts_hold_the_images_that_were_seen(script):
    """The lit quarter, the action of the agent and the reward belong together."""
    run = make_run(script, "QuadrantUint8First", num_steps=12, num_envs=4)
    rollout = roll(run)
    lit = rollout.obs[:, :, 1].bool()
    cues = 2 * lit[..., -1, :].any(-1) + lit[..., -1].any(-1)
    right = rollout.actions[..., 0] == cues
    assert torch.equal(rollout.rewards, right.double())
    assert 0 < rollout.rewards.mean() < 1
    assert not rollout.obs[:, :, 0].any()


def test_one_image_or_many(script):
    """`act` takes what one environment gives, or a stack."""
    run = make_run(script, "QuadrantUint8First")
    images = np.random.default_rng(0).integers(0, 256, (5, 2, 12, 12), np.uint8)
    many, _ = act(run.agent, images)
    assert many.shape == (5,)
    for image, action in zip(images, many):
        one, _ = act(run.agent, image)
        assert np.shape(one) == ()
        assert one == action


KINDS = ("Uint8First", "Float32Last", "Uint8Last", "Float32First")
EVERY = [*itertools.product(SCRIPTS, ("", "Large"), KINDS)]
QUICK = [(SCRIPTS[0], "", "Uint8First")]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in QUICK]
SHORT = {"learning_rate": 1e-3, "gamma": 0.5, "hidden_size": 32, "lstm_hidden_size": 32}


@pytest.mark.parametrize(("script", "size", "kind"), [*QUICK, *SLOW], indirect=["script"])
def test_an_image_names_the_action(script, tmp_path, size, kind):
    """12 x 12 and 84 x 84, bytes and floats, channels first and last."""
    flags = {"num_envs": 16, "num_steps": 16, "num_minibatches": 4, "update_epochs": 4}
    flags["total_timesteps"] = 1536 if size else 4096
    metrics, _ = learn(script, tmp_path, f"{size}Quadrant{kind}", **(SHORT | flags))
    assert metrics["eval/return_mean"] > 0.95


@pytest.mark.slow
def test_only_memory_solves_a_flickering_image(script, tmp_path):
    """A black frame asks for the quarter that was lit before: by chance 1 of 4 frames pays."""
    flags = {"num_envs": 16, "num_steps": 32, "num_minibatches": 4, "update_epochs": 4}
    metrics, _ = learn(script, tmp_path, "Flicker", **(SHORT | flags), total_timesteps=12_288)
    if hasattr(script, "Carry"):
        assert metrics["eval/return_mean"] > 3.8
    else:
        assert metrics["eval/return_mean"] < 2


def test_convolutions_have_the_activation_of_the_flags(script):
    """No ReLU is left where tanh is asked for."""
    for env in ("QuadrantUint8First", "LargeQuadrantUint8First"):
        agent = make_agent(script, small_args(script, env, activation="tanh"))
        kinds = [type(module).__name__ for module in agent.actor_body.modules()]
        assert "ReLU" not in kinds
        assert kinds.count("Tanh") == kinds.count("Conv2d") + kinds.count("Linear")


@pytest.mark.parametrize(("side", "layers"), [(35, 1), (36, 3)])
def test_the_size_that_divides_grids_from_screens(script, side, layers):
    """Young & Tian 2019 below 36 rows, Mnih et al. 2015 from there."""
    body = script.Convolutions(Box(shape=(3, side, side), **BYTES), torch.nn.Tanh)
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in body.layers) == layers


@pytest.mark.parametrize(("high", "scale"), [(0.5, 1), (1, 1), (4, 0.25)])
def test_pixels_are_divided_by_their_bound_or_by_one(script, high, scale):
    """Small bounds are no reason to magnify."""
    space = Box(0, high, (2, 5, 5), np.float32)
    assert script.Convolutions(space, torch.nn.Tanh).scale == scale


def test_few_images_at_a_time_are_held_as_floats(script):
    """600 images go through in parts of 256 at most, and come out in their order."""
    body = script.Convolutions(Box(shape=(2, 5, 5), **BYTES), torch.nn.Tanh)
    sizes = []
    body.layers.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    images = torch.randint(0, 255, (3, 200, 2, 5, 5), dtype=torch.uint8)
    features = body(images)
    assert sizes == [256, 256, 88]
    torch.testing.assert_close(features[2, 7], body(images[2:, 7])[0])


def test_no_pixel_is_hidden(script):
    """Entries of a vector with the bounds 0 and 0 are those that `--masked-obs` hides. Pixels with
    such bounds are seen, as in training, which compares no bounds."""
    image = Box(np.zeros((2, 5, 5)), np.zeros((2, 5, 5)), dtype=np.uint8)
    rows, alone = script.as_rows(np.full((2, 5, 5), 9, np.uint8), image)
    assert alone
    assert (rows == 9).all()
    vector = Box(np.array([-1.0, 0]), np.array([1.0, 0]), dtype=np.float64)
    assert script.as_rows(np.array([0.5, 0.5]), vector)[0].tolist() == [[0.5, 0]]


@pytest.mark.parametrize(
    ("space", "size"),
    [(gym.spaces.MultiDiscrete([2, 3]), 5), (Box(-1, 1, (4, 6)), 24), (MultiBinary((2, 3)), 6)],
)
def test_what_is_no_image_becomes_a_flat_vector(script, space, size):
    """Choices one-hot, tables row by row."""
    see, seen = script.vector_view(space, script.Args(), ())
    space.seed(0)
    shown = space.sample()
    found = see(shown)
    assert found.shape == seen.shape == (size,)
    assert found.tolist() == gym.spaces.flatten(space, shown).tolist()
