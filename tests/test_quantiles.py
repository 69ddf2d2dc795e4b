"""Quantile critic: levels, regression loss, value clipping, CVaR and VaR."""

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import distributional_ppo_lstm as script

MODES = ("per_quantile", "mean_only", "mean_and_variance")
DTYPES = (torch.float32, torch.float64)


def tensor(data: list, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(data, dtype=dtype)


def midpoints(num_quantiles: int) -> list[float]:
    return [(i + 0.5) / num_quantiles for i in range(num_quantiles)]


def normal_quantiles(num_quantiles: int) -> Tensor:
    """Exact quantiles of N(0, 1) at the midpoints."""
    return tensor([NormalDist().inv_cdf(tau) for tau in midpoints(num_quantiles)])


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return dict.fromkeys(("rtol", "atol"), 1e-12 if dtype == torch.float64 else 1e-5)


# ------------------------------------------------------------------------------- levels and loss
def test_quantile_midpoints_are_the_centres_of_equal_bins():
    """(i + 0.5) / K, not i / (K - 1) and not (2 i + 1) / (2 (K + 1))."""
    assert script.quantile_midpoints(4).tolist() == [0.125, 0.375, 0.625, 0.875]
    assert script.quantile_midpoints(1).tolist() == [0.5]
    assert script.quantile_midpoints(51).tolist() == pytest.approx(midpoints(51), rel=1e-6)


HAND = ([[0, 2]], [[1, -1, 4]], [0.25, 0.75])  # quantiles, targets, taus


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kappa", "expected"),
    [
        # u = target - quantile   for q = 0: 1, -1, 4      for q = 2: -1, -3, 2
        # weight |tau - 1{u<0}|   tau 0.25: .25, .75, .25  tau 0.75: .25, .25, .75
        # |u|:  .25 * 1 + .75 * 1 + .25 * 4 = 2   and   .25 * 1 + .25 * 3 + .75 * 2 = 2.5
        (0, 4.5 / 6),
        # L / 1:  .5, .5, 3.5  and  .5, 2.5, 1.5:  .125 + .375 + .875  and  .125 + .625 + 1.125
        (1, (1.375 + 1.875) / 6),
        # L / 2:  .25, .25, 3  and  .25, 2, 1:  .0625 + .1875 + .75  and  .0625 + .5 + .75
        (2, (1.0 + 1.3125) / 6),
    ],
)
def test_quantile_huber_loss_worked_by_hand(kappa, expected, dtype):
    """Mean over both axes, levels on the axis of the quantiles, divided by kappa."""
    loss = script.quantile_huber_loss(*(tensor(x, dtype) for x in HAND), kappa)
    assert loss.dtype == dtype
    assert loss.tolist() == pytest.approx([expected])


def test_gradient_of_the_pinball_loss_worked_by_hand():
    """d/dq = -(tau - 1{u < 0}) / (K J): above as many targets as its level says, no pull is left.

    For q = 0: -.25 + .75 - .25 = .25; for q = 2: .25 + .25 - .75 = -.25.
    """
    quantiles, targets, taus = (tensor(x) for x in HAND)
    script.quantile_huber_loss(quantiles.requires_grad_(), targets, taus, 0.0).sum().backward()
    assert_close(quantiles.grad, tensor([[0.25, -0.25]]) / 6)


