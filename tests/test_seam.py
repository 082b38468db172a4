"""The seam: what is heard is exactly what the model computed, and the model is left as it was found.

Shapes: B text, H head, Q query, K key, T token.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import FunctionType

import accelerate
import pytest
import torch
from torch.testing import assert_close
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama import modeling_llama

from attnscope.api.capture import capture
from attnscope.attention.questions import Distance, Entropy, Features, Received
from attnscope.errors import ForwardError, ModelError, UsageError
from attnscope.hooks.engines import ENGINES, Engine, engine_named
from attnscope.hooks.listen import listen, listening, uncompiled
from helpers.compiling import compiling  # noqa: F401
from helpers.dispatched import thread_count
from helpers.families import tiny_model

FAMILIES = [
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_neox",
    "olmo2",
    "gpt_oss",
]
HOOKED = ["gpt_neo", "gptj", "codegen", "bloom", "falcon", "mpt", "xglm"]
TOKENS = 24  # longer than the tiny windows of 8
EAGER, TILES, LISTENING = ENGINES["eager"], ENGINES["tiles"], engine_named("tiles", listen=True)


def in_words(engine: Engine | None) -> str:
    return f"{engine.name}, output {engine.output}" if engine else "no engine"


def some_ids(seed: int = 0, texts: int = 1) -> torch.Tensor:
    return torch.randint(6, 128, (texts, TOKENS), generator=torch.Generator().manual_seed(seed))


def heard_weights(model: torch.nn.Module, ids_BT: torch.Tensor) -> list[torch.Tensor]:
    heard: list[torch.Tensor] = []
    listen(model, ids_BT, lambda call: heard.append(call.weights_BHQK.clone()))
    return heard


@pytest.mark.parametrize("family", FAMILIES + HOOKED)
def test_weights_are_bit_equal_to_output_attentions(family: str) -> None:
    model, ids_BT = tiny_model(family), some_ids()
    expected = model(ids_BT, output_attentions=True).attentions
    heard = heard_weights(model, ids_BT)
    assert len(heard) == len(expected) > 0
    for ours, theirs in zip(heard, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_holds_against_itself(family: str) -> None:
    report = listen(tiny_model(family), some_ids(), lambda call: None)
    assert [check.failures(torch.float32) for check in report.calls] == [[]] * len(report.calls)
    assert all(check.value_error is not None for check in report.calls)
    assert all((check.row_sum_error is None) == (family == "gpt_oss") for check in report.calls)


def test_the_checks_can_fail() -> None:
    report = listen(tiny_model("llama"), some_ids(), lambda call: None)
    check = report.calls[0]
    for name, wrong in (("row_sum_error", 0.1), ("masked_weight", 0.1), ("value_error", float("nan"))):
        good = getattr(check, name)
        setattr(check, name, wrong)
        assert len(check.failures(torch.float32)) == 1
        setattr(check, name, good)


def test_logits_are_recomputed_as_the_model_made_them() -> None:
    """Scores softmaxed again are the weights: scale, cap, bias and mask are the family's own."""
    for family in FAMILIES:
        if family == "gpt_oss":
            continue  # the sink takes a share that the softmax over keys alone does not know

        def hear(call) -> None:
            assert_close(call.spec.logits(0, TOKENS).softmax(-1), call.weights_BHQK, atol=2e-6, rtol=0)

        listen(tiny_model(family), some_ids(), hear)


def test_sink_logits_take_their_share() -> None:
    model = tiny_model("gpt_oss")

    def hear(call) -> None:
        logits = call.spec.logits(0, TOKENS)
        sink = call.module.sinks[None, :, None, None].expand(1, -1, TOKENS, 1)
        expected = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        assert_close(call.weights_BHQK, expected, atol=2e-6, rtol=0)
        assert (call.P.row_sum() < 0.999).all()

    listen(model, some_ids(), hear)


def test_only_one_matrix_is_alive_at_a_time() -> None:
    alive: list[weakref.ref] = []
    counts = []

    def hear(call) -> None:
        counts.append(sum(1 for matrix in alive if matrix() is not None))
        alive.append(weakref.ref(call.weights_BHQK))

    listen(tiny_model("llama"), some_ids(), hear)
    assert counts == [0, 0, 0, 0]


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_the_model_is_left_as_it_was_found_even_when_the_forward_raises(family: str) -> None:
    model, original = tiny_model(family), AttentionInterface.get_interface
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}

    def hear(call) -> None:
        raise RuntimeError("in the middle of a layer")

    with pytest.raises(RuntimeError, match="in the middle"):
        listen(model, some_ids(), hear)
    assert AttentionInterface.get_interface is original
    for name, module in model.named_modules():
        assert not module._forward_hooks
        assert module.__dict__.keys() == before[name].keys()
    expected = model(some_ids(), output_attentions=True).attentions
    assert torch.equal(heard_weights(model, some_ids())[0], expected[0])


