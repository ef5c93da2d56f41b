"""Decode attention over pages on CUDA: one kernel that takes lengths instead of masks and reads each key once.

The query heads that share a key head are answered together, by one block, whose warps go through every so many-th key
with a softmax of their own (running maximum, sum and weighted values, as in FlashAttention,
https://arxiv.org/abs/2205.14135) and put their results together in shared memory. There are two ways:

* *by tensor cores*, for half precision and heads of 64 or 128: a warp takes 16 keys at a time;
* *by lanes*: eight elements of a key go to a lane, and the lanes that hold one key are a *worker*.

Where there are fewer blocks than the device takes at once, each row's keys are split among several blocks, and a second
kernel puts their results together (https://pytorch.org/blog/flash-decoding).

The row's own key and value may be written by the same kernel, into the pool's own memory. To MLX the pool is an input
that does not change: whoever lets the kernel write is its only owner, and evaluates the result before anything else
reads the slot. A step's result follows from the step's before, so that steps are computed in their order.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..device import mx

_THREADS = 256
_SHARED_FLOATS = 10240
"""Of a block's shared memory, 48 KB."""
_LEAST_KEYS = 512
"""Keys that are worth a block of their own."""
_BLOCKS = 264
"""Blocks that a large device computes at once."""
_UNROLL = 4
"""Keys that a worker has on their way at once."""
_MOST_HEADS = 8
"""Query heads that fit a block's registers, and the half of a tensor core's rows that is used."""

_HEADER = r"""
// Eight elements in registers, as they lie in memory.
template <typename T>
struct Eight {
  unsigned int word[2 * sizeof(T)];

  __device__ void load(const T* from) {
    #pragma unroll
    for (int j = 0; j < sizeof(T) / 2; ++j) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[j];
      word[4 * j] = four.x;
      word[4 * j + 1] = four.y;
      word[4 * j + 2] = four.z;
      word[4 * j + 3] = four.w;
    }
  }
  __device__ float get(int i) const;
};

template <>
__device__ inline float Eight<float>::get(int i) const {
  return __uint_as_float(word[i]);
}
template <>
__device__ inline float Eight<__nv_bfloat16>::get(int i) const {
  return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
}
template <>
__device__ inline float Eight<__half>::get(int i) const {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word[i / 2] >> (i % 2 * 16))));
}

// Words of two elements, eight elements at a time, which are so far from the next eight.
template <int STRIDE, int WORDS>
__device__ inline void fetch(const unsigned short* from, unsigned int (&word)[WORDS]) {
  #pragma unroll
  for (int w = 0; w < WORDS; w += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(from + w / 4 * STRIDE);
    word[w] = four.x;
    word[w + 1] = four.y;
    word[w + 2] = four.z;
    word[w + 3] = four.w;
  }
}

template <typename T>
__device__ inline unsigned int packed(float one, float other);
template <>
__device__ inline unsigned int packed<__nv_bfloat16>(float one, float other) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(one)) |
      static_cast<unsigned int>(__bfloat16_as_ushort(__float2bfloat16_rn(other))) << 16;
}
template <>
__device__ inline unsigned int packed<__half>(float one, float other) {
  return __half_as_ushort(__float2half_rn(one)) |
      static_cast<unsigned int>(__half_as_ushort(__float2half_rn(other))) << 16;
}

// sum += A B, of whose rows from 8 on nothing is kept: they are zero.
#define MULTIPLY(TYPE)                                                                       \
  float none[2];                                                                             \
  asm(                                                                                       \
      "mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, "       \
      "{%4, %5, %6, %5}, {%7, %8}, {%0, %1, %9, %9};"                                        \
      : "+f"(sum[0]), "+f"(sum[1]), "=f"(none[0]), "=f"(none[1])                             \
      : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1), "f"(0.0f));
template <typename T>
__device__ inline void multiply(float (&sum)[2], unsigned a0, unsigned a2, unsigned b0, unsigned b1);
template <>
__device__ inline void multiply<__nv_bfloat16>(
    float (&sum)[2], unsigned a0, unsigned a2, unsigned b0, unsigned b1) {
  MULTIPLY("bf16")
}
template <>
__device__ inline void multiply<__half>(float (&sum)[2], unsigned a0, unsigned a2, unsigned b0, unsigned b1) {
  MULTIPLY("f16")
}

__device__ inline float larger(float one, float other) {
  return other > one || other != other ? other : one;
}

__device__ inline float exponent(float score, float largest) {
  // Where no key has been seen, both are -inf.
  return score == -INFINITY ? 0.0f : exp2f(score - largest);
}
"""

