"""What `tests.oracles.server` imports, once for all its forks.

Nothing here may stand in for Transformer Engine, start a thread or join ranks: `megatron_process.start` does that.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.activations
    import megatron.core.dist_checkpointing
    import megatron.core.fusions.fused_bias_geglu
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.parallel_state
    import megatron.core.post_training.modelopt.gpt.model_specs
    import megatron.core.tensor_parallel.random
    import megatron.core.transformer.moe.grouped_gemm_util
    import megatron.core.transformer.moe.moe_utils
    import megatron.core.transformer.multi_latent_attention
    import megatron.core.transformer.torch_norm  # noqa: F401
    import modelopt.torch.quantization  # noqa: F401
    import transformers  # noqa: F401

    import tests.oracles.megatron_bridge_process
    import tests.oracles.megatron_process  # noqa: F401
