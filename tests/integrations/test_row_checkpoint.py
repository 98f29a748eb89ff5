"""Gradients with `skip_rows_without_gradient` equal the gradients with torch's own checkpoint."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import tiny_model
from tolerance import (
    ROW_CHECKPOINT_BF16,
    ROW_CHECKPOINT_FP32,
    ROW_CHECKPOINT_IN_PART_FP32,
    ROW_CHECKPOINT_RELATIVE,
)
from torch import Tensor, nn

pytest.importorskip("transformers")
import transformers
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gspo_kernels.integrations.huggingface import row_checkpoint, skip_rows_without_gradient

B, T, V = 5, 12, 64
LIVE = torch.tensor([True, False, True, True, False])
SIZES = {**tiny_model.SHAPE, "vocab_size": V, "num_hidden_layers": 3, "pad_token_id": 0, "use_cache": False}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}


def build(
    kind: str = "Qwen2",
    dtype: torch.dtype = torch.float64,
    lora: bool = False,
    checkpoints: bool = True,
    reentrant: bool = False,
    **sizes: Any,
) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    attention = sizes.get("attn_implementation", "sdpa")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).train()
    if lora:
        peft = pytest.importorskip("peft")
        options = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, **options)).to(dtype)
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask, and the weights of log-probs [B, T - 1] in a loss."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, V, (B, T), generator=generator)
    mask = (torch.arange(T) < T - torch.arange(B)[:, None]).long()
    weights = torch.randn(B, T - 1, generator=generator, dtype=torch.float64)
    return ids, mask, weights * mask[:, 1:] * LIVE[:, None]


def gradients(model: Any, ids: Tensor, weights: Tensor, **inputs: Any) -> dict[str, Tensor | None]:
    logits = model(input_ids=ids, **inputs).logits[:, :-1]
    log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    (log_probs * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(ours: dict[str, Tensor | None], stock: dict[str, Tensor | None], relative: float) -> None:
    assert {name for name, x in ours.items() if x is None} == {name for name, x in stock.items() if x is None}
    assert any(x is not None for x in stock.values())
    for name, x in stock.items():
        y = ours[name]
        assert x is None or (y is not None and (x - y).norm() <= relative * x.norm()), name


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(live rows, rows) each time that rows are looked for, which reads the host."""
    seen: list[tuple[int, int]] = []
    for kind in (row_checkpoint._Padded, row_checkpoint._Packed):

        def choose(self: Any, gradients: list[Tensor], original: Any = kind.choose) -> Any:
            choice = original(self, gradients)
            seen.append((choice.live, choice.rows))
            return choice

        monkeypatch.setattr(kind, "choose", choose)
    return seen