_ROW = """
  constexpr int WARPS = THREADS / 32;
  constexpr int GROUP = HQ / HKV;
  const int row = blockIdx.z;
  const int query_head = blockIdx.y * HEADS;
  const int head = query_head / GROUP;
  const int first = rows[3 * row];
  const int length = rows[3 * row + 1];
  const int* table = rows + rows[3 * row + 2];
  const int share = (length + gridDim.x - 1) / gridDim.x;
  const int begin = blockIdx.x * share;
  const int end = min(length, begin + share);
  const long long plane = static_cast<long long>(head) * keys_shape[2];
  const int warp = threadIdx.x / 32;
  const float factor = __int_as_float(SCALE) * 1.44269504f;  // powers of two are cheaper than those of e
  __shared__ float sums[HEADS][WARPS][DV];
  __shared__ float maxima[HEADS][WARPS], totals[HEADS][WARPS];
  if (WRITES && end == length && begin < end) {
    // Blocks that share a key head and the last key write the same. What a block has written it may read afterwards: to
    // ask in the loop which key is the row's own would make the loads wait for each other.
    const int slot = first + length - 1;
    const long long place = plane + static_cast<long long>(table[slot / PAGE]) * PAGE + slot % PAGE;
    for (int i = threadIdx.x; i < D; i += THREADS) {
      const_cast<KV*>(keys)[place * D + i] =
          static_cast<KV>(static_cast<float>(k[head * k_strides[1] + row * k_strides[2] + i * k_strides[3]]));
    }
    for (int i = threadIdx.x; i < DV; i += THREADS) {
      const_cast<KV*>(values)[place * DV + i] =
          static_cast<KV>(static_cast<float>(v[head * v_strides[1] + row * v_strides[2] + i * v_strides[3]]));
    }
    __syncthreads();
  }
"""

_BY_LANES = """
  constexpr int WORKERS = THREADS / LANES;
  const int lane = threadIdx.x % LANES;
  const int worker = threadIdx.x / LANES;
  const bool has_key = lane * 8 < D;
  const bool has_value = lane * 8 < DV;
  const KV* its_keys = keys + plane * D + lane * 8;
  const KV* its_values = values + plane * DV + lane * 8;

  float query[HEADS][8], sum[HEADS][8], largest[HEADS], total[HEADS];
  #pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    largest[h] = -INFINITY;
    total[h] = 0.0f;
    const T* its = q + (query_head + h) * q_strides[1] + row * q_strides[2] + lane * 8 * q_strides[3];
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      query[h][i] = has_key ? static_cast<float>(its[i * q_strides[3]]) * factor : 0.0f;
      sum[h][i] = 0.0f;
    }
  }

  // The lanes of a warp exchange scores: all of its workers go round equally often.
  for (int start = begin; start < end; start += WORKERS * UNROLL) {
    const int at = start + worker;
    Eight<KV> key[UNROLL], value[UNROLL];
    #pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      // Past the end the last key is read again, and does not count.
      const int index = min(at + u * WORKERS, end - 1);
      const int slot = first + index;
      const long long place = static_cast<long long>(table[slot / PAGE]) * PAGE + slot % PAGE;
      if (has_key) key[u].load(its_keys + place * D);
      if (has_value) value[u].load(its_values + place * DV);
    }
    #pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      float score[UNROLL];
      float most = largest[h];
      #pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        float dot = 0.0f;
        if (has_key) {
          #pragma unroll
          for (int i = 0; i < 8; ++i) dot += query[h][i] * key[u].get(i);
        }
        #pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
        score[u] = at + u * WORKERS < end ? dot : -INFINITY;
        most = larger(most, score[u]);
      }
      const float kept = exponent(largest[h], most);
      largest[h] = most;
      total[h] *= kept;
      #pragma unroll
      for (int i = 0; i < 8; ++i) sum[h][i] *= kept;
      #pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const float weight = exponent(score[u], most);
        total[h] += weight;
        if (has_value && at + u * WORKERS < end) {
          #pragma unroll
          for (int i = 0; i < 8; ++i) sum[h][i] += weight * value[u].get(i);
        }
      }
    }
  }

  // First the workers of a warp, then the warps.
  #pragma unroll
  for (int step = LANES; step < 32; step *= 2) {
    #pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const float other = __shfl_xor_sync(0xffffffffu, largest[h], step);
      const float most = larger(largest[h], other);
      const float mine = exponent(largest[h], most), its = exponent(other, most);
      largest[h] = most;
      total[h] = total[h] * mine + __shfl_xor_sync(0xffffffffu, total[h], step) * its;
      #pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[h][i] = sum[h][i] * mine + __shfl_xor_sync(0xffffffffu, sum[h][i], step) * its;
      }
    }
  }
  if (threadIdx.x % 32 < LANES) {
    #pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      if (lane == 0) {
        maxima[h][warp] = largest[h];
        totals[h][warp] = total[h];
      }
      if (has_value) {
        #pragma unroll
        for (int i = 0; i < 8; ++i) sums[h][warp][lane * 8 + i] = sum[h][i];
      }
    }
  }
"""

