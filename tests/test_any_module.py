"""Modules of any code, heard by what they ask of PyTorch: the weights, and outputs that stay as they were."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import attnscope
from attnscope.attention.operator import DenseAttention
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiling import TiledAttention
from attnscope.errors import InputError, MemoryLimitError, ModelError, UsageError
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import select_operator
from attnscope.hooks.functions import LAYERS, check_heard, hearing
from attnscope.hooks.report import CaptureReport
from attnscope.reference import naive
from helpers import any_modules
from helpers.command_line import Result, call

T, E, HEADS = 10, 32, 4
PADDED = torch.tensor([[False] * T, [False] * 6 + [True] * 4])
CAUSAL = torch.ones(T, T).triu(1).bool()
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "nanogpt": (any_modules.NanoGPT, (torch.arange(T)[None],)),
    "nanogpt without flash": (partial(any_modules.NanoGPT, flash=False, probabilities=True), (torch.arange(T)[None],)),
    "esm": (any_modules.Esm, (torch.tensor([[0, 4, 5, 6, 2], [0, 4, 2, 1, 1]]),)),
    "diffusion": (any_modules.CrossBlock, (torch.ones(2, 16, E).cumsum(1), torch.ones(2, 7, 24).cumsum(2))),
    "vit": (any_modules.Vit, (torch.arange(3 * 32 * 32).view(1, 3, 32, 32) / 1000,)),
    "windows": (any_modules.Windows, (torch.arange(64 * E).view(1, 8, 8, E) / 1000,)),
    "talking heads": (any_modules.TalkingHeads, (torch.arange(T * E).view(1, T, E) / 100,)),
}


def eager(spec: AttentionSpec) -> DenseAttention:
    return DenseAttention(spec.weights(0, spec.visible.queries), spec.visible, spec)


OPERATORS = {"fused": select_operator, "tiles": TiledAttention, "eager": eager}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Spy(TorchFunctionMode):
    """What Python calls, another way of hearing: weights of each softmax, and of each kernel by a loop over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, func(*args, **(kwargs or {}))
        if func is nn.functional.scaled_dot_product_attention:
            (q, k, _), mask = args[:3], kwargs.get("attn_mask")
            if kwargs.get("is_causal"):
                mask = torch.ones(q.shape[-2], k.shape[-2]).tril().bool()
            self.weights.append(naive.attention_weights(q, k, mask=mask))
        elif func in (nn.functional.softmax, Tensor.softmax):
            self.weights.append(result)
        return result


def heard(
    module: nn.Module, *inputs: Any, how: Callable[..., Any] = select_operator, **named: Any
) -> tuple[list[AttentionCall], CaptureReport]:
    """The calls of a pass, whose output is the one without anybody listening, bit for bit."""
    calls: list[AttentionCall] = []
    with torch.no_grad():
        alone = module(*inputs, **named)
        with hearing(module, calls.append, operator=how) as report:
            output = module(*inputs, **named)
    for before, after in zip(
        *(value if isinstance(value, tuple) else (value,) for value in (alone, output)), strict=True
    ):
        assert before is after is None or torch.equal(before, after)
    assert report.failures("float32") == []
    return calls, report


@pytest.mark.parametrize("engine", OPERATORS)
@pytest.mark.parametrize("name", MODULES)
def test_weights_are_those_of_a_loop_and_the_output_stays(name: str, engine: str) -> None:
    make, inputs = MODULES[name]
    module = make().eval()
    calls, _ = heard(module, *inputs, how=OPERATORS[engine])
    with torch.no_grad(), Spy() as spy:
        module(*inputs)
    expected = spy.weights[: len(calls)]  # of a language model a softmax over the vocabulary follows
    for heard_call, weights in zip(calls, expected, strict=True):
        torch.testing.assert_close(heard_call.P.dense().flatten(), weights.flatten().float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nanogpt", [("h.0.attn", "decoder", 4), ("h.1.attn", "decoder", 4)]),
        ("nanogpt without flash", [("h.0.attn", "decoder", 4), ("h.1.attn", "decoder", 4)]),
        ("esm", [("", "encoder", 4)]),
        ("diffusion", [("attn1", "encoder", 4), ("attn2", "cross", 4)]),
        ("vit", [("blocks.0.attn", "encoder", 4), ("blocks.1.attn", "encoder", 4)]),
        ("windows", [("attn", "encoder", 4)]),
        ("talking heads", [("", "encoder", 4), ("class_attn", "cross", 4)]),
    ],
)
def test_layers_have_the_paths_of_their_modules(name: str, expected: list[tuple[str, str, int]]) -> None:
    make, inputs = MODULES[name]
    calls, report = heard(make().eval(), *inputs)
    assert [(check.path, check.stack, check.heads) for check in report.calls] == expected
    assert [call.layer for call in calls] == list(range(len(expected)))
    assert report.unheard == {}


