"""What the loop asks of quantile critics: reduction of twins, loss, clipping, calibration."""

from __future__ import annotations

import pytest
import torch
from helpers import small_args
from torch import Tensor
from torch.testing import assert_close

import distributional_ppo_lstm as script


def distribution(**flags) -> script.ValueDistribution:
    """The value distribution for some flags."""
    return script.ValueDistribution(small_args(script, "Counter", **flags))


# Two critics, two states, three quantiles. Means: critic 1 has 2 and 3, critic 2 has 3 and 2.
TWINS = torch.tensor([[[0.0, 1.0, 5.0], [4.0, 2.0, 3.0]], [[3.0, 2.0, 4.0], [1.0, 6.0, -1.0]]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # the critic with the smaller mean, its quantiles as they are
        ("min", [[0, 1, 5], [1, 6, -1]]),
        # pooled and sorted: 0 1 2 3 4 5 and -1 1 2 3 4 6; neighbours averaged
        ("mean", [[0.5, 2.5, 4.5], [0, 2.5, 5]]),
        # sorted: 0 1 5 with 2 3 4, and 2 3 4 with -1 1 6; elementwise minimum
        ("min_quantile", [[0, 1, 4], [-1, 1, 4]]),
    ],
)
def test_reduction_of_twins_by_hand(mode, expected):
    """Each mode, state by state."""
    reduced = distribution(twin_reduce=mode, num_quantiles=3).reduce_twins(TWINS)
    assert_close(reduced, torch.tensor(expected, dtype=torch.float32))


def test_order_of_the_reductions():
    """mean(min of quantiles) <= min of means <= mean of means, on random critics."""
    outputs = torch.randn(2, 50, 4, 7)
    value = {}
    for mode in ("min_quantile", "min", "mean"):
        dist = distribution(twin_reduce=mode)
        value[mode] = dist.mean(dist.reduce_twins(outputs))
        assert value[mode].shape == (50, 4)
    assert (value["min_quantile"] <= value["min"] + 1e-6).all()
    assert (value["min"] <= value["mean"] + 1e-6).all()
    assert_close(value["min"], outputs.mean(-1).amin(0))
    assert_close(value["mean"], outputs.mean((0, -1)))
    assert value["min_quantile"].mean() < value["min"].mean() - 0.05


@pytest.mark.parametrize("mode", ["min", "mean", "min_quantile"])
def test_one_critic_is_its_own_reduction(mode):
    """Nothing to reduce."""
    dist = distribution(twin_reduce=mode, num_critics=1)
    outputs = torch.randn(1, 5, 7)
    assert torch.equal(dist.reduce_twins(outputs), outputs[0])


def test_description_of_a_uniform_distribution():
    """Quantiles of U(0, 10) at K = 5 are 1 3 5 7 9: F^-1(tau) = 10 tau, linear, so exact."""
    outputs = torch.tensor([[[9.0, 1.0, 5.0, 3.0, 7.0]]])
    dist = distribution(num_quantiles=5, cvar_alpha=0.3)
    facts = dist.describe(outputs)
    # std of the five: sqrt((16 + 4 + 0 + 4 + 16) / 5) = sqrt(8); CVaR_0.3 = 10 * 0.15
    expected = {"p10": 1.0, "p50": 5.0, "p90": 9.0, "var": 3.0, "std": 8**0.5, "cvar": 1.5}
    assert {k: float(v) for k, v in facts.items()} == pytest.approx(expected)
    assert all(v.shape == (1, 1) for v in facts.values())
    assert float(dist.mean(outputs)) == pytest.approx(5)
    dist.moments.mean.fill_(100.0)  # the same in the units of returns of mean 100 and std 2
    dist.moments.var.fill_(4.0)
    facts = dist.describe(outputs)
    expected = {k: 2 * x + (0 if k == "std" else 100) for k, x in expected.items()}
    assert {k: float(v) for k, v in facts.items()} == pytest.approx(expected)
    assert float(dist.mean(outputs)) == pytest.approx(110)


def test_crossing_fraction_counts_neighbours_in_the_wrong_order():
    """0 1 5 none; 4 2 3 one; 3 2 4 one; 1 6 -1 one: 3 of 8. Equal neighbours do not cross."""
    dist, one = distribution(num_quantiles=3), torch.ones(4, 1)
    _, metrics = dist.encode_targets(TWINS, torch.zeros(2, 1), one[:2])
    assert float(metrics["value/crossing_fraction"]) == 3 / 8
    for equal in (torch.ones(2, 4, 3), torch.ones(2, 4, 1)):  # a single quantile has no neighbour
        _, metrics = dist.encode_targets(equal, torch.zeros(4, 1), one)
        assert float(metrics["value/crossing_fraction"]) == 0


def test_targets_are_trained_on_in_normalised_returns():
    """Samples of returns of mean 100 and std 2, as they are but for that."""
    dist, samples = distribution(num_quantiles=3), torch.tensor([[100.0, 104.0], [97.0, 101.0]])
    dist.moments.mean.fill_(100.0)
    dist.moments.var.fill_(4.0)
    encoded, _ = dist.encode_targets(TWINS, samples, torch.full((2, 2), 0.5))
    assert_close(encoded, torch.tensor([[0.0, 2.0], [-1.5, 0.5]]))


