"""A recording: the forwards of somebody's own code, joined to one map of each text, and the model left as it is.

The joined map is compared with one pass of the same model over the whole text in float64, without a cache.

Shapes: B text, L layer, H head, Q query, K key.
"""

import copy
from collections.abc import Callable
from functools import cache
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import AttentionInterface

import attnscope
from attnscope.api.captured import Capture
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.hooks import forwards
from attnscope.model.loaded import LoadedModel
from attnscope.observe.request import Request
from helpers.families import few, tiny_model
from helpers.parity_models import rouse, roused_model
from helpers.stack_families import tiny as of_stacks

WEIGHTS = Request(weights=True)
PROMPT, NEW, PAD = 14, 8, 3  # tokens of a prompt, new ones, and of padding before the shorter prompt
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3},
    "assistant": {},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "static": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 5},
    "no cache": {"use_cache": False},
}
ALONE = ("assistant", "lookup")  # ways that read one text
FAMILIES = (
    *("llama", "gpt2", "mistral", "gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v3", "lfm2", "jamba"),
    *("falcon_h1", "roberta", "olmo2"),
)
DEFAULT = {
    ("llama", "beams"), ("llama", "no cache"), ("gemma3_text", "assistant"), ("gemma3_text", "static"),
    ("mistral", "chunked"), ("gpt_oss", "lookup"), ("qwen3_next", "sampled"), ("roberta", "plain"),
}  # fmt: skip


@cache
def model_of(family: str) -> Any:
    """A tiny model under its deployed implementation, which never ends a text by itself."""
    model = roused_model(family)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    if getattr(model, "_supports_sdpa", True) and family != "gpt_oss":
        model.set_attn_implementation("sdpa")
    return model


def ids_of(batch: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, 120, (batch, PROMPT), generator=torch.Generator().manual_seed(seed))


def whole_pass(model: Any, ids: torch.Tensor, **inputs: Any) -> Any:
    """What one pass over a whole text gives, in float64 and eager, without a cache."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    if getattr(model.config, "_experts_implementation", None):  # the others take no float64
        model.set_experts_implementation("eager")
    return model(ids[None], output_attentions=True, use_cache=False, **inputs)


def assert_joined(text: Capture, attentions: Any, atol: float = 1e-5) -> None:
    """The maps are those of the pass; the last token has no row."""
    heard = [weights for weights in attentions if weights is not None]
    numbered = heard if len(heard) == len(text.weights) else attentions
    assert len(text.weights) > 0
    for number, (key, weights_HQK) in enumerate(text.weights.items()):
        own_HQK = numbered[number if numbered is heard else key.layer][0]
        count = weights_HQK.shape[1]
        assert count >= PROMPT
        torch.testing.assert_close(weights_HQK.double(), own_HQK[:, :count, :count], atol=atol, rtol=0)


def generated(family: str, way: str) -> tuple[Callable[[], torch.Tensor], int]:
    """A call of the model's `generate`, and how many tokens of padding its first text has."""
    model, how = model_of(family), dict(WAYS[way])
    ids = ids_of(1 if way in ALONE else 2)
    if way == "lookup":
        ids = ids[:, : PROMPT // 2].repeat(1, 2)
    mask, pad = torch.ones_like(ids), 0 if way in ALONE else PAD
    mask[0, :pad] = 0
    if way == "assistant":
        how["assistant_model"] = draft = copy.deepcopy(model)
        rouse(draft.get_output_embeddings(), seed=9)  # some of its drafts are rejected

    def call() -> torch.Tensor:
        torch.manual_seed(0)
        return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **{"do_sample": False} | how)

    return call, pad


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=() if (family, way) in DEFAULT else pytest.mark.families)
        for family in FAMILIES
        for way in WAYS
        if (family, way) != ("jamba", "chunked")  # whose own chunks give other logits than the whole prompt
    ],
)
def test_a_generation_is_one_map_of_each_text(family: str, way: str) -> None:
    call, pad = generated(family, way)
    try:
        plain = call()
    except (ValueError, RuntimeError, AttributeError, TypeError) as error:  # what this family's cache cannot do
        pytest.skip(str(error))
    with attnscope.recording(model_of(family), keep=WEIGHTS) as seen:
        ids = call()
    assert torch.equal(ids, plain)
    for number, text in enumerate(seen.of(ids)):
        own = ids[number, pad * (number == 0) :]
        assert text.prompt.ids == tuple(own[: len(text.prompt)].tolist())
        assert len(text.prompt) >= len(own) - 1
        assert not text.failures
        places = {"position_ids": torch.arange(len(own))[None]} if family == "roberta" else {}  # as `generate` counts
        assert_joined(text, whole_pass(model_of(family), own, **places).attentions)
    assert seen.notes == []


