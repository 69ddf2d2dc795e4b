"""CVaR and VaR: of quantiles, of atoms, of a sample of returns."""

import itertools
import math
from collections.abc import Callable
from statistics import NormalDist

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import distributional_ppo_categorical as categorical
import distributional_ppo_lstm as lstm

DTYPES = (torch.float32, torch.float64)
ALPHAS = (1e-3, 0.05, 0.1, 0.125, 0.25, 0.3, 0.5, 0.75, 0.875, 0.9, 0.97, 1)
MEASURES = (lstm.cvar, lstm.value_at_risk)
NORMAL_CVAR = -2.0627128  # CVaR_0.05 of N(0, 1): -pdf(-1.6448536) / 0.05


def tensor(data: list, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(data, dtype=dtype)


ATOMS = tensor([-1, 0, 1, 2, 3])


def midpoints(num_quantiles: int) -> list[float]:
    return [(i + 0.5) / num_quantiles for i in range(num_quantiles)]


def normal_quantiles(num_quantiles: int) -> list[float]:
    """Exact quantiles of N(0, 1) at the midpoints, ascending."""
    return [NormalDist().inv_cdf(tau) for tau in midpoints(num_quantiles)]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return dict.fromkeys(("rtol", "atol"), 1e-12 if dtype == torch.float64 else 1e-5)


# -------------------------------------------------------------------------- quantiles: definition
def quantile_function(points: list[float], tau: float) -> float:
    """Linear between the points (tau_i, q_i) and beyond both ends."""
    K = len(points)
    if K == 1:
        return points[0]
    k = 0
    while k < K - 2 and tau > (k + 1.5) / K:
        k += 1
    slope = K * (points[k + 1] - points[k])
    return points[k] + slope * (tau - (k + 0.5) / K)


def slow_cvar(points: list[float], alpha: float) -> float:
    """Its integral up to alpha, a trapezoid between neighbouring kinks."""
    if alpha == 1:
        return sum(points) / len(points)
    kinks = [0.0, *(tau for tau in midpoints(len(points)) if tau < alpha), alpha]
    heights = [quantile_function(points, tau) for tau in kinks]
    area = 0.0
    for (a, f), (b, g) in itertools.pairwise(zip(kinks, heights)):
        area += (b - a) * (f + g) / 2
    return area / alpha


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [1, 2, 3, 4, 10, 32])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_cvar_is_the_integral_of_the_piecewise_linear_quantile_function(alpha, K, dtype):
    """Rockafellar & Uryasev 2000: exact, from quantiles in any order, which stay as they are."""
    quantiles = 5 * torch.randn(3, K, dtype=dtype) - 2
    copy = quantiles.clone()
    cvar = lstm.cvar(quantiles, alpha)
    expected = [slow_cvar(sorted(row), alpha) for row in quantiles.tolist()]
    assert cvar.dtype == dtype
    assert_close(cvar.double(), tensor(expected), **tolerance(dtype))
    assert quantiles.equal(copy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [1, 2, 3, 4, 10, 32])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_var_is_the_piecewise_linear_quantile_function(alpha, K, dtype):
    """Rockafellar & Uryasev 2000: interpolated, from quantiles in any order, which stay."""
    quantiles = 5 * torch.randn(3, K, dtype=dtype) - 2
    copy = quantiles.clone()
    var = lstm.value_at_risk(quantiles, alpha)
    expected = [quantile_function(sorted(row), alpha) for row in quantiles.tolist()]
    assert var.dtype == dtype
    assert_close(var.double(), tensor(expected), **tolerance(dtype))
    assert quantiles.equal(copy)


# Quantiles 1, 2, 6 at levels 1/6, 3/6, 5/6, given out of order.
# F^-1(0) = 1 - 0.5 = 0.5 by extension, F^-1(1/4) = 1.25, F^-1(2/3) = 4, F^-1(1) = 6 + 2 = 8.
HAND = [6, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("alpha", "expected"), [(0.25, 1.25), (2 / 3, 4), (1, 8)])
def test_var_worked_by_hand(alpha, expected, dtype):
    """Rockafellar & Uryasev 2000; lines between and beyond the quantiles ours."""
    var = lstm.value_at_risk(tensor([HAND], dtype), alpha)
    assert var.tolist() == pytest.approx([expected])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        # the mean of 0.5 and 1.25
        (0.25, 0.875),
        # trapezoids 1/2 * (0.5 + 2) / 2 = 0.625 and 1/6 * (2 + 4) / 2 = 0.5, over 2/3
        (2 / 3, 1.6875),
        # the plain mean
        (1, 3),
    ],
)
def test_cvar_worked_by_hand(alpha, expected, dtype):
    """Rockafellar & Uryasev 2000; lines between and beyond the quantiles ours."""
    cvar = lstm.cvar(tensor([HAND], dtype), alpha)
    assert cvar.tolist() == pytest.approx([expected])


