"""Byte Latent Transformer: its layers over bytes, over patches of bytes, and from the ones to the others, by name."""

import json
from collections import Counter

import pytest
import torch
from transformers.models.blt import modeling_blt

import attnscope
from attnscope.certificate.check import check_parity
from attnscope.errors import ModelError
from attnscope.export.drawing import about
from attnscope.inputs.answers import of_patches
from attnscope.inputs.prompt import from_text
from attnscope.model.geometry import geometry_of
from attnscope.model.loading import wrap
from attnscope.observe.collect import observe
from attnscope.observe.request import Request
from attnscope.steps.traced import explain_head
from attnscope.studies.comparison import check_alike
from helpers.command_line import SENTENCE, call
from helpers.made_tokenizers import single_bytes
from helpers.parity_models import roused_model

EVERY = Request(relations=True, top_k=None, maps="all", weights=True)
OF_BYTES = {"vocab_size": 260}
BYTES = {"patcher_config": OF_BYTES, "encoder_config": OF_BYTES, "decoder_config": OF_BYTES, **OF_BYTES}
THRESHOLD = 5.3336  # nats; of bytes that the patcher finds about equally likely a third are above
PART_OF = {  # by where the module stands
    "model.patcher.layers": "patcher",
    "model.local_encoder.layers": "local",
    "model.local_encoder.cross_attn_layers": "pooling",
    "model.global_transformer.layers": "global",
    "model.local_decoder.cross_attn_layers": "unpooling",
    "model.local_decoder.layers": "decoder",
}


def made(**config):
    model = roused_model("blt", **BYTES, patching_threshold=THRESHOLD, local_attention_window_len=16, **config)
    return wrap(model.eval(), single_bytes(), "blt")


@pytest.fixture(scope="module")
def blt():
    return made()


@pytest.fixture(scope="module")
def seen(blt):
    return attnscope.capture(blt, SENTENCE, request=EVERY)


def own_weights(loaded, text=SENTENCE):
    """{(part, layer): (H, Q, K)}: what transformers' own eager attention gave, in a pass of the model alone."""
    names, found = {module: name for name, module in loaded.model.named_modules()}, {}
    eager = modeling_blt.eager_attention_forward

    def kept(module, *args, **kwargs):
        output, weights = eager(module, *args, **kwargs)
        where, _, layer = names[module].removesuffix(".self_attn").rpartition(".")
        found[PART_OF[where], int(layer)] = weights[0]
        return output, weights

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(modeling_blt, "eager_attention_forward", kept)
        loaded.model(torch.tensor([loaded.tokenizer(text).input_ids]), use_cache=False)
    return found


def patches_of(loaded, text=SENTENCE):
    """The tokens of each patch, as lists, by the lengths that the model's patcher gives."""
    config, ids = loaded.model.config, torch.tensor([loaded.tokenizer(text).input_ids])
    _, lengths, _ = loaded.model.model.patcher(ids, patch_size=config.patch_size, threshold=config.patching_threshold)
    ends = lengths[0].cumsum(0).tolist()
    return [list(range(end - length, end)) for end, length in zip(ends, lengths[0].tolist(), strict=True)]


def test_every_call_is_a_map_with_the_weights_of_the_models_own_attention(blt, seen):
    expected = own_weights(blt)
    assert len(expected) == 21
    found = {(kind, key.layer): weights for kind, one in seen.stacks.items() for key, weights in one.weights.items()}
    assert found.keys() == expected.keys()
    for place, weights_HQK in expected.items():
        torch.testing.assert_close(found[place], weights_HQK, rtol=0, atol=1e-6)
    assert (expected["local", 1] - expected["decoder", 1]).abs().max() > 1e-3
    assert (seen.failures, seen.unmeasured) == ([], [])
    checks = [call for one in seen.stacks.values() for call in one.calls]
    assert len(checks) == 21
    assert all(check.value_error < 1e-5 and check.row_sum_error < 1e-5 for check in checks)


