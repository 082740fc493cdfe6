"""Tiny configs of encoders of text, and of encoder-decoders."""

from __future__ import annotations

from tests.sweep.decoders import PLAIN, TEXT, Fields

_BERT = PLAIN | {"type_vocab_size": 3, "num_labels": 5}
_ROBERTA = _BERT | {"pad_token_id": 1, "bos_token_id": 0}
_LONG = _BERT | {"attention_window": 8}
_BART: Fields = {
    "vocab_size": 330, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 384, "decoder_ffn_dim": 256, "max_position_embeddings": 96,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_T5: Fields = {
    "vocab_size": 330, "d_model": 128, "d_kv": 32, "d_ff": 384, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip

ENCODERS: dict[str, Fields] = {
    "AlbertForSequenceClassification": _BERT | {"embedding_size": 128},
    "BertForSequenceClassification": _BERT,
    "BertForTokenClassification": _BERT,
    "BertForQuestionAnswering": {key: _BERT[key] for key in _BERT if key != "num_labels"},
    "BertModel": _BERT,
    "BigBirdForMaskedLM": _BERT | {"attention_type": "original_full"},
    "CamembertForSequenceClassification": _ROBERTA,
    "CanineForSequenceClassification": _BERT | {
        "num_hash_functions": 4, "num_hash_buckets": 64, "local_transformer_stride": 16,
    },
    "ConvBertForMaskedLM": _BERT | {"embedding_size": 128},
    "Data2VecTextForMaskedLM": _ROBERTA,
    "DebertaForSequenceClassification": _BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DebertaV2ForSequenceClassification": _BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DistilBertForSequenceClassification": {
        "vocab_size": 330, "dim": 128, "hidden_dim": 384, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 96,
        "num_labels": 5,
    },
    "ElectraForSequenceClassification": _BERT | {"embedding_size": 128},
    "ErnieForMaskedLM": _BERT,
    "EsmForMaskedLM": _BERT | {"position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": False},
    "EuroBertForMaskedLM": TEXT,
    "FunnelForMaskedLM": {
        "vocab_size": 330, "d_model": 128, "d_inner": 384, "n_head": 4, "d_head": 32, "block_sizes": [1, 1],
        "num_decoder_layers": 1,
    },
    "GteForMaskedLM": _BERT,
    "IBertForMaskedLM": _ROBERTA,
    "JinaEmbeddingsV3ForMaskedLM": _BERT,
    "LayoutLMForSequenceClassification": _BERT,
    "LayoutLMv3ForSequenceClassification": _ROBERTA | {
        "coordinate_size": 20, "shape_size": 24, "input_size": 32, "patch_size": 8, "max_2d_position_embeddings": 64,
    },
    "LongformerForMaskedLM": _LONG | {"pad_token_id": 1},
    "LongformerForSequenceClassification": _LONG | {"pad_token_id": 1},
    "LukeForMaskedLM": _ROBERTA | {"entity_vocab_size": 20, "entity_emb_size": 128},
    "MPNetForMaskedLM": _ROBERTA,
    "MegatronBertForMaskedLM": _BERT,
    "MobileBertForMaskedLM": _BERT | {"embedding_size": 64, "intra_bottleneck_size": 128, "true_hidden_size": 128},
    "ModernBertForMaskedLM": PLAIN | {"global_attn_every_n_layers": 2, "local_attention": 16},
    "ModernBertForSequenceClassification": PLAIN | {"global_attn_every_n_layers": 2, "local_attention": 16},
    "NomicBertForMaskedLM": _BERT,
    "NystromformerForMaskedLM": _BERT | {"num_landmarks": 8, "segment_means_seq_len": 24},
    "RemBertForMaskedLM": _BERT | {"input_embedding_size": 128, "output_embedding_size": 128},
    "RoFormerForMaskedLM": _BERT,
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA,
    "RobertaPreLayerNormForMaskedLM": _ROBERTA,
    "SplinterForQuestionAnswering": {k: v for k, v in _BERT.items() if k != "num_labels"} | {"question_token_id": 4},
    "SqueezeBertForMaskedLM": _BERT | {"embedding_size": 128},
    "XLMRobertaForSequenceClassification": _ROBERTA,
    "XLMRobertaXLForMaskedLM": _ROBERTA,
    "XLMWithLMHeadModel": {"vocab_size": 330, "emb_dim": 128, "n_layers": 2, "n_heads": 4, "n_langs": 1},
    "XLNetLMHeadModel": {"vocab_size": 330, "d_model": 128, "n_layer": 2, "n_head": 4, "d_inner": 384},
    "XmodForMaskedLM": _ROBERTA | {"languages": ["en_XX"], "default_language": "en_XX"},
}  # fmt: skip
ENCODER_DECODERS: dict[str, Fields] = {
    "BartForConditionalGeneration": _BART,
    "BigBirdPegasusForConditionalGeneration": _BART | {"attention_type": "original_full"},
    "BlenderbotForConditionalGeneration": _BART,
    "LEDForConditionalGeneration": _BART | {
        "attention_window": 8, "max_encoder_position_embeddings": 96, "max_decoder_position_embeddings": 96,
    },
    "LongT5ForConditionalGeneration": _T5 | {"local_radius": 8},
    "M2M100ForConditionalGeneration": _BART,
    "MBartForConditionalGeneration": _BART,
    "MT5ForConditionalGeneration": _T5,
    "MarianMTModel": _BART,
    "NllbMoeForConditionalGeneration": _BART | {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "PegasusForConditionalGeneration": _BART,
    "ProphetNetForConditionalGeneration": {
        "vocab_size": 330, "hidden_size": 128, "encoder_ffn_dim": 384, "decoder_ffn_dim": 256,
        "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4, "max_position_embeddings": 96,
    },
    "SwitchTransformersForConditionalGeneration": _T5 | {
        "num_decoder_layers": 2, "num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    },
    "T5EncoderModel": _T5,
    "T5ForConditionalGeneration": _T5,
    "T5GemmaForConditionalGeneration": {"encoder": TEXT, "decoder": TEXT, "vocab_size": 330},
    "UMT5ForConditionalGeneration": _T5,
}  # fmt: skip
