"""Modules as their users write them: small, of the forms that libraries and research code have. T token, E width."""

import math

import torch
import torch.nn.functional as F  # noqa: N812, as these modules write it
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend


class CausalSelfAttention(nn.Module):
    """nanoGPT's."""

    def __init__(self, width=32, heads=4, flash=True):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd, self.flash = heads, width, flash

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(torch.ones(T, T).tril() == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, attn, width=32):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), attn, nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A language model: ids to logits; its last softmax, where it is asked for one, is over the vocabulary."""

    def __init__(self, vocabulary=50, width=32, layers=2, flash=True, probabilities=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.h = nn.ModuleList(Block(CausalSelfAttention(width, flash=flash)) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.probabilities = probabilities

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits.softmax(-1) if self.probabilities else logits


class Esm(nn.Module):
    """Protein language models' encoder: heads folded into the batch, weights by bmm, padding hidden by -inf."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.embed = nn.Embedding(33, width, padding_idx=1)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.num_heads, self.scaling = heads, (width // heads) ** -0.5

    def forward(self, tokens):
        x = self.embed(tokens).transpose(0, 1)  # (T, B, E), as fairseq has it
        T, B, E = x.shape
        q, k, v = (
            proj(x).contiguous().view(T, B * self.num_heads, -1).transpose(0, 1)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = torch.bmm(q * self.scaling, k.transpose(1, 2)).view(B, self.num_heads, T, T)
        weights = weights.masked_fill(tokens.eq(1)[:, None, None], float("-inf")).view(-1, T, T)
        weights = F.softmax(weights, dim=-1)
        return self.out_proj(torch.bmm(weights, v).transpose(0, 1).contiguous().view(T, B, E))


class CrossBlock(nn.Module):
    """A diffusion model's block: self-attention over a picture's places, cross-attention to a text of another width."""

    class Attention(nn.Module):
        def __init__(self, width, context, heads):
            super().__init__()
            self.heads = heads
            self.to_q = nn.Linear(width, width, bias=False)
            self.to_k, self.to_v = (nn.Linear(context, width, bias=False) for _ in range(2))
            self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Dropout(0.0)])

        def forward(self, hidden_states, encoder_hidden_states=None):
            states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
            B = len(hidden_states)
            q, k, v = (
                part.view(B, -1, self.heads, part.shape[-1] // self.heads).transpose(1, 2)
                for part in (self.to_q(hidden_states), self.to_k(states), self.to_v(states))
            )
            out = attend(q, k, v).transpose(1, 2).reshape(B, hidden_states.shape[1], -1)
            return self.to_out[1](self.to_out[0](out))

    def __init__(self, width=32, context=24, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn1, self.attn2 = self.Attention(width, width, heads), self.Attention(width, context, heads)

    def forward(self, hidden_states, encoder_hidden_states):
        hidden_states = hidden_states + self.attn1(self.norm1(hidden_states))
        return hidden_states + self.attn2(self.norm2(hidden_states), encoder_hidden_states)


class Vit(nn.Module):
    """timm's ViT: a picture in patches, a class token before them, one product for q, k and v."""

    class Attention(nn.Module):
        def __init__(self, dim=32, num_heads=4):
            super().__init__()
            self.num_heads, self.head_dim = num_heads, dim // num_heads
            self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

        def forward(self, x):
            B, N, C = x.shape
            qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))

    def __init__(self, depth=2, dim=32, patch=8):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.blocks = nn.Sequential(*[Block(self.Attention(dim)) for _ in range(depth)])

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        return self.blocks(torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1))[:, 0]


class Windows(nn.Module):
    """timm's Swin and MaxViT: windows folded into the batch, a bias of places added to the logits."""

    def __init__(self, dim=32, num_heads=4, window=4):
        super().__init__()
        self.window, self.attn = window, self.WindowAttention(dim, num_heads, window * window)

    class WindowAttention(nn.Module):
        def __init__(self, dim, num_heads, tokens):
            super().__init__()
            self.num_heads, self.bias = num_heads, nn.Parameter(torch.randn(num_heads, tokens, tokens))
            self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

        def forward(self, x):
            B, N, C = x.shape
            q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.unsqueeze(0))
            return self.proj(x.transpose(1, 2).reshape(B, N, C))

    def forward(self, x):
        B, H, W, C = x.shape
        size = self.window
        x = x.view(B, H // size, size, W // size, size, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, C)
        x = self.attn(x).view(B, H // size, W // size, size, size, C)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)


class TalkingHeads(nn.Module):
    """timm's CaiT: logits and weights are mixed over heads; then a class token attends to all."""

    class ClassAttention(nn.Module):
        def __init__(self, dim, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))

        def forward(self, x):
            B, N, C = x.shape
            q = self.q(x[:, 0]).unsqueeze(1).reshape(B, 1, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
            k, v = (
                part(x).reshape(B, N, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
                for part in (self.k, self.v)
            )
            x_cls = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, 1, C)
            return self.proj(x_cls)

    def __init__(self, dim=32, num_heads=4):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.proj_l, self.proj_w = nn.Linear(num_heads, num_heads), nn.Linear(num_heads, num_heads)
        self.class_attn = self.ClassAttention(dim, num_heads)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = self.proj_l(((q * self.scale) @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        attn = self.proj_w(attn.softmax(dim=-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.class_attn(x + self.proj((attn @ v).transpose(1, 2).reshape(B, N, C)))


class CrossCovariance(nn.Module):
    """timm's XCiT: attention over the channels of a head."""

    def __init__(self, dim=32, num_heads=4):
        super().__init__()
        self.num_heads, self.temperature = num_heads, nn.Parameter(torch.ones(num_heads, 1, 1))
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 4, 1).unbind(0)
        attn = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)) * self.temperature
        return self.proj((attn.softmax(dim=-1) @ v).permute(0, 3, 1, 2).reshape(B, N, C))