def slow_quantile_huber(quantiles, targets, taus, kappa) -> list[float]:
    """The double sum, one sample at a time."""
    losses = []
    for row, samples in zip(quantiles.tolist(), targets.tolist()):
        total = 0.0
        for q, tau in zip(row, taus.tolist()):
            for x in samples:
                weight = 1 - tau if x < q else tau
                error = abs(x - q)
                if kappa == 0:
                    total += weight * error
                elif error <= kappa:
                    total += weight * error**2 / (2 * kappa)
                else:
                    total += weight * (error - kappa / 2)
        losses.append(total / (len(row) * len(samples)))
    return losses


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kappa", [0, 0.01, 0.7, 1, 30])
@pytest.mark.parametrize(("K", "J"), [(7, 3), (2, 9), (1, 4), (5, 1), (1, 1)])
def test_quantile_huber_loss_is_the_double_sum(K, J, kappa, dtype):
    """Unsorted quantiles and targets, ties between them, K and J alike or not."""
    quantiles, targets = torch.randn(4, K, dtype=dtype), 3 * torch.randn(4, J, dtype=dtype)
    targets[1, 0] = quantiles[1, -1]
    taus = tensor(midpoints(K), dtype)
    copies = quantiles.clone(), targets.clone(), taus.clone()
    loss = script.quantile_huber_loss(quantiles, targets, taus, kappa)
    expected = tensor(slow_quantile_huber(quantiles, targets, taus, kappa))
    assert loss.dtype == dtype
    assert_close(loss.double(), expected, **tolerance(dtype))
    assert all(x.equal(y) for x, y in zip((quantiles, targets, taus), copies))


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0, 10.0])
def test_quantile_huber_loss_passes_gradcheck(kappa):
    """Finite differences in the quantiles: quadratic part, linear part, both sides."""
    quantiles = tensor([[0.3, -1.2, 2.1], [0.9, 0.1, -0.4]]).requires_grad_()
    targets, taus = tensor([[1, -1.5], [-2, 0.6]]), tensor(midpoints(3))
    assert torch.autograd.gradcheck(
        lambda q: script.quantile_huber_loss(q, targets, taus, kappa), quantiles
    )


def test_quantile_huber_loss_meets_the_pinball_loss_as_kappa_goes_to_zero():
    """Divided by kappa: at most kappa / 2 away for every kappa, and finite for the smallest."""
    quantiles, targets, taus = torch.randn(3, 5), torch.randn(3, 2), tensor(midpoints(5))
    pinball = script.quantile_huber_loss(quantiles, targets, taus, 0.0)
    for kappa in (1e-1, 1e-3, 1e-12, 1e-30):
        q = quantiles.clone().requires_grad_()
        loss = script.quantile_huber_loss(q, targets, taus, kappa)
        assert ((loss - pinball).abs() <= kappa / 2 + 1e-7).all()
        assert torch.autograd.grad(loss.sum(), q)[0].isfinite().all()


@pytest.mark.parametrize(("tau", "expected"), [(0.9, 90), (0.1, 10), (0.25, 25), (0.75, 75)])
def test_pinball_minimiser_is_the_quantile_of_its_level(tau, expected):
    """Of the samples 0..100, level 0.9 picks 90 and not 10: u = target - predicted."""
    candidates = torch.arange(101.0)[:, None]
    samples = torch.arange(101.0).expand(101, 101)
    losses = script.quantile_huber_loss(candidates, samples, tensor([tau], torch.float32), 0.0)
    assert int(losses.argmin()) == expected


@pytest.mark.parametrize("kappa", [0.0, 0.3])
def test_quantile_huber_loss_of_large_returns_keeps_its_digits(kappa):
    """Around 8192, where float32 holds steps of 1 / 1024: exact inputs, errors of rounding only."""
    q, x = torch.randint(-2000, 2000, (6, 9)) / 1024, torch.randint(-2000, 2000, (6, 51)) / 1024
    taus = script.quantile_midpoints(9)
    near, far = (script.quantile_huber_loss(q + c, x + c, taus, kappa) for c in (0, 8192))
    torch.testing.assert_close(far, near, rtol=0, atol=1e-6)