def test_cvar_weights_worked_by_hand():
    """Rockafellar & Uryasev 2000: K = 3, alpha = 2/3, from unit vectors in place of 1, 2, 6.

    (1, 0, 0): F^-1(0) = 1.5, falling to 0 at 1/2: area 0.375.  (0, 0, 1): from 1/2 to 2/3 rising
    to 1/2: area 1/24.  Over 2/3: 0.5625 and 0.0625; the rest is 0.375.
    """
    assert lstm.cvar_weights(3, 2 / 3).tolist() == pytest.approx([0.5625, 0.375, 0.0625])


@pytest.mark.parametrize("K", [1, 2, 3, 21, 32])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_cvar_weights_sum_to_one_and_give_cvar(alpha, K):
    """Rockafellar & Uryasev 2000: linear in the sorted quantiles, one vector per K and alpha."""
    ordered = torch.randn(2, K).sort(-1).values
    weights = lstm.cvar_weights(K, alpha)
    assert weights.shape == (K,)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-6)
    assert_close(ordered @ weights, lstm.cvar(ordered, alpha), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("K", [1, 2, 3, 21, 32])
def test_cvar_weights_of_alpha_1_are_uniform(K):
    """Rockafellar & Uryasev 2000: CVaR_1 is the mean, exactly."""
    weights = lstm.cvar_weights(K, 1).tolist()
    assert weights == pytest.approx([1 / K] * K, rel=1e-7)
    assert len(set(weights)) == 1


# --------------------------------------------------------------------------- quantiles: properties
@pytest.mark.parametrize("alpha", [0.01, 0.3, 0.8, 1])
def test_cvar_passes_gradcheck(alpha):
    """Rockafellar & Uryasev 2000: the gradient goes to each quantile by its rank."""
    quantiles = tensor([[3, -1, 0.5, 2], [0.1, 5, -4, 1]]).requires_grad_()
    assert gradcheck(lambda q: lstm.cvar(q, alpha), quantiles)


@pytest.mark.parametrize("K", [2, 5, 21])
@pytest.mark.parametrize("alpha", [1e-3, 0.05, 0.4, 0.99])
def test_cvar_and_var_are_exact_for_linear_quantile_functions(alpha, K):
    """Rockafellar & Uryasev 2000: U(-3, 7), F^-1(tau) = 10 tau - 3, CVaR = 5 alpha - 3."""
    quantiles = 10 * tensor([midpoints(K)]).flip(-1) - 3
    assert lstm.value_at_risk(quantiles, alpha).tolist() == pytest.approx([10 * alpha - 3])
    assert lstm.cvar(quantiles, alpha).tolist() == pytest.approx([5 * alpha - 3])


def percent_off(cvar: float) -> float:
    """Error of a CVaR_0.05 of N(0, 1), percent; positive where the tail is too mild."""
    return 100 * (1 - cvar / NORMAL_CVAR)


@pytest.mark.parametrize(("K", "percent"), [(21, 4.6), (32, 2.5), (51, 1.4)])
def test_cvar_of_a_normal_distribution(K, percent):
    """Rockafellar & Uryasev 2000: the known error of K exact quantiles at alpha 0.05."""
    cvar = lstm.cvar(tensor([normal_quantiles(K)]), 0.05).item()
    assert percent_off(cvar) == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(("K", "here", "percent"), [(21, 4.6, 16), (51, 1.4, 5)])
def test_the_mean_of_the_lowest_quantiles_errs_more(K, here, percent):
    """Ours, why CVaR interpolates: the lowest ceil(alpha K) of K normal quantiles miss the tail.

    2 of 21 quantiles reach up to level 0.095, 3 of 51 up to 0.059, with alpha 0.05.
    """
    quantiles = normal_quantiles(K)
    lowest = quantiles[: math.ceil(0.05 * K)]
    assert len(lowest) == {21: 2, 51: 3}[K]
    plain = percent_off(sum(lowest) / len(lowest))
    interpolated = percent_off(lstm.cvar(tensor([quantiles]), 0.05).item())
    assert plain == pytest.approx(percent, abs=0.5)
    assert interpolated == pytest.approx(here, abs=0.05)
    assert plain > 3 * interpolated


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_risk_measures_do_not_depend_on_the_order_and_move_with_the_distribution(alpha, measure):
    """Rockafellar & Uryasev 2000: permutations, translation, positive scale."""
    quantiles = torch.randn(4, 9, dtype=torch.float64)
    shuffled = torch.stack([row[torch.randperm(9)] for row in quantiles])
    expected = measure(quantiles, alpha)
    assert measure(shuffled, alpha).equal(expected)
    assert_close(measure(3 * quantiles - 5, alpha), 3 * expected - 5)


@pytest.mark.parametrize("K", [2, 9, 32])
def test_cvar_grows_with_alpha_up_to_the_mean(K):
    """Rockafellar & Uryasev 2000: monotone, <= mean up to alpha = 1 - 1 / (2 K), the mean at 1."""
    quantiles = torch.randn(50, K, dtype=torch.float64).exp()
    alphas = torch.linspace(1e-3, 1 - 0.5 / K, 60).tolist()
    curve = torch.stack([lstm.cvar(quantiles, alpha) for alpha in alphas])
    assert (curve.diff(dim=0) >= 0).all()
    assert (curve <= quantiles.mean(-1) + 1e-12).all()
    assert_close(lstm.cvar(quantiles, 1), quantiles.mean(-1))


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("alpha", [0, 9.99e-4, -0.5, 1 + 1e-9, 50, float("nan")])
def test_alpha_outside_its_range_is_refused(alpha, K):
    """Ours: [1e-3, 1] is closed; ValueError names the value, also for a single quantile."""
    with pytest.raises(ValueError, match=str(alpha)):
        lstm.cvar_weights(K, alpha)
    for measure in MEASURES:
        with pytest.raises(ValueError, match=str(alpha)):
            measure(torch.zeros(2, K), alpha)


@pytest.mark.parametrize("measure", MEASURES)
def test_risk_measures_take_critics_and_time_as_batch_axes(measure):
    """Rockafellar & Uryasev 2000: (2, 4, 3, K), every row as if alone."""
    quantiles = torch.randn(2, 4, 3, 6, dtype=torch.float64)
    alone = measure(quantiles.reshape(-1, 6), 0.3)
    assert_close(measure(quantiles, 0.3).flatten(), alone)


@pytest.mark.parametrize("measure", MEASURES)
def test_risk_measures_stay_on_the_device(measure):
    """Rockafellar & Uryasev 2000: nothing is built on the CPU for inputs that are elsewhere."""
    assert measure(torch.empty(4, 8, device="meta"), 0.3).is_meta


# ------------------------------------------------------------------------------------------ atoms
@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.1, -1.0),
        (0.2, -1.0),
        (0.4, -0.5),  # (0.2 * -1 + 0.2 * 0) / 0.4
        (0.8, 0.0),  # (-0.2 + 0 + 0.1 * 2) / 0.8
        (1.0, 0.4),  # the mean
    ],
)
def test_cvar_of_atoms_by_hand(alpha, expected):
    """Rockafellar & Uryasev 2000: mass 0.2 at -1, 0.5 at 0, 0.3 at 2; an atom may count in part."""
    probs, atoms = tensor([[0.2, 0.5, 0.3]]), tensor([-1.0, 0.0, 2.0])
    cvar = categorical.cvar_categorical(probs, atoms, alpha)
    assert float(cvar) == pytest.approx(expected)


