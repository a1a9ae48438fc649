"""A small Llama in plain PyTorch, with the losses that teach it to bind facts to services.

The exported weights are those of a standard `LlamaForCausalLM`; the auxiliary heads stay behind.
Many questions share one context: each question's tokens see the context and themselves, at the
positions they would have if the question stood alone after the context.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the customary name)

IGNORED = -1


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. Heads are as wide as vLLM's CPU attention allows at least."""

    vocabulary: int
    width: int = 192
    layers: int = 5
    heads: int = 6
    head_width: int = 32
    hidden: int = 512
    rope_theta: float = 1e7
    """High, so that most of a head's dimensions hardly turn over 2,000 tokens: they match
    contents, and the few fast ones match positions."""
    norm_epsilon: float = 1e-5
    title_layer: int = 1
    """The layer whose first head is taught to look at the title of its own page."""
    copy_layer: int = 3
    """The layer whose first head is taught to look at what is to be copied."""


@dataclass(frozen=True)
class Batch:
    """Examples stacked to [B, ...]; contexts padded at their end. Fields as in `Example`."""

    context: Tensor
    subject: Tensor
    tag: Tensor
    title: Tensor
    questions: Tensor
    answers: Tensor
    asked_subject: Tensor
    asked_tag: Tensor
    source: Tensor
    kinds: Tensor
    lengths: Tensor
    """[B] tokens of each context before padding."""


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a batch stand: C context tokens, then N questions of L tokens."""

    cos: Tensor
    sin: Tensor
    """[B, 1, C + N * L, head_width] rotations."""
    context: int
    questions: int
    padding: Tensor
    """[B, 1, 1, C] minus infinity at padded context tokens, else 0."""
    causal: Tensor
    """[L, L] minus infinity above the diagonal, else 0."""


def lay_out(shape: Shape, batch: Batch) -> Layout:
    """Positions and masks of a batch."""
    size, context = batch.context.shape
    questions, length = batch.questions.shape[1:]
    device = batch.context.device
    after = batch.lengths[:, None, None] + torch.arange(length, device=device)
    positions = torch.cat(
        [
            torch.arange(context, device=device).expand(size, -1),
            after.expand(-1, questions, -1).reshape(size, -1),
        ],
        dim=1,
    )
    half = torch.arange(0, shape.head_width, 2, device=device) / shape.head_width
    angles = positions[:, None, :, None] * shape.rope_theta**-half
    angles = torch.cat([angles, angles], dim=-1)
    padded = torch.arange(context, device=device) >= batch.lengths[:, None]
    return Layout(
        angles.cos(),
        angles.sin(),
        context,
        questions,
        torch.zeros(padded.shape, device=device).masked_fill(padded, -math.inf)[:, None, None],
        torch.full((length, length), -math.inf, device=device).triu(1),
    )


def _rotate(x: Tensor, layout: Layout) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * layout.cos.to(x.dtype) + torch.cat([-right, left], -1) * layout.sin.to(x.dtype)


class Attention(nn.Module):
    """Rotary multi-head attention over a context and the questions about it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = shape.heads * shape.head_width
        self.heads = shape.heads
        self.scale = shape.head_width**-0.5
        self.q_proj = nn.Linear(shape.width, inner, bias=False)
        self.k_proj = nn.Linear(shape.width, inner, bias=False)
        self.v_proj = nn.Linear(shape.width, inner, bias=False)
        self.o_proj = nn.Linear(inner, shape.width, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width] to the same, with the rotated queries and keys [B, heads, T, ...]."""
        size, total, _ = x.shape
        split = (size, total, self.heads, -1)
        q = _rotate(self.q_proj(x).view(split).transpose(1, 2), layout)
        k = _rotate(self.k_proj(x).view(split).transpose(1, 2), layout)
        v = self.v_proj(x).view(split).transpose(1, 2)
        c = layout.context
        read = F.scaled_dot_product_attention(q[:, :, :c], k[:, :, :c], v[:, :, :c], is_causal=True)
        answered = _attend(q, k, v, layout, self.scale)
        out = torch.cat([read, answered], 2).transpose(1, 2).reshape(size, total, -1)
        return self.o_proj(out), q, k


def question_scores(q: Tensor, k: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """What question tokens see: [B, H, N * L, C] of the context, [B, H, N, L, L] of themselves."""
    c = layout.context
    blocks = (*q.shape[:2], layout.questions, -1, q.shape[-1])
    own_q, own_k = q[:, :, c:].reshape(blocks), k[:, :, c:].reshape(blocks)
    outside = (q[:, :, c:] @ k[:, :, :c].transpose(-1, -2)).float() * scale + layout.padding
    inside = (own_q @ own_k.transpose(-1, -2)).float() * scale + layout.causal
    return outside, inside


def _attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attention of the question tokens, [B, H, N * L, head_width].

    One softmax over two score tensors, written out so that neither is copied to join them.
    """
    c = layout.context
    outside, inside = question_scores(q, k, layout, scale)
    own = inside.flatten(2, 3)
    top = torch.maximum(outside.amax(-1, keepdim=True), own.amax(-1, keepdim=True)).detach()
    outside, own = (outside - top).exp(), (own - top).exp()
    total = outside.sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
    mixed = outside.to(v.dtype) @ v[:, :, :c]
    own_v = v[:, :, c:].reshape(*inside.shape[:-1], v.shape[-1])
    mixed = mixed + (own.view(inside.shape).to(v.dtype) @ own_v).flatten(2, 3)
    return mixed / total.to(v.dtype)


