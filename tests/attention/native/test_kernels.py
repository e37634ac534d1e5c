"""The native kernels against the formula: outputs and all gradients, by every variant that this CPU can run."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from formula import by_formula, by_kernel, over_tokens, random_call
from vicinal.attention.native import NativeState, native_status, prepare_native
from vicinal.attention.native.operators import NativeArguments, native_attention
from vicinal.attention.recompute import Settings
from vicinal.grid import Grid

pytestmark = pytest.mark.skipif(
    native_status().state is not NativeState.READY and prepare_native().state is not NativeState.READY,
    reason="no native library here",
)
EPSILON = torch.finfo(torch.float32).eps
CASES = {
    "tables": {},
    "scale": {"bias": False},
    "bias": {"scale": False},
    "no prior": {"scale": False, "bias": False},
    "pairs": {"per_offset": False},
    "sharp": {"sharp": 30.0},
    "order": {"permuted": True},
    "mask of heads": {"mask": "head"},
    "mask of images": {"mask": "image", "permuted": False},
    "mask of keys": {"mask": "key", "scale": False, "bias": False},
    "mask of windows": {"mask": "window"},
    "pairs and mask": {"per_offset": False, "mask": "image"},
}


@pytest.fixture(params=["portable", "avx2", "avx512"])
def variant(request):
    """Computes by a variant; the best one again afterwards."""
    if request.param not in torch.ops.vicinal_native.variants():
        pytest.skip(f"this CPU cannot run {request.param}")
    torch.ops.vicinal_native.set_variant(request.param)
    yield request.param
    torch.ops.vicinal_native.set_variant(native_status().variant)


def case(name, grid, batch, heads, **options):
    """Returns a random call of a case; masks by the axes along which they differ."""
    wanted, tokens = dict(CASES[name]), grid.tokens
    shapes = {
        "head": (1, heads, tokens, tokens),
        "image": (batch, 1, tokens, tokens),
        "key": (batch, heads, 1, tokens),
        "window": (2, 1, tokens, tokens),
    }
    if "mask" in wanted:
        wanted["mask"] = shapes[wanted["mask"]]
    return random_call(grid, batch=batch, heads=heads, **wanted, **options)


def relative_errors(found, truth):
    """Returns the largest error of each result, relative to the largest number of the truth."""
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, truth, strict=True)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("grid", "heads", "dim", "v_dim"),
    [
        (Grid(8, 8, 1), 3, 16, 16),
        (Grid(3, 5, 2), 2, 8, 8),
        (Grid(7, 7, 9), 2, 24, 12),
        (Grid(1, 9), 1, 5, 3),
        (Grid(9, 2, 1), 3, 40, 7),
        (Grid(1, 1, 1), 2, 1, 1),
        (Grid(26, 27, 1), 1, 8, 8),
    ],
    ids=str,
)
def test_double_precision_equals_the_formula(variant, grid, heads, dim, v_dim, name):
    call = case(name, grid, 4, heads, dim=dim, v_dim=v_dim)
    for mine, exact in zip(by_kernel(call, torch.float64), by_formula(call, torch.float64), strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("grid", "dim"), [(Grid(8, 8, 1), 16), (Grid(14, 14, 1), 64), (Grid(9, 2, 1), 40)], ids=str)
def test_single_precision_errs_at_most_three_times_as_much_as_the_formula(variant, grid, dim, name):
    ours, theirs = [], []
    for seed in range(3):
        call = case(name, grid, 4, 2, dim=dim, seed=seed)
        truth = by_formula(call, torch.float64)
        ours.append(relative_errors(by_kernel(call, torch.float32), truth))
        theirs.append(relative_errors(by_formula(call, torch.float32), truth))
    for mine, formulas in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        assert max(mine) <= 3 * max(*formulas, EPSILON), (ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(variant, dtype):
    call = case("tables", Grid(8, 8, 1), 3, 2, dtype=dtype)
    call.scale, call.bias = call.scale.float(), call.bias.float()
    truth = by_formula(call, torch.float64)
    found = by_kernel(call, dtype, prior_dtype=torch.float32)
    assert all(x.dtype == dtype for x in found[:4])
    assert all(x.dtype == torch.float32 for x in found[4:])
    limit = torch.finfo(dtype).eps
    assert all(error <= limit for error in relative_errors(found, truth))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_numbers_of_half_precision_are_read_and_rounded_exactly(variant, dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    one, two = bits.view(dtype), bits[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].view(dtype)
    v = torch.stack([one, two]).view(1, 2, 1024, 64).permute(2, 0, 1, 3)  # two keys of equal weight: their mean
    q = torch.zeros_like(v)
    given = NativeArguments(None, None, None, None, Settings(0, 0, 0, False, 1.0, 0.0, 0))
    found = native_attention(q[:, :, :1], q, v, given)
    expected = flushed(flushed(v.float()).sum(2, keepdim=True) / 2).to(dtype)
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


def flushed(x):
    """Returns fp32 numbers with 0 in place of denormal ones, which bfloat16 has as well."""
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("grid", "dim"), [(Grid(8, 8, 1), 16), (Grid(14, 14, 1), 64), (Grid(16, 16), 32)], ids=str)
@pytest.mark.parametrize("name", ["no prior", "bias"])
def test_half_precision_is_no_worse_than_that_of_torch(variant, name, grid, dim, dtype):
    ours, theirs = [], []
    for seed in range(3):
        call = case(name, grid, 3, 2, dim=dim, seed=seed, dtype=dtype)
        truth = by_formula(call, torch.float64)[:4]
        leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        mask = None if call.bias is None else over_tokens(call, call.bias, 0.0)
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
        ours.append(mean_square_errors(by_kernel(call, dtype)[:4], truth))
        theirs.append(mean_square_errors([out, *torch.autograd.grad(out, leaves, call.direction)], truth))
    for mine, of_torch in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        assert sum(mine) <= 1.00001 * sum(of_torch), (ours, theirs)  # rounding the result is nearly all of both


def mean_square_errors(found, truth):
    """Returns the mean square error of each result."""
    return [float((a.detach().double() - b).square().mean()) for a, b in zip(found, truth, strict=True)]


def test_queries_and_keys_of_different_places(variant):
    call = random_call(None, queries=11, keys=30, dim=12, v_dim=20)
    assert max(relative_errors(by_kernel(call, torch.float64), by_formula(call, torch.float64))) < 1e-12


@given(
    height=st.integers(1, 12),
    width=st.integers(1, 30),
    prefix=st.integers(0, 3),
    batch=st.integers(1, 5),
    heads=st.integers(1, 3),
    dim=st.integers(1, 35),
    v_dim=st.integers(1, 35),
    name=st.sampled_from([name for name in CASES if name != "mask of windows"]),
    seed=st.integers(0, 10),
)
def test_any_shape_equals_the_formula(height, width, prefix, batch, heads, dim, v_dim, name, seed):
    call = case(name, Grid(height, width, prefix), batch, heads, dim=dim, v_dim=v_dim, seed=seed)
    found, truth = by_kernel(call, torch.float64), by_formula(call, torch.float64)
    for mine, exact in zip(found, truth, strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("per_offset", [True, False])
def test_the_same_bits_for_the_same_number_of_threads(per_offset):
    call = random_call(Grid(8, 8, 1), batch=9, heads=3, per_offset=per_offset, dtype=torch.float32)
    before, results = torch.get_num_threads(), {}
    try:
        for threads in (1, 2, 3, 2, 1):
            torch.set_num_threads(threads)
            found = by_kernel(call, torch.float32)
            known = results.setdefault(threads, found)
            assert all(torch.equal(a, b) for a, b in zip(found, known, strict=True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(results[1][:4], results[3][:4], strict=True))  # q, k, v: no sums


@pytest.mark.parametrize("name", ["tables", "order", "mask of heads", "pairs"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_threads_share_the_queries_of_a_few_heads(name, dtype):
    call = case(name, Grid(10, 10, 1), batch=1, heads=3)
    truth, before, outputs = by_formula(call, torch.float64)[0], torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 16):
            torch.set_num_threads(threads)
            outputs.append(by_kernel(call, dtype)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    bound = 1e-12 if dtype == torch.float64 else 0.02
    assert relative_errors(outputs[:1], [truth]) < [bound]


def test_queries_without_a_key_get_zeros_and_no_gradient(variant):
    call = random_call(Grid(4, 4), mask=(2, 1, 16, 16), dtype=torch.float64)
    call.mask = torch.where(call.mask > 0, 0.0, -torch.inf)
    call.mask[1, 0, 3] = -torch.inf
    out, dq, dk, dv, *others = by_kernel(call, torch.float64)
    assert (out[1, :, 3] == 0).all()
    assert (dq[1, :, 3] == 0).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv, *others))
    mask, call.mask = call.mask, call.mask.clone()
    call.mask[1, 0, 3] = 0.0
    truth = by_formula(call, torch.float64)[0]
    keep = torch.ones(16, dtype=torch.bool).index_fill(0, torch.tensor(3), False)
    torch.testing.assert_close(out[:, :, keep], truth[:, :, keep], atol=1e-12, rtol=0)
    assert mask[1, 0, 3].isinf().all()


@pytest.mark.parametrize("where", ["q", "k", "v", "scale", "bias"])
def test_nan_reaches_the_output(variant, where):
    call = random_call(Grid(4, 5, 1), dtype=torch.float32)
    x = getattr(call, where)
    x[(0,) * x.dim() if where in ("q", "k", "v") else (0, 3, 4)] = torch.nan  # offset 0 of the tables
    assert by_kernel(call, torch.float32)[0].isnan().any()


def test_nothing_to_compute_gives_empty_results():
    call = random_call(Grid(2, 3), batch=0)
    assert [tuple(x.shape) for x in by_kernel(call, torch.float64)][:2] == [(0, 2, 6, 16)] * 2
    call = random_call(None, queries=4, keys=0)
    assert (by_kernel(call, torch.float64)[0] == 0).all()


def test_narrow_windows_leave_no_denormal_numbers(variant):
    call = random_call(Grid(16, 16), scale=False, dtype=torch.float32)
    rows = torch.arange(-15, 16.0)
    call.bias = -(rows[:, None] ** 2 + rows**2).expand(2, -1, -1) / (2 * 0.5**2)
    for x in by_kernel(call, torch.float32):
        assert not ((x != 0) & (x.abs() < torch.finfo(torch.float32).tiny)).any()