_BY_TENSOR_CORES = """
  // A warp takes 16 keys at a time. Of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16") a lane holds, with
  // g = lane / 4 and t = lane % 4: of A rows g and g + 8, of B column g, of C rows g and g + 8, columns 2t and 2t + 1.
  // Rows are query heads; those from 8 on are left zero. Which element of a key stands at which place of a product does
  // not matter as long as the query's stands there too: of 32 elements lane t has a quarter, side by side, so that the
  // four lanes together read what lies together. Of 64 elements of a value lane g has an eighth likewise, and the
  // results' elements are taken back from there.
  constexpr int KEY_WORDS = D / 8;
  constexpr int TILES = DV / 8;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  const unsigned short* its_keys = reinterpret_cast<const unsigned short*>(keys) + plane * D;
  const unsigned short* its_values = reinterpret_cast<const unsigned short*>(values) + plane * DV;

  unsigned int query[KEY_WORDS];
  #pragma unroll
  for (int w = 0; w < KEY_WORDS; ++w) {
    query[w] = 0;
    if (g < HEADS) {
      const unsigned short* its = reinterpret_cast<const unsigned short*>(q) + (query_head + g) * q_strides[1] +
          row * q_strides[2] + (w / 4 * 32 + t * 8 + w % 4 * 2) * q_strides[3];
      query[w] = its[0] | static_cast<unsigned int>(its[q_strides[3]]) << 16;
    }
  }

  float sum[TILES][2], largest = -INFINITY, total = 0.0f;
  #pragma unroll
  for (int tile = 0; tile < TILES; ++tile) sum[tile][0] = sum[tile][1] = 0.0f;

  unsigned int key[2][KEY_WORDS], value[4][TILES / 2];
  const auto place = [&](int index) {
    // Past the end the last key is read again, and does not count.
    const int slot = first + min(index, end - 1);
    return static_cast<long long>(table[slot / PAGE]) * PAGE + slot % PAGE;
  };
  const auto load_keys = [&](int at) {
    const long long places[2] = {place(at + g), place(at + 8 + g)};
    #pragma unroll
    for (int half = 0; half < 2; ++half) fetch<32>(its_keys + places[half] * D + t * 8, key[half]);
  };
  const auto load_values = [&](int at) {
    at += 2 * t;
    const long long places[4] = {place(at), place(at + 1), place(at + 8), place(at + 9)};
    #pragma unroll
    for (int four = 0; four < 4; ++four) fetch<64>(its_values + places[four] * DV + g * 8, value[four]);
  };
  int at = begin + warp * 16;
  if (at < end) {
    load_keys(at);
    load_values(at);
  }
  // What the next round takes is on its way as soon as this one's has been used.
  for (; at < end; at += WARPS * 16) {
    float score[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      #pragma unroll
      for (int w = 0; w < KEY_WORDS; w += 2) {
        multiply<KV>(score[half], query[w], query[w + 1], key[half][w], key[half][w + 1]);
      }
    }
    load_keys(at + WARPS * 16);
    float most = largest;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& its = score[i / 2][i % 2];
      its = at + i / 2 * 8 + 2 * t + i % 2 < end ? its * factor : -INFINITY;
      most = larger(most, its);
    }
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const float kept = exponent(largest, most);
    largest = most;
    unsigned int weight[2];
    total *= kept;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float one = exponent(score[half][0], most), other = exponent(score[half][1], most);
      total += one + other;
      weight[half] = packed<KV>(one, other);
    }
    #pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int w = tile / 2;
      const unsigned int which = tile % 2 ? 0x7632u : 0x5410u;  // the higher or the lower halves of two words
      sum[tile][0] *= kept;
      sum[tile][1] *= kept;
      multiply<KV>(
          sum[tile], weight[0], weight[1], __byte_perm(value[0][w], value[1][w], which),
          __byte_perm(value[2][w], value[3][w], which));
    }
    load_values(at + WARPS * 16);
  }
  total += __shfl_xor_sync(0xffffffffu, total, 1);
  total += __shfl_xor_sync(0xffffffffu, total, 2);
  if (g < HEADS) {
    if (t == 0) {
      maxima[g][warp] = largest;
      totals[g][warp] = total;
    }
    #pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int d = tile / 8 * 64 + tile % 8;
      sums[g][warp][d + 2 * t * 8] = sum[tile][0];
      sums[g][warp][d + (2 * t + 1) * 8] = sum[tile][1];
    }
  }
"""