def reference_loss(q: list, target: float, kappa: float) -> float:
    """Quantile Huber loss of one sample, written out."""
    total = 0.0
    for i, value in enumerate(q):
        tau, u = (i + 0.5) / len(q), target - value
        size = abs(u) if kappa == 0 or abs(u) > kappa else u * u / (2 * kappa)
        size = size - kappa / 2 if kappa > 0 and abs(u) > kappa else size
        total += abs(tau - (u < 0)) * size
    return total / len(q)


@pytest.mark.parametrize("kappa", [0.0, 0.5])
def test_loss_of_each_critic_on_the_same_targets(kappa):
    """(C, T, N) losses in the order of the inputs, unclipped by default."""
    dist = distribution(num_quantiles=3, kappa=kappa)
    outputs, targets = torch.randn(2, 4, 5, 3), torch.randn(4, 5, 1)
    loss, changed = dist.loss(outputs, targets, torch.randn(2, 4, 5, 3))
    assert loss.shape == (2, 4, 5)
    assert changed.sum() == 0
    for c in range(2):
        for t in range(4):
            for n in range(5):
                expected = reference_loss(outputs[c, t, n].tolist(), float(targets[t, n]), kappa)
                assert float(loss[c, t, n]) == pytest.approx(expected, rel=1e-5)


def clip_by_hand(q: Tensor, old: Tensor, d: float, mode: str) -> Tensor:
    """One prediction clipped around its old self, written out."""
    if mode == "per_quantile":
        return torch.stack([o + min(max(x - o, -d), d) for x, o in zip(q, old)])
    m, m_old = q.mean(), old.mean()
    centre = m_old + min(max(m - m_old, -d), d)
    if mode == "mean_only":
        return q - m + centre
    spread, old_spread = q.std(correction=0), old.std(correction=0)
    return centre + (q - m) * min(1.0, float(2 * old_spread / spread))


@pytest.mark.parametrize("mode", ["per_quantile", "mean_only", "mean_and_variance"])
def test_value_clipping_takes_the_larger_loss_per_sample_and_critic(mode):
    """The maximum comes ahead of every mean, and each critic is clipped around its own old."""
    dist = distribution(num_quantiles=3, kappa=0.0, vf_clip=mode, vf_clip_coef=0.2)
    outputs, targets = torch.randn(2, 3, 4, 3), torch.randn(3, 4, 1)
    old = outputs + 0.4 * torch.randn_like(outputs)
    loss, changed = dist.loss(outputs, targets, old)
    larger = 0
    for c in range(2):
        for t in range(3):
            for n in range(4):
                q, target = outputs[c, t, n], float(targets[t, n])
                clipped = clip_by_hand(q, old[c, t, n], 0.2, mode)
                both = [reference_loss(x.tolist(), target, 0.0) for x in (q, clipped)]
                assert float(loss[c, t, n]) == pytest.approx(max(both), rel=1e-4)
                assert bool(changed[c, t, n]) == bool((clipped - q).abs().max() > 1e-5)
                larger += both[1] > both[0]
    assert 0 < larger < 24


def test_the_twins_do_not_share_an_old_value():
    """Another old output of critic 2 changes the loss of critic 2 alone."""
    dist = distribution(vf_clip="per_quantile", num_quantiles=7)
    outputs, targets, old = torch.randn(2, 3, 4, 7), torch.randn(3, 4, 1), torch.randn(2, 3, 4, 7)
    base, _ = dist.loss(outputs, targets, old)
    old[1] += 0.5
    moved, _ = dist.loss(outputs, targets, old)
    assert torch.equal(base[0], moved[0])
    assert not torch.equal(base[1], moved[1])


def test_clipped_samples_are_counted_beyond_rounding():
    """Predictions inside the range are not changed, even where a + (b - a) rounds."""
    dist = distribution(vf_clip="mean_only", vf_clip_coef=0.2, num_quantiles=7)
    old = 7 * torch.randn(2, 50, 1, 7)
    _, changed = dist.loss(old + 0.1, torch.zeros(50, 1, 1), old)
    assert changed.sum() == 0
    _, changed = dist.loss(old + 0.3, torch.zeros(50, 1, 1), old)
    assert changed.all()


def test_default_flags_learn_quantiles_and_not_expectiles():
    """Fit to N(0, 1): every quantile covers its level within 2 points, CVaR_0.05 within 5 %."""
    flags = script.Args()
    dist = script.ValueDistribution(flags)
    sample = torch.randn(4000, 1, generator=torch.Generator().manual_seed(1))
    q = torch.zeros(flags.num_quantiles, requires_grad=True)
    optimizer = torch.optim.Adam([q], 0.05)
    for i in range(400):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - i / 400)
        loss, _ = dist.loss(q.expand(1, 4000, -1), sample, q.detach().expand(1, 4000, -1))
        optimizer.zero_grad()
        (loss.mean() * flags.num_quantiles).backward()
        optimizer.step()
    coverage = (sample <= q.detach()).float().mean(0)
    assert_close(coverage, dist.support, rtol=0, atol=0.02)
    worst = sample.flatten().sort().values[:200].mean()  # 5 % of 4000
    assert float(dist.describe(q.detach())["cvar"]) == pytest.approx(float(worst), rel=0.05)


def test_equal_means_are_the_first_critic_s():
    """A tie of the twins goes to critic 1."""
    outputs = torch.tensor([[[0.0, 4.0]], [[1.0, 3.0]]])
    assert distribution(twin_reduce="min").reduce_twins(outputs).tolist() == [[0.0, 4.0]]
