"""Test the Triton backend: block shapes, offsets past 2^31, backend selection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.device import DEVICE, on_device, policy_loss
from helpers.head_rows import NEEDS, head_rows
from helpers.relaunch import relaunch
from tolerance import EQUAL_TOKENS_ABSOLUTE, EQUAL_TOKENS_RELATIVE
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gspo_kernels import Objective
from gspo_kernels.backends import dispatch
from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.backends import triton as triton_backend
from gspo_kernels.backends.rows import Groups, HeadResult, HeadRows
from gspo_kernels.backends.triton import gradient_rows, logit_tile, tuning
from gspo_kernels.backends.triton.launch import launches
from gspo_kernels.ops.head import all_columns, head_backward_op
from gspo_kernels.validation import TensorChecks


def head_and_upstream(n: int, v: int, seed: int = 0, **changes: Any) -> tuple[HeadRows, HeadResult, Tensor]:
    """Return a random head, the result of its forward, and upstream gradients [n], 0 at masked and some other rows."""
    rng = torch.Generator().manual_seed(seed)
    head = head_rows(n, 24, v, mask=torch.rand(n, generator=rng) > 0.3, **changes)
    d = torch.randn(n, generator=rng) * (torch.rand(n, generator=rng) > 0.4)
    return head, triton_backend.head_forward(head), d.to(DEVICE) * head.mask


@on_device
def test_masked_rows_are_not_computed() -> None:
    """The kernels are launched for unmasked rows, and in the backward for rows with a gradient."""
    head, _, d = head_and_upstream(300, 601)
    with launches() as seen:
        result = triton_backend.head_forward(head)
        triton_backend.head_backward(head, result, d, None, NEEDS)
    forward = next(x for x in seen if x.kernel.__name__ == "forward_tile")
    gradient = next(x for x in seen if x.kernel.__name__ == "gradient_tile")
    assert forward.arguments["n_unmasked"].item() == int(head.mask.sum()) < 300
    assert gradient.arguments["n_rows"] == int((head.mask & (d != 0)).sum())
    assert torch.equal(gradient.arguments["index"], (head.mask & (d != 0)).nonzero()[:, 0])


# -- offsets past 2^31


def far_view(shape: tuple[int, int], stride: int, like: Tensor) -> Tensor:
    """Return a copy of `like` with rows `stride` elements apart. Only touched pages take memory."""
    out = torch.empty((shape[0] - 1) * stride + shape[1], dtype=like.dtype).as_strided(shape, (stride, 1))
    return out.copy_(like)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_a_head_past_two_to_the_31_elements_is_read(architecture: str) -> None:
    """V x stride exceeds 2^31 elements. sm_80 loads by pointers, sm_90 by descriptors."""
    head, _, d = head_and_upstream(40, 601)
    head = head._replace(hidden=head.hidden.to(torch.float16), weight=head.weight.to(torch.float16))
    far = head._replace(weight=far_view((601, 24), 2**22, head.weight))
    assert 600 * 2**22 > 2**31
    with tuning.assume(architecture):
        near_result, far_result = triton_backend.head_forward(head), triton_backend.head_forward(far)
        assert torch.equal(near_result.log_probs, far_result.log_probs)
        near = triton_backend.head_backward(head, near_result, d, None, NEEDS)
        gradients = triton_backend.head_backward(far, far_result, d, None, NEEDS)
    for a, b in zip(near[:2], gradients[:2], strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_the_gradient_tile_reads_and_writes_rows_past_two_to_the_31() -> None:
    """Run a recorded kernel again with rows so far apart that offsets of hidden and d_logits exceed 2^31."""
    head, result, d = head_and_upstream(300, 601)
    with tuning.assume("sm_80"), launches() as seen:
        triton_backend.head_forward(head)
        triton_backend.head_backward(head, result, d, None, NEEDS)
    tile = next(x for x in seen if x.kernel.__name__ == "gradient_tile").arguments
    n = tile["n_rows"]
    stride = 2**25
    assert n * stride > 2**31
    d_logits = far_view((n, 601), stride, torch.zeros(n, 601))
    hidden = far_view((n, 24), stride, tile["hidden"])
    relaunch(seen, "gradient_tile", hidden=hidden, stride_hidden_row=stride, d_logits=d_logits, width=stride)
    assert torch.equal(d_logits, tile["d_logits"][:, :601]) and d_logits.any()


def test_partial_results_past_two_to_the_31_are_written_and_reduced() -> None:
    """The offset of a tile's partial results, its number times N, exceeds 2^31."""
    head = head_and_upstream(40, 1201)[0]._replace(entropy=True)
    with launches() as seen:
        expected, cached = triton_backend.forward_and_cache(head, tile_mass=True)
    # The kernels are given 2^28 as the number of rows, although 40 exist. Results of the tenth tile begin past 2^31.
    far = 2**28
    tiles = next(x for x in seen if x.kernel.__name__ == "forward_tile").arguments["column_blocks"]
    assert (tiles - 1) * far > 2**31
    names = ("tile_top", "tile_mass", "tile_entropy")
    partial = {name: far_view((tiles, 40), far, torch.zeros(tiles, 40)) for name in names}
    tile = next(x for x in seen if x.kernel.__name__ == "forward_tile").arguments
    # A full block of rows may be read and written.
    hidden, order = torch.cat([tile["hidden"], torch.zeros(88, 24)]), torch.cat([tile["order"], torch.arange(40, 128)])
    relaunch(seen, "forward_tile", n_rows=far, hidden=hidden, order=order, **partial)
    outputs = dict(zip(("log_probs", "entropy", "shift", "log_total"), torch.empty(4, 128), strict=True))
    place = torch.empty(128, dtype=torch.int64)
    relaunch(seen, "reduce_rows", n_rows=far, order=order, place=place, **outputs, **partial)
    assert torch.equal(outputs["log_probs"][:40], expected.log_probs)
    assert torch.equal(outputs["entropy"][:40], expected.entropy)
    unmasked = int(head.mask.sum())  # these rows come first
    assert torch.equal(partial["tile_mass"][:, :unmasked], cached.tile_mass[:, :unmasked])