def slow_weights(layer: nn.TransformerEncoderLayer, x: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor:
    """The weights that PyTorch's own slow path returns."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        x = layer.norm1(x) if layer.norm_first else x
        how = {"attn_mask": mask, "key_padding_mask": padding, "average_attn_weights": False}
        weights: Tensor = layer.self_attn(x, x, x, **how)[1]
        return weights
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("padding", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["both ways", "causal"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_encoder_of_pytorch_keeps_its_fast_path(
    norm_first: bool, nested: bool, mask: Tensor | None, padding: Tensor | None
) -> None:
    layer = nn.TransformerEncoderLayer(E, HEADS, 64, batch_first=True, dropout=0.0, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x = torch.randn(2, T, E)
    calls, report = heard(encoder, x, mask=mask, src_key_padding_mask=padding)
    assert [(check.path, check.route) for check in report.calls] == [
        ("layers.0.self_attn", "layer"),
        ("layers.1.self_attn", "layer"),
    ]
    assert all(check.value_error is not None and check.value_error < 1e-5 for check in report.calls)
    with torch.no_grad():
        expected = slow_weights(encoder.layers[0], x, mask, padding)
    for text, length in enumerate([T, 6] if padding is not None else [T, T]):
        weights = calls[0].P.dense()[text, :, :length]
        torch.testing.assert_close(weights, expected[text, :, :length], rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tokens_of_padding_that_a_nested_tensor_lacks_have_no_rows() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, HEADS, 2 * E, batch_first=True), 2).eval()
    x_BTE = torch.randn(2, T, E)
    with torch.no_grad(), attnscope.recording(attnscope.wrap(encoder, row=1)) as seen:
        encoder(x_BTE, src_key_padding_mask=PADDED)
    padded, alone = seen.texts[0], attnscope.capture(attnscope.wrap(encoder), x_BTE[1:, :6])
    for layer, expected in alone.weights.items():
        weights = torch.as_tensor(padded.weights[layer])
        torch.testing.assert_close(weights[:, :6, :6], torch.as_tensor(expected), atol=1e-6, rtol=0)
        assert not weights[:, 6:].any()
    np.testing.assert_allclose(*(of.table()["entropy"].to_numpy() for of in (padded, alone)), atol=1e-5)


def test_what_a_layer_is_said_to_compute_is_held_against_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.TransformerEncoderLayer(E, HEADS, 64, batch_first=True, dropout=0.0).eval()
    _, right = heard(module, torch.randn(2, T, E))
    name, broken = "_transformer_encoder_layer_fwd", lambda given, states, heads: states + heads
    monkeypatch.setitem(LAYERS, name, LAYERS[name]._replace(finished=broken))
    with torch.no_grad(), hearing(module, lambda call: None) as wrong:
        module(torch.randn(2, T, E))
    assert right.failures("float32") == []
    assert "P V differs" in wrong.failures("float32")[0]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "masks", [{}, {"key_padding_mask": PADDED}, {"attn_mask": CAUSAL}], ids=["none", "pad", "causal"]
)
@pytest.mark.parametrize("crossing", [False, True], ids=["self", "cross"])
def test_multihead_attention_of_pytorch(masks: dict[str, Tensor], need_weights: bool, crossing: bool) -> None:
    module = nn.MultiheadAttention(E, HEADS, batch_first=True).eval()
    x = torch.randn(2, T, E)
    key = torch.randn(2, T, E) if crossing else x
    calls, report = heard(module, x, key, key, need_weights=need_weights, **masks)
    with torch.no_grad():
        _, expected = module(x, key, key, average_attn_weights=False, **masks)
    torch.testing.assert_close(calls[0].P.dense(), expected, rtol=0, atol=1e-6)
    assert report.calls[0].stack == ("cross" if crossing else "decoder" if "attn_mask" in masks else "encoder")
    assert report.calls[0].route == ("layer" if not crossing else "softmax" if need_weights else "kernel")


def test_texts_second_and_heads_folded_into_the_batch() -> None:
    module = nn.MultiheadAttention(E, HEADS).eval()
    x = torch.randn(T, 3, E)
    calls, _ = heard(module, x, x, x)
    with torch.no_grad():
        expected = module(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(calls[0].P.dense(), expected, rtol=0, atol=1e-6)


def test_attention_over_channels_is_named_and_not_shown() -> None:
    calls, report = heard(any_modules.CrossCovariance().eval(), torch.randn(2, T, E))
    assert calls == []
    assert report.unheard == {"": "attention over channels, not over tokens"}
    with pytest.raises(ModelError, match="heard in xcit; attention over channels, not over tokens: the module itself"):
        check_heard(report, "xcit")


class Slots(nn.Module):
    """Slots compete for places: its softmax is over the queries."""

    def forward(self, x: Tensor) -> Tensor:
        states = x[:, None]
        return ((states @ states.mT).softmax(dim=-2) @ states)[:, 0]


def test_a_softmax_over_another_axis_is_named() -> None:
    net = nn.Sequential(Slots(), any_modules.CausalSelfAttention()).eval()
    calls, report = heard(net, torch.randn(2, T, E))
    assert [call.path for call in calls] == ["1"]
    assert report.unheard == {"0": "a softmax over another axis than that of the keys"}
    seen = attnscope.capture(attnscope.wrap(net), torch.randn(1, T, E))
    assert "a softmax over another axis than that of the keys: 0" in seen.unmeasured


class Softmaxes(nn.Module):
    """Attention by a softmax of its own, then what a case does with the weights (B, H, T, T); the last are kept."""

    def __init__(self, then: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], heads: int = HEADS) -> None:
        super().__init__()
        self.then, self.heads = then, heads
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        states = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        self.weights, output = self.then((states @ states.mT).softmax(-1), states)
        return output


def halved(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    P = P.bfloat16()
    return P.float(), P @ v.bfloat16()


def folded_and_halved(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    half = P.flatten(0, 1).to(torch.bfloat16)
    return half.float().view_as(P), torch.bmm(half, v.flatten(0, 1).bfloat16())


def cloned_and_cut(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    P = P.clone()
    P[..., 0] = 0
    P /= P.sum(-1, keepdim=True)
    return P, P @ v


def kept_beside(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return P.clone(), P @ v


def one_kv_head(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return P, torch.bmm(P.flatten(1, 2), v[:, 0]).unflatten(1, P.shape[1:3])


@pytest.mark.parametrize("then", [halved, folded_and_halved, cloned_and_cut, kept_beside, one_kv_head])
def test_a_copy_of_weights_is_what_the_values_are_multiplied_by(then: Any) -> None:
    net = Softmaxes(then).eval()
    [call], report = heard(net, torch.randn(2, T, E))
    assert call.weights_BHQK is not None
    assert torch.equal(call.weights_BHQK.float(), net.weights)
    assert report.calls[0].value_error is not None
    assert report.unheard == {}


def turned(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return P, P.mT @ v


def with_a_column_more(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    P = torch.cat([P, P[..., :1]], -1).softmax(-1)
    return P, P[..., :-1] @ v


def queries_first(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    P = torch.einsum("bhqk->bqhk", P).log().softmax(-1)
    return P, torch.einsum("bqhk,bhkd->bqhd", P, v)


def queries_first_of_one_kv_head(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    P = P.transpose(1, 2).log().contiguous().softmax(-1)
    return P, torch.bmm(P.flatten(1, 2), v[:, 0])


def linear(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return P, v.softmax(-1) @ (v.softmax(-2).mT @ v)


def folded_and_mixed(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    P = P.flatten(0, 1).log().softmax(-1)
    return P, (P * 0.5) @ v.flatten(0, 1)


def head_by_head(P: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    heads = [P[:, head].log().softmax(-1) for head in range(HEADS)]
    return P, torch.stack([weights @ v[:, head] for head, weights in enumerate(heads)], 1)


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (head_by_head, "that values were not seen to be multiplied by"),
        (turned, "another axis than that of the keys"),
        (with_a_column_more, "over other columns than its tokens"),
        (queries_first, "with their queries before their heads"),
        (queries_first_of_one_kv_head, "with their queries before their heads"),
        (linear, "attention over channels"),
        (folded_and_mixed, "that values were not seen to be multiplied by"),
    ],
)
def test_a_softmax_that_is_no_map_of_queries_and_keys_is_named(then: Any, words: str) -> None:
    _, report = heard(Softmaxes(then).eval(), torch.randn(2, T, E))
    assert words in report.unheard[""]


def test_the_order_of_heads_in_the_batch_is_a_note_with_several_texts() -> None:
    net = attnscope.wrap(Softmaxes(folded_and_halved).eval(), row=1)
    assert "may lie head by head with several texts: the module itself" in str(
        attnscope.capture(net, torch.randn(2, T, E)).facts["notes"]
    )
    net = attnscope.wrap(Softmaxes(folded_and_halved).eval())
    assert "head by head" not in str(attnscope.capture(net, torch.randn(1, T, E)).facts["notes"])


def test_a_module_without_attention_says_what_was_looked_for() -> None:
    calls, report = heard(nn.Sequential(nn.Linear(E, E), nn.Softmax(-1)).eval(), torch.randn(2, T, E))
    assert calls == []
    with pytest.raises(ModelError) as caught:
        check_heard(report, "mlp")
    assert "scaled_dot_product_attention" in str(caught.value.hint)


class Kernel(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, **self.how)


KernelCase = tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...], int]


def kernel_cases() -> Iterator[KernelCase]:
    yield "plain", {}, (2, 4, 6, 8), (2, 4, 6, 8), 8
    yield "scale", {"scale": 0.3}, (2, 4, 6, 8), (2, 4, 6, 8), 8
    yield "causal", {"is_causal": True}, (2, 4, 6, 8), (2, 4, 6, 8), 8
    yield "causal with fewer queries", {"is_causal": True}, (2, 4, 3, 8), (2, 4, 6, 8), 8
    yield "groups", {"enable_gqa": True}, (2, 4, 6, 8), (2, 2, 6, 8), 8
    yield "other values", {}, (2, 4, 6, 8), (2, 4, 6, 8), 5  # which no fused kernel takes
    yield "boolean", {"attn_mask": torch.tensor([[1, 0, 1, 1, 0, 1]]).bool()}, (2, 4, 6, 8), (2, 4, 6, 8), 8
    yield "bias", {"attn_mask": torch.linspace(-2, 2, 144).view(4, 6, 6)}, (2, 4, 6, 8), (2, 4, 6, 8), 8
    yield "one head", {}, (2, 6, 8), (2, 6, 8), 8
    yield "five axes", {}, (2, 3, 4, 6, 8), (2, 3, 4, 6, 8), 8


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("case", [*kernel_cases()], ids=lambda case: case[0])
def test_every_argument_of_the_kernel(case: tuple[Any, ...], mode: Callable[[], Any]) -> None:
    _, how, queries, keys, width = case
    q, k, v = torch.randn(queries), torch.randn(keys), torch.randn(*keys[:-1], width)
    module, calls = Kernel(**how).eval(), list[AttentionCall]()
    with mode():
        alone = module(q, k, v)
        with hearing(module, calls.append) as report:
            assert torch.equal(module(q, k, v), alone)
    mask = how.get("attn_mask")
    if how.get("is_causal"):
        mask = torch.ones(queries[-2], keys[-2]).tril().bool()
    expected = naive.attention_weights(
        *(x if x.ndim > 3 else x[:, None] for x in (q, k)), scale=how.get("scale"), mask=mask
    )
    actual = calls[0].P.dense().reshape(expected.shape)
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=1e-6)
    assert report.failures("float32") == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("flash", [True, False])
def test_other_precisions(flash: bool, dtype: torch.dtype) -> None:
    layer = nn.TransformerEncoderLayer(E, HEADS, 64, batch_first=True, dropout=0.0, norm_first=True, activation="gelu")
    net = nn.Sequential(any_modules.CausalSelfAttention(flash=flash), layer).eval().to(dtype)
    x = torch.randn(1, T, E, dtype=dtype)
    with torch.no_grad():
        alone = net(x)
        with hearing(net, lambda call: None) as report:
            assert torch.equal(net(x), alone)
    assert report.failures(dtype) == []
    assert attnscope.capture(attnscope.wrap(net, parts="1*"), x).failures == []


@pytest.mark.parametrize("norm_first", [False, True])
def test_autocast_rounds_the_fast_path_as_without_anybody_listening(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(E, HEADS, 64, batch_first=True, dropout=0.0, norm_first=norm_first)
    net = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(E, E)).eval()
    x = torch.randn(2, T, E)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        alone = net[0](x)
        with hearing(net, lambda call: None) as report:
            output = net[0](x)
    assert (output.dtype, torch.equal(output, alone)) == (alone.dtype, True)
    assert [check.route for check in report.calls] == ["layer", "layer"]
    assert report.failures("float32") == []


def test_one_text_of_queries_for_several_of_keys() -> None:
    q, k = torch.randn(1, 4, 6, 8), torch.randn(2, 4, 6, 8)
    for mode in (torch.no_grad, torch.inference_mode):
        calls, module = list[AttentionCall](), Kernel().eval()
        with mode(), hearing(module, calls.append):
            module(q, k, k)
        expected = naive.attention_weights(q.expand(2, -1, -1, -1), k)
        torch.testing.assert_close(calls[0].P.dense(), expected.float(), rtol=0, atol=1e-6)


def test_the_kernels_of_other_devices_are_known_by_their_arguments() -> None:
    """Their names are those of PyTorch's operations, which no CPU can run."""
    with hearing(Kernel(), lambda call: None):
        ear = torch.utils._python_dispatch._get_current_dispatch_mode()
        for name in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable"):
            func = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
            assert ear._handler(func) == ear._on_kernel, name
            backward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward").default
            assert ear._handler(backward) is None, name
        assert ear._handler(torch.ops.aten._flash_attention_forward.default) == ear._on_unknown


class Both(nn.Module):
    """A part that is called twice, behind a part that is scripted or traced."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.shared = first, any_modules.CausalSelfAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(self.first(x)))


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(1, 2), -1) @ x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_and_scripted_parts_and_a_part_that_is_called_twice() -> None:
    x = torch.randn(2, T, E)
    for first in (torch.jit.script(Scripted()), torch.jit.trace(any_modules.CausalSelfAttention().eval(), x)):
        _, report = heard(Both(first).eval(), x)
        assert [(check.path, check.layer, check.call) for check in report.calls] == [
            ("first", 0, 0),
            ("shared", 1, 0),
            ("shared", 1, 1),
        ]


@pytest.mark.e2e  # imports the compiler
def test_what_is_compiled_runs_as_its_own_code() -> None:
    module = any_modules.CausalSelfAttention().eval()
    x, compiled = torch.randn(2, T, E), torch.compile(module, backend="eager")
    with torch.no_grad(), hearing(compiled, lambda call: None) as report:
        compiled(x)
    assert [check.path for check in report.calls] == [""]


def test_other_threads_and_what_is_outside_are_not_heard() -> None:
    module, x = any_modules.CausalSelfAttention().eval(), torch.randn(2, T, E)
    with torch.no_grad(), hearing(module, lambda call: None) as report:
        other = threading.Thread(target=module, args=(x,))
        other.start()
        other.join()
        nn.functional.scaled_dot_product_attention(x, x, x)
        any_modules.CausalSelfAttention()(x)
    assert report.calls == []


def test_an_error_of_the_module_leaves_nothing_behind() -> None:
    module, x = any_modules.CausalSelfAttention().eval(), torch.randn(2, T, E)
    calls: list[AttentionCall] = []
    module.c_proj.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError), hearing(module, calls.append):
        module(x)
    module.c_proj._forward_hooks.clear()
    module(x)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "make",
    [
        any_modules.CausalSelfAttention,
        partial(any_modules.CausalSelfAttention, flash=False),
        partial(nn.TransformerEncoderLayer, E, HEADS, 64, batch_first=True, dropout=0.0),
    ],
    ids=["kernel", "softmax", "encoder layer"],
)
def test_a_change_of_the_outputs_is_what_the_module_goes_on_with(make: Callable[[], nn.Module]) -> None:
    module, x = make().eval(), torch.randn(2, T, E)

    def without_head_1(call: AttentionCall) -> Tensor:
        assert call.output_BQHV is not None
        return call.output_BQHV.index_fill(2, torch.tensor([1]), 0.0)

    with torch.no_grad():
        with hearing(module, lambda call: None, change=without_head_1) as report:
            changed = module(x)
        # The same head left out by weights of 0: its columns of the output projection.
        last: Any = module.c_proj if hasattr(module, "c_proj") else module.self_attn.out_proj
        last.weight[:, 8:16] = 0
        expected = module(x)
    torch.testing.assert_close(changed, expected, rtol=0, atol=1e-5)
    assert [check.altered for check in report.calls] == [True]
    assert torch.backends.mha.get_fastpath_enabled()


# Wrapped and captured.


class Characters:
    """A tokenizer of another library."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 50 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + token) for token in ids)


TEXT = "the bank of the river"


@pytest.mark.parametrize("engine", ["auto", "eager", "fused", "tiles"])
@pytest.mark.parametrize("flash", [True, False], ids=["kernel", "softmax"])
def test_a_language_model_of_other_code_is_captured(engine: Any, flash: bool) -> None:
    net = any_modules.NanoGPT(flash=flash).eval()
    seen = attnscope.capture(attnscope.wrap(net, Characters(), "nano"), TEXT, engine=engine)
    with torch.no_grad(), Spy() as spy:
        net(torch.tensor([Characters().encode(TEXT)]))
    for layer in (0, 1):
        torch.testing.assert_close(seen.weights[layer], spy.weights[layer][0].float(), rtol=0, atol=1e-6)
    assert seen.stack == "decoder"
    assert len(seen.heads) == 8
    assert seen.failures == []
    assert seen.facts["model"]["modules"] == {"0": "h.0.attn", "1": "h.1.attn"}
    assert seen.queries.text == Characters().decode(Characters().encode(TEXT))


def test_the_ways_out_of_a_capture(tmp_path: Path) -> None:
    seen = attnscope.capture(attnscope.wrap(any_modules.NanoGPT().eval(), Characters(), "nano"), TEXT, query="last")
    assert seen.table("entropy").num_rows == 8
    assert seen.head("L1H2").strongest is not None
    assert seen.relations().num_rows > 0
    assert seen.heatmap("L1H2").save(tmp_path / "map.png").stat().st_size > 0
    seen.page().save(tmp_path / "page.html")
    written = {path.name for path in seen.export(tmp_path / "out", figures=[])}
    assert {"heads.csv", "manifest.json"} <= written
    assert "nano" in (tmp_path / "page.html").read_text("utf-8")


def test_the_demo_in_a_module_of_other_code_has_its_own_numbers() -> None:
    """The same model once by transformers' interface, once by what its functions ask of PyTorch."""
    demo = attnscope.load("demo")
    by_interface = attnscope.capture(demo, TEXT)

    def feed(text: str) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([by_interface.prompt.ids]), "use_cache": torch.tensor(False)}

    heard = attnscope.capture(attnscope.wrap(demo.model, demo.tokenizer, feed=feed), TEXT)
    assert heard.prompt.labels == by_interface.prompt.labels
    for layer, weights in by_interface.weights.items():
        torch.testing.assert_close(heard.weights[layer.layer], weights, rtol=0, atol=1e-6)
    for name in ("entropy", "focus", "sink"):
        theirs, ours = (np.array([head.score[name] for head in seen.heads]) for seen in (by_interface, heard))
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_patches_of_a_picture_and_the_token_before_them() -> None:
    seen = attnscope.capture(attnscope.wrap(any_modules.Vit().eval()), torch.randn(1, 3, 32, 32), key="img")
    assert seen.stack == "encoder"
    assert seen.queries.labels[:3] == ("0", "img 0,0", "img 0,1")
    assert len(seen.queries) == 17
    assert seen.facts["notes"] == [
        "17 tokens are read as the picture in 4 x 4 patches after 1 other token, by their number"
    ]
    assert "mass" in seen.columns.scores