OTHERWISE = {  # a family and its cache, whose forwards are other numbers than one pass over the text
    "gpt_neo": {"cache_implementation": "static"},  # its own mask counts from the end of the cache
    "moshi": {},  # a window in cached steps alone
    "nemotron_h": {},  # cached steps leave out the least time step
    "zamba2": {},
}


@pytest.mark.parametrize("family", few(OTHERWISE, also=["gpt_neo", "moshi"]))
def test_rows_are_those_of_the_forwards_themselves(family: str) -> None:
    """Where cached steps compute something else than one pass: the weights that the model itself returned."""
    model, ids = copy.deepcopy(model_of(family)), ids_of(1)
    if model.config._attn_implementation != "eager":
        model.set_attn_implementation("eager")
    with attnscope.recording(model, keep=WEIGHTS) as seen:
        made = model.generate(
            ids,
            max_new_tokens=NEW,
            do_sample=False,
            output_attentions=True,
            return_dict_in_generate=True,
            **OTHERWISE[family],
        )
    [text] = seen.of(made)
    differences = []
    for step, attentions in enumerate(made.attentions):
        heard = [weights for weights in attentions if weights is not None]
        rows = slice(0, PROMPT) if step == 0 else slice(PROMPT + step - 1, PROMPT + step)
        for weights_HQK, own_BHQK in zip(text.weights.values(), heard, strict=True):
            keys = min(own_BHQK.shape[-1], rows.stop)
            first = rows.stop - keys if own_BHQK.shape[-1] < rows.stop else 0  # a window holds the last keys alone
            differences.append((weights_HQK[:, rows, first : rows.stop] - own_BHQK[0, ..., :keys]).abs().max())
            assert not weights_HQK[:, rows, :first].any()
    assert max(differences) < 1e-6
    whole = whole_pass(model, made.sequences[0])
    heard = [weights for weights in whole.attentions if weights is not None]
    pairs = zip(text.weights.values(), heard, strict=True)
    others = [
        (weights_HQK - own[0, :, : weights_HQK.shape[1], : weights_HQK.shape[1]]).abs().max()
        for weights_HQK, own in pairs
    ]
    assert max(others) > 1e-5


@pytest.mark.parametrize("family", few(["t5", "bart"], also=()))
@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.families), 3])
def test_an_encoder_decoder_is_encoder_decoder_and_cross(family: str, beams: int) -> None:
    model = of_stacks(family)
    rouse(model)
    config = model.generation_config
    config.eos_token_id, config.forced_eos_token_id, config.decoder_start_token_id = None, None, 2
    source, mask = ids_of(2), torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, PROMPT - PAD :] = 0
    how = {"attention_mask": mask, "max_new_tokens": PROMPT, "do_sample": False, "num_beams": beams}
    plain = model.generate(source, **how)
    with attnscope.recording(model, keep=WEIGHTS) as seen:
        ids = model.generate(source, **how)
    assert torch.equal(ids, plain)
    for number, text in enumerate(seen.of(ids)):
        own = source[number, : PROMPT - PAD * number]
        whole = whole_pass(model, own, decoder_input_ids=ids[number : number + 1])
        assert_joined(text, whole.decoder_attentions)
        assert_joined(text.of("encoder"), whole.encoder_attentions) if number == 0 else None
        for key, weights_HQK in text.of("cross").weights.items():
            expected = whole.cross_attentions[key.layer][0][:, : weights_HQK.shape[1]]
            torch.testing.assert_close(weights_HQK.double(), expected, atol=1e-5, rtol=0)