def test_pinball_loss_does_without_all_pairs():
    """Kappa 0 keeps nothing larger than sorted samples and their sums: no (B, K, J) tensor."""
    kept, quantiles = [], torch.randn(3, 40, requires_grad=True)
    hooks = (lambda x: kept.append(x.numel()) or x, lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        script.quantile_huber_loss(quantiles, torch.randn(3, 50), torch.rand(40), 0.0)
    assert max(kept) <= 3 * 51


def test_pinball_gradient_of_huge_errors_is_finite():
    """Kappa 0, u = 1e6 and -1e6: d loss / d q_i = -tau_i and 1 - tau_i, over K = 2."""
    taus, quantiles = torch.tensor([0.25, 0.75]), torch.zeros(2, 2, requires_grad=True)
    script.quantile_huber_loss(quantiles, torch.tensor([[1e6], [-1e6]]), taus, 0.0).sum().backward()
    expected = torch.tensor([[-0.125, -0.375], [0.375, 0.125]])
    torch.testing.assert_close(quantiles.grad, expected)


@pytest.mark.parametrize("kappa", [0.0, 0.3])
def test_losses_of_the_rows_do_not_mix(kappa):
    """A permuted batch has permuted losses, and rows appended behind leave the others bit-equal."""
    quantiles, targets, taus = torch.randn(6, 6), torch.randn(6, 6), tensor(midpoints(6)).float()
    losses = script.quantile_huber_loss(quantiles, targets, taus, kappa)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert script.quantile_huber_loss(quantiles[order], targets[order], taus, kappa).equal(
        losses[order]
    )
    longer = [torch.cat((x, torch.full((2, 6), 1e9))) for x in (quantiles, targets)]
    assert script.quantile_huber_loss(*longer, taus, kappa)[:6].equal(losses)


def test_default_flags_recover_the_quantiles_of_a_normal_distribution():
    """Coverage of every level within 2 points and CVaR_0.05 within 5 %: kappa learns no expectiles.

    CVaR_0.05 of N(0, 1) is -pdf(-1.645) / 0.05 = -2.0627.
    """
    args = script.Args()
    samples = normal_quantiles(999).float()[None]
    taus = script.quantile_midpoints(args.num_quantiles)
    quantiles = torch.zeros(1, args.num_quantiles, requires_grad=True)
    optimizer = torch.optim.Adam([quantiles], lr=0.1)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 150)
        optimizer.zero_grad()
        script.quantile_huber_loss(quantiles, samples, taus, args.kappa).sum().backward()
        optimizer.step()
    coverage = (samples <= quantiles.detach().T).float().mean(1)
    assert (coverage - taus).abs().max() < 0.02
    assert script.cvar(quantiles, 0.05).item() == pytest.approx(-2.0627, rel=0.05)


# --------------------------------------------------------------------------------- value clipping
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # q = 0, 3, 9: m = 4, s^2 = (16 + 1 + 25) / 3 = 14; old 1, 2, 0: m = 1, s^2 = 2 / 3; d = 0.5
        ("per_quantile", [1 + 0.0 - 0.5, 2 + 0.5, 0 + 0.5]),
        ("mean_only", [1.5 - 4, 1.5 - 1, 1.5 + 5]),
        # 2 s_old / s = 2 sqrt(1 / 21) = 0.4364358 on the deviations -4, -1, 5
        ("mean_and_variance", [1.5 - 1.7457431, 1.5 - 0.4364358, 1.5 + 2.1821789]),
    ],
)
def test_clip_quantiles_worked_by_hand(mode, expected, dtype):
    """Old quantiles out of order, one quantile falling while the mean rises."""
    quantiles, old = tensor([[0, 3, 9]], dtype), tensor([[1, 2, 0]], dtype)
    out = script.clip_quantiles(quantiles, old, 0.5, mode)
    assert_close(out, tensor([expected], dtype), rtol=1e-6, atol=1e-6)
    assert quantiles.tolist() == [[0, 3, 9]]
    assert old.tolist() == [[1, 2, 0]]


def slow_clip(row: list[float], old: list[float], d: float, mode: str) -> list[float]:
    """One row of quantiles, step by step."""

    def limited(new: float, around: float) -> float:
        return max(around - d, min(around + d, new))

    def moments(x: list[float]) -> tuple[float, float]:
        m = sum(x) / len(x)
        return m, math.sqrt(sum((v - m) ** 2 for v in x) / len(x) + 1e-12)

    if mode == "per_quantile":
        return [limited(q, o) for q, o in zip(row, old)]
    (m, s), (m_old, s_old) = moments(row), moments(old)
    scale = 1.0
    if mode == "mean_and_variance" and s > 2 * s_old:
        scale = 2 * s_old / s
    return [limited(m, m_old) + (q - m) * scale for q in row]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("K", [1, 2, 7])