def test_a_window_is_a_row_of_the_batch() -> None:
    net, x = any_modules.Windows().eval(), torch.randn(1, 8, 8, E)
    calls, _ = heard(net, x)
    for row in (0, 3):
        seen = attnscope.capture(attnscope.wrap(net, row=row), x)
        torch.testing.assert_close(seen.weights[0], calls[0].P.dense()[row], rtol=0, atol=1e-6)
        assert seen.queries.labels[:2] == ("0,0", "0,1")
        assert f"row {row} is shown of a batch of 4" in seen.facts["notes"][-1]
    with pytest.raises(InputError, match="no call of Windows is of row 4"):
        attnscope.capture(attnscope.wrap(net, row=4), x)


def test_cross_attention_has_names_for_both_texts() -> None:
    net, text = any_modules.CrossBlock().eval(), torch.randn(1, 7, 24)
    seen = attnscope.capture(
        attnscope.wrap(net), {"hidden_states": torch.randn(1, 16, E), "encoder_hidden_states": text}
    )
    assert list(seen.stacks) == ["decoder", "cross"]
    assert (len(seen.stacks["cross"].queries), len(seen.stacks["cross"].keys)) == (16, 7)
    assert seen.stacks["cross"].weights[1, "cross"].shape == (HEADS, 16, 7)


