"""BERT encoders and their usual heads as Tripy modules.

Names are Hugging Face's, outputs come in the order of transformers.
"""

from __future__ import annotations

from typing import Any

import nvtripy as tp

from bridge.core.errors import PlanError
from bridge.targets.tripy.models.layers import Heads, Parts, Seen, activation


class Embeddings(tp.Module):
    def __init__(self, config: Any, parts: Parts) -> None:
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = parts.embedding(config.vocab_size, width)
        self.position_embeddings = parts.embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = parts.embedding(config.type_vocab_size, width)
        self.LayerNorm = parts.layer_norm(width, config.layer_norm_eps)

    def forward(self, input_ids: Any, token_type_ids: Any) -> Any:
        position = tp.unsqueeze(tp.arange(input_ids.shape[1], dtype=tp.int32), 0)
        kinds = tp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(kinds)
        return self.LayerNorm(x + self.position_embeddings(position))


class SelfAttention(tp.Module):
    """Every token attends to every token that is not padding."""

    def __init__(self, config: Any, parts: Parts, name: str) -> None:
        super().__init__()
        width, count = config.hidden_size, config.num_attention_heads
        self.heads = Heads(count, count, width // count, (width // count) ** -0.5)
        self.query = parts.linear(f"{name}.query", width, width)
        self.key = parts.linear(f"{name}.key", width, width)
        self.value = parts.linear(f"{name}.value", width, width)

    def forward(self, x: Any, seen: Seen) -> Any:
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (self.heads.split(part, seen, self.heads.queries) for part in parts)
        return self.heads.attend(query, key, value, seen)


class Dense(tp.Module):
    """A Linear called `dense`; with `normed` (an epsilon), a norm of its output plus the residual."""

    def __init__(self, parts: Parts, name: str, widths: tuple[int, int], normed: float | None = None) -> None:
        super().__init__()
        self.dense = parts.linear(f"{name}.dense", *widths)
        self.normed = normed is not None
        if normed is not None:
            self.LayerNorm = parts.layer_norm(widths[1], normed)

    def forward(self, x: Any, residual: Any = None) -> Any:
        x = self.dense(x)
        return self.LayerNorm(x + residual) if self.normed else x


class Attention(tp.Module):
    def __init__(self, config: Any, parts: Parts, name: str) -> None:
        super().__init__()
        self.self = SelfAttention(config, parts, f"{name}.self")
        widths = (config.hidden_size, config.hidden_size)
        self.output = Dense(parts, f"{name}.output", widths, config.layer_norm_eps)

    def forward(self, x: Any, seen: Seen) -> Any:
        return self.output(self.self(x, seen), x)


class Layer(tp.Module):
    """One layer, norms last."""

    def __init__(self, config: Any, parts: Parts, name: str) -> None:
        super().__init__()
        width, ffn = config.hidden_size, config.intermediate_size
        self.act = activation(config.hidden_act)
        self.attention = Attention(config, parts, f"{name}.attention")
        self.intermediate = Dense(parts, f"{name}.intermediate", (width, ffn))
        self.output = Dense(parts, f"{name}.output", (ffn, width), config.layer_norm_eps)

    def forward(self, x: Any, seen: Seen) -> Any:
        x = self.attention(x, seen)
        return self.output(self.act(self.intermediate(x)), x)


class Encoder(tp.Module):
    def __init__(self, config: Any, parts: Parts, name: str) -> None:
        super().__init__()
        self.layer = [Layer(config, parts, f"{name}.layer.{at}") for at in range(config.num_hidden_layers)]

    def forward(self, x: Any, seen: Seen) -> Any:
        for layer in self.layer:
            x = layer(x, seen)
        return x


class BertModel(tp.Module):
    """Token ids to hidden states and, with a pooler, to one vector for each text."""

    def __init__(self, config: Any, parts: Parts, prefix: str = "", pooled: bool = True) -> None:
        super().__init__()
        if (kind := getattr(config, "position_embedding_type", "absolute")) != "absolute":
            raise PlanError(
                f"config.json: position_embedding_type {kind!r}: the Tripy module of BERT has absolute positions only"
            )
        self.embeddings = Embeddings(config, parts)
        self.encoder = Encoder(config, parts, f"{prefix}encoder")
        self.pooled = pooled
        if pooled:
            self.pooler = Dense(parts, f"{prefix}pooler", (config.hidden_size, config.hidden_size))

    def forward(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> Any:
        """int32 [batch, length] -> [batch, length, hidden], and [batch, hidden] with a pooler."""
        seen = Seen.of(input_ids, attention_mask, causal=False)
        x = self.encoder(self.embeddings(input_ids, token_type_ids), seen)
        return (x, tp.tanh(self.pooler(x[:, 0]))) if self.pooled else x


class Predictions(tp.Module):
    """The head for masked words. `bias` is `decoder.bias` under its old name, if the source ties the two."""

    def __init__(self, config: Any, parts: Parts, name: str) -> None:
        super().__init__()
        self.transform = Transform(config, parts, f"{name}.transform")
        self.decoder = parts.linear(f"{name}.decoder", config.hidden_size, config.vocab_size)
        if parts.stored_twice(f"{name}.bias"):
            self.bias = parts.vector(config.vocab_size)

    def forward(self, x: Any) -> Any:
        return self.decoder(self.transform(x))


class Transform(tp.Module):
    def __init__(self, config: Any, parts: Parts, name: str) -> None:
        super().__init__()
        self.act = activation(config.hidden_act)
        self.dense = parts.linear(f"{name}.dense", config.hidden_size, config.hidden_size)
        self.LayerNorm = parts.layer_norm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Any) -> Any:
        return self.LayerNorm(self.act(self.dense(x)))


class Cls(tp.Module):
    """transformers' `cls`: predictions of masked words, of the next sentence, or of both."""

    def __init__(self, config: Any, parts: Parts, words: bool, sentences: bool) -> None:
        super().__init__()
        self.words, self.sentences = words, sentences
        if words:
            self.predictions = Predictions(config, parts, "cls.predictions")
        if sentences:
            self.seq_relationship = parts.linear("cls.seq_relationship", config.hidden_size, 2)

    def forward(self, x: Any, pooled: Any = None) -> Any:
        logits = [self.predictions(x)] if self.words else []
        logits += [self.seq_relationship(pooled)] if self.sentences else []
        return logits[0] if len(logits) == 1 else tuple(logits)


class _WithCls(tp.Module):
    """An encoder below `cls`."""

    words, sentences = True, False

    def __init__(self, config: Any, parts: Parts) -> None:
        super().__init__()
        self.bert = BertModel(config, parts, "bert.", pooled=self.sentences)
        self.cls = Cls(config, parts, self.words, self.sentences)

    def forward(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> Any:
        hidden = self.bert(input_ids, attention_mask, token_type_ids)
        return self.cls(*hidden) if self.sentences else self.cls(hidden)


class BertForMaskedLM(_WithCls):
    """Token ids to logits of words."""


class BertForPreTraining(_WithCls):
    """Token ids to logits of words and of the next sentence."""

    sentences = True


class BertForNextSentencePrediction(_WithCls):
    """Token ids to logits of the next sentence."""

    words, sentences = False, True


class _WithLinear(tp.Module):
    """An encoder below one Linear, which reads every token or the pooled text."""

    head, pooled = "classifier", False

    def __init__(self, config: Any, parts: Parts) -> None:
        super().__init__()
        self.bert = BertModel(config, parts, "bert.", pooled=self.pooled)
        setattr(self, self.head, parts.linear(self.head, config.hidden_size, config.num_labels))

    def forward(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> Any:
        hidden = self.bert(input_ids, attention_mask, token_type_ids)
        return getattr(self, self.head)(hidden[1] if self.pooled else hidden)


class BertForSequenceClassification(_WithLinear):
    """Token ids to one row of logits for each text."""

    pooled = True


class BertForTokenClassification(_WithLinear):
    """Token ids to logits of every token."""


class BertForQuestionAnswering(_WithLinear):
    """Token ids to logits of the answer's start and of its end."""

    head = "qa_outputs"

    def forward(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> Any:
        logits = super().forward(input_ids, attention_mask, token_type_ids)
        return logits[:, :, 0], logits[:, :, 1]
