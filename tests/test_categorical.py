"""Categorical critics: projection, encodings, clipping, CVaR, and the loop around them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import make_run, prepare, small_args
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import distributional_ppo_categorical as script
from distributional_ppo_categorical import (
    categorical_cross_entropy,
    categorical_quantile,
    clip_categorical,
    cvar_categorical,
    hl_gauss,
    project_categorical,
    two_hot,
)

ATOMS = torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0], dtype=torch.float64)


def t64(data: list) -> Tensor:
    """float64 tensor."""
    return torch.tensor(data, dtype=torch.float64)


def project_by_loops(probs: Tensor, source: Tensor, target: Tensor) -> np.ndarray:
    """Algorithm 1 of Bellemare et al. 2017 with loops and floor and ceiling."""
    probs, source, target = (x.double().numpy() for x in (probs, source, target))
    source = np.broadcast_to(source, probs.shape)
    dz = (target[-1] - target[0]) / (len(target) - 1)
    out = np.zeros((len(probs), len(target)))
    for b in range(len(probs)):
        for i in range(probs.shape[1]):
            z = min(max(source[b, i], target[0]), target[-1])
            position = (z - target[0]) / dz
            lower = min(math.floor(position), len(target) - 2)
            out[b, lower] += probs[b, i] * (lower + 1 - position)
            out[b, lower + 1] += probs[b, i] * (position - lower)
    return out


def test_projection_by_hand():
    """Sources on an atom, between atoms, and outside on both sides."""
    probs = t64([[0.1, 0.2, 0.3, 0.4]])
    source = t64([1.0, 0.25, -7.0, 3.5])
    # 1.0 is atom 2: 0.1 there. 0.25 lies a quarter from atom 1 to 2: 0.15 and 0.05.
    # -7 is clipped to -1: 0.3 at atom 0. 3.5 is clipped to 3: 0.4 at atom 4.
    assert_close(project_categorical(probs, source, ATOMS), t64([[0.3, 0.15, 0.15, 0, 0.4]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("shared", [True, False])
def test_projection_equals_the_loops(dtype, spread, shared):
    """Source narrower than, equal to and wider than the target; one source or one per row."""
    probs = torch.randn(6, 7, dtype=dtype).softmax(-1)
    shape = (7,) if shared else (6, 7)
    source = spread * torch.randn(shape, dtype=dtype) + 1
    target = torch.linspace(-2, 3, 11, dtype=dtype)
    out = project_categorical(probs, source, target)
    assert out.dtype == dtype
    expected = project_by_loops(probs, source, target)
    np.testing.assert_allclose(
        out.double(), expected, atol=1e-6 if dtype == torch.float32 else 1e-12
    )
    assert_close(out.sum(-1), torch.ones(6, dtype=dtype))


def test_projection_keeps_the_mean_inside_the_support():
    """sum p z is what it was, for sources that need no clipping."""
    probs = torch.randn(5, 9, dtype=torch.float64).softmax(-1)
    source = torch.rand(5, 9, dtype=torch.float64) * 4 - 1
    out = project_categorical(probs, source, ATOMS)
    assert_close((out * ATOMS).sum(-1), (probs * source).sum(-1))


def test_projection_onto_the_same_atoms_is_the_identity():
    """float32, 51 atoms on [-20, 20]: no mass leaks through rounded indices."""
    atoms = torch.linspace(-20, 20, 51)
    probs = torch.randn(8, 51).softmax(-1)
    assert_close(project_categorical(probs, atoms, atoms), probs, rtol=0, atol=1e-6)
    edge = torch.eye(51)[[0, 50]]
    assert_close(project_categorical(edge, atoms + 1e4, atoms), torch.eye(51)[[50, 50]])
    assert_close(project_categorical(edge, atoms - 1e4, atoms), torch.eye(51)[[0, 0]])


def test_projection_has_gradients_in_probabilities_and_atoms():
    """Finite differences in both, away from the kinks at the atoms."""
    probs = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    source = t64([[-0.7, 0.4, 1.3, 2.6], [0.2, 0.3, 2.2, 5.0], [-3.0, 1.6, 1.7, 2.9]])
    assert gradcheck(project_categorical, (probs, source.requires_grad_(), ATOMS))


def test_projection_does_without_all_pairs():
    """Nothing larger than its inputs and its result is kept for the gradient: no (B, K, K')."""
    kept, probs = [], torch.rand(3, 40, requires_grad=True)
    source = torch.randn(3, 40, requires_grad=True)
    hooks = (lambda x: kept.append(x.numel()) or x, lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        project_categorical(probs, source, torch.linspace(-1, 1, 50))
    assert max(kept) <= 3 * 50


def test_projection_of_what_is_no_number_is_no_number():
    """The finite check of the update names the fault, and no index error comes ahead of it."""
    source = t64([[0.5, math.nan]])
    assert project_categorical(t64([[0.5, 0.5]]), source, ATOMS).isnan().any()


def test_two_hot_by_hand():
    """On an atom, between, outside."""
    out = two_hot(t64([2.0, 0.3, 9.0, -9.0]), ATOMS)
    expected = [[0, 0, 0, 1, 0], [0, 0.7, 0.3, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]
    assert_close(out, t64(expected))


def test_hl_gauss_by_hand():
    """Masses of the normal distribution between the bin edges -1.5 ... 3.5, renormalised."""

    def cdf(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    out = hl_gauss(t64([0.4, 2.9]), ATOMS, 0.8)
    for row, target in enumerate((0.4, 2.9)):
        edges = [(-1.5 + i - target) / 0.8 for i in range(6)]
        inside = cdf(edges[-1]) - cdf(edges[0])
        expected = [(cdf(b) - cdf(a)) / inside for a, b in itertools.pairwise(edges)]
        assert_close(out[row], t64(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hl_gauss_of_a_far_target_is_that_of_the_edge(dtype):
    """Clamped first: no 0 / 0, and the loss still pulls towards the edge."""
    atoms = torch.linspace(-5, 5, 51, dtype=dtype)
    out = hl_gauss(torch.tensor([1e6, -1e6, 5.0], dtype=dtype), atoms, 0.15)
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert torch.equal(out[0], out[2])
    assert int(out[1].argmax()) == 0
    assert_close(out.sum(-1), torch.ones(3, dtype=dtype))


def test_cross_entropy_by_hand_and_for_huge_logits():
    """-sum p log softmax; finite where softmax rounds to 0."""
    target, logits = t64([[0.25, 0.75]]), t64([[0.0, math.log(3)]])
    # softmax = (1/4, 3/4): the loss is the entropy of (1/4, 3/4)
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert float(categorical_cross_entropy(target, logits)) == pytest.approx(expected)
    loss = categorical_cross_entropy(torch.tensor([[1.0, 0.0]]), torch.tensor([[-500.0, 500.0]]))
    assert float(loss) == 1000


def test_clipping_shifts_the_distribution_and_keeps_its_shape():
    """Mean 1.2, old mean 0.4, d = 0.3: shifted by 0.7 - 1.2 = -0.5; inside the range: untouched."""
    probs = t64([[0, 0.2, 0.5, 0.2, 0.1]])  # mean 0.5 + 0.4 + 0.3 = 1.2
    out = clip_categorical(probs, t64([0.4]), 0.3, ATOMS)
    # every atom moves half a bin down: each mass splits evenly over two atoms
    assert_close(out, t64([[0.1, 0.35, 0.35, 0.15, 0.05]]))
    assert_close((out * ATOMS).sum(-1), t64([0.7]))
    assert_close(clip_categorical(probs, t64([1.4]), 0.3, ATOMS), probs)
    up = clip_categorical(probs, t64([2.0]), 0.3, ATOMS)  # shifted up by 0.5, edge mass clipped
    assert_close(up, t64([[0, 0.1, 0.35, 0.35, 0.2]]))


def test_clipping_has_a_gradient():
    """Through the shift; the old means carry none."""
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    old = t64([0.33, 1.21, 0.87, 1.04])
    assert gradcheck(lambda x: clip_categorical(x.softmax(-1), old, 0.1, ATOMS), (logits,))


def test_cvar_by_hand():
    """Mass 0.2 at -1, 0.5 at 0, 0.3 at 2: whole atoms, an atom in part, everything."""
    probs, atoms = t64([[0.2, 0.5, 0.3]]), t64([-1.0, 0.0, 2.0])
    for alpha, expected in ((0.1, -1.0), (0.2, -1.0), (0.4, -0.5), (0.8, 0.0), (1.0, 0.4)):
        # 0.4: (0.2 * -1 + 0.2 * 0) / 0.4; 0.8: (-0.2 + 0 + 0.1 * 2) / 0.8; 1: the mean
        assert float(cvar_categorical(probs, atoms, alpha)) == pytest.approx(expected)


def test_cvar_properties():
    """Translation, scale, monotone in alpha, never above the mean."""
    probs = torch.randn(6, 5, dtype=torch.float64).softmax(-1)
    base = cvar_categorical(probs, ATOMS, 0.3)
    assert_close(cvar_categorical(probs, 3 * ATOMS + 2, 0.3), 3 * base + 2)
    levels = [cvar_categorical(probs, ATOMS, a) for a in (0.001, 0.1, 0.5, 0.9, 1.0)]
    for low, high in itertools.pairwise(levels):
        assert (low <= high + 1e-12).all()
    assert_close(levels[-1], (probs * ATOMS).sum(-1))
    assert gradcheck(lambda p: cvar_categorical(p, ATOMS, 0.3), (probs.requires_grad_(),))


@pytest.mark.parametrize("alpha", [0.0, 9e-4, 1.001, -0.1])
def test_cvar_refuses_levels_outside_its_range(alpha):
    """[1e-3, 1]."""
    with pytest.raises(ValueError, match=r"\[1e-3, 1\]"):
        cvar_categorical(torch.ones(1, 1), torch.zeros(1), alpha)


def test_quantiles_spread_each_atom_over_its_bin():
    """Mass 0.2, 0.5, 0.3 on bins [-1.5, -0.5], [-0.5, 0.5], [0.5, 1.5]."""
    probs, atoms = t64([[0.2, 0.5, 0.3]]), t64([-1.0, 0.0, 1.0])
    # 0.1 is half of the first bin; 0.2 its end; 0.45 half of the second; 0.85 half of the third
    for level, expected in ((0.1, -1.0), (0.2, -0.5), (0.45, 0.0), (0.85, 1.0), (1.0, 1.5)):
        assert float(categorical_quantile(probs, atoms, level)) == pytest.approx(expected)


def distribution(**flags) -> script.ValueDistribution:
    """The value distribution for some flags: 5 atoms from -1 to 3."""
    flags = {"num_atoms": 5, "v_min": -1.0, "v_max": 3.0} | flags
    return script.ValueDistribution(small_args(script, "Counter", **flags))


TWINS = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1], [0.3, 0.1, 0.1, 0.1, 0.4]])  # means 1.0, 1.2


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min", [0.1, 0.2, 0.4, 0.2, 0.1]),
        ("mean", [0.2, 0.15, 0.25, 0.15, 0.25]),
        # CDFs .1 .3 .7 .9 1 and .3 .4 .5 .6 1: maximum .3 .4 .7 .9 1
        ("min_quantile", [0.3, 0.1, 0.3, 0.2, 0.1]),
    ],
)
def test_reduction_of_twins_by_hand(mode, expected):
    """Each mode, as logits of the reduced distribution."""
    dist = distribution(twin_reduce=mode)
    for order in ((0, 1), (1, 0)):
        reduced = dist.reduce_twins(TWINS[list(order)].log())
        assert_close(reduced.softmax(-1), torch.tensor(expected))
    assert torch.equal(dist.reduce_twins(TWINS[:1].log()), TWINS[0].log())


@pytest.mark.parametrize("mode", ["min", "mean", "min_quantile"])
def test_states_of_a_rollout_are_reduced_one_by_one(mode):
    """(C, T, N, K): each (t, n) as if it were alone; distributions over the last axis."""
    dist = distribution(twin_reduce=mode)
    outputs = torch.randn(2, 3, 4, 5)
    reduced = dist.reduce_twins(outputs)
    for t, n in itertools.product(range(3), range(4)):
        assert_close(reduced[t, n], dist.reduce_twins(outputs[:, t, n]))


def test_risk_advantages_of_a_rollout_are_taken_one_by_one():
    """(T, N): each (t, n) as if it were alone."""
    dist = distribution(cvar_alpha=0.3)
    outputs, weights = torch.randn(3, 4, 5), torch.rand(3, 4, 2).softmax(-1)
    targets = torch.randn(3, 4, 2)
    together = dist.risk_advantages(targets, weights, outputs)
    for t, n in itertools.product(range(3), range(4)):
        alone = [x[t, n][None, None] for x in (targets, weights, outputs)]
        assert_close(together[t, n], dist.risk_advantages(*alone)[0, 0])


@pytest.mark.parametrize(
    ("probs", "alpha", "expected"),
    [
        # F(0) = 0.25 = alpha: nu = 0, u(2) = 0; CVaR = 0
        ([0.25, 0.75, 0.0], 0.25, 0.0),
        # nu = 2, the last atom, u(2) = 2; CVaR = (0 * .25 + 1 * .25 + 2 * .4) / .9 = 7 / 6
        ([0.25, 0.25, 0.5], 0.9, 2 - 7 / 6),
    ],
)
def test_value_at_risk_of_cvar_advantages_is_an_atom(probs, alpha, expected):
    """All returns at 2; nu is the smallest atom z with F(z) >= alpha."""
    target, atoms = t64([[[0.0, 0.0, 1.0]]]), t64([0.0, 1.0, 2.0])
    advantage = script.cvar_advantages_categorical(target, t64([[probs]]), atoms, alpha)
    assert float(advantage) == pytest.approx(expected, abs=1e-12)


def test_description_by_hand():
    """0.2, 0.5, 0.3 at 0, 1, 2 of five atoms: mean 1.1, variance 0.2 * 1.21 + 0.005 + 0.243."""
    probs = torch.tensor([[1e-9, 0.2, 0.5, 0.3, 1e-9]])
    dist = distribution(cvar_alpha=0.4)
    # p10: half of bin 0; p50: 0.3 of 0.5 into bin 1; p90: 0.2 of 0.3 into bin 2; VaR: 0.2 of 0.5
    # into bin 1; CVaR 0.2 / 0.4
    expected = {"p10": 0, "p50": 0.5 + 0.6, "p90": 1.5 + 2 / 3, "var": 0.5 + 0.4, "cvar": 0.5}
    expected |= {"std": 0.49**0.5}
    facts = dist.describe(probs.log())
    assert {k: float(v) for k, v in facts.items()} == pytest.approx(expected, abs=1e-5)
    assert float(dist.mean(probs.log())) == pytest.approx(1.1)
    dist.moments.mean.fill_(10.0)  # the same in the units of returns of mean 10 and std 2
    dist.moments.var.fill_(4.0)
    facts = dist.describe(probs.log())
    expected = {k: 2 * x + (0 if k == "std" else 10) for k, x in expected.items()}
    assert {k: float(v) for k, v in facts.items()} == pytest.approx(expected, abs=1e-4)
    assert float(dist.mean(probs.log())) == pytest.approx(12.2)
    many = dist.describe(probs.log().expand(3, 2, -1))  # (T, N, K)
    assert all(torch.equal(many[k], x.reshape(1, 1).expand(3, 2)) for k, x in facts.items())


def test_share_outside_of_the_support():
    """-1.5 and 3.5 and 9 of six targets; the edges are inside."""
    targets = torch.tensor([-1.5, -1.0, 3.0, 3.5, 9.0, 0.0])[:, None]
    outputs, dist = torch.zeros(2, 6, 5), distribution()
    _, metrics = dist.encode_targets(outputs, targets, torch.ones(6, 1))
    assert float(metrics["value/outside_support"]) == 0.5
    samples, weights = torch.tensor([[-1.5, 2.0, 9.0]]), torch.tensor([[0.25, 0.7, 0.05]])
    _, metrics = dist.encode_targets(outputs, samples, weights)
    assert float(metrics["value/outside_support"]) == pytest.approx(0.3)
    many = (samples.expand(4, 2, 3), weights.expand(4, 2, 3))  # (T, N, J)
    _, metrics = dist.encode_targets(outputs, *many)
    assert float(metrics["value/outside_support"]) == pytest.approx(0.3)
    dist.moments.mean.fill_(9.0)  # -10.5, -7, 0: only the last is inside
    _, metrics = dist.encode_targets(outputs, samples, weights)
    assert float(metrics["value/outside_support"]) == pytest.approx(0.95)


def test_encodings():
    """two_hot as the function; hl_gauss with sigma in bin widths, bins of 2; samples mixed."""
    targets = torch.tensor([[0.3], [2.2]])
    one = (torch.zeros(2, 2, 5), targets, torch.ones(2, 1))
    pairs, weights = torch.tensor([[0.3, 1.6], [2.2, -0.4]]), torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    kinds = {
        "two_hot": (distribution(target_encoding="two_hot"), two_hot),
        "hl_gauss": (
            distribution(target_encoding="hl_gauss", hl_gauss_sigma=0.6, v_max=7.0),
            lambda x, z: hl_gauss(x, z, 1.2),
        ),
    }
    for dist, encode in kinds.values():
        z = dist.support
        assert_close(dist.encode_targets(*one)[0], encode(targets[:, 0], z))
        for mean, std in ((0.0, 1.0), (10.0, 2.0)):  # targets come in the task's units
            dist.moments.mean.fill_(mean)
            dist.moments.var.fill_(std**2)
            encoded, _ = dist.encode_targets(one[0], std * pairs + mean, weights)
            parts = [encode(pairs[:, j], z) * weights[:, j, None] for j in (0, 1)]
            assert_close(encoded, sum(parts), rtol=1e-5, atol=1e-6)


def test_loss_with_and_without_clipping():
    """Per sample and critic the larger of two; clipped around each critic's own old mean."""
    outputs, old = torch.randn(2, 3, 4, 5), 1 + 0.5 * torch.randn(2, 3, 4, 1)
    dist = distribution(vf_clip="mean_only", vf_clip_coef=0.2)
    targets, _ = dist.encode_targets(outputs, torch.randn(3, 4, 1), torch.ones(3, 4, 1))
    plain, nothing = distribution().loss(outputs, targets, old)
    loss, changed = dist.loss(outputs, targets, old)
    assert nothing.sum() == 0
    larger = 0
    for c in range(2):
        for t in range(3):
            for n in range(4):
                logits, p = outputs[c, t, n], outputs[c, t, n].softmax(-1)
                base = float(-(targets[t, n] * logits.log_softmax(-1)).sum())
                assert float(plain[c, t, n]) == pytest.approx(base, rel=1e-5)
                clipped = clip_categorical(p[None], old[c, t, n], 0.2, dist.support)[0]
                other = float(-(targets[t, n] * clipped.clamp(min=1e-8).log()).sum())
                assert float(loss[c, t, n]) == pytest.approx(max(base, other), rel=1e-4)
                assert bool(changed[c, t, n]) == bool((clipped - p).abs().max() > 1e-5)
                larger += other > base
    assert 0 < larger < 24
    old[1] += 1
    moved, _ = dist.loss(outputs, targets, old)
    assert torch.equal(loss[0], moved[0])
    assert not torch.equal(loss[1], moved[1])


def test_a_far_target_still_pulls_towards_the_edge():
    """The gradient raises the last logit, for both encodings."""
    for encoding in ("two_hot", "hl_gauss"):
        dist = distribution(target_encoding=encoding)
        logits = torch.zeros(1, 1, 5, requires_grad=True)
        far = (torch.tensor([[1000.0]]), torch.ones(1, 1))
        targets, _ = dist.encode_targets(logits.detach(), *far)
        dist.loss(logits, targets, torch.zeros(1, 1, 1))[0].sum().backward()
        assert int(logits.grad.argmin()) == 4
        assert logits.grad[0, 0, 4] < -0.3


def test_moving_statistics_are_logged_as_the_jump_they_are():
    """Outputs stay; old means are kept in the new units; the jump of decoded means is reported."""
    run = make_run(script, "Counter", num_atoms=21)
    prepare(run)
    moments = run.agent.dist.moments
    before = (moments.mean.clone(), moments.std.clone())
    batch = prepare(run)
    outputs = run.agent.critic(batch.obs, batch.critic_state, batch.episode_start)
    mean = outputs.softmax(-1) @ run.agent.dist.support
    was = mean * before[1] + before[0]
    now = mean * moments.std + moments.mean
    assert float(run.metrics["norm/value_shift"]) == pytest.approx(
        float((now - was).detach().abs().mean()), rel=1e-4
    )
    assert run.metrics["norm/value_shift"] > 0.1
    kept = moments.denormalize(batch.old.movedim(2, 0)[..., 0].double())
    assert_close(kept, was.double().detach(), rtol=1e-4, atol=1e-3)


def test_the_share_outside_is_that_of_what_the_critics_train_on():
    """Returns in the thousands are inside the support once the statistics have taken them in."""
    run = make_run(script, "Counter", num_atoms=21)
    run.agent.dist.moments.mean += 1e5
    run.agent.dist.moments.count.zero_()  # the first update replaces these statistics
    prepare(run)
    assert run.metrics["value/outside_support"] < 0.1


@pytest.mark.parametrize(("reward", "gamma"), [(1.0, 0.95), (-20.0, 0.95)])
def test_constant_reward_is_approached_without_overshoot(tmp_path, reward, gamma):
    """True values 20 and -400: the mean value of a rollout never passes them by a fifth."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = small_args(
        script, "", env_id="probes:Endless-v0", run_dir=str(tmp_path), num_envs=4, num_steps=32,
        total_timesteps=15_360, update_epochs=4, num_minibatches=2, hidden_size=16, num_atoms=51,
        gamma=gamma, gae_lambda=0.95, learning_rate=3e-3, eval_episodes=1, anneal_lr=False,
        masked_obs=(), num_critics=2,
    )  # fmt: skip
    original = script.make_env

    def scaled(*a, **k):
        import gymnasium as gym

        return gym.wrappers.TransformReward(original(*a, **k), lambda r: reward * r)

    script.make_env = scaled
    try:
        metrics = script.train(args)
    finally:
        script.make_env = original
    events = EventAccumulator(metrics["run_dir"], {"scalars": 0})
    events.Reload()
    target = reward / (1 - gamma)
    path = [p.value / target for p in events.Scalars("value/p50")]
    assert max(path) < 1.2
    assert path[-1] == pytest.approx(1, abs=0.1)