def test_clip_quantiles_equals_the_definition(K, mode, dtype):
    """Rows that move up, down, little, and that get wider or narrower."""
    old = torch.randn(40, K, dtype=dtype)
    wider = torch.logspace(-1, 1, 40, dtype=dtype)[:, None]
    quantiles = old * wider + torch.linspace(-1, 1, 40, dtype=dtype)[torch.randperm(40), None]
    out = script.clip_quantiles(quantiles, old, 0.3, mode)
    expected = [slow_clip(q, o, 0.3, mode) for q, o in zip(quantiles.tolist(), old.tolist())]
    assert out.dtype == dtype
    assert_close(out.double(), tensor(expected), **tolerance(dtype))


@pytest.mark.parametrize("mode", MODES)
def test_clip_quantiles_of_one_quantile_is_scalar_value_clipping(mode):
    """old + clamp(new - old, -d, d), with PPO's gradient: 1 inside, 0 outside."""
    quantiles = tensor([[5], [-5], [0.25], [-0.25]]).requires_grad_()
    out = script.clip_quantiles(quantiles + 1, tensor([[1]] * 4), 0.5, mode)
    assert_close(out, tensor([[1.5], [0.5], [1.25], [0.75]]))
    out.sum().backward()
    assert quantiles.grad.tolist() == [[0], [0], [1], [1]]


def test_the_width_is_limited_to_twice_the_old_one():
    """1.9 times as wide stays, 3 times as wide becomes 2, narrower is never widened."""
    old = tensor([[-1, 0, 1]])
    for width, expected in ((0.1, 0.1), (1.9, 1.9), (3, 2)):
        out = script.clip_quantiles(width * old, old, 0.5, "mean_and_variance")
        assert_close(out, expected * old)


