"""A method's program as a function of MLX arrays, without ExecuTorch in between."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from executorch_mlx.extension.llm.cache.session import active_cache

from ..program import SlotType
from .caches import MLXCache
from .compile import CompiledProgram
from .device import DTYPES, STREAM, dtype_name, exclusive, mx


class DirectMethod:
    """Calls a program with MLX arrays and returns MLX arrays.

    What a step computes need not come to the host: the likeliest tokens of one step may be the next one's input. Each
    call is a step of the active session's cache, if the program attends.
    """

    def __init__(self, program: CompiledProgram) -> None:
        self._program = program
        graph = program.graph
        self._dtypes = [
            DTYPES[meta.scalar_type] if entry.slot_type == SlotType.TensorSlot and meta is not None else None
            for entry in graph.input_map
            for meta in [graph.tensor_meta[entry.idx] if entry.idx < len(graph.tensor_meta) else None]
        ]

    def __call__(self, inputs: Sequence[Any], *, wait: bool = True) -> list[Any]:
        """Run the program.

        Args:
            inputs: per input an MLX array, or what numpy makes an array of. Give positions and rows as numpy's or as
                lists: the host needs them, and an MLX array would be waited for.
            wait: evaluate before returning. Otherwise the device is given its work, and computes while the caller
                prepares the next step. An index that turns out to lie outside of its tensor (a token past the
                vocabulary) is then reported by the next call.

        Returns:
            The outputs.

        Raises:
            IndexError: an index outside of its tensor, of this call or, of one that did not wait, of the call before.
            LookupError: the program attends, and no session is active.
            TypeError: an input of another dtype, or a cache that holds no MLX arrays.
            ValueError: another number of inputs; what the program or the cache refuses.
        """
        if len(inputs) != len(self._dtypes):
            raise ValueError(f"the program takes {len(self._dtypes)} inputs, got {len(inputs)}")
        program = self._program
        with exclusive(), mx.stream(STREAM):
            program.check()
            arrays, numbers = [], {}
            for index, (value, dtype) in enumerate(zip(inputs, self._dtypes, strict=True)):
                if dtype is None or isinstance(value, mx.array):
                    if dtype is not None and value.dtype != dtype:
                        raise TypeError(f"input {index}: expected {dtype_name(dtype)}, got {dtype_name(value.dtype)}")
                    arrays.append(value)
                    continue
                known = np.asarray(value)
                arrays.append(mx.array(known).astype(dtype))
                if known.dtype.kind in "iu":
                    numbers[index] = known
            cache = self._cache()
            with nullcontext() if cache is None or cache.in_step else cache.step():
                try:
                    outputs = program(arrays, cache, numbers=numbers, reads_inputs=wait)
                    pending = [*outputs, *program.pending(), *(() if cache is None else cache.release())]
                    pending = [array for array in pending if isinstance(array, mx.array)]
                    if wait:
                        mx.eval(pending)
                        program.check()
                    else:
                        mx.async_eval(pending)  # type: ignore[no-untyped-call]
                    program.commit()
                except BaseException:
                    if cache is not None:
                        cache.fail_step()
                    raise
            return outputs

    def _cache(self) -> MLXCache[Any] | None:
        if not self._program.uses_cache:
            return None
        cache = active_cache()
        if cache is None:
            raise LookupError("the program attends over a KV cache and no session is active: run it in a CacheSession")
        if not isinstance(cache, MLXCache):
            raise TypeError(f"the active cache is a {type(cache).__name__}, which holds no MLX arrays")
        return cache