MODELS: dict[str, Callable[[], Any]] = {
    "sdpa": build,
    "eager": partial(build, attn_implementation="eager"),
    "reentrant": partial(build, reentrant=True),
    "LoRA": partial(build, lora=True),
    "LoRA, reentrant, eager": partial(build, lora=True, reentrant=True, attn_implementation="eager"),
    "sliding windows": partial(build, "Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "recurrence": partial(build, "Mamba", state_size=4, expand=2, attn_implementation="eager"),
    "soft-caps": partial(build, "Gemma2", attn_implementation="eager"),
}


@pytest.mark.parametrize("live", ["some", "all", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_torchs_checkpoint(name: str, live: str, choices: list[tuple[int, int]]) -> None:
    """One layer of a micro-batch looks for the rows."""
    ids, mask, weights = batch()
    weights = {"some": weights, "all": torch.ones_like(weights), "none": 0 * weights}[live]
    expected = gradients(MODELS[name](), ids, weights, attention_mask=mask)
    model = MODELS[name]()
    rows = skip_rows_without_gradient(model)
    assert skip_rows_without_gradient(model) is rows
    computed = gradients(model, ids, weights, attention_mask=mask)
    # Gemma and Mamba compute norms or states in fp32.
    in_fp32 = name in ("recurrence", "soft-caps")
    relative = ROW_CHECKPOINT_IN_PART_FP32 if in_fp32 else ROW_CHECKPOINT_RELATIVE
    assert_same(computed, expected, relative)
    count = {"some": 3, "all": 5, "none": 0}[live]
    assert choices == [(count, B)] and rows.take() == (count, B) and rows.take() == (0, 0)
    assert not rows.fallbacks


def test_rows_are_looked_for_again_after_a_hook_changed_a_gradient_in_place(choices: list[tuple[int, int]]) -> None:
    ids, mask, weights = batch()
    computed = []
    for skips in (False, True):
        model = build()
        if skips:
            skip_rows_without_gradient(model)

        def add(layer: Any, inputs: Any, output: Any) -> None:
            hidden = output if isinstance(output, Tensor) else output[0]
            hidden.register_hook(lambda gradient: gradient.__setitem__(1, 0.01))

        model.model.layers[1].register_forward_hook(add)
        computed.append(gradients(model, ids, weights, attention_mask=mask))
    assert_same(computed[1], computed[0], ROW_CHECKPOINT_RELATIVE)
    assert choices == [(3, B), (4, B)]


OFFSETS = [*range(0, B * T + 1, T)]
WRONG_OFFSETS = [[*OFFSETS[:-2], 60], [*OFFSETS[:-2], 47, 60], [0, *OFFSETS]]


@pytest.mark.parametrize("live", ["some", "none"])
@pytest.mark.parametrize("offsets", [None, "eager", OFFSETS, *WRONG_OFFSETS])
def test_sequences_of_a_packed_row_are_left_out(
    live: str, offsets: Any, choices: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`offsets`: for flash attention. If they disagree with the position_ids, all sequences run."""
    given: list[Tensor] = []
    attention = transformers.models.qwen2.modeling_qwen2.Qwen2Attention.forward

    def forward(self: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and offsets:
            given.extend(kwargs[f"cu_seq_lens_{x}"] for x in "qk")
        return attention(self, **kwargs)

    monkeypatch.setattr(transformers.models.qwen2.modeling_qwen2.Qwen2Attention, "forward", forward)
    ids, _, weights = batch()
    weights = nn.functional.pad(weights * (live == "some"), (0, 1)).view(1, -1)[:, :-1]
    inputs: dict[str, Any] = {"ids": ids.view(1, -1), "weights": weights}
    inputs["position_ids"] = torch.arange(T).repeat(B)[None]
    build_model = build
    if offsets == "eager":  # whose masks hold the smallest number of the dtype
        build_model, offsets = partial(build, attn_implementation="eager"), None
    if offsets:
        inputs |= {f"cu_seq_lens_{x}": torch.tensor(offsets, dtype=torch.int32) for x in "qk"}
        inputs |= {f"max_length_{x}": T for x in "qk"}
    model = build_model()
    expected = gradients(build_model(), **inputs)
    given.clear()
    rows = skip_rows_without_gradient(model)
    assert_same(gradients(model, **inputs), expected, ROW_CHECKPOINT_RELATIVE)
    are_known = offsets in (None, OFFSETS)
    found = (3 if live == "some" else 0) if are_known else B
    assert choices == [(found, B)] and not rows.fallbacks
    taken = OFFSETS[: max(found, 1) + 1] if are_known else offsets
    assert all(x.tolist() == taken and x.dtype == torch.int32 for x in given) and bool(given) == bool(offsets)


def loss_of_routers(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, output_router_logits=True, labels=ids).aux_loss


# A model, and a loss: rows, or what a layer returns or records, depend on more than a row's hidden states.
CONNECTED: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "a mask of a packed row": (
        partial(build, attn_implementation="eager"),
        lambda model, ids: packed_loss(model, ids, attention_mask=torch.ones(1, B * T)),
    ),
    "windows of a packed row": (
        partial(build, "GptOss", torch.float32, attn_implementation="eager", num_local_experts=4, sliding_window=4),
        lambda model, ids: packed_loss(model, ids),
    ),
    "convolutions of a packed row": (
        partial(build, "Lfm2", layer_types=["conv", "full_attention", "conv"]),
        lambda model, ids: packed_loss(model, ids),
    ),
    "router logits": (partial(build, "Qwen3Moe", torch.float32, **EXPERTS), loss_of_routers),
    "attentions": (
        partial(build, attn_implementation="eager"),
        lambda model, ids: torch.stack(model(input_ids=ids, output_attentions=True).attentions).square()[:, 0].sum(),
    ),
}


def packed_loss(model: Any, ids: Tensor, **inputs: Tensor) -> Tensor:
    """A loss of the third of five sequences."""
    logits = model(input_ids=ids.view(1, -1), position_ids=torch.arange(T).repeat(B)[None], **inputs).logits
    return logits[0, 2 * T : 3 * T].log_softmax(-1)[:, 0].sum()


@pytest.mark.parametrize("name", CONNECTED)
def test_rows_that_are_connected_are_all_differentiated(name: str) -> None:
    make, loss = CONNECTED[name]
    ids, *_ = batch()
    computed = []
    for skips in (False, True):
        model = make()
        if skips:
            skip_rows_without_gradient(model)
        loss(model, ids).backward()
        computed.append({key: p.grad for key, p in model.named_parameters()})
    assert_same(
        computed[1], computed[0], ROW_CHECKPOINT_RELATIVE if model.dtype == torch.float64 else ROW_CHECKPOINT_FP32
    )


def test_a_single_row_is_differentiated(choices: list[tuple[int, int]]) -> None:
    """Its attention mask is None, so that attention would cross sequences."""
    ids, _, weights = batch()
    for live in (1, 0):
        inputs = {"ids": ids[:1], "weights": live * weights[:1]}
        expected = gradients(build(), **inputs)
        model = build()
        rows = skip_rows_without_gradient(model)
        assert_same(gradients(model, **inputs), expected, ROW_CHECKPOINT_RELATIVE)
        assert choices.pop() == (live, 1) and not choices and not rows.fallbacks


def test_answers_that_share_a_packed_prompt_are_all_differentiated(choices: list[tuple[int, int]]) -> None:
    """Positions of the second answer begin after the prompt, which it attends to."""
    ids, _, weights = batch()
    positions = torch.cat([torch.arange(30), torch.arange(10, 40)])[None]
    weights = nn.functional.pad(weights, (0, 1)).view(1, -1)[:, :-1] * (torch.arange(59) >= 30)
    see = positions[0, :, None] >= positions[0]
    see &= (torch.arange(60)[:, None] < 30) | (torch.arange(60) < 10) | (torch.arange(60) >= 30)
    mask = torch.zeros(1, 1, 60, 60, dtype=torch.float64).masked_fill(~see, -torch.inf)
    inputs = {"ids": ids.view(1, -1), "weights": weights, "position_ids": positions, "attention_mask": mask}
    expected = gradients(build(), **inputs)
    model = build()
    skip_rows_without_gradient(model)
    assert_same(gradients(model, **inputs), expected, ROW_CHECKPOINT_RELATIVE)
    assert choices == [(2, 2)]


class _Block(nn.Module):
    """A layer that gets an argument besides its input, and calls its checkpoint function as models of a hub do."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.function = function

    def forward(self, hidden: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        out = self.function(self.linear(hidden), *args)
        return out, out.mean(-1)


def _row_of_block_mask(hidden: Tensor, mask: Any) -> Tensor:
    heads = hidden.float()[:, None]
    return flex_attention(heads, heads, heads, block_mask=mask)[:, 0].double()


BY_ROWS = torch.randn(B, T, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
# A layer's function of hidden states [B, T, 8] and another argument; the argument; whether rows are left out.
ARGUMENTS: dict[str, tuple[Callable[..., Tensor], Any, bool]] = {
    "none": (lambda h, x: h, None, True),
    "rows": (lambda h, x: h * x, BY_ROWS, True),
    "rows in a tuple": (lambda h, x: h * x[0] + x[1][0], (BY_ROWS, [BY_ROWS + 1, "text"]), True),
    "tokens": (lambda h, x: h * x, torch.arange(T)[:, None] + 1.0, True),
    "shared": (lambda h, x: h * x, torch.full((1, 1, 8), 2.0), True),
    "with a gradient": (lambda h, x: h * x, BY_ROWS.clone().requires_grad_(), False),
    "with a gradient, in a tuple": (lambda h, x: h * x[0], (BY_ROWS.clone().requires_grad_(),), False),
    "rows in the second axis": (lambda h, x: h * x.sum(0), torch.ones(3, B, T, 1), False),
    "as many heads as rows": (lambda h, x: h * x.sum(0)[..., None], torch.ones(B, 1, T), False),
    "an object": (lambda h, x: h * x.value, type("Scale", (), {"value": BY_ROWS})(), False),
}


def _run(function: Callable[..., Tensor], argument: Any, skips: bool, rows: int = B) -> tuple[list[Tensor], Any]:
    """Gradients of a block, by way of both of its outputs, and the RowCheckpoint."""
    model = build()
    torch.manual_seed(3)
    block = _Block(function)
    hidden = torch.randn(rows, T, 8, dtype=torch.float64).requires_grad_()
    skipping = skip_rows_without_gradient(model) if skips else None
    checkpoint = model.model.layers[0]._gradient_checkpointing_func
    out, means = checkpoint(block, hidden, argument)
    weights = torch.randn(rows, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    weights[1::3] = 0
    ((out.sin().sum(-1) + means) * weights[:, None]).sum().backward()
    extra = [argument.grad] if isinstance(argument, Tensor) and argument.grad is not None else []
    if extra:
        argument.grad = None
    assert hidden.grad is not None
    return [hidden.grad, *[p.grad for p in block.parameters() if p.grad is not None], *extra], skipping


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_a_layer_are_taken_by_rows_or_all_rows_run(name: str, choices: list[tuple[int, int]]) -> None:
    function, argument, is_known = ARGUMENTS[name]
    expected, _ = _run(function, argument, False)
    computed, rows = _run(function, argument, True)
    for x, y in zip(expected, computed, strict=True):
        torch.testing.assert_close(y, x, rtol=ROW_CHECKPOINT_RELATIVE, atol=ROW_CHECKPOINT_RELATIVE)
    assert bool(choices) == is_known != bool(rows.fallbacks)
    assert rows.take() == ((3, B) if is_known else (0, 0))


# Shapes of arguments whose rows are known, and others, for hidden states [B, T, H] and [1, T, H] of packed sequences.
PADDED = [(), (B, T), (B, T, 8), (B, 1, T, T), (B, 3, 1, T), (1, 1, 8), (T,), (T, 8)]
PADDED_UNKNOWN = [(B, T, T), (B, 8, T), (B, 1, T, 8), (T, B, 8), (3, B, T, 1), (B,)]
PACKED = [(), (1, T), (1, T, 8), (1, 1, T, T), (T,)]
PACKED_UNKNOWN = [(2, T), (1, 8, T), (T, 8), (1, 1, 1, T), (2, 1, T, T), (8,)]


def test_rows_are_known_by_shape() -> None:
    padded = row_checkpoint._Padded(torch.zeros(B, T, 8))
    packed = row_checkpoint._Packed(torch.zeros(1, T, 8), torch.arange(T)[None], None)
    for rows, known, unknown in ((padded, PADDED, PADDED_UNKNOWN), (packed, PACKED, PACKED_UNKNOWN)):
        for shape in known:
            rows.check_tensor("x", torch.zeros(shape))
        for shape in unknown:
            with pytest.raises(row_checkpoint.UnknownRows, match=re.escape(f"x, a tensor {list(shape)}")):
                rows.check_tensor("x", torch.zeros(shape))
    padded.check_tensor("position_embeddings", torch.zeros(B, T, T))


@pytest.mark.parametrize("reentrant", [False, True])
def test_as_many_rows_as_tokens_all_run(reentrant: bool, choices: list[tuple[int, int]]) -> None:
    """A tensor [T, ...] could have rows or tokens.

    Modules run in the order of other batches, which other ranks may have. Their collectives then match under ZeRO-3.
    """
    orders = []
    for length in (T, B):
        order: list[str] = []
        model = build(reentrant=reentrant)
        skip_rows_without_gradient(model)
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *_, name=name, order=order: order.append(name))
        ids, _, weights = batch()
        gradients(model, ids[:, :length], weights[:, : length - 1])
        orders.append(order)
    assert orders[0] == orders[1] and len(choices) == 1
    choices.clear()
    weights = torch.arange(1.0, T + 1, dtype=torch.float64)[:, None]
    expected, _ = _run(lambda h, x: h * x, weights, False, rows=T)
    computed, rows = _run(lambda h, x: h * x, weights, True, rows=T)
    torch.testing.assert_close(computed, expected, rtol=ROW_CHECKPOINT_RELATIVE, atol=ROW_CHECKPOINT_RELATIVE)
    assert not choices and rows.fallbacks == {"a batch with as many rows as tokens in a row"}


@pytest.mark.parametrize("batch_size", [1, B])
def test_block_masks_are_taken_by_rows(batch_size: int) -> None:
    """PyTorch has no backward of flex attention on a CPU, so compare forwards."""
    starts = torch.arange(B) % 3
    size = None if batch_size == 1 else B

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & ((kv >= starts[b]) if size else (kv >= 0))

    mask = create_block_mask(mask_mod, size, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    hidden = torch.randn(B, 64, 8, dtype=torch.float64)
    index = LIVE.nonzero()[:, 0]
    taken = row_checkpoint._Padded(hidden).of_block_mask("", mask, row_checkpoint.Choice(0, index, len(index), B))
    expected = _row_of_block_mask(hidden, mask)[index]
    torch.testing.assert_close(_row_of_block_mask(hidden[index], taken), expected, rtol=0.0, atol=0.0)
    with pytest.raises(row_checkpoint.UnknownRows, match="batch size 5") if size else contextlib.nullcontext():
        row_checkpoint._Padded(hidden[:4]).check_block_mask("x", mask)


def test_what_cannot_be_differentiated_by_rows_raises() -> None:
    with pytest.raises(TypeError, match="model must be a model of transformers that supports gradient checkpointing"):
        skip_rows_without_gradient(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        skip_rows_without_gradient(build(attention_dropout=0.1))
    with pytest.raises(ValueError, match=r"jitter_noise=0\.1"):
        skip_rows_without_gradient(build("Mixtral", router_jitter_noise=0.1, num_local_experts=2))
    peft = pytest.importorskip("peft")
    for config, reason in (
        (peft.LoKrConfig(r=2, target_modules=["q_proj"], rank_dropout=0.5), r"rank_dropout=0\.5"),
        (peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"], boft_dropout=0.5), "MultiplicativeDropoutLayer"),
        (peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[1], task_type="CAUSAL_LM"), "aLoRA"),
    ):
        with pytest.raises(ValueError, match=reason):
            skip_rows_without_gradient(peft.get_peft_model(build(), config))
    ids, *_ = batch()
    model = build()
    skip_rows_without_gradient(model)
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad and"):
        torch.autograd.grad(model(input_ids=ids).logits.sum(), list(model.parameters()))


def test_checkpointing_may_be_enabled_later_and_copies_are_models_of_their_own(choices: list[tuple[int, int]]) -> None:
    ids, mask, weights = batch()
    model = build(checkpoints=False)
    rows = skip_rows_without_gradient(model)
    expected = gradients(model, ids, weights, attention_mask=mask)
    assert not choices
    loaded = pickle.loads(pickle.dumps(model))
    skip_rows_without_gradient(loaded)
    for i, other in enumerate((model, copy.deepcopy(model), loaded), 1):
        other.gradient_checkpointing_enable()
        other.zero_grad()
        assert_same(gradients(other, ids, weights, attention_mask=mask), expected, ROW_CHECKPOINT_RELATIVE)
        assert choices == [(3, B)] * i
    assert rows.take() == (3, B)


def test_the_backward_runs_under_the_autocast_of_the_forward() -> None:
    ids, mask, weights = batch()
    computed = []
    for skips in (False, True):
        model = build(dtype=torch.float32)
        if skips:
            skip_rows_without_gradient(model)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=mask).logits
        (logits.float().log_softmax(-1)[:, :-1, 0] * weights).sum().backward()
        computed.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(computed[1], computed[0], ROW_CHECKPOINT_BF16)