def test_a_transformer_of_pytorch_has_three_stacks() -> None:
    net = nn.Transformer(E, HEADS, 2, 2, 64, batch_first=True, dropout=0.0).eval()
    seen = attnscope.capture(attnscope.wrap(net), (torch.randn(1, 9, E), torch.randn(1, 6, E)))
    assert {stack: [key.layer for key in of.kv_of] for stack, of in seen.stacks.items()} == {
        "encoder": [0, 1],
        "decoder": [2, 4],
        "cross": [3, 5],
    }
    assert seen.facts["model"]["modules"]["3"] == "decoder.layers.0.multihead_attn"


def test_layers_over_other_tokens_are_named_and_can_be_chosen() -> None:
    net, x = any_modules.TalkingHeads().eval(), torch.randn(1, T, E)
    seen = attnscope.capture(attnscope.wrap(net), x)
    assert seen.facts["notes"][0] == (
        "1 of 1 calls take a softmax of their own, read as finished weights: the module itself"
    )
    assert "may be mixed of these weights" in seen.facts["notes"][1]
    assert any("not shown, with 1 queries and 10 keys: class_attn" in line for line in seen.unmeasured)
    alone = attnscope.capture(attnscope.wrap(net, parts="class_*"), x)
    assert alone.weights[1].shape == (HEADS, 1, T)


