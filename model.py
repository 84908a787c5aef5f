"""The GPT that every script trains or runs, its key-value cache, and the log-probabilities of tokens.

GPT-2's shape with pre-norm blocks, learned positions, GELU, tied embeddings and no biases (Radford et al. 2019). The
default size has 5.8 million parameters. Differences from GPT-2: no bias anywhere, and the vocabulary is our own
4,096 tokens.

Padding always comes after a row's tokens and attention is causal, so no attention mask is needed: what a pad
computes, no token reads.

Sizes, everywhere in this repository: B rows, T tokens, C channels, H heads, D channels of a head, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import distributed

PIECE = 128  # positions whose logits are made together: 2 MB


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a GPT."""

    vocabulary: int = 4_096  # tokens, the three special ones among them
    context: int = 256  # tokens a row may have
    layers: int = 6
    heads: int = 4
    channels: int = 256  # 64 for each head
    dropout: float = 0.0  # share of activations dropped while training; helps from the second pass over the data on

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "layers", "heads", "channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout}: 0 or more, below 1")
        if self.channels % self.heads:
            raise ValueError(f"{self.channels} channels do not divide into {self.heads} heads")


class Cache:
    """Keys and values of the tokens read so far, for rows that are all at the same position."""

    def __init__(self, config: ModelConfig, rows: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.layers, rows, config.heads, tokens, config.channels // config.heads)
        self.keys = torch.empty(shape, device=device, dtype=dtype)  # (layers, B, H, T, D), read up to `length` only
        self.values = torch.empty(shape, device=device, dtype=dtype)  # (layers, B, H, T, D)
        self.length = 0  # tokens read so far

    def extended(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, length + T, D) of a layer with those of T new tokens written behind them, in place."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def kept(self, rows: Tensor) -> Self:
        """This cache with only the given rows (N,), changed in place: a finished row costs no more attention.

        Only rows that change their place are copied, and of these only what was read: the whole cache of 128 stories
        has half a gigabyte, and copying it whenever a story ends took longer than the arithmetic in between.
        """
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        for kind in (self.keys, self.values):
            kind[:, moved, :, : self.length] = kind[:, rows[moved], :, : self.length]
        self.keys, self.values = self.keys[:, : len(rows)], self.values[:, : len(rows)]
        return self


def attention_of_products(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Causal attention of queries, keys and values, each (B, H, T, D), as two matrix products; returns (B, H, T, D).

    What `scaled_dot_product_attention` computes, with scores rounded to the precision of `q`. On CPUs that multiply
    bfloat16, where only the products matter, its backward pass takes a quarter of the time (docs/speed.md).
    """
    rows, heads, tokens, channels = q.shape
    future = torch.full((tokens, tokens), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    q, k, v = (x.reshape(rows * heads, tokens, channels) for x in (q, k, v))
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=channels**-0.5)  # (B H, T, T)
    return torch.bmm(F.dropout(scores.softmax(-1), dropout), v).view(rows, heads, tokens, channels)


class Attention(nn.Module):
    """Causal self-attention with all heads in two matrix products."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.channels, 3 * config.channels, bias=False)
        self.out = nn.Linear(config.channels, config.channels, bias=False)

    def forward(self, x: Tensor, cache: Cache | None, layer: int) -> Tensor:
        rows, tokens, channels = x.shape
        qkv = self.qkv(x).view(rows, tokens, 3, self.heads, channels // self.heads)  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        causal = tokens > 1  # a single token may see all that stands in the cache
        if cache is not None:
            assert cache.length == 0 or tokens == 1, "a filled cache takes one token at a time"
            k, v = cache.extended(layer, k, v)
            q = q.to(k.dtype)
        dropout = self.dropout if self.training else 0.0
        if cache is None and q.dtype == torch.bfloat16 and q.device.type == "cpu":
            y = attention_of_products(q, k, v, dropout)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout)
        return cast(Tensor, self.out(y.transpose(1, 2).reshape(rows, tokens, channels)))  # (B, T, C)


class Block(nn.Module):
    """One pre-norm transformer layer: attention, then a two-layer perceptron four times as wide."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.channels, bias=False)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.channels, bias=False)
        self.up = nn.Linear(config.channels, 4 * config.channels, bias=False)
        self.down = nn.Linear(4 * config.channels, config.channels, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: Cache | None, layer: int) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x), cache, layer))
        return cast(Tensor, x + self.dropout(self.down(F.gelu(self.up(self.norm_mlp(x))))))


class GPT(nn.Module):
    """A GPT of the given shape, with random weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.channels)
        self.positions = nn.Embedding(config.context, config.channels)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.channels, bias=False)
        self.head = nn.Linear(config.channels, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # GPT-2's rule: matrices that write into the residual stream are scaled down by the number of writers.
                writer = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.layers) if writer else 0.02)

    @property
    def device(self) -> torch.device:
        return self.tokens.weight.device

    def hidden(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """ids: (B, T) -> (B, T, C) channels after the final norm. With a cache, `ids` are the tokens that follow it."""
        start = cache.length if cache is not None else 0
        end = start + ids.shape[1]
        assert end <= self.config.context, f"{end} tokens do not fit the context of {self.config.context}"
        x = self.dropout(self.tokens(ids) + self.positions.weight[start:end])  # (B, T, C)
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)
        if cache is not None:
            cache.length = end
        return cast(Tensor, self.norm(x))

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """ids: (B, T) -> (B, T, V) logits of the token that follows each position."""
        return cast(Tensor, self.head(self.hidden(ids, cache)))


