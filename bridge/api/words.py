"""Names and options for editors and type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

TargetName = Literal["gguf", "hf", "megatron", "mlx", "ort", "torchtitan", "tripy", "trt", "trtllm"]
SchemeName = Literal[
    "affine2", "affine3", "affine4", "affine5", "affine6", "affine8", "fp8", "fp8_block", "fp8_block_dynamic",
    "fp8_pc_pt", "int2:best", "int2:gptq", "int2:imatrix", "int2:rtn", "int2:signround", "int3:best", "int3:gptq",
    "int3:imatrix", "int3:rtn", "int3:signround", "int4", "int4:awq", "int4:best", "int4:gptq", "int4:imatrix",
    "int4:rtn", "int4:signround", "int4_awq", "int4_awq_clip", "int4_awq_full", "int4_gptq", "int4_mse", "int4_wo",
    "int5:best", "int5:imatrix", "int5:rtn", "int6:best", "int6:imatrix", "int6:rtn", "int8", "int8_pc_pt",
    "int8_sq", "int8_wo", "iq4_nl", "iq4_xs", "mxfp4", "mxfp4_wo", "mxfp4_wo:best", "mxfp4_wo:gptq",
    "mxfp4_wo:imatrix", "mxfp4_wo:rtn", "mxfp8", "mxfp8_wo", "nvfp4", "nvfp4:best", "nvfp4:gptq", "nvfp4:imatrix",
    "nvfp4:mse", "nvfp4_act_headroom", "nvfp4_awq", "nvfp4_experts_only", "nvfp4_four_over_six", "nvfp4_gptq",
    "nvfp4_input_scale1", "nvfp4_local_hessian", "nvfp4_mlp_only", "nvfp4_mse", "nvfp4_wo", "nvfp4_wo:best",
    "nvfp4_wo:gptq", "nvfp4_wo:imatrix", "nvfp4_wo:mse", "nvfp4_wo_mse", "q2_k", "q3_k_l", "q3_k_m", "q3_k_s",
    "q4_0", "q4_0_imatrix", "q4_1", "q4_k", "q4_k_imatrix", "q4_k_m", "q4_k_s", "q5_0", "q5_1", "q5_k",
    "q5_k_imatrix", "q5_k_m", "q5_k_s", "q6_k", "q6_k_imatrix", "q8_0", "w4a8_awq", "w4a8_fp8", "w4a8_int8",
    "w4a8_nvfp4_fp8",
]  # fmt: skip
KvName = Literal["fp8", "fp8_cast", "int8", "nvfp4", "nvfp4_cast"]
RotationName = Literal["hadamard", "hadamard:heads", "hadamard:stream"]


class TargetOptions(TypedDict, total=False):
    """The options of all built-in targets; `bridge.targets.<target>.Options` says what each does and its default."""

    allow_split: bool
    attention_op: bool
    cache: bool | int
    custom_ops: bool
    drafts: str | None
    dtype: str | None
    engine: bool | str
    era: str
    exact: bool
    format: str | None
    linear: bool
    logits: str
    opset: int | None
    own_scales: bool
    pp: int
    profile: str | Mapping[str, Sequence[int]] | None
    shard_size: str
    spec: str
    stamp: bool
    task: str | None
    tp: int
    vocab_multiple: int
    vocabulary: str | None