def test_heads_are_selected_as_of_a_model() -> None:
    loaded = attnscope.wrap(any_modules.NanoGPT().eval(), Characters())
    assert [head.name for head in attnscope.capture(loaded, TEXT, select="1.2,0.0").kept_heads()] == ["L0H0", "L1H2"]
    assert {key.layer for key in attnscope.capture(loaded, TEXT, layers=[1]).weights} == {1}
    assert len(attnscope.capture(loaded, [TEXT, "a bank"])) == 2


@pytest.mark.parametrize("value", [torch.arange(9), np.arange(9)[None], list(range(9)), torch.arange(9)[None]])
def test_ids_in_any_form(value: Any) -> None:
    net = any_modules.NanoGPT().eval()
    value = value[None] if isinstance(value, Tensor) and value.ndim == 1 else value
    seen = attnscope.capture(attnscope.wrap(net), value)
    assert seen.queries.labels == tuple(map(str, range(9)))
    assert attnscope.capture(attnscope.wrap(net, Characters()), value).queries.labels[1] == "a"


def failing(text: str) -> None:
    raise ZeroDivisionError("of what")


@pytest.mark.parametrize(
    ("wrapped", "how", "value", "error", "words"),
    [
        ({}, {}, TEXT, UsageError, "has no tokenizer, and this is a text"),
        ({"tokenizer": object()}, {}, TEXT, UsageError, "expected a tokenizer with encode and decode, got object"),
        ({"feed": failing}, {}, TEXT, InputError, "the feed of NanoGPT failed: .*of what"),
        ({"tokenizer": Characters()}, {"generate": 3}, TEXT, UsageError, "generate needs a model of transformers"),
        ({"tokenizer": Characters()}, {"verify": True}, TEXT, UsageError, "verify needs a model of transformers"),
        ({"tokenizer": Characters()}, {"engine": "quick"}, TEXT, UsageError, "there is no engine 'quick'"),
        ({"tokenizer": Characters()}, {"engine": "probe"}, TEXT, UsageError, "a module of other code has none"),
        ({"tokenizer": Characters()}, {"select": "9.9"}, TEXT, UsageError, "9"),
        ({"parts": "none.*"}, {}, torch.arange(4)[None], InputError, "of none\\.\\*"),
        ({}, {}, torch.full((1, 4), 999), attnscope.AttnscopeError, "NanoGPT failed"),
    ],
)
def test_what_is_refused_of_a_module(
    wrapped: dict[str, Any], how: dict[str, Any], value: Any, error: type[Exception], words: str
) -> None:
    loaded = attnscope.wrap(any_modules.NanoGPT().eval(), **wrapped)
    with pytest.raises(error, match=words):
        attnscope.capture(loaded, value, **how)


