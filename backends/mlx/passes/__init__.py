"""Graph rewrites, one per file.

``rewrite_attention`` and ``argmax_output`` are for exporters to call before lowering. The fusions of ``FUSIONS`` run by
themselves, in this order: before ExecuTorch decomposes a program, and once more on what is delegated.
"""

from .argmax_output import argmax_output
from .fuse_rms_norm import fuse_rms_norm
from .fuse_rope import fuse_rope
from .rewrite_attention import (
    AttentionLayer,
    AttentionNotRewritableError,
    RewrittenProgram,
    rewrite_attention,
)

FUSIONS = (fuse_rms_norm, fuse_rope)

__all__ = [
    "FUSIONS",
    "AttentionLayer",
    "AttentionNotRewritableError",
    "RewrittenProgram",
    "argmax_output",
    "fuse_rms_norm",
    "fuse_rope",
    "rewrite_attention",
]
