"""A decoder whose modelling file comes with it. Saved beside its weights; read by tests/test_their_code.py."""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class TheirConfig(PreTrainedConfig):
    model_type = "theirs"

    def __init__(self, asks=True, vocab_size=2000, hidden_size=32, **rest):
        self.asks, self.vocab_size, self.hidden_size = asks, vocab_size, hidden_size
        self.num_attention_heads, self.num_hidden_layers, self.max_position_embeddings = 4, 3, 128
        super().__init__(**rest)


def eager(module, query, key, value, attention_mask, scaling, **rest):
    logits = query @ key.mT * scaling
    weights = (logits if attention_mask is None else logits + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class TheirAttention(nn.Module):
    """Asks the interface, or computes alone and gives its weights where the whole model is asked for them."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, mask, output_attentions=False):
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attend = eager
        if self.config.asks:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        given, weights = attend(self, q, k, v, mask, scaling=q.shape[-1] ** -0.5)
        return self.out(given.flatten(-2)), weights if self.config.asks or output_attentions else None


class TheirPreTrained(PreTrainedModel):
    config_class = TheirConfig
    _supports_sdpa = True

    def _init_weights(self, module):
        for parameter in module.parameters(recurse=False):
            parameter.data.normal_(std=0.3)


class TheirModel(TheirPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TheirAttention(config, index) for index in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids, use_cache=None, output_attentions=False):
        x, tokens = self.embed(input_ids), input_ids.shape[1]
        mask = torch.full((tokens, tokens), torch.finfo(x.dtype).min).triu(1)[None, None]
        kept = []
        for layer in self.layers:
            given, weights = layer(x, mask, output_attentions)
            x, kept = x + given, [*kept, weights]
        return BaseModelOutput(last_hidden_state=x, attentions=tuple(kept) if output_attentions else None)


class TheirModelForCausalLM(TheirPreTrained):
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = TheirModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed

    def forward(self, input_ids, use_cache=None, output_attentions=False):
        output = self.model(input_ids, output_attentions=output_attentions)
        return CausalLMOutput(logits=self.lm_head(output.last_hidden_state), attentions=output.attentions)
