"""Graph rewrites, one per file.

``rewrite_attention``, ``quantize_weights`` and ``argmax_output`` are for exporters to call before lowering. The fusions
of ``FUSIONS`` run by themselves, in this order: before ExecuTorch decomposes a program, and once more on what is
delegated.
"""

from .argmax_output import argmax_output
from .fuse_experts import fuse_experts
from .fuse_quantized import fuse_quantized
from .fuse_rms_norm import fuse_rms_norm
from .fuse_rope import fuse_rope
from .quantize_weights import quantize_weights
from .rewrite_attention import (
    AttentionLayer,
    AttentionNotRewritableError,
    RewrittenProgram,
    rewrite_attention,
)

FUSIONS = (fuse_quantized, fuse_rms_norm, fuse_rope, fuse_experts)

__all__ = [
    "FUSIONS",
    "AttentionLayer",
    "AttentionNotRewritableError",
    "RewrittenProgram",
    "argmax_output",
    "fuse_experts",
    "fuse_quantized",
    "fuse_rms_norm",
    "fuse_rope",
    "quantize_weights",
    "rewrite_attention",
]