def test_what_needs_a_model_of_transformers_says_so() -> None:
    loaded: Any = attnscope.wrap(any_modules.NanoGPT().eval(), Characters())
    for study in (attnscope.scan, attnscope.parity):
        with pytest.raises(UsageError, match="NanoGPT is a module of other code"):
            study(loaded)
    view = attnscope.Request(view=attnscope.View(weights="value"), relations=True)
    with pytest.raises(UsageError, match="norms of what keys write need a model of transformers"):
        attnscope.capture(loaded, TEXT, request=view)
    with pytest.raises(UsageError, match="training mode"):
        attnscope.capture(attnscope.wrap(any_modules.NanoGPT(), Characters()), TEXT)
    with pytest.raises(UsageError, match="expected a row of the batch from 0, got -1"):
        attnscope.wrap(any_modules.NanoGPT(), row=-1)


def test_finished_weights_of_all_layers_have_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.observe.any_module.SURELY_FREE", 0)
    monkeypatch.setattr("attnscope.observe.any_module.free_memory", lambda device: 1000)
    with pytest.raises(MemoryLimitError, match="the weights of NanoGPT take over"):
        attnscope.capture(attnscope.wrap(any_modules.NanoGPT(flash=False).eval()), torch.arange(9)[None])


# Cut.