def test_a_join_that_is_off_by_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured on some rows: the joined rows times the values are what the model's own attention gave."""
    call, _ = generated("llama", "plain")
    with attnscope.recording(model_of("llama"), keep=WEIGHTS) as seen:
        ids = call()
    segments = forwards.path(seen._kept.forwards[-1], 0)
    moved = [segment.forward for segment in segments[1:]]
    for forward in moved:
        rows = next(iter(forward.calls.values()))
        rows.spec.k_BGKD = rows.spec.k_BGKD.roll(1, -1)
    with pytest.raises(ModelError, match="cannot be joined: in layer 0"):
        seen.of(ids)


class RoundedLayer(DynamicLayer):
    """A layer of a cache that keeps its keys rounded."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.get_seq_length():
            self.keys = (self.keys * 2).round() / 2
        return super().update(key_states, value_states, *args, **kwargs)


def test_a_cache_that_rounds_its_keys_is_refused_in_words() -> None:
    model = model_of("llama")
    rounding = DynamicCache()
    rounding.layer_class_to_replicate = RoundedLayer
    with attnscope.recording(model, keep=WEIGHTS) as seen:
        ids = model.generate(ids_of(1), past_key_values=rounding, max_new_tokens=4, do_sample=False)
    assert any(isinstance(layer, RoundedLayer) for layer in rounding.layers)
    with pytest.raises(ModelError, match="its cache rounds what it keeps"):
        seen.of(ids)


def test_calls_outside_a_forward_are_counted() -> None:
    model, ids = model_of("llama"), ids_of(1)
    states = torch.zeros(1, PROMPT, model.config.hidden_size)
    turned = model.model.rotary_emb(states, torch.arange(PROMPT)[None])
    with attnscope.recording(model, keep=WEIGHTS) as seen:
        model(ids)
        model.model.layers[0].self_attn(states, position_embeddings=turned, attention_mask=None)
    assert (len(seen.passes), len(seen.notes)) == (1, 1)
    assert "1 attention call outside a forward" in seen.notes[0]


def test_layers_over_summaries_are_left_out() -> None:
    """Of a family whose keys are summaries of tokens what is left is recorded; where nothing is left that is said."""
    model = roused_model("deepseek_v4")
    nothing = "nothing of DeepseekV4ForCausalLM can be joined: decoder layer 0: its keys are summaries"
    with pytest.raises(ModelError, match=nothing), attnscope.recording(model):
        model(ids_of(1))


def test_forwards_of_a_loop_are_a_text_and_its_passes() -> None:
    model, ids = model_of("llama"), ids_of(1)
    with attnscope.recording(model, keep=WEIGHTS) as seen, torch.no_grad():
        first = model(ids[:, :6], use_cache=True)
        model(ids[:, 6:9], past_key_values=first.past_key_values)
        model(ids[:, 9:], past_key_values=first.past_key_values)
        model(ids_of(1, seed=1))
    assert [(of.before, len(of.ids[0])) for of in seen.passes] == [(0, 6), (6, 3), (9, 5), (0, PROMPT)]
    assert [text.prompt.ids for text in seen.texts] == [tuple(ids[0].tolist()), tuple(ids_of(1, seed=1)[0].tolist())]
    assert_joined(seen.texts[0], whole_pass(model, ids[0]).attentions)
    assert seen.texts[0].facts["recorded"] == {"forwards": 3}


def test_the_model_gives_all_that_it_gives_without_a_recording() -> None:
    """Its weights too, where they were asked for, and gradients, under whatever implementation it runs."""
    model, ids = model_of("llama"), ids_of(1)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        asked = {"output_attentions": implementation == "eager", "output_hidden_states": True}
        plain = model(ids, **asked)
        with attnscope.recording(model) as seen:
            recorded = model(ids, **asked)
            assert model.config._attn_implementation == implementation
        assert torch.equal(recorded.logits, plain.logits)
        for own, other in zip(recorded.attentions or (), plain.attentions or (), strict=True):
            assert torch.equal(own, other)
        assert seen.texts[0].facts["attention"] == implementation
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(ids).logits
        with attnscope.recording(model, keep=WEIGHTS) as seen:
            recorded = model(ids).logits
    assert torch.equal(recorded, plain)
    assert not seen.texts[0].failures
    embeddings = model.get_input_embeddings().weight.requires_grad_(True)
    try:
        with attnscope.recording(model):
            model(ids).logits.sum().backward()
        assert embeddings.grad is not None
    finally:
        embeddings.requires_grad_(False).grad = None


def hooks_of(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_what_an_error_ends_is_kept_until_then_and_nothing_stays_hooked() -> None:
    model, ids, before = model_of("llama"), ids_of(1), AttentionInterface.get_interface
    hooks = hooks_of(model)  # transformers leaves some of its own
    seen = attnscope.recording(model, keep=WEIGHTS)

    def run(*texts: torch.Tensor) -> None:
        for text in texts:
            model(text)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), seen:
        run(ids)
    assert [text.prompt.ids for text in seen.texts] == [tuple(ids[0].tolist())]
    seen = attnscope.recording(model, keep=WEIGHTS)
    with pytest.raises(IndexError), seen:
        run(ids, ids + 1000)  # ids that the model has no embedding of
    assert (len(seen.passes), len(seen.notes)) == (1, 1)
    assert "ended with an error" in seen.notes[0]
    assert AttentionInterface.get_interface is before
    assert hooks_of(model) == hooks


def test_recordings_within_each_other_hear_the_same() -> None:
    model, ids = model_of("llama"), ids_of(1)
    with attnscope.recording(model, keep=WEIGHTS) as outer:
        model(ids[:, :8])
        with attnscope.recording(model, keep=WEIGHTS) as inner:
            model(ids)
    assert (len(outer.passes), len(inner.passes)) == (2, 1)
    for key, weights in inner.texts[0].weights.items():
        assert torch.equal(weights, outer.of(ids)[0].weights[key])


def test_a_thread_records_its_own_forwards_and_says_what_others_ran() -> None:
    model, ids = model_of("llama"), ids_of(1)
    theirs: list[Any] = []

    def other() -> None:
        with attnscope.recording(model, keep=WEIGHTS) as seen:
            model(ids)
        theirs.append(seen)

    with attnscope.recording(model, keep=WEIGHTS) as seen:
        model(ids[:, :8])
        thread = Thread(target=other)
        thread.start()
        thread.join()
    assert [len(of.ids[0]) for of in seen.passes] == [8]
    assert [len(of.ids[0]) for of in theirs[0].passes] == [PROMPT]
    assert any("another thread" in note for note in seen.notes)

    def run_there() -> None:
        thread = Thread(target=model, args=(ids,))
        thread.start()
        thread.join()

    with pytest.raises(ModelError, match="ran in another thread"), attnscope.recording(model):
        run_there()


@pytest.mark.e2e
def test_a_compiled_model_is_recorded_uncompiled() -> None:
    model, ids = model_of("llama"), ids_of(1)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(ids)
        with attnscope.recording(compiled, keep=WEIGHTS) as seen:
            recorded = compiled(ids).logits
        assert torch.equal(recorded, model(ids).logits)
    assert_joined(seen.texts[0], whole_pass(model, ids[0]).attentions)


@pytest.mark.e2e
def test_flex_attention_is_read_by_the_rule_of_its_mask() -> None:
    """A window and padding, in blocks: the rule says which keys a query sees."""
    model, ids = copy.deepcopy(model_of("mistral")), ids_of(2)
    model.set_attn_implementation("flex_attention")
    mask = torch.ones_like(ids)
    mask[0, :PAD] = 0
    how = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    with torch.compiler.set_stance("force_eager"):
        plain = model.generate(ids, **how)
        with attnscope.recording(model, keep=WEIGHTS) as seen:
            made = model.generate(ids, **how)
    assert torch.equal(made, plain)
    for number, text in enumerate(seen.of(made)):
        assert_joined(text, whole_pass(model, made[number, PAD * (number == 0) :]).attentions)


def test_nothing_that_was_heard_is_an_error_that_says_what_was_looked_for() -> None:
    nothing = "no forward of LlamaForCausalLM ran; looked for calls of"
    with pytest.raises(ModelError, match=nothing), attnscope.recording(model_of("llama")):
        pass
    model = tiny_model("falcon", attention="sdpa")  # whose own attention returns no weights
    nothing = "nothing was heard of FalconForCausalLM in 1 forward; looked for calls"
    with pytest.raises(ModelError, match=nothing), attnscope.recording(model):
        model(ids_of(1))


def test_what_cannot_be_recorded_is_refused(demo: LoadedModel) -> None:
    with pytest.raises(UsageError, match="expected a model of transformers"):
        attnscope.recording("demo")
    with pytest.raises(UsageError, match="norms and effects of values"):
        attnscope.recording(demo, keep=Request(view=attnscope.View(weights="value")))
    with pytest.raises(UsageError, match="expected a Request, got 'weights'"):
        attnscope.recording(demo, keep="weights")  # type: ignore[arg-type]
    model = copy.deepcopy(model_of("llama")).train()
    with pytest.raises(UsageError, match="training mode"):
        attnscope.recording(model)
    with attnscope.recording(demo) as seen:
        demo.model(ids_of(1))
    with pytest.raises(UsageError, match="was used before"), seen:
        pass
    with pytest.raises(InputError, match="sequence 0: its first 0 of 14 tokens were read"):
        seen.of(ids_of(1, seed=3))
    for none in (None, 3, "abc", [[]], [["a"]], [[1.5]], torch.zeros(1, 2, 2), torch.zeros(1, 3)):
        with pytest.raises(UsageError, match="expected ids"):
            seen.of(none)
    ids = ids_of(1)
    assert len(seen.of([*ids])) == len(seen.of(ids.numpy())) == len(seen.of(ids[0].tolist())) == 1


@pytest.mark.parametrize(("family", "layers"), [("qwen3_next", "0-2"), ("jamba", "0,2")])
def test_linear_layers_of_a_recorded_text_are_named_as_not_measured(family: str, layers: str) -> None:
    model, ids = roused_model(family), torch.arange(6, 14)[None]
    with attnscope.recording(model, keep=WEIGHTS) as seen:
        model(ids)
    [text] = seen.texts
    assert text.unmeasured == [f"linear layers {layers}: a recording is of attention"]
    with pytest.raises(UsageError, match="has no linear layers"):
        attnscope.recording(model, select="linear.0.1" if family == "qwen3_next" else "channels.0")


def test_a_model_without_attention_is_refused_before_it_runs() -> None:
    with pytest.raises(UsageError, match="a recording is of attention"):
        attnscope.recording(roused_model("mamba2"))


def test_a_cache_from_before_the_recording_is_refused() -> None:
    model, ids = model_of("llama"), ids_of(1)
    with torch.no_grad():
        cached = model(ids[:, :6], use_cache=True).past_key_values
        with attnscope.recording(model) as seen:
            model(ids[:, 6:], past_key_values=cached)
    assert [of.before for of in seen.passes] == [6]
    assert "continued a cache from before" in seen.notes[0]
    with pytest.raises(ModelError, match="continued 6 tokens of a cache"):
        _ = seen.texts


def test_rows_of_weights_of_several_texts_are_joined_by_their_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that shows its weights alone: the keys of its cache say which beam a row continues."""
    model, ids = roused_model("bloom"), ids_of(2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    how = {"max_new_tokens": NEW, "num_beams": 3, "do_sample": False}
    with attnscope.recording(model, keep=WEIGHTS) as seen:
        made = model.generate(ids, **how)
    for row, text in zip(made, seen.of(made), strict=True):
        assert_joined(text, whole_pass(model, row).attentions)
    monkeypatch.setattr(forwards._OpenForward, "_keys", lambda self: None)
    with attnscope.recording(model, keep=WEIGHTS) as seen:
        model.generate(ids, **how)
    with pytest.raises(ModelError, match="which recorded forward filled it is not known"):
        _ = seen.texts


def test_a_text_of_a_recording_is_what_capture_gives(demo: LoadedModel) -> None:
    """The tables of one pass over a text that a loop read in three parts."""
    ids = torch.tensor([attnscope.capture(demo, "the financial bank is located on river bank").prompt.ids])
    with attnscope.recording(demo, keep=Request(relations=True), select="1.*") as seen, torch.no_grad():
        cached = demo.model(ids[:, :4], use_cache=True).past_key_values
        demo.model(ids[:, 4:6], past_key_values=cached)
        demo.model(ids[:, 6:], past_key_values=cached)
    [text] = seen.of(ids)
    whole = attnscope.capture(demo, ids[0].tolist(), engine="eager", request=Request(relations=True))
    assert text.prompt.tokens == whole.prompt.tokens
    for own, other in zip(text.heads, whole.heads, strict=True):
        assert own.name == other.name
        assert own.role == other.role
        for name, score in other.score.items():
            assert own.score[name] == pytest.approx(score, abs=1e-5, nan_ok=True)
    assert set(text.kept_keys) == {(1, "decoder")}


def test_a_text_ends_with_its_end_token() -> None:
    """Texts of a batch end where their end token is; what follows it there is padding."""
    model, ids = copy.deepcopy(model_of("llama")), ids_of(2)
    made = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    end = next(int(token) for token in made[0, PROMPT + 2 :] if token not in made[1])
    model.generation_config.eos_token_id = end
    with attnscope.recording(model, keep=WEIGHTS) as seen:
        made = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    first, second = seen.of(made)
    at = made[0].tolist().index(end)
    assert first.prompt.ids == tuple(made[0, : at + 1].tolist())
    assert len(second.prompt) == PROMPT + NEW - 1
    assert_joined(first, whole_pass(model, made[0, : at + 1]).attentions)


class Spoken(nn.Module):
    """A module of other code, which refuses long texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(50, 32), nn.Linear(32, 96)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        if ids_BT.shape[1] > 9:
            raise ValueError("too long")
        q, k, v = self.qkv(self.embed(ids_BT)).view(*ids_BT.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_the_forwards_of_other_code_are_a_text_each() -> None:
    net, ids = Spoken().eval(), [torch.arange(length)[None] for length in (5, 6, 7)]
    plain = [net(of) for of in ids]
    with attnscope.recording(net, keep=WEIGHTS) as seen:
        recorded = [net(of) for of in ids]
        with pytest.raises(ValueError, match="too long"):
            net(torch.arange(12)[None])
        try:
            raise KeyError
        except KeyError:  # a forward while another error is handled has not failed
            net(ids_BT=ids[0])
        other = Thread(target=net, args=(ids[0],))
        other.start()
        other.join()
    assert all(map(torch.equal, plain, recorded))
    assert [len(text.prompt) for text in seen.texts] == [5, 6, 7, 5]
    for text, of in zip(seen.texts, [*ids, ids[0]], strict=True):
        torch.testing.assert_close(text.weights[0], attnscope.capture(attnscope.wrap(net), of).weights[0])
    assert [note.partition(",")[0] for note in seen.notes] == [
        "1 forward: each ended with an error",
        "1 forward: each ran in another thread",
    ]
    assert "4 forwards of Spoken" in repr(seen)


def test_a_fast_path_stays_on_in_a_recording() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    states, padding = torch.randn(2, 10, 32), torch.zeros(2, 10, dtype=torch.bool)
    padding[1, 6:] = True
    with torch.no_grad():
        plain = encoder(states, src_key_padding_mask=padding)
        with attnscope.recording(encoder) as seen:
            assert torch.equal(encoder(states, src_key_padding_mask=padding), plain)
    assert [text.weights[0].shape for text in seen.texts] == [(4, 10, 10)]
    assert {check.kernel for check in seen.texts[0].report.calls} == {"fast path"}


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda net: None, "nothing was recorded: no forward of Identity ran"),
        (lambda net: net(torch.ones(2)), "no attention was heard in Identity"),
    ],
)
def test_other_code_without_attention(run: Callable[[nn.Module], object], words: str) -> None:
    net = nn.Identity().eval()
    with pytest.raises(ModelError, match=words), attnscope.recording(net):
        run(net)


def test_other_code_that_is_interrupted_leaves_nothing_open() -> None:
    class Interrupted(Spoken):
        def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    net = Interrupted().eval()
    with pytest.raises(KeyboardInterrupt), attnscope.recording(net):
        net(torch.arange(5)[None])
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    net.train()
    with pytest.raises(UsageError, match="training mode"):
        attnscope.recording(net)