_JOIN_WARPS = """
  __syncthreads();
  for (int index = threadIdx.x; index < HEADS * DV; index += THREADS) {
    const int h = index / DV;
    const int d = index % DV;
    float most = -INFINITY, weights = 0.0f, result = 0.0f;
    for (int w = 0; w < WARPS; ++w) most = larger(most, maxima[h][w]);
    for (int w = 0; w < WARPS; ++w) {
      const float weight = exponent(maxima[h][w], most);
      weights += weight * totals[h][w];
      result += weight * sums[h][w][d];
    }
    const long long place = static_cast<long long>(row) * HQ + query_head + h;
    STORE
  }
"""

_STORE_ALL = "out[place * DV + d] = static_cast<T>(result / weights);"

_STORE_PART = """
    float* part = parts + (place * gridDim.x + blockIdx.x) * (DV + 2);
    part[d] = result;
    if (d == 0) {
      part[DV] = most;
      part[DV + 1] = weights;
    }
"""

_JOIN = """
  const long long place = blockIdx.x;
  const int d = threadIdx.x;
  const int splits = parts_shape[2];
  const float* its = parts + place * splits * (DV + 2);
  float most = -INFINITY, weights = 0.0f, result = 0.0f;
  for (int s = 0; s < splits; ++s) {
    most = larger(most, its[s * (DV + 2) + DV]);
  }
  for (int s = 0; s < splits; ++s) {
    const float* part = its + s * (DV + 2);
    const float weight = exponent(part[DV], most);
    weights += weight * part[DV + 1];
    result += weight * part[d];
  }
  out[place * DV + d] = static_cast<T>(result / weights);
"""

_INPUTS = ["q", "k", "v", "keys", "values", "rows"]


@functools.cache
def _kernels(on_tensor_cores: bool) -> tuple[Any, Any, Any]:
    how = _BY_TENSOR_CORES if on_tensor_cores else _BY_LANES

    def kernel(name: str, output: str, store: str) -> Any:
        source = _ROW + how + _JOIN_WARPS.replace("STORE", store)
        name = f"executorch_mlx_{name}_{'mma' if on_tensor_cores else 'lanes'}"
        return mx.fast.cuda_kernel(name, _INPUTS, [output], source, _HEADER, ensure_row_contiguous=False)

    whole, part = kernel("ragged", "out", _STORE_ALL), kernel("ragged_part", "parts", _STORE_PART)
    return whole, part, mx.fast.cuda_kernel("executorch_mlx_ragged_join", ["parts"], ["out"], _JOIN, _HEADER)


@functools.cache
def _has_tensor_cores() -> bool:
    """Whether the device multiplies matrices of bfloat16, from compute capability 8.0 on."""
    return int(mx.device_info().get("compute_capability_major", 0)) >= 8


def takes(head_dim: int, value_dim: int) -> bool:
    """Whether the kernel is made for heads of these sizes."""
    return head_dim % 8 == 0 and value_dim % 8 == 0 and max(head_dim, value_dim) <= 256