def without(net: nn.Module, layer: int, head: int) -> nn.Module:
    """The same with the columns of one head's output 0 in the projection."""
    net.h[layer].attn.c_proj.weight.data[:, head * 8 : head * 8 + 8] = 0
    return net


@pytest.mark.parametrize("flash", [True, False], ids=["kernel", "softmax"])
def test_heads_that_give_nothing_cost_what_they_cost_without_their_projection(flash: bool) -> None:
    ids = torch.tensor([Characters().encode(TEXT)])
    net = any_modules.NanoGPT(flash=flash).eval()
    wrapped = attnscope.wrap(net, Characters())

    def measure(logits: Tensor) -> Tensor:
        return logits[0, -1].log_softmax(-1)[7]

    cuts = attnscope.knockout(wrapped, TEXT, None, measure=measure, over="heads", how="zero")
    table = cuts.table().to_pydict()
    assert (table["layer"], table["head"]) == ([0] * 4 + [1] * 4, [0, 1, 2, 3] * 2)
    with torch.no_grad():
        assert cuts.intact == pytest.approx(float(measure(net(ids))), abs=1e-6)
        for place, (layer, head) in enumerate(zip(table["layer"], table["head"], strict=True)):
            torch.manual_seed(0)
            other = without(any_modules.NanoGPT(flash=flash).eval(), layer, head)
            other.load_state_dict(net.state_dict())
            expected = float(measure(without(other, layer, head)(ids)))
            assert table["measured"][place] == pytest.approx(expected, abs=1e-5)
            assert table["effect"][place] == pytest.approx(cuts.intact - expected, abs=1e-5)


@pytest.mark.parametrize("how", ["mask", "zero"])
def test_a_key_is_cut_from_a_row_as_by_a_mask_of_the_logits(how: Any) -> None:
    """Against the same block with a key hidden from its last query, or without the product of their weight."""
    x = torch.randn(1, T, E)
    net = any_modules.CausalSelfAttention().eval()

    def measure(output: Tensor) -> Tensor:
        return output[0, -1].sum()

    cuts = attnscope.knockout(attnscope.wrap(net), x, T - 1, 3, measure=measure, how=how)
    with torch.no_grad():
        q, k, v = (part.view(T, HEADS, 8).transpose(0, 1) for part in net.c_attn(x)[0].split(E, 1))
        logits = (q[:, -1:] @ k.mT) / 8**0.5
        weights = logits.softmax(-1)
        if how == "mask":
            logits[..., 3] = -torch.inf
            weights = logits.softmax(-1)
        weights[..., 3] = 0
        expected = net.c_proj((weights @ v).transpose(0, 1).flatten()).sum()
    assert cuts.cuts[0][1] == pytest.approx(float(expected), abs=1e-5)
    assert cuts.line.startswith("CausalSelfAttention: intact ")


def test_the_fast_path_is_cut_too() -> None:
    layer = nn.TransformerEncoderLayer(E, HEADS, 64, batch_first=True, dropout=0.0)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(1, T, E)
    cuts = attnscope.knockout(attnscope.wrap(net), x, None, measure=lambda y: y[0, 0, 0], over="layers", how="zero")
    with torch.no_grad():
        for number, (_, measured) in enumerate(cuts.cuts):
            kept = {name: value.clone() for name, value in net.state_dict().items()}
            net.layers[number].self_attn.out_proj.weight.zero_()
            assert measured == pytest.approx(float(net(x)[0, 0, 0]), abs=1e-5)
            net.load_state_dict(kept)
        assert cuts.intact == pytest.approx(float(net(x)[0, 0, 0]), abs=1e-5)


@pytest.mark.parametrize(
    ("net", "how", "error", "words"),
    [
        (any_modules.NanoGPT, {"measure": None}, UsageError, "give measure, which makes a number of it"),
        (any_modules.NanoGPT, {"answer": "x"}, UsageError, "answer needs a model of transformers"),
        (any_modules.NanoGPT, {"over": "kv"}, UsageError, "over: expected one of none, heads, layers, got 'kv'"),
        (any_modules.NanoGPT, {"measure": lambda logits: logits}, InputError, "the measure of NanoGPT failed"),
        (any_modules.NanoGPT, {"measure": lambda logits: float("nan")}, InputError, "the measure of NanoGPT is nan"),
        (any_modules.NanoGPT, {"select": "7.1"}, UsageError, "7"),
        (any_modules.TalkingHeads, {}, ModelError, "shows no values of its heads"),
    ],
)
def test_cuts_that_are_refused(net: Any, how: dict[str, Any], error: type[Exception], words: str) -> None:
    wrapped: Any = attnscope.wrap(net().eval())
    given = torch.arange(9)[None] if net is any_modules.NanoGPT else torch.randn(1, T, E)
    with pytest.raises(error, match=words):
        attnscope.knockout(wrapped, given, **{"measure": lambda output: output.sum(), **how})