@pytest.mark.slow
def test_sums_of_pairs_past_two_to_the_31_are_written() -> None:
    """Only the last group has a pair. Its row begins 2^31 elements into the output."""
    groups, width = 2049, 2**20
    begin = torch.zeros(groups + 1, dtype=torch.int64)
    begin[-1] = 1
    zero = torch.zeros(1, dtype=torch.int64)
    with launches() as seen:
        triton_backend.pair_sums(torch.ones(1), torch.full((1, 1), 3.0), zero, Groups(None, begin, None), groups)
    assert (groups - 1) * width == 2**31
    # Only pages that are written take memory. If the offset overflows, the kernel writes to the first half instead.
    out = torch.empty(2 * groups, width, dtype=torch.float16)[groups:]
    relaunch(seen, "sum_pairs", out=out, width=width, stride_matrix_column=0, BLOCK_P=1, BLOCK_H=width)
    assert (out[-1] == 3.0).all()


# -- backend selection


@pytest.mark.parametrize(
    ("capability", "row"),
    [
        ((7, 5), None),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_89"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_103"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_cuda_devices_select_their_block_shapes(
    capability: tuple[int, int], row: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert tuning.architecture(torch.device("cuda")) == row


@pytest.mark.parametrize(("name", "row"), [("gfx942:sramecc+", "gfx942"), ("gfx950", "gfx950"), ("gfx1100", None)])
def test_rocm_devices_select_their_block_shapes(name: str, row: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        gcnArchName = name

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert tuning.architecture(torch.device("cuda")) == row


def test_kernels_that_are_not_interpreted_are_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_tile, "INTERPRETED", False)
    assert "TRITON_INTERPRET=1" in (dispatch._triton_obstacle.__wrapped__(torch.device("cpu")) or "")


def test_auto_selects_triton_on_a_gpu_and_torch_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    call = TensorChecks("test")
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: None)
    assert dispatch.pick_backend(call, "auto", torch.device("cuda")) == "triton"
    assert dispatch.pick_backend(call, "auto", torch.device("cpu")) == "torch"
    assert dispatch.pick_backend(call, "triton", torch.device("cpu")) == "triton"
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: "test obstacle")
    assert dispatch.pick_backend(call, "auto", torch.device("cuda")) == "torch"
    with pytest.raises(ValueError, match="test obstacle"):
        dispatch.pick_backend(call, "triton", torch.device("cuda"))
    assert dispatch.implementation("torch") is torch_backend


@pytest.mark.parametrize("operand", ["hidden", "weight"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_strides_of_gradients_of_transposed_operands_equal_the_fake_kernels(operand: str, backend: str) -> None:
    head = head_rows(20, 24, 70)
    head = head._replace(**{operand: getattr(head, operand).t().contiguous().t()})
    result, cached = dispatch.implementation(backend).forward_and_cache(head)
    live = all_columns(torch.device("cpu"))
    args = head_backward_op.flatten((head, result, cached, torch.ones(20), None, live, None, NEEDS, backend))
    real = head_backward_op.op(*args)
    with FakeTensorMode() as mode:
        fake = head_backward_op.op(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args))
    assert [x.stride() for x in real] == [x.stride() for x in fake]


# -- faults in kernels that other tests miss


@on_device
def test_reduction_steps_after_the_first_rescale_the_sum() -> None:
    """The last tile has the largest logits, so the last step must rescale the sum of the earlier tiles."""
    head = head_rows(5, 24, 64 * (tuning.REDUCE_TILES + 1), entropy=True)
    head.weight[-64:] *= 4
    head = head._replace(hidden=head.hidden.double(), weight=head.weight.double())
    with launches() as seen:
        ours, expected = triton_backend.head_forward(head), torch_backend.head_forward(head)
    assert seen[0].arguments["column_blocks"] > tuning.REDUCE_TILES
    torch.testing.assert_close(ours[:2], expected[:2])


@on_device
def test_sums_over_several_chains_of_hidden_elements_are_complete() -> None:
    head = head_rows(5, 600, 40)
    head = head._replace(hidden=head.hidden / 25)
    assert 0 < tuning.tile_config(head, "forward").chain < 600
    d = torch.ones(5, device=DEVICE)
    ours, expected = triton_backend.head_forward(head), torch_backend.head_forward(head)
    torch.testing.assert_close(ours.log_probs, expected.log_probs)
    gradients = triton_backend.head_backward(head, ours, d, None, NEEDS)
    torch.testing.assert_close(gradients[:2], torch_backend.head_backward(head, expected, d, None, NEEDS)[:2])


@on_device
def test_nan_rows_without_a_gradient_stay_zero_without_host_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without host reads, as during the capture of a CUDA graph, the kernels compute all rows, even masked ones."""
    head, _, d = head_and_upstream(300, 601, temperature=torch.full((300,), 0.7))
    head.hidden[d == 0] = head.temperature[d == 0] = torch.nan
    result = triton_backend.head_forward(head)
    assert result.log_probs[head.mask & (d == 0)].isnan().any()
    expected = triton_backend.head_backward(head, result, d, None, NEEDS)
    monkeypatch.setattr(gradient_rows, "may_read", lambda x: False)
    monkeypatch.setattr(torch.Tensor, "nonzero", None)
    gradients = triton_backend.head_backward(head, result, d, None, NEEDS)
    torch.testing.assert_close(gradients[:2], expected[:2])
    assert expected.hidden is not None and expected.hidden.isfinite().all()


@on_device
def test_sums_of_equal_tokens_are_exact(backend: str) -> None:
    """Sums in fp32 would round equal terms in one direction, by an amount that matters in GSPO's clip window."""
    tokens = 8192
    log_ratio = torch.tensor([1e-4, 3.1e-4])
    log_probs = log_ratio[:, None].repeat(1, tokens).requires_grad_()
    objective = Objective(kl_coef=0.1, kl_estimator="k1")
    old = torch.zeros(2, tokens)
    ref = torch.full((2, tokens), -0.3)
    options = dict(old_log_probs=old, ref_log_probs=ref, entropy=torch.full((2, tokens), 0.7))
    out = policy_loss(log_probs, torch.tensor([1.0, -1.0]), objective=objective, backend=backend, **options)
    (gradient,) = torch.autograd.grad(out.loss, log_probs)
    wide = log_ratio.double()
    ratio = wide.exp() * torch.tensor([1.0, -1.0])
    kl = wide - ref[:, 0].double()
    assert torch.equal(out.log_ratio, log_ratio)
    exact: dict[str, Any] = {"rtol": 2e-7, "atol": 0}
    torch.testing.assert_close(out.loss.double(), (0.1 * kl - ratio).mean(), rtol=0, atol=EQUAL_TOKENS_ABSOLUTE)
    of_token = (0.1 - ratio) / (2 * tokens)
    expected = of_token[:, None].expand_as(gradient)
    torch.testing.assert_close(gradient.double(), expected, rtol=EQUAL_TOKENS_RELATIVE, atol=0)
    torch.testing.assert_close(out.metrics["kl"].double(), kl.mean(), **exact)
    torch.testing.assert_close(out.metrics["kl_to_old"].double(), -wide.mean(), **exact)
    torch.testing.assert_close(out.metrics["entropy"].double(), torch.tensor(0.7).double(), **exact)