def atom_cvar(alpha: float) -> Callable[[Tensor], Tensor]:
    """CVaR as a function of the probabilities alone."""
    return lambda probs: categorical.cvar_categorical(probs, ATOMS, alpha)


def some_probs() -> Tensor:
    """Six distributions on five atoms."""
    return torch.randn(6, 5, dtype=torch.float64).softmax(-1)


def test_cvar_of_atoms_moves_and_scales_with_them():
    """Rockafellar & Uryasev 2000: translation and positive scale."""
    probs = some_probs()
    moved = categorical.cvar_categorical(probs, 3 * ATOMS + 2, 0.3)
    assert_close(moved, 3 * atom_cvar(0.3)(probs) + 2)


def test_cvar_of_atoms_grows_with_alpha_up_to_the_mean():
    """Rockafellar & Uryasev 2000: monotone, the mean at 1 and thus never above it."""
    probs = some_probs()
    levels = [atom_cvar(alpha)(probs) for alpha in (0.001, 0.1, 0.5, 0.9, 1.0)]
    for low, high in itertools.pairwise(levels):
        assert (low <= high + 1e-12).all()
    assert_close(levels[-1], (probs * ATOMS).sum(-1))


def test_cvar_of_atoms_passes_gradcheck():
    """Rockafellar & Uryasev 2000: finite differences in the probabilities."""
    assert gradcheck(atom_cvar(0.3), (some_probs().requires_grad_(),))


@pytest.mark.parametrize("alpha", [0.0, 9e-4, 1.001, -0.1])
def test_cvar_of_atoms_refuses_levels_outside_its_range(alpha):
    """Ours: [1e-3, 1], as for quantiles."""
    with pytest.raises(ValueError, match=r"\[1e-3, 1\]"):
        categorical.cvar_categorical(torch.ones(1, 1), torch.zeros(1), alpha)
    with pytest.raises(ValueError, match=r"\[1e-3, 1\]"):
        categorical.categorical_quantile(torch.ones(1, 1), torch.zeros(1), alpha)