def num_splits(num_rows: int, q_heads: int, kv_heads: int, longest: int) -> int:
    """Return among how many blocks a row's keys are split."""
    blocks = num_rows * q_heads // _heads(q_heads // kv_heads)
    return max(1, min(_BLOCKS // blocks, longest // _LEAST_KEYS))


def _heads(group: int) -> int:
    """Return how many query heads of a group a block answers."""
    return max(size for size in range(1, _MOST_HEADS + 1) if group % size == 0)


@functools.cache
def _template(
    dtype: mx.Dtype,
    kv_dtype: mx.Dtype,
    dim: int,
    value_dim: int,
    q_heads: int,
    kv_heads: int,
    page: int,
    writes: bool,
    scale: float,
) -> tuple[int, int, list[tuple[str, Any]]]:
    """Return query heads and threads of a block, and the kernel's template arguments."""
    heads, lanes = _heads(q_heads // kv_heads), 1
    while lanes * 8 < max(dim, value_dim):
        lanes *= 2
    threads = _THREADS
    while heads * value_dim * threads // 32 > _SHARED_FLOATS:
        threads //= 2
    return (
        heads,
        threads,
        [
            *(("T", dtype), ("KV", kv_dtype), ("D", dim), ("DV", value_dim), ("HQ", q_heads), ("HKV", kv_heads)),
            *(("HEADS", heads), ("LANES", lanes), ("THREADS", threads), ("PAGE", page), ("WRITES", writes)),
            ("SCALE", int(np.float32(scale).view(np.int32))),  # its bits: template arguments are integers
            ("UNROLL", _UNROLL if heads <= 4 else _UNROLL // 2),
        ],
    )


def attend(
    q: mx.array,
    own: tuple[mx.array, mx.array] | None,
    pools: tuple[mx.array, mx.array],
    rows: mx.array,
    *,
    page_size: int,
    splits: int,
    scale: float,
) -> mx.array:
    """Attend with one query per row.

    Args:
        q: queries [1, H_q, n, D].
        own: each row's last key [1, H_kv, n, D] and value [1, H_kv, n, D_v], to be written into the pools, in place;
            None where they are there.
        pools: keys [1, H_kv, slots, D] and values [1, H_kv, slots, D_v], evaluated and contiguous.
        rows: int32: of each row its first key, counted in slots from its first page, its number of keys, and where in
            this array its pages are listed; then these lists. Made by the device: every block's
            first load of what the host has made takes some 20 µs on an H200.
        page_size: slots of a page.
        splits: see ``num_splits``.
        scale: softmax scale.

    Returns:
        [1, H_q, n, D_v] in q's dtype.
    """
    _, q_heads, num_rows, dim = q.shape
    keys, values = pools
    _, kv_heads, _, value_dim = values.shape
    if scale < 0:
        q, scale = -q, -scale  # a kernel's name, which has its template arguments in it, takes no sign
    heads, threads, template = _template(
        q.dtype, keys.dtype, dim, value_dim, q_heads, kv_heads, page_size, own is not None, scale
    )
    k, v = (q, q) if own is None else (array.astype(q.dtype) for array in own)
    is_half = q.dtype == keys.dtype != mx.float32
    whole, part, join = _kernels(is_half and dim in (64, 128) and value_dim in (64, 128) and _has_tensor_cores())
    launch = {
        "inputs": [q, k, v, keys, values, rows],
        "template": template,
        "grid": (splits * threads, q_heads // heads, num_rows),
        "threadgroup": (threads, 1, 1),
    }
    shape = (num_rows, q_heads, value_dim)
    if splits == 1:
        (out,) = whole(output_shapes=[shape], output_dtypes=[q.dtype], **launch)
    else:
        (parts,) = part(
            output_shapes=[(num_rows, q_heads, splits, value_dim + 2)], output_dtypes=[mx.float32], **launch
        )
        (out,) = join(
            inputs=[parts],
            template=[("T", q.dtype), ("DV", value_dim)],
            grid=(num_rows * q_heads * value_dim, 1, 1),
            threadgroup=(value_dim, 1, 1),
            output_shapes=[shape],
            output_dtypes=[q.dtype],
        )
    result: mx.array = out.swapaxes(0, 1)[None]
    return result
