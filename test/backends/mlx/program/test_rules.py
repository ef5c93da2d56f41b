"""What each rule refuses, and says of it; what may be: nothing known, or ranges that leave room."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from executorch_mlx.backends.mlx.program import ProgramError, Tid, Vid, make_node, verify_graph
from executorch_mlx.backends.mlx.program.dtypes import SCALAR_TYPE_CODES
from executorch_mlx.backends.mlx.program.types import ANY, TensorType, Type, exactly
from oracles.hand_built import assembled, slot_variant
from oracles.sample_graphs import inferred
from oracles.written_calls import WrittenCalls, described_as, written_graph

INT8, BOOL, F16, F32 = (SCALAR_TYPE_CODES[name] for name in ("int8", "bool", "float16", "float32"))
N = Vid(0)

AFFINE: dict[str, Any] = {
    "w": "uint32[8, 4]",
    "scales": "float32[8, 1]",
    "biases": "float32[8, 1]",
    "mode": "affine",
    "bits": 4,
    "group_size": 32,
}
NVFP4: dict[str, Any] = {
    "w": "uint32[8, 4]",
    "scales": "uint8[8, 2]",
    "mode": "nvfp4",
    "bits": 4,
    "group_size": 16,
}
HEADS: dict[str, Any] = {
    "q": "float32[2, 4, 3, 8]",
    "k": "float32[2, 2, 5, 8]",
    "v": "float32[2, 2, 5, 6]",
    "scale": 1.0,
}
CACHED: dict[str, Any] = {
    "q": "float32[1, 4, 3, 8]",
    "k": "float32[1, 2, 3, 8]",
    "v": "float32[1, 2, 3, 6]",
    "position": "int64[3]",
    "layer_id": 0,
    "scale": 1.0,
}
METAL: dict[str, Any] = {
    "name": "kernel",
    "source": "",
    "inputs": ["float32[2]"],
    "input_names": ["x"],
    "output_names": ["y"],
    "output_shape_lengths": [1],
    "output_dtypes": [F32],
    "output_shapes_flat": [2],
    "grid": [1, 1, 1],
    "threadgroup": [1, 1, 1],
}
CONV: dict[str, Any] = {"x": "float32[2, 5, 4]", "w": "float32[6, 3, 4]"}


def with_(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**base, **changes}


# (kind, fields, what the error says)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # values
    ("FloorDivideIntNode", {"a": 1, "b": 0}, "b is 0"),
    ("ModIntNode", {"a": N, "b": 0}, "b is 0"),
    ("ItemIntNode", {"x": "int64[2]"}, "x has shape [2], expected one element"),
    ("ItemIntNode", {"x": "int64[0.., 0]"}, "x has shape [0.., 0], expected one element"),
    ("SymSizeNode", {"a": "float32[2]", "dim": 1}, "dim is 1, of a tensor of shape [2]"),
    ("SymSizeNode", {"a": "float32[2]", "dim": -2}, "dim is -2, of a tensor of shape [2]"),
    ("SymSizeNode", {"a": "float32[]", "dim": 0}, "a has no axes"),
    # one operand
    ("BitwiseInvertNode", {"x": "float32[2]"}, "x is of float32, expected one of bool, int16"),
    ("NegNode", {"x": "bool[2]"}, "x is of bool, expected one of"),
    ("AsTypeNode", {"x": "float32[2]", "scalar_type": 8}, "scalar_type: unknown scalar type 8"),
    ("GeluNode", {"x": "float32[2]", "approximate": ""}, "approximate is '', expected one of 'none', 'tanh'"),
    # several
    ("AddNode", {"a": "float32[2]", "b": "float32[3]"}, "sizes 2 and 3 do not go together"),
    ("BitwiseAndNode", {"a": "int8[2]", "b": "float16[2]"}, "b is of float16, expected one of bool"),
    ("BitwiseOrNode", {"a": "int8[2]", "b": "uint64[2]"}, "computed in float32, expected bits"),
    ("LessNode", {"a": "int8[0]", "b": "int8[2]"}, "sizes 0 and 2 do not go together"),
    ("ClipNode", {"x": "float32[2]"}, "neither a_min nor a_max is there"),
    ("ClipNode", {"x": "float32[2]", "a_max": "float32[3]"}, "sizes 2 and 3 do not go together"),
    ("WhereNode", {"condition": "bool[2]", "x": "int8[3]", "y": "int8[1]"}, "sizes 2 and 3 do not go together"),
    # reductions and orders
    ("SumNode", {"x": "float32[2, 3]", "axes": [2]}, "axes is 2, of a tensor of shape [2, 3]"),
    ("SumNode", {"x": "float32[2, 3]", "axes": [0, -2]}, "axes [0, -2] name one axis twice"),
    ("MeanNode", {"x": "float32[]", "axes": [1]}, "axes is 1, of a tensor of shape []"),
    ("MaxNode", {"x": "float32[2, 0]", "axes": [1]}, "axes [1] have no elements, of which there is no extreme"),
    ("MinNode", {"x": "float32[0, 2]"}, "axes [0] have no elements, of which there is no extreme"),
    ("MedianNode", {"x": "float32[0]"}, "axes [0] have no elements"),
    ("ArgmaxNode", {"x": "float32[2, 0]", "axis": -1}, "axis 1 has no elements, of which there is no extreme"),
    ("ArgminNode", {"x": "float32[2]", "axis": 9}, "axis is 9, of a tensor of shape [2]"),
    ("SoftmaxNode", {"x": "float32[2]", "axis": 1}, "axis is 1, of a tensor of shape [2]"),
    ("SoftmaxNode", {"x": "int64[2]"}, "x is of int64, expected one of bfloat16, float16"),
    ("CumsumNode", {"x": "float32[]", "axis": 1}, "axis is 1, of a tensor of shape []"),
    ("SortNode", {"x": "float32[2, 2]", "axis": -3}, "axis is -3, of a tensor of shape [2, 2]"),
    ("PartitionNode", {"x": "float32[4]", "kth": 4}, "kth is 4, of an axis of 4"),
    ("ArgPartitionNode", {"x": "float32[4]", "kth": -5}, "kth is -5, of an axis of 4"),
    ("ArgPartitionNode", {"x": "float32[0..4]", "kth": 4}, "kth is 4, of an axis of 0..4"),
    ("PartitionNode", {"x": "float32[4]", "kth": 0, "axis": 1}, "axis is 1, of a tensor of shape [4]"),
    # shapes
    ("ARangeNode", {"start": 0, "stop": 3, "step": 0}, "step is 0"),
    ("ARangeNode", {"start": 0, "stop": 3, "step": 1, "scalar_type": BOOL}, "scalar_type is bool, expected numbers"),
    ("ARangeNode", {"start": 0, "stop": N, "step": 1, "scalar_type": -1}, "scalar_type: unknown scalar type -1"),
    ("AsStridedNode", {"x": "float32[4]", "shape": [2], "strides": []}, "1 sizes and 0 strides"),
    ("AsStridedNode", {"x": "float32[4]", "shape": [-1], "strides": [1]}, "shape is -1, expected 0 or more"),
    ("AsStridedNode", {"x": "float32[4]", "shape": [5], "strides": [1]}, "reaches elements 0 to 4 of 4"),
    ("AsStridedNode", {"x": "float32[4]", "shape": [2, 2], "strides": [2, 1], "offset": 1}, "elements 1 to 4 of 4"),
    ("AsStridedNode", {"x": "float32[4]", "shape": [3], "strides": [-1], "offset": 1}, "elements -1 to 1 of 4"),
    ("AsStridedNode", {"x": "float32[0..4]", "shape": [1], "strides": [0], "offset": 4}, "elements 4 to 4 of 0..4"),
    ("BroadcastToNode", {"x": "float32[2, 3]", "shape": [3]}, "shape [2, 3] has more axes than [3]"),
    ("BroadcastToNode", {"x": "float32[2]", "shape": [3]}, "sizes that do not go together: 2 and 3"),
    ("BroadcastToNode", {"x": "float32[2]", "shape": [-2]}, "shape is -2, expected -1 or more"),
    ("ConcatenateNode", {"tensors": []}, "there are no tensors"),
    ("ConcatenateNode", {"tensors": ["float32[]", "float32[]"]}, "the tensors have no axes"),
    ("ConcatenateNode", {"tensors": ["float32[2]", "float32[2, 2]"]}, "the tensors have [1, 2] axes"),
    ("ConcatenateNode", {"tensors": ["int8[2, 3]", "int8[2, 4]"], "axis": 0}, "sizes of axis 1: 3 and 4"),
    ("ConcatenateNode", {"tensors": ["int8[2]"], "axis": 1}, "axis is 1, of a tensor of shape [2]"),
    ("StackNode", {"tensors": []}, "there are no tensors"),
    ("StackNode", {"tensors": ["float32[2]", "float32[]"]}, "the tensors have [0, 1] axes"),
    ("StackNode", {"tensors": ["float32[2]", "float32[3]"]}, "sizes of axis 0: 2 and 3"),
    ("StackNode", {"tensors": ["float32[2]"], "axis": 2}, "axis is 2, of a tensor of shape [2]"),
    ("ExpandDimsNode", {"x": "float32[2]", "axis": 2}, "axis is 2, of a tensor of shape [2]"),
    ("ExpandDimsNode", {"x": "float32[2]", "axis": -3}, "axis is -3, of a tensor of shape [2]"),
    ("FlipNode", {"x": "float32[2]", "axes": [1]}, "axes is 1, of a tensor of shape [2]"),
    ("FlipNode", {"x": "float32[2]", "axes": [0, 0]}, "axes [0, 0] name one axis twice"),
    ("FlipNode", {"x": "float32[]", "axes": [0]}, "axes are [0], of a tensor without axes"),
    ("FullNode", {"shape": [-1], "v": 0.0, "scalar_type": F32}, "shape is -1, expected 0 or more"),
    ("FullNode", {"shape": [1], "v": 0.0, "scalar_type": 8}, "scalar_type: unknown scalar type 8"),
    ("FullNode", {"shape": [1], "v": math.inf, "scalar_type": INT8}, "v is inf, in a tensor of int8"),
    ("FullNode", {"shape": [1], "v": math.nan, "scalar_type": INT8}, "v is nan, in a tensor of int8"),
    ("FullLikeNode", {"x": "int32[1]", "v": -1e20}, "v is -1e+20, in a tensor of int32"),
    ("FullLikeNode", {"x": "int32[1]", "v": 1.0, "scalar_type": 8}, "scalar_type: unknown scalar type 8"),
    ("PadNode", {"x": "float32[2]", "pad_width": [0, 0], "mode": "reflect"}, "mode is 'reflect', expected one of"),
    ("PadNode", {"x": "float32[2]", "pad_width": [0], "mode": "edge"}, "pad_width has 1 entries, expected pairs"),
    ("PadNode", {"x": "float32[2]", "pad_width": [0, -1], "mode": "edge"}, "pad_width is -1, expected 0 or more"),
    ("PadNode", {"x": "float32[2, 2]", "pad_width": [0, 0], "mode": "edge"}, "pad_width has 1 pairs, of a tensor"),
    ("PadNode", {"x": "float32[0]", "pad_width": [0, 1], "mode": "edge"}, "an axis of no elements has no edge"),
    ("RandomBitsNode", {"shape": [2], "width": 3}, "width is 3, expected one of 1, 2, 4"),
    ("RandomBitsNode", {"shape": [-2]}, "shape is -2, expected 0 or more"),
    ("RepeatNode", {"x": "float32[]", "repeats": 2}, "x has no axes"),
    ("RepeatNode", {"x": "float32[2]", "repeats": -1}, "repeats is -1, expected 0 or more"),
    ("RepeatNode", {"x": "float32[0]", "repeats": 2**31}, "repeats is 2147483648, expected 31 bits"),
    ("RepeatNode", {"x": "float32[2]", "repeats": 1, "axis": 1}, "axis is 1, of a tensor of shape [2]"),
    ("ReshapeNode", {"x": "float32[6]", "shape": [4]}, "shape [4] for 6 elements"),
    ("ReshapeNode", {"x": "float32[6]", "shape": [4, -1]}, "shape [4, -1] for 6 elements"),
    ("ReshapeNode", {"x": "float32[0]", "shape": [0, -1]}, "shape [0, -1] for 0 elements"),
    ("ReshapeNode", {"x": "float32[6]", "shape": [-1, -1]}, "shape [-1, -1] leaves more than one size open"),
    ("ReshapeNode", {"x": "float32[6]", "shape": [-2]}, "shape is -2, expected -1 or more"),
    ("ReshapeNode", {"x": "float32[0..6]", "shape": [7]}, "shape [7] for 0..6 elements"),
    ("RollNode", {"x": "float32[2]", "shift": [1, 1], "axes": [0]}, "2 shifts for 1 axes"),
    ("RollNode", {"x": "float32[]", "shift": [1], "axes": [0]}, "axes are [0], of a tensor without axes"),
    ("RollNode", {"x": "float32[2]", "shift": [1], "axes": [1]}, "axes is 1, of a tensor of shape [2]"),
    ("SplitNode", {"x": "float32[]", "sizes": [1]}, "x has no axes"),
    ("SplitNode", {"x": "float32[4]", "sizes": [4], "num_outs": 0}, "there are no outs"),
    ("SplitNode", {"x": "float32[4]", "sizes": [1, 3], "num_outs": 3}, "2 sizes for 3 outs"),
    ("SplitNode", {"x": "float32[4]", "sizes": [1, 2], "num_outs": 2}, "sizes do not add up to the axis: 3 and 4"),
    ("SplitNode", {"x": "float32[4]", "sizes": [1], "num_outs": 2}, "2 chunks of 1 of an axis of 4"),
    ("SplitNode", {"x": "float32[4]", "sizes": [5], "num_outs": 2}, "2 chunks of 5 of an axis of 4"),
    ("SplitNode", {"x": "float32[4]", "sizes": [-1], "num_outs": 2}, "sizes is -1, expected 0 or more"),
    ("SplitNode", {"x": "float32[4]", "sizes": [4], "axis": 1}, "axis is 1, of a tensor of shape [4]"),
    ("SqueezeNode", {"x": "float32[1]", "dims": [1]}, "dims is 1, of a tensor of shape [1]"),
    ("SqueezeNode", {"x": "float32[1]", "dims": [0, 0]}, "dims [0, 0] name one axis twice"),
    ("SqueezeNode", {"x": "float32[]", "dims": [0]}, "dims are [0], of a tensor without axes"),
    ("TileNode", {"x": "float32[2]", "reps": [-1]}, "reps is -1, expected 0 or more"),
    ("TileNode", {"x": "float32[0]", "reps": [2**31]}, "reps are [2147483648], expected 31 bits"),
    ("TransposeNode", {"x": "float32[2, 3]", "perm": [0]}, "perm is [0], of a tensor of shape [2, 3]"),
    ("TransposeNode", {"x": "float32[2, 3]", "perm": [0, -2]}, "perm [0, -2] name one axis twice"),
    ("TransposeNode", {"x": "float32[2, 3]", "perm": [0, 2]}, "perm is 2, of a tensor of shape [2, 3]"),
    ("TriNode", {"n": -1, "m": 2, "scalar_type": F32}, "n is -1, expected 0 or more"),
    ("TriNode", {"n": 1, "m": 2, "scalar_type": 99}, "scalar_type: unknown scalar type 99"),
    ("TrilNode", {"x": "float32[2]"}, "x has shape [2], expected 2 or more axes"),
    ("TriuNode", {"x": "float32[]"}, "x has shape [], expected 2 or more axes"),
    # indices
    (
        "GatherNode",
        {"x": "float32[4, 5]", "indices": ["int32[3]"], "axes": [0, 1], "slice_sizes": [1, 1]},
        "1 indices for 2 axes",
    ),
    ("GatherNode", {"x": "int8[]", "indices": ["int32[3]"], "axes": [0], "slice_sizes": []}, "axes are [0], of a"),
    ("GatherNode", {"x": "int8[4]", "indices": ["int32[3]"], "axes": [0], "slice_sizes": []}, "0 slice sizes, of a"),
    (
        "GatherNode",
        {"x": "int8[4]", "indices": ["int32[3]"], "axes": [0], "slice_sizes": [5]},
        "slice_sizes: 5 of axis 0 of 4",
    ),
    (
        "GatherNode",
        {"x": "int8[4]", "indices": ["int32[3]"], "axes": [0], "slice_sizes": [-1]},
        "slice_sizes is -1, expected 0 or more",
    ),
    (
        "GatherNode",
        {"x": "int8[4]", "indices": ["bool[3]"], "axes": [0], "slice_sizes": [1]},
        "indices is of bool, expected one of int16",
    ),
    (
        "GatherNode",
        {"x": "int8[4, 4]", "indices": ["int32[3]", "int32[2]"], "axes": [0, 1], "slice_sizes": [1, 1]},
        "sizes 3 and 2 do not go together",
    ),
    ("IndexCopyNode", {"dst": "int8[4]", "update": "int8[2]", "indices": "float32[2]"}, "indices is of float32"),
    ("IndexCopyNode", {"dst": "int8[4]", "update": "int8[2]", "indices": "int32[]"}, "indices has shape []"),
    ("IndexCopyNode", {"dst": "int8[]", "update": "int8[2]", "indices": "int32[2]"}, "dst has no axes"),
    (
        "IndexCopyNode",
        {"dst": "int8[4, 2]", "update": "int8[3, 2]", "indices": "int32[2]"},
        "sizes 3 and 2 do not go together",
    ),
    (
        "IndexCopyNode",
        {"dst": "int8[4]", "update": "int8[2, 2]", "indices": "int32[2]"},
        "update has shape [2, 2], what it is written to has [2]",
    ),
    (
        "IndexCopyNode",
        {"dst": "int8[4, 1]", "update": "int8[2, 3]", "indices": "int32[2]"},
        "update has shape [2, 3], what it is written to has [2, 1]",
    ),
    ("ScatterAddNode", {"x": "int8[]", "indices": "int32[]", "updates": "int8[]"}, "x has no axes"),
    ("ScatterAddNode", {"x": "int8[4]", "indices": "bool[2]", "updates": "int8[2]"}, "indices is of bool"),
    (
        "ScatterAddNode",
        {"x": "int8[4, 4]", "indices": "int32[2]", "updates": "int8[2, 2]"},
        "indices has shape [2], x has [4, 4]",
    ),
    (
        "ScatterAddNode",
        {"x": "int8[4, 4]", "indices": "int32[2, 2]", "updates": "int8[2]"},
        "updates has shape [2], x has [4, 4]",
    ),
    (
        "ScatterAddNode",
        {"x": "int8[4, 4]", "indices": "int32[2, 5]", "updates": "int8[2, 5]"},
        "indices have 5 places on axis 1, x has 4",
    ),
    (
        "ScatterAddNode",
        {"x": "int8[4, 4]", "indices": "int32[3, 2]", "updates": "int8[2, 2]"},
        "indices have 3 places on axis 0, updates have 2",
    ),
    ("SliceNode", {"x": "int8[4]", "axis": 1, "start": 0, "stop": 1}, "axis is 1, of a tensor of shape [4]"),
    ("SliceNode", {"x": "int8[4]", "axis": -2, "start": 0, "stop": 1}, "axis is -2, of a tensor of shape [4]"),
    ("SliceNode", {"x": "int8[4]", "axis": 0, "start": 0, "stop": 1, "step": 0}, "step is 0"),
    (
        "SliceNode",
        {"x": "int8[4]", "axis": 0, "start": 0, "stop": 1, "step": 2**30 + 1},
        "step is 1073741825, expected",
    ),
    ("SliceNode", {"x": "int8[]", "axis": 0, "start": 0, "stop": 1}, "there are no axes to slice"),
    (
        "SliceUpdateNode",
        {"dst": "int8[4]", "update": "int8[3]", "axis": 0, "start": 0, "stop": 2},
        "sizes 3 and 2 do not go together",
    ),
    (
        "SliceUpdateNode",
        {"dst": "int8[4]", "update": "int8[3]", "axis": 0, "start": 0, "stop": 1},
        "update has shape [3], what it is written to has [1]",
    ),
    (
        "SliceUpdateNode",
        {"dst": "int8[0..4]", "update": "int8[5]", "axis": 0, "start": 0, "stop": N},
        "update has shape [5], what it is written to has [0..4]",
    ),
    ("TakeNode", {"x": "int8[]", "index": 0}, "x has no axes"),
    ("TakeNode", {"x": "int8[4]", "index": 4}, "index is 4, of an axis of 4"),
    ("TakeNode", {"x": "int8[0..4]", "index": -5}, "index is -5, of an axis of 0..4"),
    ("TakeNode", {"x": "int8[4]", "index": "float32[2]"}, "index is of float32, expected one of int16"),
    ("TakeNode", {"x": "int8[4]", "index": "int32[2]", "axis": 1}, "axis is 1, of a tensor of shape [4]"),
    ("TakeNode", {"x": "int8[0, 4]", "index": "int32[2]"}, "axis 0 of [0, 4] has no elements"),
    ("TakeAlongAxisNode", {"x": "int8[]", "indices": "int32[]"}, "a tensor has no axes"),
    ("TakeAlongAxisNode", {"x": "int8[4]", "indices": "int32[]"}, "a tensor has no axes"),
    ("TakeAlongAxisNode", {"x": "int8[4]", "indices": "bool[2]"}, "indices is of bool"),
    ("TakeAlongAxisNode", {"x": "int8[4, 2]", "indices": "int32[2]"}, "indices have shape [2], x has [4, 2]"),
    ("TakeAlongAxisNode", {"x": "int8[4, 2]", "indices": "int32[2, 3]"}, "sizes 2 and 3 do not go together"),
    # products
    ("AddmmNode", {"mat1": "float32[]", "mat2": "float32[2]"}, "a factor has no axes"),
    ("AddmmNode", {"mat1": "float32[2, 3]", "mat2": "float32[4, 2]"}, "3 columns and 4 rows, of tensors of shapes"),
    ("AddmmNode", {"mat1": "float32[2]", "mat2": "float32[3]"}, "2 columns and 3 rows"),
    ("AddmmNode", {"mat1": "int32[2, 3]", "mat2": "int32[3, 2]"}, "computed in int32, expected one of bfloat16"),
    ("AddmmNode", {"mat1": "float32[5, 2, 3]", "mat2": "float32[4, 3, 2]"}, "sizes 5 and 4 do not go together"),
    (
        "AddmmNode",
        {"mat1": "float32[2, 3]", "mat2": "float32[3, 2]", "bias": "float32[3]"},
        "sizes 3 and 2 do not go together",
    ),
    (
        "AddmmNode",
        {"mat1": "float32[1, 3]", "mat2": "float32[3, 2]", "bias": "float32[4, 2]"},
        "bias has shape [4, 2], the product has [1, 2]",
    ),
    (
        "AddmmNode",
        {"mat1": "float32[3]", "mat2": "float32[3, 2]", "bias": "float32[1, 2]"},
        "bias has shape [1, 2], the product has [2]",
    ),
    ("Conv1DNode", with_(CONV, x="float32[2, 4]"), "x has shape [2, 4], expected 3 axes"),
    ("Conv1DNode", with_(CONV, w="float32[6, 3, 4, 1]"), "w has shape [6, 3, 4, 1], expected 3 axes"),
    ("Conv1DNode", with_(CONV, groups=0), "groups is 0, expected 1 or more"),
    ("Conv1DNode", with_(CONV, stride=0), "stride is 0, expected 1 or more"),
    ("Conv1DNode", with_(CONV, dilation=0), "dilation is 0, expected 1 or more"),
    ("Conv1DNode", with_(CONV, padding=-1), "padding is -1, expected 0 or more"),
    ("Conv1DNode", with_(CONV, x="int32[2, 5, 4]"), "computed in int32, expected one of bfloat16, float16, float32"),
    ("Conv1DNode", with_(CONV, w="float64[6, 3, 4]"), "computed in float64, expected one of bfloat16"),
    ("Conv1DNode", with_(CONV, w="float32[6, 0, 4]"), "w has shape [6, 0, 4], without elements"),
    ("Conv1DNode", with_(CONV, groups=4), "6 channels out, for 4 groups"),
    ("Conv1DNode", with_(CONV, groups=2), "channels of x, and of w times groups: 4 and 8"),
    ("Conv1DNode", with_(CONV, dilation=3), "an axis of 5, padded by 0, is smaller than a kernel of 3"),
    ("Conv2DNode", {"x": "float32[2, 5, 5, 4]", "w": "float32[6, 3, 3, 4]", "stride_w": 0}, "stride_w is 0"),
    ("Conv3DNode", {"x": "float32[2, 5, 5, 5, 4]", "w": "float32[6, 3, 3, 6, 4]"}, "an axis of 5, padded by 0"),
    ("ConvTranspose1DNode", with_(CONV, output_padding=1), "output_padding is 1, expected less than 1"),
    ("ConvTranspose1DNode", with_(CONV, output_padding=-1), "output_padding is -1, expected 0 or more"),
    ("ConvTranspose1DNode", with_(CONV, padding=4), "an axis of 5, of which padding 4 leaves nothing"),
    (
        "ConvTranspose2DNode",
        {"x": "float32[2, 5, 5, 4]", "w": "float32[6, 3, 3, 4]", "dilation_h": 2, "output_padding_h": 2},
        "output_padding_h is 2, expected less than 2",
    ),
    # quantized
    ("DequantizeNode", with_(AFFINE, mode="int4"), "mode is 'int4', expected one of 'affine', 'mxfp4'"),
    ("DequantizeNode", with_(AFFINE, group_size=16), "group_size is 16, expected one of 32, 64, 128"),
    ("DequantizeNode", with_(AFFINE, bits=7), "bits is 7, expected one of 2, 3, 4"),
    ("DequantizeNode", with_(AFFINE, biases=None), "biases: mode 'affine' needs them"),
    ("DequantizeNode", with_(NVFP4, biases="float32[8, 2]"), "biases: mode 'nvfp4' has none of them"),
    ("DequantizeNode", with_(AFFINE, w="int32[8, 4]"), "w is of int32, expected one of uint32"),
    ("DequantizeNode", with_(AFFINE, scales="uint8[8, 1]"), "scales is of uint8, expected one of bfloat16"),
    ("DequantizeNode", with_(NVFP4, scales="float32[8, 2]"), "scales is of float32, expected one of uint8"),
    ("DequantizeNode", with_(AFFINE, biases="int8[8, 1]"), "biases is of int8"),
    ("DequantizeNode", with_(AFFINE, w="uint32[]"), "w has shape [], expected 1 or more axes"),
    ("DequantizeNode", with_(AFFINE, bits=3), "w has 4 words a row, which are no numbers of its bits"),
    ("DequantizeNode", with_(AFFINE, scales="float32[8, 2]"), "scales has shape [8, 2], for w of [8, 32] in groups"),
    ("DequantizeNode", with_(AFFINE, biases="float32[7, 1]"), "biases has shape [7, 1], for w of [8, 32] in groups"),
    ("DequantizeNode", with_(AFFINE, scales="float32[1]"), "scales has shape [1], for w of [8, 32] in groups of 32"),
    ("DequantizeNode", with_(AFFINE, dtype=INT8), "dtype is int8, expected floats"),
    ("DequantizeNode", with_(AFFINE, dtype=8), "dtype: unknown scalar type 8"),
    ("DequantizeNode", with_(AFFINE, global_scale="float32[]"), "global_scale: of mode 'nvfp4' only"),
    ("DequantizeNode", with_(NVFP4, global_scale="float16[]"), "global_scale is of float16"),
    ("QuantizedMatmulNode", with_(AFFINE, x="float32[2, 31]"), "31 columns and 32 rows"),
    ("QuantizedMatmulNode", with_(AFFINE, x="float32[2, 32]", transpose=False), "32 columns and 8 rows"),
    ("QuantizedMatmulNode", with_(AFFINE, x="float32[]"), "a factor has no axes"),
    ("QuantizedMatmulNode", with_(AFFINE, x="int8[2, 32]"), "x is of int8, expected one of bfloat16"),
    ("QuantizedMatmulNode", with_(AFFINE, x="float64[2, 32]"), "x is of float64, expected one of bfloat16"),
    (
        "QuantizedMatmulNode",
        with_(AFFINE, x="float32[2, 32]", scales="float64[8, 1]"),
        "computed in float64, expected one of bfloat16",
    ),
    ("QuantizedMatmulNode", with_(AFFINE, x="float32[2, 0, 32]"), "x has shape [2, 0, 32], without rows"),
    (
        "QuantizedMatmulNode",
        with_(AFFINE, x="float32[2, 32]", w="uint32[4]", scales="?", biases="?"),
        "w has shape [4], expected 2 or more axes",
    ),
    ("GatherQmmNode", with_(AFFINE, x="float32[32]"), "a factor of shape [32] holds no matrices"),
    ("GatherQmmNode", with_(AFFINE, x="float32[2, 31]"), "31 columns and 32 rows"),
    ("GatherQmmNode", with_(AFFINE, x="float32[0, 32]"), "x has shape [0, 32], without rows"),
    ("GatherQmmNode", with_(AFFINE, x="float32[2, 32]", rhs_indices="bool[1]"), "rhs_indices is of bool"),
    ("GatherMmNode", {"a": "int8[2, 3]", "b": "float32[3, 2]"}, "a is of int8, expected one of bfloat16"),
    ("GatherMmNode", {"a": "float32[2, 3]", "b": "float32[3]"}, "a factor of shape [3] holds no matrices"),
    ("GatherMmNode", {"a": "float32[2, 3]", "b": "float32[4, 2]"}, "3 columns and 4 rows"),
    (
        "GatherMmNode",
        {"a": "float32[5, 2, 3]", "b": "float32[4, 3, 2]", "lhs_indices": "int32[2]", "rhs_indices": "int32[3]"},
        "sizes 2 and 3 do not go together",
    ),
    ("GatherMmNode", {"a": "float32[5, 2, 3]", "b": "float32[4, 3, 2]"}, "sizes 5 and 4 do not go together"),
    # norms, rotations, attention
    ("RMSNormNode", {"x": "int32[2]"}, "x is of int32, expected one of bfloat16"),
    ("RMSNormNode", {"x": "float32[]"}, "x has no axes"),
    ("RMSNormNode", {"x": "float32[2]", "weight": "float32[3]"}, "a parameter and of the last axis: 3 and 2"),
    ("LayerNormNode", {"x": "float32[2]", "weight": "int8[2]"}, "a parameter is of int8"),
    ("LayerNormNode", {"x": "float32[2]", "bias": "float32[1, 2]"}, "bias has shape [1, 2], expected 1 axes"),
    ("RopeNode", {"x": "float32[2, 8]", "dims": 8, "offset": N}, "x has shape [2, 8], expected 3 or more axes"),
    ("RopeNode", {"x": "int8[2, 3, 8]", "dims": 8, "offset": N}, "x is of int8"),
    ("RopeNode", {"x": "float32[2, 3, 8]", "dims": 7, "offset": N}, "dims is 7, expected a positive even number"),
    ("RopeNode", {"x": "float32[2, 3, 8]", "dims": 0, "offset": N}, "dims is 0, expected a positive even number"),
    ("RopeNode", {"x": "float32[2, 3, 8]", "dims": 10, "offset": N}, "dims is 10, of an axis of 8"),
    ("RopeNode", {"x": "float32[2, 3, 8]", "dims": 8, "offset": "float32[]"}, "offset is of float32"),
    ("RopeNode", {"x": "float32[2, 3, 8]", "dims": 8, "offset": "int32[1, 1]"}, "expected 0 to 1 axes"),
    ("RopeNode", {"x": "float32[2, 3, 8]", "dims": 8, "offset": "int32[3]"}, "3 offsets for a batch of 2"),
    (
        "RopeNode",
        {"x": "float32[2, 3, 8]", "dims": 8, "offset": N, "freqs": "float32[8]"},
        "sizes of freqs and of half of dims: 8 and 4",
    ),
    ("RopeNode", {"x": "float32[2, 3, 8]", "dims": 8, "offset": N, "freqs": "float32[]"}, "freqs has shape []"),
    ("SdpaNode", with_(HEADS, q="float32[4, 3, 8]"), "q has shape [4, 3, 8], expected 4 axes"),
    ("SdpaNode", with_(HEADS, q="int8[2, 4, 3, 8]", k="int8[2, 2, 5, 8]", v="bool[2, 2, 5, 6]"), "computed in int8"),
    ("SdpaNode", with_(HEADS, q="float32[3, 4, 3, 8]"), "batches of q and k: 3 and 2"),
    ("SdpaNode", with_(HEADS, v="float32[3, 2, 5, 6]"), "batches of k and v: 2 and 3"),
    ("SdpaNode", with_(HEADS, v="float32[2, 4, 5, 6]"), "heads of k and v: 2 and 4"),
    ("SdpaNode", with_(HEADS, v="float32[2, 2, 4, 6]"), "lengths of k and v: 5 and 4"),
    ("SdpaNode", with_(HEADS, q="float32[2, 4, 3, 6]"), "sizes of the heads of q and k: 6 and 8"),
    ("SdpaNode", with_(HEADS, q="float32[2, 3, 3, 8]"), "3 heads of q share 2 of k and v"),
    ("SdpaNode", with_(HEADS, q="float32[2, 0, 3, 8]"), "there are no heads"),
    ("SdpaNode", with_(HEADS, k="float32[2, 0, 5, 8]", v="float32[2, 0, 5, 6]"), "there are no heads"),
    ("SdpaNode", with_(HEADS, mask="int8[3, 5]"), "mask is of int8, expected one of bfloat16, bool"),
    ("SdpaNode", with_(HEADS, mask="bool[]"), "mask has no axes"),
    ("SdpaNode", with_(HEADS, mask="bool[1, 2, 4, 3, 5]"), "mask has shape [1, 2, 4, 3, 5], what it masks has"),
    ("SdpaNode", with_(HEADS, mask="bool[3, 3]"), "sizes 3 and 5 do not go together"),
    (
        "SdpaNode",
        with_(HEADS, q="float32[2, 4, 1, 8]", mask="bool[3, 5]"),
        "mask has shape [3, 5], what it masks has [2, 4, 1, 5]",
    ),
    ("UpdateAndAttendNode", with_(CACHED, layer_id=None), "layer_id and scale are required"),
    ("UpdateAndAttendNode", with_(CACHED, scale=None), "layer_id and scale are required"),
    ("UpdateAndAttendNode", with_(CACHED, q="float32[3, 8]"), "q has shape [3, 8], expected 4 axes"),
    ("UpdateAndAttendNode", with_(CACHED, position="float32[3]"), "position is of float32"),
    ("UpdateAndAttendNode", with_(CACHED, out_dtype=8), "out_dtype: unknown scalar type 8"),
    ("UpdateAndAttendNode", with_(CACHED, q="float32[1, 4, 2, 8]"), "lengths of q and k: 3 and 2"),
    ("UpdateAndAttendNode", with_(CACHED, v="float32[1, 2, 2, 6]"), "lengths of k and v: 3 and 2"),
    ("UpdateAndAttendNode", with_(CACHED, v="float32[1, 1, 3, 6]"), "heads of k and v: 2 and 1"),
    ("UpdateAndAttendNode", with_(CACHED, k="float32[1, 2, 3, 4]"), "sizes of the heads of q and k: 8 and 4"),
    # control
    ("ScanNode", {"originals": [], "sliced": [], "carry": []}, "there is nothing to go over"),
    ("ScanNode", {"originals": ["float32[2]"], "sliced": [], "carry": []}, "1 originals, 0 slices"),
    ("ScanNode", {"originals": ["float32[]"], "carry": [], "scan_axis": 0}, "one of the originals has no axes"),
    ("ScanNode", {"originals": ["float32[2]"], "carry": []}, "scan_axis is 1, of a tensor of shape [2]"),
    ("ScanNode", {"originals": ["float32[0]"], "carry": [], "scan_axis": 0}, "there is nothing to go over"),
    (
        "ScanNode",
        {"originals": ["float32[2]", "float32[3]"], "carry": [], "scan_axis": 0, "num_outs": 2},
        "lengths of what it goes over: 2 and 3",
    ),
    ("MetalKernelNode", with_(METAL, input_names=None), "input_names has 0 entries, expected 1"),
    ("MetalKernelNode", with_(METAL, output_names=["y", "z"]), "output_names has 2 entries, expected 1"),
    ("MetalKernelNode", with_(METAL, output_shape_lengths=None), "output_shape_lengths has 0 entries, expected 1"),
    ("MetalKernelNode", with_(METAL, output_dtypes=None), "output_dtypes has 0 entries, expected 1"),
    ("MetalKernelNode", with_(METAL, output_dtypes=[8]), "output_dtypes: unknown scalar types in [8]"),
    ("MetalKernelNode", with_(METAL, grid=[1, 1]), "grid has 2 sizes, expected 3"),
    ("MetalKernelNode", with_(METAL, threadgroup=[1, 0, 1]), "threadgroup is 0, expected 1 or more"),
    ("MetalKernelNode", with_(METAL, output_shapes_flat=None), "output_shapes_flat has 0 sizes, output_shape_lengths"),
    ("MetalKernelNode", with_(METAL, output_shapes_flat=[-1]), "output_shapes_flat is -1, expected 0 or more"),
    ("MetalKernelNode", with_(METAL, output_shape_lengths=[-1]), "output_shapes_flat has 1 sizes"),
    ("MetalKernelNode", with_(METAL, template_arg_names=["T"]), "template arguments: names, kinds and values differ"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [pytest.param(*row, id=f"{row[0]}: {row[2]}") for row in REFUSED],
)
def test_what_an_instruction_cannot_take_is_refused_with_what_is_wrong(
    kind: str, fields: dict[str, Any], message: str
) -> None:
    graph = written_graph(kind, **fields)
    with pytest.raises(ProgramError, match=rf"^chain 0, instruction 0 \({kind}\): .*{re.escape(message)}"):
        verify_graph(graph)


# (kind, fields, types of what it gives): sizes that are not known, and tensors of which nothing is
INFERRED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("AddNode", {"a": "float32[2, 0..5]", "b": "float16[2, 1]"}, ["float32[2, 0..5]"]),
    ("AddNode", {"a": "float32[0..5]", "b": "int8[0..3]"}, ["float32[0..5]"]),
    ("AddNode", {"a": "float32[0..5]", "b": "int8[4]"}, ["float32[4]"]),
    ("AddNode", {"a": "?", "b": "int8[4]"}, ["?[...]"]),
    ("SumNode", {"x": "?", "axes": [1]}, ["?[...]"]),
    ("MaxNode", {"x": "float32[2, 0..]", "keepdims": True}, ["float32[1, 1]"]),
    ("ArgmaxNode", {"x": "?", "axis": 3}, ["int64[...]"]),
    ("PartitionNode", {"x": "?", "kth": N}, ["?[...]"]),
    ("PartitionNode", {"x": "float32[]", "kth": 0}, ["float32[]"]),
    ("ARangeNode", {"start": 0, "stop": N, "step": 2}, ["int64[0..]"]),
    ("ARangeNode", {"start": 9, "stop": N, "step": -2}, ["int64[0..]"]),
    ("ARangeNode", {"start": 0, "stop": 9, "step": N}, ["int64[0..]"]),
    ("AsStridedNode", {"x": "?", "shape": [N, 2], "strides": [N, 1]}, ["?[0.., 2]"]),
    ("BroadcastToNode", {"x": "?", "shape": [-1, 3]}, ["?[0.., 3]"]),
    ("BroadcastToNode", {"x": "int8[0..4]", "shape": [2, -1]}, ["int8[2, 0..4]"]),
    ("BroadcastToNode", {"x": "int8[2]", "shape": [N]}, ["int8[2]"]),
    ("BroadcastToNode", {"x": "int8[1]", "shape": [N]}, ["int8[0..]"]),
    ("BroadcastToNode", {"x": "int8[0..4]", "shape": [7]}, ["int8[7]"]),
    ("ConcatenateNode", {"tensors": ["int8[2]", "?"]}, ["?[...]"]),
    ("ConcatenateNode", {"tensors": ["int8[2, 0..9]", "bool[0..3, 5]"], "axis": 0}, ["int8[2..5, 5]"]),
    ("StackNode", {"tensors": ["int8[2]", "?"]}, ["?[...]"]),
    ("StackNode", {"tensors": ["int8[2]", "int8[0..3]"], "axis": -1}, ["int8[2, 2]"]),
    ("ExpandDimsNode", {"x": "?", "axis": 1}, ["?[...]"]),
    ("FullLikeNode", {"x": "?", "v": 1.0}, ["?[...]"]),
    ("FullNode", {"shape": [2], "v": math.nan, "scalar_type": BOOL}, ["bool[2]"]),
    ("FullNode", {"shape": [N], "v": math.inf, "scalar_type": F16}, ["float16[0..]"]),
    ("PadNode", {"x": "?", "pad_width": [0, 0, N, 1], "mode": "edge"}, ["?[0.., 0..]"]),
    ("PadNode", {"x": "int8[0..3]", "pad_width": [N, 1], "mode": "constant"}, ["int8[1..]"]),
    ("RepeatNode", {"x": "?", "repeats": 2}, ["?[...]"]),
    ("RepeatNode", {"x": "int8[0..3]", "repeats": 2}, ["int8[0..6]"]),
    ("ReshapeNode", {"x": "?", "shape": [-1, 3]}, ["?[0.., 3]"]),
    ("ReshapeNode", {"x": "int8[0..6]", "shape": [-1, 3]}, ["int8[0..2, 3]"]),
    ("ReshapeNode", {"x": "int8[0.., 6]", "shape": [-1, 3]}, ["int8[0.., 3]"]),
    ("ReshapeNode", {"x": "int8[6]", "shape": [N, 3]}, ["int8[0.., 3]"]),
    ("RollNode", {"x": "?", "shift": [N], "axes": [4]}, ["?[...]"]),
    ("SplitNode", {"x": "?", "sizes": [1], "num_outs": 2}, ["?[...]", "?[...]"]),
    ("SplitNode", {"x": "int8[0..5]", "sizes": [2], "num_outs": 3}, ["int8[2]", "int8[2]", "int8[0..1]"]),
    ("SplitNode", {"x": "int8[5]", "sizes": [N, 2], "num_outs": 2}, ["int8[0..]", "int8[2]"]),
    ("SplitNode", {"x": "int8[5]", "sizes": [N], "num_outs": 2}, ["int8[0..]", "int8[0..5]"]),
    ("SqueezeNode", {"x": "?", "dims": [3]}, ["?[...]"]),
    ("SqueezeNode", {"x": "int8[1, 0..3]"}, ["int8[...]"]),
    ("SqueezeNode", {"x": "int8[1, 2..3]", "dims": [1]}, ["int8[...]"]),
    ("SqueezeNode", {"x": "int8[1, 0..3]", "dims": [0]}, ["int8[0..3]"]),
    ("SqueezeNode", {"x": "int8[]"}, ["int8[]"]),
    ("TileNode", {"x": "?", "reps": [2]}, ["?[...]"]),
    ("TileNode", {"x": "int8[0..3]", "reps": [N, 2]}, ["int8[0.., 0..6]"]),
    ("TransposeNode", {"x": "?", "perm": [1, 0]}, ["?[...]"]),
    ("GatherNode", {"x": "?", "indices": ["?"], "axes": [0], "slice_sizes": [1]}, ["?[...]"]),
    ("GatherNode", {"x": "?", "indices": ["int8[3]"], "axes": [0], "slice_sizes": [1]}, ["?[3, 1]"]),
    ("GatherNode", {"x": "int8[]", "indices": [], "axes": [], "slice_sizes": []}, ["int8[]"]),
    ("IndexCopyNode", {"dst": "?", "update": "int8[2]", "indices": "int8[2]"}, ["?[...]"]),
    ("IndexCopyNode", {"dst": "int8[4]", "update": "int8[2]", "indices": "?"}, ["int8[4]"]),
    ("IndexCopyNode", {"dst": "int8[4]", "update": "?", "indices": "int8[2]"}, ["int8[4]"]),
    ("ScatterAddNode", {"x": "?", "indices": "int8[2]", "updates": "int8[2]"}, ["?[...]"]),
    ("ScatterAddNode", {"x": "int8[4]", "indices": "?", "updates": "?"}, ["int8[4]"]),
    ("ScatterAddNode", {"x": "int8[4]", "indices": "int8[9]", "updates": "?"}, ["int8[4]"]),
    ("SliceNode", {"x": "?", "axis": 0, "start": 0, "stop": 1}, ["?[...]"]),
    ("SliceNode", {"x": "int8[4, 5]", "axis": N, "start": 0, "stop": 1}, ["int8[0..4, 0..5]"]),
    ("SliceNode", {"x": "int8[4]", "axis": 0, "start": N, "stop": 9, "step": -2}, ["int8[0..2]"]),
    ("SliceNode", {"x": "int8[0..]", "axis": 0, "start": N, "stop": N}, ["int8[0..]"]),
    ("SliceNode", {"x": "int8[0..]", "axis": 0, "start": 2, "stop": 9, "step": 3}, ["int8[0..3]"]),
    ("SliceUpdateNode", {"dst": "?", "update": "int8[9]", "axis": 0, "start": 0, "stop": 1}, ["?[...]"]),
    ("SliceUpdateNode", {"dst": "int8[4]", "update": "?", "axis": 0, "start": 0, "stop": 1}, ["int8[4]"]),
    ("TakeNode", {"x": "?", "index": N}, ["?[...]"]),
    ("TakeNode", {"x": "int8[4]", "index": "?"}, ["int8[...]"]),
    ("TakeNode", {"x": "int8[0, 4]", "index": "int32[0]"}, ["int8[0, 4]"]),
    ("TakeAlongAxisNode", {"x": "?", "indices": "int32[2]"}, ["?[...]"]),
    ("TakeAlongAxisNode", {"x": "int8[2]", "indices": "?"}, ["int8[...]"]),
    ("AddmmNode", {"mat1": "?", "mat2": "float32[2]", "bias": "float32[3]"}, ["?[...]"]),
    ("AddmmNode", {"mat1": "float32[2]", "mat2": "float32[2]"}, ["float32[]"]),
    ("AddmmNode", {"mat1": "float32[0.., 0..4]", "mat2": "int8[4, 2]", "bias": "?"}, ["?[0.., 2]"]),
    ("Conv1DNode", with_(CONV, x="?"), ["?[...]"]),
    ("Conv1DNode", with_(CONV, w="?"), ["?[...]"]),
    ("Conv1DNode", with_(CONV, x="float32[0.., 0..9, 4]"), ["float32[0.., 1..7, 6]"]),
    ("ConvTranspose1DNode", with_(CONV, x="float32[0.., 0..9, 4]"), ["float32[0.., 2..11, 6]"]),
    ("DequantizeNode", with_(AFFINE, w="?"), ["float32[...]"]),
    ("DequantizeNode", with_(AFFINE, w="uint32[8, 0..]"), ["float32[8, 0..]"]),
    ("DequantizeNode", with_(AFFINE, scales="?", biases="?", dtype=F16), ["float16[8, 32]"]),
    ("DequantizeNode", with_(NVFP4, global_scale="float32[]"), ["?[8, 32]"]),
    ("QuantizedMatmulNode", with_(AFFINE, x="?"), ["?[...]"]),
    ("QuantizedMatmulNode", with_(AFFINE, x="float16[0.., 32]", w="?"), ["float32[...]"]),
    ("QuantizedMatmulNode", with_(NVFP4, x="float16[32]"), ["float16[8]"]),
    ("GatherQmmNode", with_(AFFINE, x="?", sorted_indices_flag=N), ["?[...]"]),
    ("GatherQmmNode", with_(NVFP4, x="float16[1, 32]", rhs_indices="?"), ["float16[...]"]),
    ("GatherQmmNode", with_(NVFP4, x="float16[1, 32]", w="?"), ["float16[...]"]),
    ("GatherMmNode", {"a": "float32[0.., 2, 3]", "b": "float32[3, 2]"}, ["float32[0.., 2, 2]"]),
    ("RMSNormNode", {"x": "?", "weight": "?"}, ["?[...]"]),
    ("LayerNormNode", {"x": "float16[2]", "bias": "float32[0..2]"}, ["float16[2]"]),
    ("RopeNode", {"x": "?", "dims": 8, "offset": "?", "freqs": "?"}, ["?[...]"]),
    ("RopeNode", {"x": "float32[0..2, 3, 8]", "dims": 8, "offset": "int8[2]"}, ["float32[0..2, 3, 8]"]),
    ("SdpaNode", with_(HEADS, v="?"), ["?[...]"]),
    ("SdpaNode", with_(HEADS, mask="?"), ["float32[2, 4, 3, 6]"]),
    ("SdpaNode", with_(HEADS, q="float32[0..9, 0.., 0.., 8]", mask="bool[0.., 5]"), ["float32[2, 0.., 0.., 6]"]),
    ("UpdateAndAttendNode", CACHED, ["float32[1, 4, 3, 6]"]),
    ("UpdateAndAttendNode", with_(CACHED, v="?", out_dtype=F16), ["float16[...]"]),
    ("MetalKernelNode", METAL, ["float32[2]"]),
    ("MetalKernelNode", with_(METAL, num_outs=0, output_names=[], output_shapes_flat=None, output_shape_lengths=None,
                              output_dtypes=None), []),
    (
        "MetalKernelNode",
        with_(METAL, num_outs=2, output_names=["y", "z"], output_shapes_flat=[2, N, 3], output_shape_lengths=[1, 2],
              output_dtypes=[F32, INT8]),
        ["float32[2]", "int8[0.., 3]"],
    ),
    # values
    ("SymSizeNode", {"a": "?", "dim": 3}, ["0.."]),
    ("SymSizeNode", {"a": "int8[0..4]", "dim": -1}, ["0..4"]),
    ("ItemIntNode", {"x": "?"}, [".."]),
    ("ItemIntNode", {"x": "int8[0..4]"}, [".."]),
    ("FloorDivideIntNode", {"a": 7, "b": N}, [".."]),
    ("ModIntNode", {"a": N, "b": 4}, ["0..4"]),
    ("NoopNode", {}, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields", "types"),
    [pytest.param(*row, id=f"{row[0]} {row[1]}".replace("'", "")) for row in INFERRED],
)
def test_what_is_not_known_leaves_room(kind: str, fields: dict[str, Any], types: list[str]) -> None:
    graph = written_graph(kind, **fields)
    facts = verify_graph(graph)
    (node,) = graph.instruction_chains[0].instructions
    assert list(map(str, facts.results[id(node)])) == types


# -- several instructions ---------------------------------------------------------


def last_of(calls: WrittenCalls, *others: list[Any]) -> list[Type]:
    """Return the types of what the last instruction writes."""
    graph = calls.graph(*others)
    facts = verify_graph(graph)
    return facts.results[id(graph.instruction_chains[0].instructions[-1])]


class TestSizesOfOneName:
    """A size that is not known is the same wherever it comes from one tensor's axis."""

    def test_reshaping_around_it_finds_the_size_left_open(self) -> None:
        calls = WrittenCalls()
        calls.call("SymSizeNode", a="float32[1, 0..64, 576]", dim=1, out=Vid(0))
        calls.call("ReshapeNode", x=Tid(0), shape=[1, Vid(0), -1, 64])
        assert list(map(str, last_of(calls))) == ["float32[1, 0..64, 9, 64]"]

    def test_reshaping_to_other_numbers_around_it_is_refused(self) -> None:
        calls = WrittenCalls()
        calls.call("SymSizeNode", a="float32[1, 0..64, 576]", dim=1, out=Vid(0))
        calls.call("ReshapeNode", x=Tid(0), shape=[1, Vid(0), -1, 65])
        with pytest.raises(ProgramError, match=re.escape("for 576 elements")):
            verify_graph(calls.graph())

    def test_it_survives_functions_of_each_element_and_sizes_that_must_be_the_same(self) -> None:
        calls = WrittenCalls()
        calls.call("SymSizeNode", a="float32[0..64, 4]", dim=0, out=Vid(0))
        (y,) = calls.call("NegNode", x=Tid(0))
        (z,) = calls.call("AddNode", a=y, b=Tid(0))
        (s,) = calls.call("StackNode", tensors=[z, Tid(0)])
        calls.call("ReshapeNode", x=s, shape=[2, Vid(0), -1])
        assert list(map(str, last_of(calls))) == ["float32[2, 0..64, 4]"]

    def test_a_required_equality_names_a_size_that_had_none(self) -> None:
        calls = WrittenCalls()
        calls.call("SymSizeNode", a="float32[0..64, 4]", dim=0, out=Vid(0))
        (x,) = calls.call("SliceNode", x="float32[9, 4]", axis=0, start=0, stop=Vid(1))
        (s,) = calls.call("StackNode", tensors=[x, Tid(0)], axis=1)
        calls.call("ReshapeNode", x=s, shape=[Vid(0), -1])
        assert list(map(str, last_of(calls))) == ["float32[0..64, 8]"]


