"""Test `fuse_head`: the logit options that it measures on transformers models, and losses computed at their heads."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers.pages import HUGGINGFACE_LINES
from helpers.second_device import SECOND, SecondDevice
from tolerance import MODEL_GRADIENT_RELATIVE
from torch import Tensor, nn

from gspo_kernels import KeptSets, gspo_fused_loss, linear_log_probs
from gspo_kernels.distillation import linear_top_k
from gspo_kernels.integrations.huggingface import (
    HeadError,
    HeadOutput,
    fuse_head,
    logit_options,
)
from gspo_kernels.integrations.huggingface.fused_head import _check_packed

PLAIN = {"logit_scale": 1.0, "logit_softcap": None, "vocab_size": 96}
EIGHT = {"head_dim": 8}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Configuration class, model class, additional configuration values, and the expected options that differ from PLAIN.
CENSUS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", EIGHT, {}),
    "qwen3 tied": ("Qwen3Config", "Qwen3ForCausalLM", {**EIGHT, "tie_word_embeddings": True}, {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**EIGHT, "final_logit_softcapping": 5.0}, {"logit_softcap": 5.0}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.0625}, {"logit_scale": 0.0625}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"logits_scaling": 6.0}, {"logit_scale": 1 / 6.0}),
    "phi, a bias": ("PhiConfig", "PhiForCausalLM", {}, {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}, {}),
    "falcon-h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {"lm_head_multiplier": 0.4, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
        {"logit_scale": 0.4},
    ),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM", {}, {"logit_softcap": 15.0}),
    "modernbert decoder, a module before the head": (
        "ModernBertDecoderConfig",
        "ModernBertDecoderForCausalLM",
        {"cls_token_id": 3, "sep_token_id": 4},
        {},
    ),
    "inkling, a padded vocabulary": (
        "InklingTextConfig",
        "InklingForCausalLM",
        {
            **EIGHT,
            "vocab_size": 112,
            "unpadded_vocab_size": 96,
            "swa_num_attention_heads": 4,
            "swa_head_dim": 8,
            "swa_num_key_value_heads": 2,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense"] * 2,
        },
        {},
    ),
    "paligemma, text alone": (
        "PaliGemmaConfig",
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**SIZES, **EIGHT, "model_type": "gemma2", "final_logit_softcapping": 5.0},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "projection_dim": 32,
            "image_token_index": 96,
        },
        {"logit_softcap": 5.0},
    ),
}


def make(name: str, **changes: Any) -> Any:
    """Return a small random model of CENSUS in evaluation mode."""
    config_name, model_name, options, _ = CENSUS[name]
    if not hasattr(transformers, config_name):
        pytest.skip(f"{config_name} is not in transformers {transformers.__version__}")
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**SIZES, **options, **changes})
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():  # make logits large enough for a soft-cap, and the bias nonzero
        head = model.get_output_embeddings()
        head.weight.mul_(8)
        if getattr(head, "bias", None) is not None:
            head.bias.normal_()
    return model.eval()


def batch() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return inputs, completion mask [3, 8] and advantages [3] of three sequences."""
    ids = torch.randint(3, 96, (3, 9), generator=torch.Generator().manual_seed(1))
    attention = torch.ones_like(ids)
    mask = torch.arange(8)[None, :] >= torch.tensor([[3], [2], [4]])
    return {"input_ids": ids, "attention_mask": attention}, mask, torch.tensor([1.0, -0.5, 2.0])


def dense_log_probs(model: Any) -> Tensor:
    """Return log-probs [3, 8] computed from the logits that the model returns."""
    inputs, _, _ = batch()
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]