def test_the_axes_say_which_bytes_a_patch_is_of(blt, seen):
    patches, tokens = patches_of(blt), list(seen.queries.tokens)
    assert {1, 2} < {len(one) for one in patches}
    names = [f"patch {one[0]}-{one[-1]}" if len(one) > 1 else f"patch {one[0]}" for one in patches]
    apart = [f"{name} {part}/2" for name in names for part in (1, 2)]
    axes = {kind: [list(one.queries.tokens), list(one.keys.tokens)] for kind, one in seen.stacks.items()}
    assert axes == {
        **{kind: [tokens, tokens] for kind in ("patcher", "local", "decoder")},
        "pooling": [apart, tokens],
        "global": [names, names],
        "unpooling": [tokens, apart],
    }


def test_a_patch_looks_at_its_own_bytes_and_a_byte_at_the_last_whole_patch(blt, seen):
    patches = patches_of(blt)
    pooling, unpooling = (seen.of(kind).weights[0] for kind in ("pooling", "unpooling"))
    for number, of_patch in enumerate(patches):
        for query in (2 * number, 2 * number + 1):
            assert (pooling[:, query] > 0).any(0).nonzero()[:, 0].tolist() == of_patch
    for at in range(len(seen.queries)):
        last = max(number for number, one in enumerate(patches[:-1]) if one[-1] <= at)  # the last makes what follows
        assert (unpooling[:, at] > 0).any(0).nonzero()[:, 0].tolist() == [2 * last, 2 * last + 1]


def test_the_fused_engine_reads_every_map(blt, seen):
    fused = attnscope.capture(blt, SENTENCE, request=EVERY, engine="fused")
    assert fused.stacks.keys() == seen.stacks.keys()
    for kind, one in seen.stacks.items():
        for key, weights in one.weights.items():
            torch.testing.assert_close(fused.of(kind).weights[key], weights, rtol=0, atol=2e-6)
    assert (fused.failures, fused.unmeasured) == ([], [])


def test_metrics_of_tokens_are_null_where_patches_are_looked_at(seen):
    rows = seen.table().to_pylist()
    null = {kind: {n for r in rows if r["stack"] == kind for n, v in r.items() if v is None} for kind in seen.stacks}
    of_text = {"previous_token", "duplicate_token", "induction", "distance", "local_mass_32"}
    assert null["pooling"] >= of_text | {"self"}
    assert null["unpooling"] >= of_text | {"self"}
    assert null["global"] & (of_text | {"self", "entropy"}) == of_text
    for kind in ("patcher", "local", "decoder"):
        assert not null[kind] & (of_text | {"self", "entropy"})


def test_distances_in_the_local_encoder_are_those_of_its_weights(seen):
    [row] = [r for r in seen.table().to_pylist() if (r["stack"], r["layer"], r["head"]) == ("local", 2, 1)]
    weights, total = seen.of("local").weights[2][1].tolist(), 0.0
    for query in range(1, len(weights)):
        total += sum(weight * (query - key) for key, weight in enumerate(weights[query]))
    assert row["distance"] == pytest.approx(total / (len(weights) - 1), rel=1e-4)


def test_what_asks_about_tokens_leaves_out_maps_over_patches(blt):
    asked = attnscope.capture(blt, SENTENCE, query="bank")
    assert list(asked.stacks) == ["patcher", "local", "decoder"]
    alone = attnscope.capture(blt, SENTENCE, select="unpooling.1.2,0.1")
    assert [head.name for head in alone.kept_heads()] == ["unpooling L1H2", "L0H1"]


def test_texts_of_a_batch_have_the_patches_that_they_have_alone(blt):
    prompts = [from_text(blt.tokenizer, text) for text in (SENTENCE, "Mary saw the river bank", "a")]
    for one, prompt in zip(observe(blt, prompts, EVERY), prompts, strict=True):
        expected = own_weights(blt, prompt.text)
        found = {(kind, key.layer): weights for kind, of in one.stacks.items() for key, weights in of.weights.items()}
        assert found.keys() == expected.keys()
        for place, weights_HQK in expected.items():
            torch.testing.assert_close(found[place], weights_HQK, rtol=0, atol=1e-6)