# Slots of the graphs below: two inputs, a condition, what chains write.
X, Y, OUT, COPY = map(Tid, range(4))


def branches(then: list[Any], other: list[Any], x: str, y: str) -> list[Type]:
    """Return what is known of a slot that two branches write, after them."""
    main = [
        make_node("IfNode", cond=Vid(0), then_chain_idx=1, else_chain_idx=2),
        make_node("IdCopyNode", x=OUT, out=COPY),
    ]
    graph = assembled([main, then, other], [X, Y, Vid(0)], [], meta=[described_as(x), described_as(y)])
    return verify_graph(graph).results[id(main[1])]


class TestBranches:
    """What is known after an IfNode is what holds of either branch."""

    copy_x = (make_node("IdCopyNode", x=X, out=OUT),)
    copy_y = (make_node("IdCopyNode", x=Y, out=OUT),)

    @pytest.mark.parametrize(
        ("x", "y", "either"),
        [
            ("float32[2, 3]", "float32[2, 3]", "float32[2, 3]"),
            ("float32[2, 3]", "float32[2, 5]", "float32[2, 3..5]"),
            ("float32[2, 3]", "float32[3]", "float32[...]"),
            ("float32[2]", "int8[2]", "?[2]"),
            ("float32[2]", "?", "?[...]"),
        ],
    )
    def test_what_both_write_is_joined(self, x: str, y: str, either: str) -> None:
        assert list(map(str, branches([*self.copy_x], [*self.copy_y], x, y))) == [either]

    def test_what_one_writes_is_joined_with_what_was_there(self) -> None:
        main = [
            make_node("IdCopyNode", x=X, out=OUT),
            make_node("IfNode", cond=Vid(0), then_chain_idx=1, else_chain_idx=2),
            make_node("IdCopyNode", x=OUT, out=COPY),
        ]
        for chains in ([[*self.copy_y], []], [[], [*self.copy_y]]):
            graph = assembled(
                [main, *chains], [X, Y, Vid(0)], [], meta=[described_as("int8[2]"), described_as("int8[4]")]
            )
            assert list(map(str, verify_graph(graph).results[id(main[2])])) == ["int8[2..4]"]

    def test_an_instruction_in_a_branch_is_checked_on_what_is_known_where_it_is_entered(self) -> None:
        with pytest.raises(ProgramError, match=r"chain 2, instruction 0 \(TrilNode\): x has shape \[2\]"):
            branches([*self.copy_x], [make_node("TrilNode", x=Y, out=OUT)], "int8[2, 2]", "int8[2]")

    def test_an_instruction_that_runs_twice_is_known_by_what_holds_of_both(self) -> None:
        inner = make_node("NegNode", x=OUT, out=OUT)
        run = {"cond": Vid(0), "then_chain_idx": 1, "else_chain_idx": 1}
        main = [
            make_node("IdCopyNode", x=X, out=OUT),
            make_node("IfNode", **run),
            make_node("IdCopyNode", x=Y, out=OUT),
            make_node("IfNode", **run),
        ]
        meta = [described_as("int8[2]"), described_as("int8[4]")]
        facts = verify_graph(assembled([main, [inner]], [X, Y, Vid(0)], [], meta=meta))
        assert list(map(str, facts.results[id(inner)])) == ["int8[2..4]"]


