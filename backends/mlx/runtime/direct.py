"""A method's program as a function of MLX arrays, without ExecuTorch in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from executorch_mlx.extension.llm.cache.session import active_key

from ..program.dtypes import SCALAR_TYPE_CODES, SCALAR_TYPE_NAMES
from .compile import CompiledProgram, check_extents
from .device import DTYPES, STREAM, dtype_name, exclusive, mx
from .execution import Signature, cache_of, run_step
from .kernels import Extent


class DirectMethod:
    """Calls a program with MLX arrays and returns MLX arrays.

    What a step computes need not come to the host: the likeliest tokens of one step may be the next one's input. Each
    call is a step of the active session's cache, if the program attends.
    """

    def __init__(self, program: CompiledProgram) -> None:
        self._program = program
        self._signature = Signature(program.graph)
        # Of a call that did not wait: extremes of its indices, which are not there yet.
        self._unchecked: list[Extent] = []

    def __call__(self, inputs: Sequence[Any], *, wait: bool = True) -> list[Any]:
        """Run the program.

        Args:
            inputs: per input an MLX array, or what numpy makes an array of. Give positions and rows as numpy's or as
                lists: the host needs them, and an MLX array would be waited for.
            wait: evaluate before returning. Otherwise the device is given its work, and computes while the caller
                prepares the next step. An index that turns out to lie outside of its tensor (a token past the
                vocabulary) is then reported by this object's next call, which does nothing else.

        Returns:
            An MLX array or a number per output.

        Raises:
            IndexError: an index outside of its tensor, of this call or, of one that did not wait, of the call before.
            LookupError: the program attends, and no session is active.
            TypeError: an input of another dtype, or a cache that holds no MLX arrays.
            ValueError: another number of inputs, or another shape; what the program or the cache refuses.
        """
        expected = len(self._signature.inputs)
        if len(inputs) != expected:
            raise ValueError(f"the program takes {expected} inputs, got {len(inputs)}")
        delivered: list[Any] = []
        with exclusive(), mx.stream(STREAM):
            unchecked, self._unchecked = self._unchecked, []
            check_extents(unchecked)
            arrays, numbers = [], {}
            for index, value in enumerate(inputs):
                array, known = self._input(index, value)
                arrays.append(array)
                if known is not None:
                    numbers[index] = known
            cache = cache_of(self._program, active_key())
            run_step(self._program, self._signature, arrays, cache, delivered.extend, numbers=numbers, waits=wait)
            if not wait:
                self._unchecked = self._program.extents
        return delivered

    def _input(self, index: int, value: Any) -> tuple[Any, np.ndarray[Any, Any] | None]:
        """Return an input as the program takes it, and its integers where the host has them."""
        meta, known = self._signature.inputs[index], None
        if meta is None:
            return value, None
        if not isinstance(value, mx.array):
            expected, array = SCALAR_TYPE_NAMES[meta.scalar_type], np.asarray(value)
            if array.dtype.kind not in ("f" if "float" in expected else "b" if expected == "bool" else "iu"):
                raise TypeError(f"input {index}: expected {expected}, got {array.dtype}")
            if array.dtype.kind in "iu":
                known = array.astype(expected, copy=False)
                if known is not array and not np.array_equal(known, array):
                    raise ValueError(
                        f"input {index}: expected {expected}, got numbers from {array.min()} to {array.max()}"
                    )
            value = mx.array(array).astype(DTYPES[meta.scalar_type])
        self._signature.check_input(f"input {index}", index, SCALAR_TYPE_CODES[dtype_name(value.dtype)], value.shape)
        return value, known
