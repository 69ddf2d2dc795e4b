"""Policy loss, entropy loss and the linear schedule of coefficients."""

import math

import pytest
import torch
from conftest import ONE_SCRIPT, each_of
from torch import Tensor
from torch.testing import assert_close

script = each_of(ONE_SCRIPT)  # both have the same functions

DTYPES = (torch.float32, torch.float64)
# Ratios below, inside and above the range [0.75, 1.25], each with both signs of the advantage.
RATIOS = [2, 2, 0.5, 0.5, 1.125]
ADVANTAGES = [3, -1, 4, -2, 8]


def tensor(data: list, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(data, dtype=dtype)


# ------------------------------------------------------------------------------ clipped surrogate
@pytest.mark.parametrize("dtype", DTYPES)
def test_policy_loss_worked_by_hand(script, dtype):
    """Schulman et al. 2017, eq. 7: the smaller of r A and clip(r) A, negated, in the mean."""
    # min(6, 3.75) = 3.75  min(-2, -1.25) = -2  min(2, 3) = 2  min(-1, -1.5) = -1.5  9
    # sum 11.25, over 5
    log_ratio, advantages = tensor(RATIOS, dtype).log(), tensor(ADVANTAGES, dtype)
    out = script.clipped_policy_loss(log_ratio, advantages, 0.25)
    assert all(x.dtype == dtype for x in out)
    assert all(x.dim() == 0 for x in out)
    assert float(out[0]) == pytest.approx(-2.25, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_approx_kl_worked_by_hand(script, dtype):
    """Schulman's note on KL approximation, estimator k3: the mean of (r - 1) - log r."""
    # 1 - ln 2 twice, -1/2 + ln 2 twice, 1/8 - ln 1.125
    log_ratio, advantages = tensor(RATIOS, dtype).log(), tensor(ADVANTAGES, dtype)
    approx_kl = script.clipped_policy_loss(log_ratio, advantages, 0.25)[1]
    expected = (1 + 1 / 8 - math.log(1.125)) / 5
    assert float(approx_kl) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_fraction_worked_by_hand(script, dtype):
    """Schulman et al. 2017, eq. 7: 4 of 5 ratios are outside of [0.75, 1.25]."""
    log_ratio, advantages = tensor(RATIOS, dtype).log(), tensor(ADVANTAGES, dtype)
    fraction = script.clipped_policy_loss(log_ratio, advantages, 0.25)[2]
    assert float(fraction) == pytest.approx(0.8, rel=1e-6)


def test_policy_loss_is_flat_only_where_the_clip_binds(script):
    """Schulman et al. 2017, eq. 7: d loss / d log r = -A r / B; 0 past the clip, in A's sense."""
    log_ratio = tensor(RATIOS).log().requires_grad_()
    script.clipped_policy_loss(log_ratio, tensor(ADVANTAGES), 0.25)[0].backward()
    assert_close(log_ratio.grad, tensor([0, 2, -2, 0, -9]) / 5)


def test_a_ratio_of_150_with_a_negative_advantage_keeps_its_gradient(script):
    """Schulman et al. 2017, eq. 7: r is not clamped ahead of the minimum, -A r = 300 at r = 150."""
    log_ratio = tensor([math.log(150)]).requires_grad_()
    loss = script.clipped_policy_loss(log_ratio, tensor([-2]), 0.2)[0]
    loss.backward()
    assert loss.item() == pytest.approx(300)
    assert log_ratio.grad.item() == pytest.approx(300)


def test_policy_loss_passes_gradcheck(script):
    """Schulman et al. 2017, eq. 7: finite differences, away from the edges of the range."""
    log_ratio = tensor([0.5, 0.6, -0.5, -0.7, 0.1, -0.05]).requires_grad_()
    advantages = tensor([3, -1, 4, -2, 8, -5])

    def loss(x: Tensor) -> Tensor:
        return script.clipped_policy_loss(x, advantages, 0.2)[0]

    assert torch.autograd.gradcheck(loss, log_ratio)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("size", "used"), [(19, 19), (21, 20), (1e4, 20)])
def test_log_ratios_are_clamped_to_20(script, size, used, sign):
    """Ours, against overflow in eq. 7 of Schulman et al. 2017: inside of 20 nothing changes."""
    log_ratio = tensor([sign * size]).requires_grad_()
    ratio = math.exp(sign * used)
    loss, kl, fraction = script.clipped_policy_loss(log_ratio, tensor([-1]), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(max(ratio, 0.8))
    assert float(kl) == pytest.approx(ratio - 1 - sign * used)
    assert float(fraction) == 1
    slope = ratio if 0 < sign * size < 20 else 0
    assert float(log_ratio.grad) == pytest.approx(slope)


def test_approx_kl_is_positive_but_for_a_ratio_of_one(script):
    """Schulman's note on KL approximation, k3: >= 0 sample by sample, for either sign."""
    sizes = (0.001, 0.1, 1, 5, 30)
    for log_ratio in (0, *sizes, *(-x for x in sizes)):
        kl = script.clipped_policy_loss(tensor([log_ratio]), tensor([1]), 0.2)[1]
        assert float(kl) > 0 if log_ratio else float(kl) == 0


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("exponent", range(-12, 1))
def test_approx_kl_is_not_negative_near_ratio_one(script, exponent, sign):
    """Schulman's note on KL approximation, k3: exp(x) - 1 - x would be rounding in float32."""
    log_ratio = torch.tensor([sign * 10.0**exponent])
    kl = script.clipped_policy_loss(log_ratio, torch.ones(1), 0.2)[1]
    expected = math.expm1(log_ratio.item()) - log_ratio.item()
    assert kl >= 0
    assert kl.item() == pytest.approx(expected, rel=0.01, abs=1e-9)


@pytest.mark.parametrize(
    ("log_ratio", "expected"), [([0, 0], 0), ([0, 1e-3], 0.5), ([-1e-3, 0, 0, 0], 0.25)]
)
def test_clip_fraction_counts_strictly_more_than_eps(script, log_ratio, expected):
    """Schulman et al. 2017, eq. 7: a ratio of exactly 1 is inside even the empty range."""
    out = script.clipped_policy_loss(tensor(log_ratio), tensor(log_ratio), 0.0)
    assert float(out[2]) == expected


def test_policy_loss_leaves_its_arguments_alone(script):
    """Schulman et al. 2017, eq. 7, as a pure function: even log ratios beyond 20 stay."""
    log_ratio, advantages = tensor([-50, 0.5, 50]), tensor([1, -2, 3])
    script.clipped_policy_loss(log_ratio, advantages, 0.2)
    assert log_ratio.tolist() == [-50, 0.5, 50]
    assert advantages.tolist() == [1, -2, 3]


# ----------------------------------------------------------------------------------- entropy loss
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("floor", "penalty", "expected"),
    [(5, 7, -0.3 + 7 * 2), (2, 7, -0.3), (3, 7, -0.3), (5, 0, -0.3)],
)
def test_entropy_loss_worked_by_hand(script, floor, penalty, expected, dtype):
    """Schulman et al. 2017, eq. 9, with a floor of ours.

    The mean of 1, 2, 6 is 3: the bonus is 0.1 * 3; a floor of 5 is missed by 2, one of 2 by 0.
    """
    loss = script.entropy_loss(tensor([1, 2, 6], dtype), 0.1, floor, penalty)
    assert loss.dtype == dtype
    assert loss.dim() == 0
    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_floor_of_0_is_missed_by_a_negative_entropy(script, dtype):
    """Schulman et al. 2017, eq. 9, with a floor of ours: -3 costs 0.1 * 3 and 7 * 3."""
    entropy = tensor([-1, -2, -6], dtype)  # as that of a narrow Gaussian
    assert float(script.entropy_loss(entropy, 0.1, 0, 7)) == pytest.approx(0.3 + 21)


@pytest.mark.parametrize(("floor", "slope"), [(2, -0.1), (20, -7.1)])
def test_entropy_is_counted_once(script, floor, slope):
    """Schulman et al. 2017, eq. 9: loss(H1) - loss(H2) in closed form, and so its slope."""
    first = tensor([1, 4, 4]).requires_grad_()  # mean 3
    second = tensor([2, 6, 10])  # mean 6
    loss = script.entropy_loss(first, 0.1, floor, 7)
    difference = loss - script.entropy_loss(second, 0.1, floor, 7)
    assert difference.item() == pytest.approx(slope * (3 - 6))
    (grad,) = torch.autograd.grad(loss, first)
    assert_close(grad, torch.full_like(first, slope / 3))


# --------------------------------------------------------------------------------------- schedule
@pytest.mark.parametrize(("start", "end"), [(3.0, 1.0), (0.0, 0.5), (-1.0, 4.0)])
def test_linear_schedule_goes_from_start_to_end_and_stays(script, start, end):
    """Ours, as in the reference code of Schulman et al. 2017: clamped to [0, 1], up or down."""
    quarter = 0.75 * start + 0.25 * end
    expected = {-0.5: start, 0: start, 0.25: quarter, 1: end, 1.5: end}
    for progress, value in expected.items():
        assert script.linear_schedule(start, end, progress) == pytest.approx(value)


def test_advantages_of_another_shape_are_refused(script):
    """(B,) and (B, 1) would give (B, B)."""
    with pytest.raises(ValueError, match=r"log_ratio and advantages are \(4,\) and \(4, 1\)"):
        script.clipped_policy_loss(torch.zeros(4), torch.zeros(4, 1), 0.2)