def test_two_models_in_two_threads_do_not_disturb_each_other() -> None:
    models = [tiny_model("llama", seed=1), tiny_model("llama", seed=2)]
    expected = [heard_weights(model, some_ids()) for model in models]
    run_pairs(models, expected, pairs=40)
    assert not torch.equal(expected[0][0], expected[1][0])


def test_a_second_capture_of_one_model_waits() -> None:
    model = tiny_model("llama")
    expected = heard_weights(model, some_ids())
    run_pairs([model, model], [expected, expected], pairs=40)
    inside = threading.Semaphore(1)

    def hear(call) -> None:
        if call.layer == 0:
            overlaps.append(not inside.acquire(blocking=False))
        if call.layer == 3:
            inside.release()

    overlaps: list[bool] = []
    threads = [threading.Thread(target=lambda: [listen(model, some_ids(), hear) for _ in range(10)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [False] * 20


def run_pairs(models: list, expected: list, pairs: int) -> None:
    """Capture in two threads at once, again and again; each must hear its own model, and nothing must leak."""
    original, start = AttentionInterface.get_interface, threading.Barrier(2)
    wrong: list[str] = []

    def work(index: int) -> None:
        for _ in range(pairs):
            start.wait()
            heard = heard_weights(models[index], some_ids())
            if len(heard) != 4 or not all(map(torch.equal, heard, expected[index])):
                wrong.append(f"thread {index}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert AttentionInterface.get_interface is original


def test_other_models_of_the_same_thread_pass_through() -> None:
    watched, other = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    heard: list[int] = []
    with listening(watched, lambda call: heard.append(call.layer)):
        attentions = other(some_ids(), output_attentions=True).attentions
        watched(some_ids())
    assert heard == [0, 1, 2, 3]
    assert all(matrix is not None for matrix in attentions)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("how", ["whole", pytest.param("in place", marks=pytest.mark.e2e), "layers"])
def test_a_compiled_model_is_read_whole(how: str) -> None:
    model, ids_BT = tiny_model("llama", num_hidden_layers=1), some_ids()
    expected = heard_weights(model, ids_BT)
    compiled = torch.compile(model, backend="eager") if how == "whole" else model
    if how == "in place":
        model.compile(backend="eager")
    if how == "layers":
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = torch.compile(layer, backend="eager")
    compiled(ids_BT)  # compiled before the capture opens
    heard = heard_weights(compiled, ids_BT)
    assert len(heard) == 1
    assert all(map(torch.equal, heard, expected))


@pytest.mark.usefixtures("compiling")
def test_two_captures_that_overlap_leave_compiling_on() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(1)
        return graph.forward

    first, second = uncompiled(), uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert not compiled, "the second has not ended"
    second.__exit__(None, None, None)
    torch.compile(lambda x: x + 2, backend=backend)(torch.ones(1))
    assert compiled


def test_what_a_module_returns_is_heard_before_a_hook_of_the_caller_changes_it() -> None:
    class SelfAttention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, torch.eye(3).repeat(1, 2, 1, 1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([SelfAttention()])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.layers[0](ids.float())[0]

    model = Model().eval()
    model.layers[0].register_forward_hook(lambda module, args, output: (output[0], None))
    report = listen(model, torch.zeros(1, 3, dtype=torch.long), lambda call: None)
    assert len(report.calls) == 1


def test_no_logits_are_computed() -> None:
    model, projected = tiny_model("llama"), []
    handle = model.lm_head.register_forward_hook(lambda *_: projected.append(1))
    listen(model, some_ids(), lambda call: None)
    handle.remove()
    assert projected == []


@pytest.mark.parametrize("engine", [None, EAGER, TILES, LISTENING], ids=in_words)
def test_every_pass_gives_back_what_the_model_s_backbone_returns(engine) -> None:
    model = tiny_model("llama", attention="sdpa")
    expected = model.model(some_ids(), use_cache=False).last_hidden_state
    for _ in range(2):
        report = listen(model, some_ids(), lambda call: None, engine=engine)
        assert len(report.calls) == model.config.num_hidden_layers
        assert_close(report.output.last_hidden_state, expected, atol=1e-5, rtol=1e-5)
        assert report.attention == (engine.implementation if engine else "sdpa")
        assert model.config._attn_implementation == "sdpa"  # as it was


@pytest.mark.parametrize("engine", [EAGER, TILES, LISTENING], ids=in_words)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_engine_that_switches_a_head_off_equals_a_model_without_it(family: str, engine) -> None:
    model, without = tiny_model(family), tiny_model(family)
    width = model.config.hidden_size // model.config.num_attention_heads
    off = slice(2 * width, 3 * width)  # head 2 of layer 1, where the output projection reads it
    if family == "llama":
        without.model.layers[1].self_attn.o_proj.weight[:, off] = 0
    else:
        without.transformer.h[1].attn.c_proj.weight[off] = 0
    expected = without.base_model(some_ids(), use_cache=False).last_hidden_state

    def change(place, output_BQHV):
        return output_BQHV.index_fill(2, torch.tensor([2]), 0.0) if place.layer == 1 else output_BQHV

    report = listen(model, some_ids(), lambda call: None, engine=replace(engine, change=change))
    assert_close(report.output.last_hidden_state, expected, atol=1e-5, rtol=1e-5)
    assert [check.altered for check in report.calls] == [False, True, False, False]
    intact = listen(model, some_ids(), lambda call: None, engine=engine)
    assert (intact.output.last_hidden_state - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", [*FAMILIES, "bloom", "ctrl"])
def test_the_models_own_logits_are_given_where_they_are_asked_for(family):
    model, ids = tiny_model(family), some_ids()
    with torch.no_grad():
        expected = model(ids).logits[:, [3, -1]]
    heard = []
    report = listen(model, ids, heard.append, engine=EAGER, logits_at=[3, -1])
    assert_close(report.logits, expected)
    assert len(heard) == len(report.calls) > 0
    assert listen(model, ids, lambda call: None).logits is None


@pytest.mark.parametrize("engine", [None, EAGER, TILES, LISTENING], ids=in_words)
def test_logits_follow_what_is_altered(engine):
    """A head of the last layer is silenced; the output projection's bias, if any, stays."""
    model, ids = tiny_model("gpt2"), some_ids()

    def silence(place, output):
        return output.index_fill(2, torch.tensor([1]), 0.0) if place.layer == 1 else output

    report = listen(model, ids, lambda call: None, engine=replace(engine or EAGER, change=silence), logits_at=[-1])
    projection, width = model.transformer.h[1].attn.c_proj, model.config.n_embd // model.config.n_head

    def without_head(module, inputs):
        cut = inputs[0].clone()
        cut[..., width : 2 * width] = 0
        return (cut,)

    handle = projection.register_forward_pre_hook(without_head)
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
        handle.remove()
        intact = model(ids).logits[:, -1:]
    assert_close(report.logits, expected, atol=1e-5, rtol=1e-5)
    assert (expected - intact).abs().max() > 1e-3


class Press:
    """As tools that change attention do it: a method of theirs is the hook."""

    def forward_hook(self, module: torch.nn.Module, args: object, output: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'layers'")

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        self.forward_hook(module, args, None)


HOOKS: dict[str, tuple[Callable[[torch.nn.Module], RemovableHandle], str]] = {
    "method": (lambda model: model.layers[1].self_attn.register_forward_hook(Press().forward_hook), "forward_hook"),
    "partial": (
        lambda model: model.layers[1].mlp.register_forward_hook(partial(Press.forward_hook, Press())),
        "forward_hook",
    ),
    "before the whole backbone": (lambda model: model.register_forward_pre_hook(Press()), "__call__"),
}


@pytest.mark.parametrize("how", HOOKS)
def test_a_hook_that_fails_is_named_and_nothing_else_is_blamed_on_one(how: str) -> None:
    model, (leave, name) = tiny_model("llama"), HOOKS[how]
    handle = leave(model.model)
    with pytest.raises(ForwardError, match=r"forward pass of llama: 'NoneType'.*; read the model without") as caught:
        listen(model, some_ids(), lambda call: None)
    assert f"a hook of {__name__} (Press.{name}) failed" in str(caught.value)
    handle.remove()
    model.model.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ForwardError, match=r"the forward pass of llama failed: .*; check its config"):
        listen(model, some_ids() + 10**6, lambda call: None)
    with pytest.raises(ZeroDivisionError):
        listen(model, some_ids(), lambda call: 1 // 0)


def test_a_kernel_of_another_package_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(*args: object) -> None:
        raise RuntimeError("0 active drivers")

    place = {**globals(), "__name__": "others_kernels.rotary"}
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", FunctionType(kernel.__code__, place))
    expected = "pass of llama failed in others_kernels: 0 active drivers; read it where others_kernels is not installed"
    with pytest.raises(ForwardError, match=expected):
        listen(tiny_model("llama"), some_ids(), lambda call: None)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", FunctionType(kernel.__code__, {"__name__": "json"}))
    with pytest.raises(ForwardError, match=r"pass of llama failed: .*; check its config"):
        listen(tiny_model("llama"), some_ids(), lambda call: None)


def test_logits_of_a_position_that_is_not_there():
    with pytest.raises(UsageError, match="token 99"):
        listen(tiny_model("gpt2"), some_ids(), lambda call: None, logits_at=[0, 99])


def test_a_family_outside_the_interface_refuses_to_be_changed() -> None:
    engine = replace(EAGER, change=lambda place, output: output)
    with pytest.raises(ModelError, match="where its output cannot be changed"):
        listen(tiny_model("bloom"), some_ids(), lambda call: None, engine=engine)


def test_an_output_of_another_shape_is_refused() -> None:
    engine = replace(EAGER, change=lambda place, output: output[..., :1])
    with pytest.raises(ModelError, match=r"expected an output of shape .*, got "):
        listen(tiny_model("llama"), some_ids(), lambda call: None, engine=engine)


def test_a_layer_that_is_not_heard_is_named() -> None:
    with pytest.raises(ModelError, match="layers 4, 5"):
        listen(tiny_model("llama"), some_ids(), lambda call: None, expected_layers=(0, 1, 2, 3, 4, 5))


def test_training_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="eval"):
        listen(tiny_model("llama").train(), some_ids(), lambda call: None)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "bloom", "gpt_neo"])
def test_visible_keys_are_those_that_get_weight(family: str) -> None:
    """Windows and causality, counted from the mask: a key is visible exactly where a tiny random model looks."""
    from attnscope.model.geometry import geometry_of

    model = tiny_model(family)
    windows = {layer.index: layer.window for layer in geometry_of(model.config).layers}

    def hear(call) -> None:
        visible = call.visible.rows(0, TOKENS).expand_as(call.weights_BHQK)
        assert torch.equal(call.weights_BHQK > 0, visible)
        assert torch.equal(call.visible.counts_BHQ[0, 0], visible[0, 0].sum(-1))

    listen(model, some_ids(), hear, windows=windows)


MODES = {
    "plain": nullcontext,
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.families), 3])  # a mode is of one thread
@pytest.mark.parametrize(
    ("family", "engine", "mode"),
    [
        pytest.param(family, engine, mode, marks=[] if mode in default else pytest.mark.families)
        for family, engine, default in (
            ("llama", EAGER, MODES),
            ("llama", TILES, ("grad", "inference_mode", "autocast")),
            ("llama", LISTENING, ("inference_mode", "autocast")),
            ("bloom", EAGER, ("inference_mode", "autocast")),
        )
        for mode in MODES
    ],
    ids=lambda value: value if isinstance(value, str) else in_words(value),
)
def test_the_callers_mode_changes_no_answer(threads: int, family: str, engine, mode: str) -> None:
    """Autocast rounds what the model computes, and not what is answered of it."""
    features = torch.randn(TOKENS, 3, generator=torch.Generator().manual_seed(0))

    def hear(call) -> None:
        answers = call.P.together([Entropy(), Features(features), Distance(), Received(torch.ones(1, TOKENS))])
        rows = call.P.dense().double()
        entropy = torch.special.entr(rows / rows.sum(-1, keepdim=True)).sum(-1)
        assert_close(answers[Entropy()].double(), entropy, atol=1e-5, rtol=0)
        assert_close(answers[Features(features)].double(), rows @ features.double(), atol=1e-5, rtol=0)
        assert {answer.dtype for answer in answers.values()} == {torch.float32}
        heard.append(rows)

    heard: list[torch.Tensor] = []
    model = tiny_model(family)
    listen(model, some_ids(), hear, engine=engine)
    expected, heard = heard, []
    with thread_count(threads), MODES[mode]():
        report = listen(model, some_ids(), hear, engine=engine)
    assert_close(heard, expected, atol=0.05 if mode == "autocast" else 1e-6, rtol=0)
    assert [line for check in report.calls for line in check.failures(torch.float32)] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_capture_under_the_callers_mode(mode: str, engine: str, demo) -> None:
    expected = capture(demo, "the financial bank is located on river bank", engine=engine)
    with MODES[mode]():
        seen = capture(demo, "the financial bank is located on river bank", engine=engine)
    assert seen.failures == []
    allowed = 0.05 if mode == "autocast" else 1e-5
    for layer, weights_HQK in expected.weights.items():
        assert_close(seen.weights[layer], weights_HQK, atol=allowed, rtol=0)


def test_right_padding_leaves_the_real_rows_alone() -> None:
    model, ids_BT = tiny_model("llama"), some_ids()
    alone = heard_weights(model, ids_BT[:, :10])
    padded = heard_weights(model, torch.cat([ids_BT[:, :10], ids_BT[:, :1].expand(1, 6)], 1))
    for short, long in zip(alone, padded, strict=True):
        assert_close(long[:, :, :10, :10], short, atol=1e-6, rtol=0)


def test_a_pass_whose_output_nobody_wants_ends_with_its_last_call() -> None:
    """Once a whole pass has shown which that is; what the calls say is the same."""
    model, ids_BT = tiny_model("llama"), some_ids()
    ran: list[int] = []
    handles = [layer.mlp.register_forward_hook(lambda *_: ran.append(1)) for layer in model.model.layers]
    heard: list[list[torch.Tensor]] = []
    for calls_alone in (False, True, True, False):
        weights: list[torch.Tensor] = []
        layers = tuple(range(len(model.model.layers)))
        keep = weights.append
        report = listen(
            model, ids_BT, lambda call, keep=keep: keep(call.P.dense()), expected_layers=layers, calls_alone=calls_alone
        )
        heard.append([*weights, torch.tensor(len(ran))])
        assert report.layers == list(layers)
        assert (report.output is None) == (len(heard) == 3)
        ran.clear()
    for handle in handles:
        handle.remove()
    whole = len(heard[0]) - 1
    assert [int(found[-1]) for found in heard] == [whole, whole, whole - 1, whole]
    for found in heard[1:]:
        assert_close(found[:-1], heard[0][:-1], atol=0, rtol=0)


@pytest.mark.parametrize("family", ["diffllama", "llama"])
def test_a_pass_goes_on_where_layers_call_more_than_once_or_hooks_wait(family: str) -> None:
    model, ids_BT = tiny_model(family), some_ids()
    if family == "llama":
        model.model.norm._hf_hook = object()  # as accelerate leaves them, to move weights when a forward ends
    twice = [0, 0] if family == "diffllama" else []
    for _ in range(2):
        calls: list[int] = []
        report = listen(model, ids_BT, lambda call, calls=calls: calls.append(call.layer), calls_alone=True)
        assert report.output is not None
        assert calls[:2] == (twice or calls[:2])


@pytest.mark.parametrize("engine", [None, EAGER])
def test_hooks_of_the_whole_model_run_though_its_backbone_alone_is_read(engine: Engine | None) -> None:
    """Such as those that unpack weights, or bring them to a device, at the first call of the whole."""
    model, ids_BT, ran = tiny_model("llama"), some_ids(), list[str]()
    plain = heard_weights(model, ids_BT)

    def other_ids(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ran.append("before")
        return (args[0].flip(-1), *args[1:])

    model.register_forward_pre_hook(other_ids)
    model.register_forward_hook(lambda *_: ran.append("after"))
    expected = model(ids_BT, output_attentions=True).attentions
    for calls_alone in (False, True, True):
        heard: list[torch.Tensor] = []
        ran.clear()
        report = listen(
            model,
            ids_BT,
            lambda call, heard=heard: heard.append(call.P.dense()),
            engine=engine,
            calls_alone=calls_alone,
        )
        assert_close(heard, list(expected), atol=0, rtol=0)
        assert ran == ["before", "after"]
        assert report.output.last_hidden_state.shape == (1, TOKENS, model.config.hidden_size)
    assert not torch.equal(heard[0], plain[0])
    assert not model.model._forward_hooks


def test_a_hook_of_accelerate_that_brings_the_whole_model_runs() -> None:
    """One that keeps the weights elsewhere; one that carries inputs alone need not, and no logits are made for it."""
    model, ids_BT = tiny_model("llama"), some_ids()
    expected = model(ids_BT, output_attentions=True).attentions
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.AlignDevicesHook(io_same_device=True))
    heads: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: heads.append(1))
    assert_close(heard_weights(model, ids_BT), list(expected), atol=0, rtol=0)
    assert not heads
    accelerate.hooks.remove_hook_from_module(model)
    away = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hook = accelerate.hooks.AlignDevicesHook("cpu", offload=True, weights_map=away, place_submodules=True)
    accelerate.hooks.add_hook_to_module(model, hook)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_close(heard_weights(model, ids_BT), list(expected), atol=0, rtol=0)
