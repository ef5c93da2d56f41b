"""The custom op ``executorch_mlx::update_and_attend``.

Functional to the tracer: the cache is no tensor of the graph but state outside the program, found through the active
``CacheSession``. Run eagerly in torch, the op asks the active cache (built for the backend "eager").
"""

from __future__ import annotations

import torch

from . import reference  # noqa: F401  registers the "eager" builders
from .session import active_cache

OP_NAME = "executorch_mlx::update_and_attend"


@torch.library.custom_op(OP_NAME, mutates_args=())
def update_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    layer_id: int,
    scale: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Append this step's keys and values to a layer's cache, then attend over what each query may see.

    Args:
        q: rotated queries [1, H_q, n, D]; a step is flat on the token axis, whatever number of sequences it carries.
        k: rotated keys [1, H_kv, n, D], H_q a multiple of H_kv.
        v: values [1, H_kv, n, D_v].
        position: each token's logical position, [n] or [n, 1], int32 or int64.
        layer_id: which layer's cache.
        scale: softmax scale.
        out_dtype: dtype of the result, whatever keys and values are stored in.

    Returns:
        [1, H_q, n, D_v] in ``out_dtype``.

    Raises:
        LookupError: no cache session is active.
    """
    cache = active_cache()
    if cache is None:
        raise LookupError(
            "update_and_attend needs a KV cache and no session is active: run the model inside"
            ' `with CacheSession(build("eager", "sequence", config)) as session:`'
        )
    out: torch.Tensor = cache.attend(layer_id, position, q, k, v, scale)
    return out.to(out_dtype)


@update_and_attend.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    layer_id: int,
    scale: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)