def test_a_module_itself_is_cut_too() -> None:
    net, x = any_modules.CausalSelfAttention().eval(), torch.randn(1, T, E)
    bare, wrapped = (
        attnscope.knockout(of, x, None, measure=torch.sum, over="heads").table() for of in (net, attnscope.wrap(net))
    )
    assert bare.equals(wrapped)


@pytest.mark.parametrize(("name", "value"), [("row", "a"), ("row", 1.0), ("parts", 3), ("parts", [3])])
def test_a_row_and_parts_that_are_none_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"expected {'a row' if name == 'row' else 'parts'}"):
        attnscope.wrap(nn.Linear(2, 2), **{name: value})


def test_a_model_of_transformers_has_answers_and_no_measure() -> None:
    with pytest.raises(UsageError, match="a measure is of a module of any code, and this is a model"):
        attnscope.knockout(attnscope.load("demo"), TEXT, key=0, measure=float)  # type: ignore[call-overload]


# From the shell.

NETS = """
import torch
from helpers.any_modules import NanoGPT, Vit
from test_any_module import Characters

def gpt():
    torch.manual_seed(0)
    return NanoGPT(), Characters()

def vit():
    return Vit(), None, lambda text: torch.full((1, 3, 32, 32), float(len(text)))

def linear():
    return torch.nn.Linear(2, 2), None, lambda text: torch.ones(1, 2)

def number():
    return 3

def broken():
    raise ValueError("no weights here")

def leaving():
    raise SystemExit(0)

demo = __import__("attnscope").load
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shell_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def ask(command: str, function: str, *more: str) -> Result:
    return call(command, TEXT, "--module", f"shell_nets:{function}", "--trust-remote-code", *more)


def test_a_module_from_the_shell(nets: Path) -> None:
    done = ask("heads", "gpt", "--format", "csv", "--sort", "layer").ok()
    torch.manual_seed(0)
    seen = attnscope.capture(attnscope.wrap(any_modules.NanoGPT().eval(), Characters()), TEXT)
    rows = [line.split(",") for line in done.out.decode().splitlines()]
    entropy = rows[0].index("entropy")
    assert [float(row[entropy]) for row in rows[1:]] == pytest.approx([head.score["entropy"] for head in seen.heads])
    assert "gpt  cpu  float32  2 layers x 4 heads (h.0.attn to h.1.attn)  21 tokens" in done.err
    assert "attnscope scan" not in done.err
    assert ask("relations", "vit", "--top-k", "1").ok().out.count(b"img 3,3") > 0


@pytest.mark.e2e
def test_a_page_and_a_run_of_a_module(nets: Path) -> None:
    ask("view", "gpt", "--out", "page.html").ok()
    page = Path("page.html").read_text("utf-8")
    assert "load_module('shell_nets:gpt', trusted=True)" in page
    assert "--module shell_nets:gpt" in page
    assert "--model demo" not in page
    ask("heads", "gpt", "--out", "run", "--figures", "top").ok()
    assert "runs code of its own" in call("heads", "run", "--top", "2").refusal
    again = call("heads", "run", "--top", "2", "--trust-remote-code").ok()
    assert again.out.count(b"\n") == 3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ("--module", "shell_nets:gpt"),
            3,
            "the module shell_nets:gpt runs code of its own; read that code, then pass",
        ),
        (("--module", "shell_nets:gpt", "-m", "demo2"), 2, "--model needs a model, and --module gives a module"),
        (("--module", "shell_nets:gpt", "--quantize", "8bit"), 2, "--quantize needs a model, and --module gives"),
    ],
)
def test_what_is_refused_before_any_code_runs(nets: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = call("heads", TEXT, *arguments)
    assert (done.code, words in done.refusal) == (code, True), done.refusal


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("linear", 3, "no attention was heard in shell_nets:linear; looked for scaled_dot_product_attention"),
        ("number", 3, "expected a module of PyTorch from shell_nets:number, got int; have the function return it"),
        ("broken", 3, "shell_nets:broken cannot be made: no weights here"),
        ("leaving", 3, "shell_nets:leaving cannot be made"),
        ("missing", 3, "shell_nets:missing cannot be made: module 'shell_nets' has no attribute 'missing'"),
        ("gpt:x", 2, "expected PACKAGE.MODULE:FUNCTION, got 'shell_nets:gpt:x'"),
    ],
)
def test_a_function_that_gives_no_module(nets: Path, function: str, code: int, words: str) -> None:
    done = ask("heads", function)
    assert (done.code, words in done.refusal) == (code, True), done.refusal


def test_a_package_that_is_not_there(nets: Path) -> None:
    done = call("heads", TEXT, "--module", "no_such_nets.gpt:make", "--trust-remote-code")
    assert "there is no package no_such_nets for no_such_nets.gpt:make; run this in the folder" in done.refusal