SLICED, CARRY, STACKED = map(Tid, range(2, 5))


def scanned(body: list[Any], x: str, carry: str, *, axis: int = 0) -> list[str]:
    """Return what is known, after a scan over x, of what it stacks and of what its rounds hand on."""
    scan = make_node(
        "ScanNode", originals=[X], sliced=[SLICED], carry=[Y], outputs=[STACKED], body_chain_idx=1, scan_axis=axis
    )
    main = [scan, make_node("IdCopyNode", x=STACKED, out=Tid(5)), make_node("IdCopyNode", x=Y, out=Tid(6))]
    facts = verify_graph(assembled([main, body], [X, Y], [], meta=[described_as(x), described_as(carry)]))
    return [str(facts.results[id(node)][0]) for node in main[1:]]


class TestScans:
    """What is known of a scan holds after any number of rounds."""

    accumulate = (make_node("AddNode", a=Y, b=SLICED, out=Y), make_node("IdCopyNode", x=Y, out=STACKED))

    @pytest.mark.parametrize(
        ("x", "carry", "axis", "after"),
        [
            ("int8[5, 2]", "int8[2]", 0, ["int8[5, 2]", "int8[2]"]),
            ("int8[2, 5]", "int8[2]", 1, ["int8[2, 5]", "int8[2]"]),
            ("int8[2, 5]", "int8[2]", -1, ["int8[2, 5]", "int8[2]"]),
            ("int8[0..9, 2]", "int8[2]", 0, ["int8[0..9, 2]", "int8[2]"]),
            ("?", "int8[2]", 0, ["?[...]", "?[...]"]),
            # The first round leaves another shape than it found.
            ("int8[5, 2]", "int8[1]", 0, ["?[...]", "?[...]"]),
            ("float32[5, 2]", "int8[2]", 0, ["?[...]", "?[...]"]),
        ],
    )
    def test_a_carry_is_known_where_no_round_changes_it(self, x: str, carry: str, axis: int, after: list[str]) -> None:
        assert scanned([*self.accumulate], x, carry, axis=axis) == after

    def test_a_body_that_cannot_take_a_slice_is_refused(self) -> None:
        body = [make_node("TrilNode", x=SLICED, out=STACKED)]
        with pytest.raises(ProgramError, match=r"chain 1, instruction 0 \(TrilNode\): x has shape \[2\]"):
            scanned(body, "int8[5, 2]", "int8[2]")

    def test_a_body_that_cannot_take_what_it_leaves_is_refused_where_that_is_known(self) -> None:
        body = [make_node("AddNode", a=SLICED, b=Y, out=STACKED), make_node("IdCopyNode", x=SLICED, out=SLICED)]
        with pytest.raises(ProgramError, match="sizes 2 and 3 do not go together"):
            scanned(body, "int8[5, 2]", "int8[3]")

    def test_a_result_that_cannot_be_stacked_there_is_refused(self) -> None:
        body = [make_node("SumNode", x=SLICED, out=STACKED)]
        with pytest.raises(ProgramError, match=r"a result int64\[\] cannot be stacked along axis 1"):
            scanned(body, "int8[2, 5]", "int8[2]", axis=1)

    def test_a_value_that_rounds_change_is_known_no_more(self) -> None:
        scan = make_node("ScanNode", originals=[X], sliced=[Y], carry=[], outputs=[], body_chain_idx=1, scan_axis=0)
        count, show = (
            make_node("AddIntNode", a=Vid(0), b=1, out=Vid(0)),
            make_node("AddIntNode", a=Vid(0), b=0, out=Vid(1)),
        )
        main = [make_node("AddIntNode", a=3, b=4, out=Vid(0)), scan, show]
        facts = verify_graph(assembled([main, [count]], [X], [], meta=[described_as("int8[5]")]))
        assert facts.results[id(main[0])] == [exactly(7)]
        assert facts.results[id(count)] == [ANY]
        assert facts.results[id(show)] == [ANY]

    def test_what_the_body_writes_and_nothing_did_before_is_not_there_after_it(self) -> None:
        scan = make_node("ScanNode", originals=[X], sliced=[Y], carry=[], outputs=[], body_chain_idx=1, scan_axis=0)
        body = [make_node("IdCopyNode", x=Y, out=OUT)]
        main = [scan, make_node("IdCopyNode", x=OUT, out=COPY)]
        with pytest.raises(ProgramError, match="which nothing has written yet"):
            verify_graph(assembled([main, body], [X], [], meta=[described_as("int8[5]")]))