def fused_loss(model: Any, old: Tensor) -> HeadOutput:
    inputs, mask, advantages = batch()

    def loss(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
        return gspo_fused_loss(
            hidden[:, :-1],
            lm_head,
            inputs["input_ids"][:, 1:],
            advantages.to(old.dtype),
            mask=mask,
            old_log_probs=old,
            **options,
        )

    return model(**inputs, use_cache=False, with_head=loss)


@pytest.mark.parametrize("name", CENSUS)
def test_loss_and_gradients_equal_those_of_the_models_logits(name: str) -> None:
    model = make(name).double()
    lp = dense_log_probs(model)
    _, mask, advantages = batch()
    old = (lp + 2e-4 * torch.randn(lp.shape, generator=torch.Generator().manual_seed(2)).to(lp.dtype)).detach()
    s = (torch.where(mask, lp - old, 0).sum(1) / mask.sum(1)).exp()
    loss = -torch.min(s * advantages, s.clamp(1 - 3e-4, 1 + 4e-4) * advantages).mean()
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)

    before = set(vars(model)), set(vars(model.get_output_embeddings()))
    head = fuse_head(model)
    expected_options = {**PLAIN, **CENSUS[name][3]}
    assert {k: getattr(head.options, k) for k in PLAIN} == expected_options
    out = fused_loss(model, old).result
    torch.testing.assert_close(out.loss, loss.detach())
    torch.testing.assert_close(torch.where(mask, lp.detach(), 0), out.log_probs)
    computed = torch.autograd.grad(out.loss, parameters, allow_unused=True)
    for a, b in zip(computed, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a - b).norm() <= MODEL_GRADIENT_RELATIVE[b.dtype] * b.norm() + 1e-12
    again = dense_log_probs(model)  # without `with_head` the model is unchanged
    assert torch.equal(torch.where(mask, again, 0), torch.where(mask, lp, 0))
    head.remove()
    assert before == (set(vars(model)), set(vars(model.get_output_embeddings())))


def test_logit_options_keeps_a_fused_model_fused() -> None:
    model = make("qwen3").double()
    head = fuse_head(model)
    assert logit_options(model) == PLAIN and fuse_head(model) is head
    compiled: Any = torch.compile(model, backend="eager")
    assert fuse_head(compiled) is head
    assert_fused_equals_dense(model)
    head.remove()
    assert logit_options(model) == PLAIN and "forward" not in vars(model)


def test_the_measurement_keeps_the_random_state() -> None:
    model = make("gpt2", resid_pdrop=0.5).train()
    state = torch.random.get_rng_state()
    fuse_head(model)
    assert torch.equal(torch.random.get_rng_state(), state) and all(module.training for module in model.modules())


def test_a_later_wrapper_must_be_removed_first() -> None:
    model = make("qwen3")
    head = fuse_head(model)
    ours = model.forward
    model.forward = lambda **kwargs: ours(**kwargs)
    with pytest.raises(HeadError, match="remove"):
        head.remove()
    model.forward = ours
    head.remove()
    assert ours(**batch()[0]).logits.shape[-1] == 96  # for a wrapper that still calls it


BODY = {"target_modules": ["q_proj"]}
TOKENS = [3, 40, 95]
PEFT: dict[str, tuple[str, str, dict[str, Any]]] = {  # model, class and values of PEFT's configuration
    "lora": ("qwen3", "LoraConfig", {"target_modules": ["lm_head", "q_proj"]}),
    "lora on the head, tied": ("qwen3 tied", "LoraConfig", {"target_modules": ["lm_head"]}),
    "lora on both, tied": ("qwen3 tied", "LoraConfig", {"target_modules": ["embed_tokens", "lm_head"]}),
    "modules_to_save": ("qwen3", "LoraConfig", {**BODY, "modules_to_save": ["lm_head"]}),
    "tokens": ("qwen3", "LoraConfig", {**BODY, "trainable_token_indices": {"lm_head": TOKENS}}),
    "tokens, tied": ("qwen3 tied", "LoraConfig", {**BODY, "trainable_token_indices": TOKENS}),
    "tokens of a head with a bias": (
        "phi, a bias",
        "LoraConfig",
        {**BODY, "trainable_token_indices": {"lm_head": TOKENS}},
    ),
    "tokens without LoRA, tied": (
        "qwen3 tied",
        "TrainableTokensConfig",
        {"target_modules": ["embed_tokens"], "token_indices": TOKENS},
    ),
}


