"""Graph rewrites, one per file.

``rewrite_attention`` is for exporters to call before lowering. The fusions of ``FUSIONS`` run by themselves, in this
order: before ExecuTorch decomposes a program, and once more on what is delegated.
"""

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
    "fuse_rms_norm",
    "fuse_rope",
    "rewrite_attention",
]