# -- limits ---------------------------------------------------------------------

MEGABYTE = 1 << 20
# (kind, fields) of what takes more than a megabyte of a few numbers.
BOMBS: list[tuple[str, dict[str, Any]]] = [
    ("ARangeNode", {"start": 0, "stop": 2**40, "step": 1}),
    ("ARangeNode", {"start": 2**62, "stop": -(2**62), "step": -1}),
    ("FullNode", {"shape": [2**20, 2**20], "v": 0.0, "scalar_type": INT8}),
    ("FullNode", {"shape": [2**62, 2**62], "v": 0.0, "scalar_type": INT8}),
    ("TriNode", {"n": 2**15, "m": 2**15, "scalar_type": BOOL}),
    ("RandomBitsNode", {"shape": [2**30], "width": 4}),
    ("BroadcastToNode", {"x": "int8[1]", "shape": [2**15, 2**15]}),
    ("AsStridedNode", {"x": "int8[1]", "shape": [2**15, 2**15], "strides": [0, 0]}),
    ("RepeatNode", {"x": "int8[4]", "repeats": 2**20}),
    ("TileNode", {"x": "int8[4]", "reps": [2**10, 2**10]}),
    ("PadNode", {"x": "int8[4]", "pad_width": [0, 2**21], "mode": "constant"}),
    ("AddNode", {"a": "int8[4096, 1]", "b": "int8[4096]"}),
    ("WhereNode", {"condition": "bool[4096, 1, 1]", "x": "int8[4096, 1]", "y": "int8[1]"}),
    ("AddmmNode", {"mat1": "float16[4096, 1]", "mat2": "float16[1, 4096]"}),
    ("TakeNode", {"x": "int8[1, 4096]", "index": "int8[4096]"}),
    ("GatherNode", {"x": "int8[4096]", "indices": ["int8[4096]"], "axes": [0], "slice_sizes": [4096]}),
    ("ConvTranspose1DNode", {"x": "float32[1, 4, 1]", "w": "float32[1, 1, 1]", "stride": 2**20}),
    ("AsTypeNode", {"x": "int8[1048576]", "scalar_type": F32}),
    ("CumsumNode", {"x": "bool[1048576]"}),
    ("MetalKernelNode", with_(METAL, output_shapes_flat=[2**20])),
]