def test_without_a_patcher_every_byte_is_a_patch_and_the_last_is_empty():
    loaded = made(patch_in_forward=False)
    assert "patcher" not in geometry_of(loaded.model.config, count=False).stacks
    found = attnscope.capture(loaded, "river", request=EVERY)
    assert list(found.stacks) == ["local", "pooling", "global", "unpooling", "decoder"]
    assert list(found.of("global").keys.tokens) == [*(f"patch {at}" for at in range(6)), "patch empty"]
    assert (found.failures, found.unmeasured) == ([], [])
    assert found.of("pooling").table().num_rows == 4


def test_names_of_patches_by_hand(blt):
    prompt = from_text(blt.tokenizer, "abc")
    assert of_patches(prompt, [[0], [1, 2, 3], []]).tokens == ("patch 0", "patch 1-3", "patch empty")
    assert of_patches(prompt, [[0, 1]], 3).labels == ("patch 0-1 1/3", "patch 0-1 2/3", "patch 0-1 3/3")


def test_the_oracle_reads_all_but_the_maps_between_bytes_and_patches_in_full(blt):
    report = check_parity(blt, from_text(blt.tokenizer, SENTENCE))
    assert report.holds
    scores = {"pooling", "unpooling"}
    assert report.levels == {kind: "scores" if kind in scores else "full" for kind in PART_OF.values()}
    assert report.too_short == ()


def test_what_counts_layers_by_number_alone_refuses_it(blt):
    text = from_text(blt.tokenizer, "abc")
    for refused in (lambda: explain_head(blt, text, 0, 0), lambda: check_alike(blt, blt)):
        with pytest.raises(ModelError, match="reads bytes and patches of them"):
            refused()


def test_commands_name_the_maps(blt, tmp_path):
    folder = str(tmp_path / "blt")
    blt.model.save_pretrained(folder)
    blt.tokenizer.save_pretrained(folder)
    done = call("heads", "-m", folder, SENTENCE, "-q")
    rows = done.rows
    assert Counter(row["stack"] for row in rows) == dict.fromkeys(PART_OF.values(), 16) | {"pooling": 4}
    listed = call("relations", "-m", folder, SENTENCE, "--select", "unpooling.1.2", "-q")
    pairs = listed.rows
    assert {(row["stack"], row["key_token"].split()[0]) for row in pairs} == {("unpooling", "patch")}
    facts = json.loads(call("info", folder, "--format", "json").out)
    kinds = {(layer["stack"], layer["type"], layer["window"]) for layer in facts["attention_layers"]}
    assert kinds == {
        ("patcher", "sliding", 8),
        ("local", "sliding", 16),
        ("pooling", "patch", None),
        ("global", "full", None),
        ("unpooling", "patch", None),
        ("decoder", "sliding", 16),
    }
    held = call("parity", "-m", folder, SENTENCE).ok()
    assert "unpooling 4 at level scores, decoder 4 at level full" in held.err


@pytest.mark.slow
def test_pictures_of_every_map_are_drawn(blt, tmp_path):
    folder = str(tmp_path / "blt")
    blt.model.save_pretrained(folder)
    blt.tokenizer.save_pretrained(folder)
    call("draw", "-m", folder, "the bank", "--select", "pooling.0.1", "--out", str(tmp_path / "maps"), "-q").ok()
    assert (tmp_path / "maps" / "pooling" / "heads" / "L00H01.png").exists()
    assert all((tmp_path / "maps" / kind / "overview.png").exists() for kind in PART_OF.values())


def test_pictures_say_of_how_many_tokens_or_patches_they_are(blt, seen):
    tokens, patches = len(seen.queries), len(patches_of(blt))
    for kind, one in seen.stacks.items():
        counted = f"{patches} patches" if kind == "global" else f"{tokens} tokens"
        assert about(one).line.endswith(counted)