def adapted(name: str) -> Any:
    """Return a model of PEFT with adapters that are not at their initial values."""
    peft = pytest.importorskip("peft")
    base, config_name, options = PEFT[name]
    config = getattr(peft, config_name)(**options, **({"r": 2} if config_name == "LoraConfig" else {}))
    model = peft.get_peft_model(make(base).double(), config).double().eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) / 4)
    return model


def fused_log_probs(model: Any, **more: Any) -> Tensor:
    inputs, mask, _ = batch()
    return model(
        **inputs,
        use_cache=False,
        with_head=lambda hidden, lm_head, **options: linear_log_probs(
            hidden[:, :-1], lm_head, inputs["input_ids"][:, 1:], mask=mask, **options, **more
        ),
    ).result.log_probs


@pytest.mark.parametrize("name", PEFT)
def test_peft_models_equal_their_logits_with_adapters_on_off_and_merged(name: str) -> None:
    model = adapted(name)
    mask = batch()[1]
    lp = dense_log_probs(model) * mask
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(lp.sum(), trained)
    fuse_head(model)
    fused = fused_log_probs(model)
    torch.testing.assert_close(fused, lp)
    for a, b in zip(torch.autograd.grad(fused.sum(), trained), expected, strict=True):
        assert b.norm() > 0 and (a - b).norm() <= MODEL_GRADIENT_RELATIVE[b.dtype] * b.norm()
    with model.disable_adapter():
        base = dense_log_probs(model) * mask
        assert not torch.equal(base, lp)
        torch.testing.assert_close(fused_log_probs(model), base)
    model.merge_adapter()
    merged = dense_log_probs(model) * mask
    torch.testing.assert_close(fused_log_probs(model), merged)


class Odd(transformers.Qwen3ForCausalLM):
    """A model that applies `change` to its logits, or calls its head twice."""

    change: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if self.change is not None:
            out.logits = self.change(out.logits)
        else:
            self.lm_head(out.logits.new_zeros(1, 2, 32))
        return out


def odd(change: Callable[[Tensor], Tensor] | None) -> Any:
    model = Odd(make("qwen3").config)
    model.change = change
    return model


def with_head(head: nn.Module | None) -> Any:
    """Return a model whose output embeddings are not the head that it calls."""
    model = make("qwen3")
    model.get_output_embeddings = lambda: head
    return model


def with_nan() -> Any:
    model = make("qwen3")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    return model


def with_dora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(make("qwen3"), peft.LoraConfig(r=2, target_modules=["lm_head"], use_dora=True))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "logits squared": (lambda: odd(torch.square), HeadError, "soft-cap"),
    "logits shifted": (lambda: odd(lambda x: x + torch.arange(x.shape[-1])), HeadError, "soft-cap"),
    "head called twice": (lambda: odd(None), HeadError, "got 2 calls"),
    "head not called": (lambda: with_head(nn.Linear(32, 96)), HeadError, "got 0 calls"),
    "no head": (lambda: with_head(None), HeadError, "output embeddings"),
    "a NaN in the weight": (with_nan, HeadError, "must equal the fused ones"),
    "DoRA": (with_dora, ValueError, "DoRA"),
    "meta device": (lambda: make("qwen3").to("meta"), HeadError, "meta device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_fused_is_refused_and_unchanged(name: str) -> None:
    make_model, error, message = REFUSED[name]
    model = make_model()
    with pytest.raises(error, match=message):
        fuse_head(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_trained_rows_that_accelerate_offloads_are_refused() -> None:
    accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"lm_head": TOKENS})
    model = peft.get_peft_model(make("qwen3"), config)
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ValueError, match="a head whose trained rows are not offloaded by accelerate"):
        fuse_head(model)