@pytest.mark.parametrize(("kind", "fields"), [pytest.param(*row, id=f"{row[0]} {i}") for i, row in enumerate(BOMBS)])
def test_a_result_that_takes_more_than_there_is_is_refused(kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ProgramError, match=rf"\({kind}\): its result .* takes \d+ bytes or more, there are {MEGABYTE}"):
        verify_graph(written_graph(kind, **fields), MEGABYTE)


# (kind, fields): results that may take more, and may not
OPEN: list[tuple[str, dict[str, Any]]] = [
    ("ARangeNode", {"start": 0, "stop": N, "step": 1}),
    ("FullNode", {"shape": [N], "v": 0.0, "scalar_type": INT8}),
    ("BroadcastToNode", {"x": "int8[1]", "shape": [N, 2]}),
    ("RepeatNode", {"x": "int8[4]", "repeats": N}),
    ("TileNode", {"x": "int8[4]", "reps": [N]}),
    ("PadNode", {"x": "int8[4]", "pad_width": [0, N], "mode": "constant"}),
    ("AddNode", {"a": "int8[0.., 1]", "b": "int8[0..]"}),
    ("AddmmNode", {"mat1": "float16[0..4096, 1]", "mat2": "float16[1, 4096]"}),
    ("AddNode", {"a": "?", "b": "int8[4]"}),
    ("AsTypeNode", {"x": "int8[0..1048576]", "scalar_type": F32}),
]