def test_the_variance_floor_is_1e_12():
    """Equal old quantiles: s_old = 1e-6, s = 1e-6 sqrt(16 + 1), the factor is 2 / sqrt(17)."""
    quantiles, old = tensor([[-4e-6, 4e-6]]), tensor([[0, 0]])
    out = script.clip_quantiles(quantiles, old, 0.5, "mean_and_variance")
    assert_close(out, quantiles * 2 / math.sqrt(17), rtol=1e-9, atol=0)
    # Old ones 4e-6 from their mean, new ones 12e-6: 2 sqrt(17 / 145).
    out = script.clip_quantiles(3 * quantiles, quantiles, 0.5, "mean_and_variance")
    assert_close(out, 6 * quantiles * math.sqrt(17 / 145), rtol=1e-9, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_clip_quantiles_passes_gradcheck(mode):
    """Finite differences: mean clipped above, below and not at all, width limited or not."""
    old = tensor([[0.1, 0.5, -0.3], [0, 1, 2], [1, -1, 0.5], [0.2, 0.1, 0]])
    quantiles = tensor([[3, 5, -1], [-4, -3.5, -3.1], [1.1, -1.07, 0.4], [0.9, 0.16, -0.7]])
    assert torch.autograd.gradcheck(
        lambda q: script.clip_quantiles(q, old, 0.25, mode), quantiles.requires_grad_()
    )


@pytest.mark.parametrize("mode", MODES)
def test_clip_quantiles_has_a_finite_gradient_for_equal_quantiles(mode):
    """The width has an infinite slope at 0 without its floor."""
    quantiles = torch.full((2, 5), 0.7, requires_grad=True)
    script.clip_quantiles(quantiles, torch.zeros(2, 5), 0.2, mode).square().sum().backward()
    assert quantiles.grad.isfinite().all()


def test_clip_quantiles_refuses_an_unknown_mode():
    """ValueError that names the mode, instead of some default."""
    with pytest.raises(ValueError, match="mean_onyl"):
        script.clip_quantiles(torch.zeros(1, 2), torch.zeros(1, 2), 0.2, "mean_onyl")


def test_clipped_value_loss_is_the_maximum_per_sample_and_critic():
    """Before any averaging: mean 21 / 6 here, where the maximum of the means would be 16 / 6."""
    loss, clipped = tensor([[1, 5, -2], [4, 0, 3]]), tensor([[3, 4, 2], [1, 6, 0]])
    out = script.clipped_value_loss(loss, clipped)
    assert out.tolist() == [[3, 5, 2], [4, 6, 3]]
    assert script.clipped_value_loss(clipped[0], loss[0]).tolist() == [3, 5, 2]
    assert out.mean() > max(loss.mean(), clipped.mean()) + 0.5


def test_clipped_value_loss_takes_the_gradient_of_the_larger_loss():
    """Where the clipped loss is larger, the unclipped prediction gets no gradient."""
    loss, clipped = tensor([1, 5]).requires_grad_(), tensor([3, 4]).requires_grad_()
    script.clipped_value_loss(loss, clipped).sum().backward()
    assert loss.grad.tolist() == [0, 1]
    assert clipped.grad.tolist() == [1, 0]


@pytest.mark.parametrize("mode", MODES)
def test_the_clipped_loss_does_not_depend_on_the_units_of_the_reward(mode):
    """Rewards times 10: the same loss once the statistics are refit, as d is in their units."""
    old, new = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    targets, taus = 40 * torch.randn(5, 3, dtype=torch.float64) + 15, tensor(midpoints(7))
    losses = []
    for scale in (1, 10):
        moments = script.RunningMoments()
        moments.update(scale * targets)
        z, z_old, x = (moments.normalize(scale * q) for q in (20 * new, 20 * old, targets))
        clipped = script.clip_quantiles(z, z_old, 0.2, mode)
        both = [script.quantile_huber_loss(q, x, taus, 0.1) for q in (z, clipped)]
        losses.append(script.clipped_value_loss(*both))
        assert (clipped - z).abs().max() > 0.1
    assert_close(losses[0], losses[1])


# ------------------------------------------------------------------------------------ CVaR and VaR
def quantile_function(points: list[float], tau: float) -> float:
    """Linear between the points (tau_i, q_i) and beyond both ends."""
    K = len(points)
    if K == 1:
        return points[0]
    k = 0
    while k < K - 2 and tau > (k + 1.5) / K:
        k += 1
    return points[k] + (tau - (k + 0.5) / K) * K * (points[k + 1] - points[k])


def slow_cvar(points: list[float], alpha: float) -> float:
    """Its integral up to alpha, a trapezoid between neighbouring kinks."""
    kinks = [0.0, *(tau for tau in midpoints(len(points)) if tau < alpha), alpha]
    heights = [quantile_function(points, tau) for tau in kinks]
    parts = zip(kinks, kinks[1:], heights, heights[1:])
    return sum((b - a) * (f + g) / 2 for a, b, f, g in parts) / alpha


ALPHAS = (1e-3, 0.05, 0.1, 0.125, 0.25, 0.3, 0.5, 0.75, 0.875, 0.9, 0.97, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [1, 2, 3, 4, 10, 32])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_cvar_and_var_equal_the_piecewise_linear_quantile_function(alpha, K, dtype):
    """Exact integral and interpolation, from quantiles in any order, which stay as they are."""
    quantiles = 5 * torch.randn(3, K, dtype=dtype) - 2
    copy = quantiles.clone()
    rows = [sorted(row) for row in quantiles.tolist()]
    var, cvar = script.value_at_risk(quantiles, alpha), script.cvar(quantiles, alpha)
    assert var.dtype == cvar.dtype == dtype
    close = tolerance(dtype)
    expected = [quantile_function(row, alpha) for row in rows]
    assert_close(var.double(), tensor(expected), **close)
    expected = [sum(row) / K if alpha == 1 else slow_cvar(row, alpha) for row in rows]
    assert_close(cvar.double(), tensor(expected), **close)
    assert quantiles.equal(copy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cvar_and_var_worked_by_hand(dtype):
    """Quantiles 1, 2, 6 at levels 1/6, 3/6, 5/6, given out of order.

    F^-1(0) = 1 - 0.5 = 0.5 by extension, F^-1(2/3) = 4, F^-1(1) = 6 + 2 = 8.
    Up to 2/3: trapezoids 1/2 * (0.5 + 2) / 2 = 0.625 and 1/6 * (2 + 4) / 2 = 0.5, over 2/3: 1.6875.
    Up to 1/4: F^-1 = 1.25, the mean of 0.5 and 1.25 is 0.875.
    """
    quantiles = tensor([[6, 1, 2]], dtype)
    assert script.value_at_risk(quantiles, 2 / 3).tolist() == pytest.approx([4])
    assert script.value_at_risk(quantiles, 1).tolist() == pytest.approx([8])
    assert script.value_at_risk(quantiles, 0.25).tolist() == pytest.approx([1.25])
    assert script.cvar(quantiles, 2 / 3).tolist() == pytest.approx([1.6875])
    assert script.cvar(quantiles, 0.25).tolist() == pytest.approx([0.875])
    assert script.cvar(quantiles, 1).tolist() == pytest.approx([3])


def test_cvar_weights_worked_by_hand():
    """K = 3, alpha = 2/3 of the example above, from unit vectors instead of 1, 2, 6.

    (1, 0, 0): F^-1(0) = 1.5, falling to 0 at 1/2: area 0.375.  (0, 0, 1): from 1/2 to 2/3 rising
    to 1/2: area 1/24.  Over 2/3: 0.5625 and 0.0625; the rest is 0.375.
    """
    assert script.cvar_weights(3, 2 / 3).tolist() == pytest.approx([0.5625, 0.375, 0.0625])


@pytest.mark.parametrize("K", [1, 2, 3, 21, 32])
def test_cvar_weights_sum_to_one_and_give_cvar(K):
    """One fixed vector for the sorted quantiles; at alpha = 1 it is exactly uniform."""
    ordered = torch.randn(2, K).sort(-1).values
    for alpha in ALPHAS:
        weights = script.cvar_weights(K, alpha)
        assert weights.shape == (K,)
        assert float(weights.sum()) == pytest.approx(1, abs=1e-6)
        assert_close(ordered @ weights, script.cvar(ordered, alpha), rtol=1e-5, atol=1e-5)
    assert script.cvar_weights(K, 1).tolist() == pytest.approx([1 / K] * K, rel=1e-7)
    assert len(set(script.cvar_weights(K, 1).tolist())) == 1


def test_cvar_passes_gradcheck():
    """Finite differences; the gradient goes to each quantile by its rank."""
    quantiles = tensor([[3, -1, 0.5, 2], [0.1, 5, -4, 1]]).requires_grad_()
    for alpha in (0.01, 0.3, 0.8, 1):
        assert torch.autograd.gradcheck(lambda q, a=alpha: script.cvar(q, a), quantiles)


@pytest.mark.parametrize("K", [2, 5, 21])
@pytest.mark.parametrize("alpha", [1e-3, 0.05, 0.4, 0.99])
def test_cvar_and_var_are_exact_for_linear_quantile_functions(alpha, K):
    """Uniform on [-3, 7]: F^-1(tau) = 10 tau - 3 and CVaR = 5 alpha - 3 for every K."""
    quantiles = 10 * tensor([midpoints(K)]).flip(-1) - 3
    assert script.value_at_risk(quantiles, alpha).tolist() == pytest.approx([10 * alpha - 3])
    assert script.cvar(quantiles, alpha).tolist() == pytest.approx([5 * alpha - 3])


@pytest.mark.parametrize(("K", "percent"), [(21, 4.6), (32, 2.5), (51, 1.4)])
def test_cvar_of_a_normal_distribution(K, percent):
    """CVaR_0.05 of N(0, 1), -pdf(-1.645) / 0.05 = -2.0627, with the known error of K quantiles."""
    cvar = script.cvar(normal_quantiles(K)[None], 0.05).item()
    assert 100 * (1 - cvar / -2.0627128) == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize("measure", [script.cvar, script.value_at_risk])
def test_risk_measures_do_not_depend_on_the_order_and_move_with_the_distribution(measure):
    """Permutation invariant, translation and positive scale equivariant."""
    quantiles = torch.randn(4, 9, dtype=torch.float64)
    shuffled = torch.stack([row[torch.randperm(9)] for row in quantiles])
    for alpha in ALPHAS:
        expected = measure(quantiles, alpha)
        assert measure(shuffled, alpha).equal(expected)
        assert_close(measure(3 * quantiles - 5, alpha), 3 * expected - 5)


@pytest.mark.parametrize("K", [2, 9, 32])
def test_cvar_grows_with_alpha_up_to_the_mean(K):
    """Monotone and at most the mean up to alpha = 1 - 1 / (2 K), and the mean at 1."""
    quantiles = torch.randn(50, K, dtype=torch.float64).exp()
    alphas = torch.linspace(1e-3, 1 - 0.5 / K, 60).tolist()
    curve = torch.stack([script.cvar(quantiles, alpha) for alpha in alphas])
    assert (curve.diff(dim=0) >= 0).all()
    assert (curve <= quantiles.mean(-1) + 1e-12).all()
    assert_close(script.cvar(quantiles, 1), quantiles.mean(-1))


@pytest.mark.parametrize("alpha", [0, 9.99e-4, -0.5, 1 + 1e-9, 50, float("nan")])
def test_alpha_outside_its_range_is_refused(alpha):
    """[1e-3, 1] is closed; ValueError names the value, also for a single quantile."""
    for K in (1, 4):
        with pytest.raises(ValueError, match=str(alpha)):
            script.cvar_weights(K, alpha)
        for measure in (script.cvar, script.value_at_risk):
            with pytest.raises(ValueError, match=str(alpha)):
                measure(torch.zeros(2, K), alpha)


def test_axes_ahead_of_the_batch_are_batch_axes_too():
    """Twin critics over time, (2, 4, 3, K) beside targets (4, 3, J): every slice as if alone."""
    quantiles, old = torch.randn(2, 2, 4, 3, 6, dtype=torch.float64)
    targets, taus = torch.randn(4, 3, 5, dtype=torch.float64), tensor(midpoints(6))
    for kappa in (0, 0.3):
        losses = script.quantile_huber_loss(quantiles, targets, taus, kappa)
        assert losses.shape == (2, 4, 3)
        for c in range(2):
            for t in range(4):
                alone = script.quantile_huber_loss(quantiles[c, t], targets[t], taus, kappa)
                assert_close(losses[c, t], alone)
    functions = [lambda q, o, m=mode: script.clip_quantiles(q, o, 0.3, m) for mode in MODES]
    functions += [lambda q, _: script.cvar(q, 0.3), lambda q, _: script.value_at_risk(q, 0.3)]
    for function in functions:
        alone = function(quantiles.reshape(-1, 6), old.reshape(-1, 6))
        assert_close(function(quantiles, old).flatten(0, 2), alone)


def test_quantile_functions_stay_on_the_device():
    """Nothing is built on the CPU for inputs that are elsewhere."""
    quantiles, targets = torch.empty(4, 8, device="meta"), torch.empty(4, 3, device="meta")
    taus = torch.empty(8, device="meta")
    results = [script.quantile_huber_loss(quantiles, targets, taus, kappa) for kappa in (0, 1)]
    results += [script.clip_quantiles(quantiles, quantiles, 0.2, mode) for mode in MODES]
    results += [f(quantiles, 0.3) for f in (script.cvar, script.value_at_risk)]
    assert all(x.is_meta for x in results)