class Picked(torch.autograd.Function):
    """Log-probability of one token at each of N positions: the head, log softmax and the token's entry in one.

    Logits are made in pieces that stay in the processor's cache, and their softmax is kept in the precision of the
    products, so that going back takes matrix products only: d log p(t) / d hidden = W[t] - sum over v of p(v) W[v].
    The log-probabilities themselves are float32: those of a bfloat16 `cross_entropy` are off by up to 1 %, which PPO
    would take for a change of policy.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, learns: bool) -> Tensor:
        """hidden: (N, C). weight: (V, C) of the head. tokens: (N,). learns: whether to keep what backward reads.

        Returns (N,) nats.
        """
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        picked = torch.empty(len(tokens), dtype=torch.float32, device=tokens.device)
        probs = torch.empty(len(tokens) if learns else 0, len(weight), dtype=dtype, device=tokens.device)
        for start in range(0, len(tokens), PIECE):
            piece = slice(start, start + PIECE)
            log_probs = F.linear(hidden[piece], weight).log_softmax(-1, dtype=torch.float32)  # (PIECE, V)
            picked[piece] = log_probs.gather(1, tokens[piece, None])[:, 0]
            if learns:
                probs[piece] = log_probs.exp_()
        ctx.save_for_backward(hidden, weight, tokens, probs)
        return picked

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """grad: (N,) of the log-probabilities."""
        hidden, weight, tokens, probs = ctx.saved_tensors
        expected = torch.mm(probs, weight)  # (N, C)
        weighted = grad[:, None] * hidden.float()  # (N, C)
        grad_weight = -torch.mm(probs.t(), weighted.to(probs.dtype)).float()  # (V, C)
        grad_weight.index_add_(0, tokens, weighted)
        return grad[:, None] * (weight[tokens].float() - expected.float()), grad_weight, None, None


def token_log_probs(model: GPT, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token that counts, given those before it.

    ids: (B, T) tokens. mask: (B, T-1) bool, true at t where token t+1 counts. Returns (B, T-1) nats, 0 where the mask
    is false.
    Logits are made for positions that count only: the head is a sixth of a forward pass, and prompts and padding
    need none. Of several processes each scores its share of the rows, and the gradient is that of its own.
    """
    assert mask.shape == (ids.shape[0], ids.shape[1] - 1), (mask.shape, ids.shape)
    assert mask.dtype == torch.bool
    rows, own = len(ids), distributed.share(len(ids))
    ids, mask = ids[own], mask[own]
    hidden = model.hidden(ids[:, :-1])[mask] / temperature  # (N, C)
    log_probs = Picked.apply(hidden, model.head.weight, ids[:, 1:][mask], torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return distributed.whole(torch.zeros(mask.shape, device=ids.device).masked_scatter(mask, log_probs), rows)


def padded(
    rows: Sequence[Sequence[int]], counts: Sequence[Sequence[bool]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """One batch of rows: ids (B, T), padded behind, and mask (B, T-1), true at t where token t+1 counts.

    rows: ids of each row. counts: for each of those ids, whether it counts (a story's token does, a prompt's does not).
    """
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (row, row_counts) in enumerate(zip(rows, counts, strict=True)):
        assert len(row) == len(row_counts), (len(row), len(row_counts))
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = torch.tensor(row_counts)
    return ids.to(device), mask[:, 1:].to(device)


@torch.no_grad()
def mean_loss(model: GPT, rows: Sequence[Sequence[int]], counts: Sequence[Sequence[bool]], batch: int) -> float:
    """Loss in nats per token that counts, over all rows: each token weighs the same, whatever the batch size."""
    total, tokens = 0.0, 0
    for start in range(0, len(rows), batch):
        ids, mask = padded(rows[start : start + batch], counts[start : start + batch], model.device)
        total -= token_log_probs(model, ids, mask).sum().item()
        tokens += int(mask.sum())
    return total / tokens