@pytest.mark.parametrize(("kind", "fields"), [pytest.param(*row, id=f"{row[0]} {i}") for i, row in enumerate(OPEN)])
def test_a_result_that_may_take_more_is_to_be_looked_at_when_its_size_is_known(
    kind: str, fields: dict[str, Any]
) -> None:
    graph = written_graph(kind, **fields)
    assert verify_graph(graph, MEGABYTE).open == {id(graph.instruction_chains[0].instructions[0])}


def test_a_result_that_fits_whatever_its_size_is_not() -> None:
    assert not verify_graph(written_graph("AddNode", a="int8[0..1024, 1]", b="int8[1024]"), MEGABYTE).open
    assert not verify_graph(written_graph("AddIntNode", a=N, b=2**62), MEGABYTE).open


# Convolutions of a small result for which the operand is padded, spread or unfolded.
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Conv1DNode", {"x": "float32[1, 9, 1]", "w": "float32[1, 3, 1]", "padding": 2**20, "stride": 2**20}),
        ("Conv1DNode", {"x": "float32[1, 2000, 1]", "w": "float32[1, 1000, 1]"}),
        ("Conv3DNode", {"x": "float32[1, 20, 20, 20, 4]", "w": "float32[1, 5, 5, 5, 4]", "padding_d": 5}),
        ("ConvTranspose1DNode", {"x": "float32[1, 2, 1]", "w": "float32[1, 1, 1]", "stride": 2**20, "padding": 2**19}),
        ("ConvTranspose1DNode", {"x": "float32[1, 9, 1]", "w": "float32[1, 2000, 1]"}),
    ],
)
def test_what_an_instruction_takes_besides_its_result_is_limited_too(kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ProgramError, match=rf"it takes \d+ bytes or more besides its result, there are {MEGABYTE}"):
        verify_graph(written_graph(kind, **fields), MEGABYTE)
    graph = written_graph(kind, **fields | {"x": fields["x"].replace("[1, ", "[0..1, ", 1)})
    assert verify_graph(graph, MEGABYTE).open == {id(graph.instruction_chains[0].instructions[0])}