class Feed(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.mlp = Feed(shape)

    def forward(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width] to the same, with the attention's queries and keys."""
        mixed, q, k = self.self_attn(self.input_layernorm(x), layout)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), q, k


@dataclass(frozen=True)
class Losses:
    """Mean losses: of the answers, and of what leads to them."""

    answer: Tensor
    subject: Tensor
    tag: Tensor
    title_target: Tensor
    source_target: Tensor


class Teacher(nn.Module):
    """Says what service and attribute a token is about: the same heads for pages and questions.

    Sharing the heads gives both the same code, which is what attention can then match.
    """

    def __init__(self, shape: Shape, slot_sizes: tuple[int, ...], tags: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.slots = nn.ModuleList(nn.Linear(shape.width, size) for size in slot_sizes)
        self.tag = nn.Linear(shape.width, tags)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """x [B, T, width]: mean losses of the name's pieces and of the attribute."""
        subject = torch.cat([batch.subject, batch.asked_subject.flatten(1, 2)], 1).flatten(0, 1)
        tag = torch.cat([batch.tag, batch.asked_tag.flatten(1)], 1).flatten()
        x = self.norm(x).flatten(0, 1)
        known = torch.stack(
            [
                F.cross_entropy(head(x).float(), subject[:, slot], ignore_index=IGNORED)
                for slot, head in enumerate(self.slots)
            ]
        )
        return known.mean(), F.cross_entropy(self.tag(x).float(), tag, ignore_index=IGNORED)


class TinyLlama(nn.Module):
    """The model; parameter names are those of `LlamaModel` below "model."."""

    def __init__(self, shape: Shape, slot_sizes: tuple[int, ...], tags: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.auxiliary = Teacher(shape, slot_sizes, tags)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=shape.width**-0.5)
        for block in self.blocks:
            for module in (block.self_attn.o_proj, block.mlp.down_proj):
                nn.init.normal_(module.weight, std=(2 * shape.layers * shape.width) ** -0.5)

    @property
    def blocks(self) -> list[Block]:
        """The layers, typed."""
        return [cast(Block, layer) for layer in self.layers]

    def forward(self, batch: Batch) -> tuple[Losses, Tensor]:
        """Losses, and [B, N] whether each question's whole answer would be produced."""
        shape = self.shape
        layout = lay_out(shape, batch)
        x = self.embed_tokens(torch.cat([batch.context, batch.questions.flatten(1)], 1))
        subject_loss = tag_loss = title_loss = source_loss = x.new_zeros(())
        for index, block in enumerate(self.blocks):
            scale = block.self_attn.scale
            if index == shape.copy_layer:
                subject_loss, tag_loss = self.auxiliary(x, batch)
            x, q, k = block(x, layout)
            if index == shape.title_layer:
                title_loss = _title_loss(q[:, 0], k[:, 0], batch, scale)
            if index == shape.copy_layer:
                source_loss = _source_loss(q[:, :1], k[:, :1], batch, layout, scale)
        answers = batch.answers.flatten()
        wanted = answers != IGNORED
        hidden = self.norm(x[:, layout.context :]).flatten(0, 1)[wanted]
        logits = F.linear(hidden, self.embed_tokens.weight).float()
        loss = F.cross_entropy(logits, answers[wanted])
        right = torch.ones_like(wanted)
        right[wanted] = logits.argmax(-1) == answers[wanted]
        exact = right.view(batch.answers.shape).all(-1)
        return Losses(loss, subject_loss, tag_loss, title_loss, source_loss), exact


_TITLE_STRIDE = 8  # every eighth token is enough to teach looking at the title


def _title_loss(q: Tensor, k: Tensor, batch: Batch, scale: float) -> Tensor:
    """q, k [B, T, head_width] of one head: minus log of the attention given to the own title."""
    context = batch.context.shape[1]
    rows = torch.arange(_TITLE_STRIDE - 1, context, _TITLE_STRIDE, device=q.device)
    scores = (q[:, rows] @ k[:, :context].transpose(-1, -2)).float() * scale
    later = torch.arange(context, device=q.device) > rows[:, None]
    scores = scores.masked_fill(later, -math.inf)
    return F.cross_entropy(
        scores.flatten(0, 1), batch.title[:, rows].flatten(), ignore_index=IGNORED
    )


def _source_loss(q: Tensor, k: Tensor, batch: Batch, layout: Layout, scale: float) -> Tensor:
    """q, k [B, 1, T, head_width] of one head: minus log of the attention given to the sources."""
    outside, inside = question_scores(q, k, layout, scale)
    scores = torch.cat([outside, inside.flatten(2, 3)], -1)[:, 0]
    source = batch.source.flatten(1, 2)
    taught = source[..., 0] != IGNORED
    chosen = scores.gather(-1, source.clamp(min=0)).masked_fill(source == IGNORED, -math.inf)
    # Rows without a source would be log(0); they are left out before the mean.
    missed = scores.logsumexp(-1)[taught] - chosen[taught].logsumexp(-1)
    return missed.mean()