def assert_fused_equals_dense(model: Any) -> None:
    torch.testing.assert_close(fused_log_probs(model), dense_log_probs(model) * batch()[1])


def gets_an_adapter(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False, lora_dropout=0.5)
    return peft.get_peft_model(model, config)


def is_resized(model: Any) -> Any:
    model.resize_token_embeddings(110)
    return model


@pytest.mark.parametrize("change", [gets_an_adapter, is_resized])
def test_a_changed_head_is_measured_again(change: Any) -> None:
    model = make("qwen3 tied").double()
    fuse_head(model)
    changed = change(model).train()
    fused_log_probs(changed)  # measures the head without its dropout
    assert_fused_equals_dense(changed.eval())


NUMBERS: dict[str, tuple[str, Callable[[Any], Any], str, Any]] = {  # a model, an object, attribute and value
    "scale of the model": ("cohere", lambda model: model, "logit_scale", 0.5),
    "scale of the configuration": ("granite", lambda model: model.config, "logits_scaling", 2),
    "scale of the body": ("falcon-h1", lambda model: model.model, "lm_head_multiplier", 1.5),
    "soft-cap": ("gemma2", lambda model: model.config, "final_logit_softcapping", 2.0),
    "soft-cap of a text configuration": (
        "paligemma, text alone",
        lambda model: model.config.text_config,
        "final_logit_softcapping",
        2.0,
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_changed_number_is_noticed_by_the_next_call(name: str) -> None:
    model_name, owner, attribute, value = NUMBERS[name]
    model = make(model_name).double()
    fused = fuse_head(model)
    assert_fused_equals_dense(model)
    model.config.pad_token_id = 5  # trainers set ids, which do not change logits
    assert not fused.is_outdated()
    before = getattr(owner(model), attribute), dict(logit_options(model))
    setattr(owner(model), attribute, value)
    assert_fused_equals_dense(model)
    assert dict(logit_options(model)) != before[1]
    setattr(owner(model), attribute, before[0])
    assert dict(logit_options(model)) == before[1]


def test_a_tensor_that_scales_logits_may_change_in_place_but_not_be_trained() -> None:
    model = make("cohere").double()
    model.logit_scale = torch.tensor(0.5)
    fuse_head(model)
    assert_fused_equals_dense(model)
    model.logit_scale.fill_(0.8)
    assert_fused_equals_dense(model)
    del model.logit_scale
    model.register_buffer("logit_scale", torch.tensor(0.5))
    assert_fused_equals_dense(model)
    model.logit_scale.fill_(0.8)
    assert_fused_equals_dense(model)
    del model.logit_scale
    model.logit_scale = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(HeadError, match="logit_scale of CohereForCausalLM must not be trained"):
        assert_fused_equals_dense(model)


def test_models_prepared_by_accelerate_are_fused_and_unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {})  # trainers of this process have set it
    model = make("gemma2").float()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # logits that bf16 rounds by more than the check allows
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    forward = prepared.forward
    head = fuse_head(prepared)
    inputs, _, _ = batch()
    assert isinstance(prepared(**inputs, with_head=lambda hidden, head, **options: 1), HeadOutput)
    head.remove()
    assert prepared.forward == forward
    model = make("qwen3").float()
    fuse_head(model)
    unwrapped = accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
    assert unwrapped(**inputs).logits.shape[-1] == 96


def test_a_device_map_moves_tensors_to_the_head_and_results_back() -> None:
    accelerate = pytest.importorskip("accelerate")

    def of_ids(hidden: Tensor, lm_head: Any, **options: Any) -> list[Any]:
        ids = batch()[0]["input_ids"]  # [3, 9]
        pairs = torch.stack([ids, (ids + 1) % 96], -1)
        return [
            linear_log_probs(hidden, lm_head, ids, kept_sets=KeptSets.from_padded(pairs, fill=-1), **options).log_probs,
            linear_log_probs(hidden, lm_head, ids, extra_ids=pairs, **options).extra_log_probs,
            *linear_top_k(hidden, lm_head, 3, **options),
        ]

    def run(device: torch.device) -> tuple[list[Any], dict[str, Tensor]]:
        """Return all outputs, and gradients of the loss. The head is on `device`, the rest on the CPU."""
        model = adapted("modules_to_save")
        head = model.get_output_embeddings().to(device)
        hook = accelerate.hooks.AlignDevicesHook(execution_device=device, io_same_device=True)
        accelerate.hooks.add_hook_to_module(head, hook)
        accelerate.hooks.attach_execution_device_hook(head, device)  # on the modules inside the head
        fused = fuse_head(model)
        out = fused_loss(model, torch.full((3, 8), -4.0, dtype=torch.float64)).result
        out.loss.backward()
        with torch.no_grad():
            of_head = model(**batch()[0], use_cache=False, with_head=of_ids).result
        fused.remove()
        return [*out[:-1], *of_head], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected, expected_gradients = run(torch.device("cpu"))
    with SecondDevice():
        out, gradients = run(SECOND)
        for got, value in zip(out, expected, strict=True):
            assert got is value is None or got.device == torch.device("cpu")
            torch.testing.assert_close(got, value)
        for n, gradient in gradients.items():
            assert gradient.device == (SECOND if "lm_head" in n else torch.device("cpu"))
            torch.testing.assert_close(gradient.to("cpu"), expected_gradients[n])
    assert gradients.keys() == expected_gradients.keys() and any("lm_head" in n for n in gradients)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied_by", [copy.deepcopy, pickled])
def test_a_copied_model_has_its_own_fused_head(copied_by: Callable[[Any], Any]) -> None:
    model = make("qwen3").double()
    fuse_head(model)
    copied = copied_by(model)
    with torch.no_grad():
        copied.lm_head.weight.mul_(2)
        copied.model.norm.weight.mul_(2)
    if copied_by is copy.deepcopy:
        assert_fused_equals_dense(copied)
    fused = fuse_head(copied)
    assert_fused_equals_dense(copied)
    assert_fused_equals_dense(model)
    fused.remove()
    fused.remove()
    assert "forward" not in vars(copied) and "forward" in vars(model)


def test_a_fused_model_is_freed_by_one_collection() -> None:
    model = make("qwen3")
    fuse_head(model)
    fused_log_probs(model).sum().backward()
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None


def test_packed_sequences_are_kept_apart_or_refused() -> None:
    """transformers ignores positions that begin again if there is a cache or a mask."""
    model = make("qwen3").double()
    lp = dense_log_probs(model)
    fuse_head(model)
    inputs, *_ = batch()
    ids = inputs["input_ids"]
    packed = {"input_ids": ids[:, :-1].reshape(1, -1), "position_ids": torch.arange(8).repeat(3)[None]}
    ones = torch.ones_like(packed["input_ids"])

    def log_probs(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
        return linear_log_probs(hidden[0], lm_head, ids[:, 1:].flatten(), **options).log_probs

    result = model(**packed, use_cache=False, with_head=log_probs).result
    torch.testing.assert_close(result.view(3, 8), lp)
    wrong = model(**packed, use_cache=False, attention_mask=ones).logits.log_softmax(-1)
    assert (wrong.gather(-1, ids[:, 1:].reshape(1, -1, 1)).view(3, 8) - lp)[1:].abs().max() > 0.1
    with pytest.raises(ValueError, match="fuse_head: use_cache must be False for packed sequences"):
        model(**packed, with_head=log_probs)  # the configuration's default is True
    for positional in (False, True):
        args = (packed["input_ids"], ones, packed["position_ids"]) if positional else ()
        with pytest.raises(ValueError, match="attention_mask must be None for packed sequences"):
            model(
                *args, **({} if positional else packed | {"attention_mask": ones}), use_cache=False, with_head=log_probs
            )

    two = {name: x.repeat(2, 1) for name, x in packed.items()}
    cache = transformers.DynamicCache(config=model.config)
    for inputs in (two | {"attention_mask": ones.repeat(2, 1)}, packed | {"past_key_values": cache}):
        with pytest.raises(ValueError, match="for packed sequences"):
            model(**inputs, use_cache=False, with_head=log_probs)

    own_mask = torch.block_diag(*[torch.ones(8, 8).tril()] * 3).bool()[None, None]  # with or without a cache
    for mask in (own_mask, {"full_attention": own_mask}):
        result = model(**packed, attention_mask=mask, with_head=log_probs).result
        torch.testing.assert_close(result.view(3, 8), lp)
    model.config._attn_implementation = "flash_attention_2"  # which ignores positions only in a padded row
    _check_packed(model, (), packed | {"attention_mask": ones})
    with pytest.raises(ValueError, match="attention_mask must be None for packed sequences"):
        _check_packed(model, (), packed | {"attention_mask": ones.index_fill(1, torch.tensor(23), 0)})
    model.config._attn_implementation = "sdpa"

    model.train().gradient_checkpointing_enable({"use_reentrant": False})  # transformers switches off the cache
    torch.testing.assert_close(model(**packed, with_head=log_probs).result.view(3, 8), lp)

    # Neither one sequence nor padding is packed, even if the positions of padding begin again.
    left = torch.tensor([[0, 0, 0, 1, 1, 1]])
    for positions in (torch.tensor([[1, 1, 1, 0, 1, 2]]), torch.tensor([[3, 1, 1, 0, 1, 2]])):
        model(input_ids=ids[:1, :6], attention_mask=left, position_ids=positions, with_head=lambda *_, **__: None)
    model(ids[:1], torch.ones_like(ids[:1]), torch.arange(9)[None], with_head=lambda *_, **__: None)


def test_labels_with_a_head_function_are_refused() -> None:
    model = make("qwen3")
    fuse_head(model)
    inputs, _, _ = batch()
    with pytest.raises(ValueError, match="labels must be None"):
        model(**inputs, labels=inputs["input_ids"], with_head=lambda hidden, head, **options: 1)


def test_the_head_is_restored_after_an_error_inside_the_model() -> None:
    model = make("qwen3")
    fuse_head(model)
    head = model.lm_head
    lp = dense_log_probs(model)

    def fail(module: Any, args: Any, output: Any) -> None:
        raise ZeroDivisionError

    hook = model.model.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        fused_log_probs(model)
    hook.remove()
    assert model.lm_head is head and torch.equal(dense_log_probs(model), lp)


def test_negative_and_unlisted_scales_are_measured() -> None:
    assert fuse_head(make("cohere", logit_scale=-0.3)).options.logit_scale == pytest.approx(-0.3)
    assert fuse_head(odd(lambda logits: logits * 0.37)).options.logit_scale == pytest.approx(0.37)
    options = fuse_head(odd(lambda logits: 5 * torch.tanh(0.4 * logits / 5))).options
    assert (options.logit_scale, options.logit_softcap) == (pytest.approx(0.4), pytest.approx(5.0))


def test_the_lines_of_the_integrations_page_have_the_gradient_of_dense_gspo() -> None:
    inputs, mask, advantages = batch()
    model = make("qwen3")
    scope: dict[str, Any] = {"model": model}
    exec(HUGGINGFACE_LINES, scope)
    old = scope["head_log_probs"](model, *inputs.values(), mask)
    scope["gspo"](model, *inputs.values(), mask, advantages, old, 3).loss.backward()
    computed = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    log_probs = dense_log_probs(model)
    log_ratio = ((log_probs - log_probs.detach()) * mask).sum(1) / mask.sum(1)  # [B]
    (-(log_ratio.exp() * advantages).sum() / 3).backward()
    expected = model.get_input_embeddings().weight.grad
    assert (computed - expected).norm() <= MODEL_GRADIENT_RELATIVE[expected.dtype] * expected.norm()