def test_cvar_of_atoms_keeps_the_digits_of_float32():
    """Half a thousandth at 0 and then all at 1e6: of the lowest thousandth half is there, so the
    CVaR is half a million. The sum of both atoms less the second would leave 3e-8 too much."""
    probs, atoms = torch.tensor([0.0005, 0.9, 0.0995]), torch.tensor([0.0, 1e6, 2e6])
    assert float(categorical.cvar_categorical(probs, atoms, 0.001)) == pytest.approx(5e5, rel=1e-6)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (0.1, -1.0),  # half of the first bin
        (0.2, -0.5),  # its end
        (0.45, 0.0),  # half of the second
        (0.85, 1.0),  # half of the third
        (1.0, 1.5),  # its end
    ],
)
def test_quantiles_of_atoms_spread_each_over_its_bin(level, expected):
    """Ours: mass 0.2, 0.5, 0.3 on the bins [-1.5, -0.5], [-0.5, 0.5], [0.5, 1.5]."""
    probs, atoms = tensor([[0.2, 0.5, 0.3]]), tensor([-1.0, 0.0, 1.0])
    value = categorical.categorical_quantile(probs, atoms, level)
    assert float(value) == pytest.approx(expected)


def test_the_last_quantile_of_atoms_ends_the_last_bin():
    """Level 1, where float32 sums reach 1 ahead of the last atom, or never reach it."""
    atoms = tensor([-1.0, 0.0, 1.0])
    for probs in ([0.5, 0.5, 1e-9], [0.5, 0.25, 0.2499999]):
        probs = torch.tensor([probs], dtype=torch.float32)
        value = categorical.categorical_quantile(probs, atoms, 1.0)
        assert float(value) == pytest.approx(1.5)


# ---------------------------------------------------------------------------- a sample of returns
@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.5, -1.8),  # two and a half returns: (-5 - 1 + 0.5 * 3) / 2.5
        (1, 2.2),
        (0.4, -3),
        (0.05, -5),  # a quarter of one return
    ],
)
def test_empirical_cvar_of_five_returns(script, alpha, expected):
    """Rockafellar & Uryasev 2000: one return may count in part; the sample stays as it is."""
    returns = tensor([3, -1, 10, 4, -5])
    cvar = script.empirical_cvar(returns, alpha)
    assert isinstance(cvar, float)
    assert cvar == pytest.approx(expected)
    assert returns.tolist() == [3, -1, 10, 4, -5]


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.1, 1.5),  # (1 + 2) / 2
        (0.125, 1.8),  # two and a half: (1 + 2 + 1.5) / 2.5
        (1.0, 10.5),
        (0.001, 1.0),
    ],
)
def test_empirical_cvar_of_1_to_20(script, alpha, expected):
    """Rockafellar & Uryasev 2000: from a sample in descending order."""
    returns = torch.arange(20.0, 0.0, -1.0).double()
    assert script.empirical_cvar(returns, alpha) == pytest.approx(expected)


def test_empirical_cvar_of_one_return(script):
    """Rockafellar & Uryasev 2000: the return itself, however small its share."""
    assert script.empirical_cvar(tensor([7]), 0.05) == pytest.approx(7)


@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.13, 0.5, 0.99, 1])
def test_empirical_cvar_is_the_mean_of_the_lowest_thousandths(script, alpha):
    """Rockafellar & Uryasev 2000: the plain mean over the lowest of 1000 copies of each return."""
    returns = torch.randn(17, dtype=torch.float64) * 30 - 5
    copies = sorted(returns.tolist() * 1000)
    lowest = copies[: round(alpha * len(copies))]
    expected = sum(lowest) / len(lowest)
    assert script.empirical_cvar(returns, alpha) == pytest.approx(expected, rel=1e-6)
    assert script.empirical_cvar(returns.flip(0), alpha) == pytest.approx(expected, rel=1e-6)
    assert script.empirical_cvar(returns.float(), alpha) == pytest.approx(expected, rel=1e-5)


def test_quantiles_that_are_integers_are_refused():
    """Weights below 1 would be cut to 0, and so would every CVaR."""
    with pytest.raises(TypeError, match=r"quantiles are torch\.int64, not floats"):
        lstm.cvar(torch.tensor([10, 20, 30, 500]), 0.5)
    with pytest.raises(TypeError, match=r"quantiles are torch\.int64, not floats"):
        lstm.value_at_risk(torch.tensor([10, 20, 30, 500]), 0.5)