def test_an_axis_longer_than_mlx_counts_is_refused() -> None:
    with pytest.raises(ProgramError, match="has an axis of more than 2147483647 elements"):
        verify_graph(written_graph("FullNode", shape=[2**31, 0], v=0.0, scalar_type=INT8))


def test_more_axes_than_are_run_are_refused() -> None:
    verify_graph(written_graph("FullNode", shape=[1] * 16, v=0.0, scalar_type=INT8))
    with pytest.raises(ProgramError, match="has 17 axes, at most 16 are run"):
        verify_graph(written_graph("FullNode", shape=[1] * 17, v=0.0, scalar_type=INT8))


@pytest.mark.parametrize("kind", ["ConcatenateNode", "StackNode"])
def test_a_chain_that_doubles_what_it_has_is_refused_where_it_becomes_too_much(kind: str) -> None:
    calls = WrittenCalls()
    (x,) = calls.call(kind, tensors=["int8[1024]", "int8[1024]"])
    for _ in range(12):
        (x,) = calls.call(kind, tensors=[x, x])
    with pytest.raises(ProgramError, match=rf"instruction 10 \({kind}\): its result .* takes 2097152 bytes"):
        verify_graph(calls.graph(), MEGABYTE)


def test_a_scan_that_stacks_more_than_there_is_is_refused() -> None:
    body = [make_node("BroadcastToNode", x=SLICED, out=STACKED, shape=[1024])]
    scan = make_node(
        "ScanNode", originals=[X], sliced=[SLICED], carry=[], outputs=[STACKED], body_chain_idx=1, scan_axis=0
    )
    for x, allowed in (("int8[1024]", MEGABYTE), ("int8[1025]", None), ("int8[0..]", MEGABYTE)):
        graph = assembled([[scan], body], [X], [], meta=[described_as(x)])
        if allowed is None:
            with pytest.raises(ProgramError, match=r"\(ScanNode\): its result int8\[1025, 1024\] takes 1049600 bytes"):
                verify_graph(graph, MEGABYTE)
        else:
            assert verify_graph(graph, allowed).open == ({id(scan)} if ".." in x else set())


class TestSteps:
    """How many instructions a run takes at least."""

    @staticmethod
    def scans(length: str, depth: int) -> Any:
        """Scans that run each other, each as often as the tensor that all of them go over is long."""
        chains = [
            [
                make_node(
                    "ScanNode",
                    originals=[X],
                    sliced=[Y],
                    carry=[],
                    outputs=[],
                    body_chain_idx=index + 1,
                    scan_axis=0,
                )
            ]
            for index in range(depth)
        ]
        return assembled([*chains, [make_node("NoopNode")]], [X], [], meta=[described_as(f"int8[{length}]")])

    def test_scans_of_scans_that_run_on_and_on_are_refused(self) -> None:
        verify_graph(self.scans("1000", 2))
        with pytest.raises(ProgramError, match=r"a run takes \d+ instructions, at most 1048576 are run"):
            verify_graph(self.scans("1000", 3))

    def test_a_length_that_is_not_known_counts_as_the_least_that_it_may_be(self) -> None:
        verify_graph(self.scans("0..", 3))
        verify_graph(self.scans("1", 20))

    def test_of_two_branches_the_shorter_counts(self) -> None:
        long = self.scans("1000", 3)
        chains = [chain.instructions for chain in long.instruction_chains]
        branch = make_node("IfNode", cond=Vid(0), then_chain_idx=1, else_chain_idx=5)
        scans = [
            [make_node("ScanNode", **{**vars(node), "body_chain_idx": node.body_chain_idx + 1})]
            for (node,) in chains[:3]
        ]
        verify_graph(assembled([[branch], *scans, [make_node("NoopNode")], []], [X, Vid(0)], [], meta=long.tensor_meta))


def test_numbers_past_64_bits_are_refused_and_what_may_be_past_them_is_open_ended() -> None:
    with pytest.raises(ProgramError, match="the result is 9223372036854775808, expected 64 bits"):
        verify_graph(written_graph("AddIntNode", a=2**63 - 1, b=1))
    calls = WrittenCalls()
    calls.call("MultiplyIntNode", a=N, b=2**40, out=Vid(1))
    calls.call("MultiplyIntNode", a=Vid(1), b=2**40, out=Vid(2))
    graph = calls.graph()
    graph.output_map = [slot_variant(Vid(2))]
    assert inferred(graph) == [ANY]


@pytest.mark.parametrize("kind", ["RandomBitsNode", "ReshapeNode", "FullNode"])
def test_a_size_that_may_be_negative_is_asked_again(kind: str) -> None:
    calls = WrittenCalls()
    calls.call("SymSizeNode", a="int8[0..10]", dim=0, out=N)
    calls.call("SubtractIntNode", a=N, b=8, out=Vid(1))
    fields = {
        "RandomBitsNode": {"shape": [Vid(1)]},
        "ReshapeNode": {"x": "int8[2]", "shape": [Vid(1), 1]},
        "FullNode": {"shape": [Vid(1)], "v": 0.0, "scalar_type": INT8},
    }[kind]
    calls.call(kind, **fields)
    graph = calls.graph()
    assert verify_graph(graph).open == {id(graph.instruction_chains[0].instructions[-1])}


def test_a_dtype_that_two_branches_leave_undecided_is_asked_again_where_it_matters() -> None:
    nodes = [
        make_node("IfNode", cond=N, then_chain_idx=1, else_chain_idx=2),
        make_node("LayerNormNode", x=OUT, out=COPY, eps=1.0),
    ]
    branches = [[make_node("AsTypeNode", x=X, out=OUT, scalar_type=code)] for code in (INT8, F32)]
    graph = assembled([nodes, *branches], [X, N], [COPY], meta=[described_as("float32[4]")])
    assert verify_graph(graph).open == {id(nodes[1])}


@pytest.mark.parametrize("is_written_before", [True, False])
def test_a_scan_may_stack_its_slices(is_written_before: bool) -> None:
    scan = make_node("ScanNode", originals=[X], sliced=[OUT], outputs=[OUT], carry=[], body_chain_idx=1, scan_axis=0)
    before = [make_node("ReshapeNode", x=X, out=OUT, shape=[8])] if is_written_before else []
    graph = assembled([[*before, scan], [make_node("NoopNode")]], [X], [OUT], meta=[described_as("float32[4, 2]")])
    assert inferred(graph) == [TensorType((exactly(4), exactly(2)), "float32")]


def test_lists_count_as_often_as_chains_that_hold_them_run() -> None:
    nested = [make_node("IfNode", cond=1, then_chain_idx=index, else_chain_idx=index) for index in range(1, 9)]
    roll = make_node("RollNode", x=X, out=OUT, shift=[0] * 5000, axes=[0] * 5000)
    graph = assembled([*[[node] for node in nested], [roll]], [X], [], meta=[described_as("float32[4]")])
    with pytest.raises(ProgramError, match="operands counted"):
        verify_graph(graph)
