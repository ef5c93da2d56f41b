// Attention of single queries over paged keys and values, on the CPU.
//
// A row's keys are cut into pieces of kPiece, each the work of one thread: the
// scores of its keys, their softmax, the weighted sum of its values. Whichever
// thread ends the last piece of a row combines them. The cuts do not depend on
// the other rows or on the number of threads; neither does a row's result.
//
// The file includes itself once for each instruction set it has a kernel for:
// a vector type is lowered for the target of the function that uses it, so
// every function of a kernel must be compiled for the kernel's target.

#ifndef SIMD_NAME

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define SIMD_X86
#include <immintrin.h>
#endif

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else // GCC has the other only since 12
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Indices){__VA_ARGS__})
#endif

namespace {

constexpr int kPiece = 256; // keys
constexpr int kHeads = 4; // query heads that are computed together, at most
constexpr int kAhead = 16; // how many keys ahead memory is asked for
constexpr int64_t kNumbersPerThread = 128 << 10; // with fewer to read, starting a thread takes longer
constexpr float kInfinity = std::numeric_limits<float>::infinity();

enum Storage { kFloat, kHalf, kBFloat };
enum class Half : uint16_t {};
enum class BFloat : uint16_t {};

struct Call {
  const float* q; // scaled such that scores are logarithms of base 2, and padded by zeros to [n, q_heads, q_size]
  const void* keys;
  const void* values;
  float* out;
  const int32_t* tables;
  const int32_t* rows;
  int64_t n, q_heads, kv_heads, d, dv, slots, page, width, storage;
  int64_t group, q_size;

  int64_t first(int64_t row) const { return rows[2 * row]; }
  int64_t length(int64_t row) const { return rows[2 * row + 1]; }
  int64_t pieces(int64_t row) const { return (length(row) + kPiece - 1) / kPiece; }
};

// `count` of a row's keys, from `begin`, for one kv head. `partial` is for the result: the greatest scores of the
// group's query heads, then the sums of their weights 2^(score - greatest), then their sums of values so weighted.
struct Piece {
  int64_t row, kv_head, begin;
  int count;
  float* partial;
};

} // namespace

#define SIMD_NAME portable // 16 bytes are a vector on every architecture
#define SIMD_BYTES 16
#define SIMD_TARGET
#include "attention.cpp"

#ifdef SIMD_X86
#define SIMD_NAME avx2
#define SIMD_BYTES 32
#define SIMD_TARGET __attribute__((target("avx2,fma,f16c"))) // AVX2 implies F16C
#include "attention.cpp"

#define SIMD_NAME avx512
#define SIMD_BYTES 64
#define SIMD_TARGET __attribute__((target("avx512f,avx2,fma,f16c")))
#include "attention.cpp"
#endif

namespace {

using Kernel = void (*)(const Call&, const Piece&);

Kernel choose_kernel([[maybe_unused]] int level) {
#ifdef SIMD_X86
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (level >= 2 && has_avx2 && __builtin_cpu_supports("avx512f")) {
    return avx512::attend_piece;
  }
  if (level >= 1 && has_avx2) {
    return avx2::attend_piece;
  }
#endif
  return portable::attend_piece;
}

// Writes the result of a row's pieces, which follow each other.
void combine(const Call& call, const Piece* first) {
  const Piece* end = first + call.pieces(first->row);
  for (int64_t head = 0; head < call.group; ++head) {
    float* out = call.out + (first->row * call.q_heads + first->kv_head * call.group + head) * call.dv;
    float greatest = -kInfinity;
    for (const Piece* piece = first; piece != end; ++piece) {
      greatest = std::max(greatest, piece->partial[head]);
    }
    float sum = 0.0f;
    std::fill_n(out, call.dv, 0.0f);
    for (const Piece* piece = first; piece != end; ++piece) {
      const float own = piece->partial[head];
      const float factor = own == -kInfinity ? 1.0f : std::exp2(own - greatest); // for -inf all sums are 0 or NaN
      const float* values = piece->partial + 2 * call.group + head * call.dv;
      sum += factor * piece->partial[call.group + head];
      for (int64_t i = 0; i < call.dv; ++i) {
        out[i] += factor * values[i];
      }
    }
    for (int64_t i = 0; i < call.dv; ++i) {
      out[i] /= sum;
    }
  }
}

// Computes `out`. All memory is had before there are threads: in them, nothing can throw.
void compute(const Call& call, Kernel kernel, int64_t threads) {
  std::vector<Piece> pieces;
  std::vector<std::atomic<int64_t>> left(call.n * call.kv_heads); // of a row and kv head's pieces
  int64_t numbers = 0;
  for (int64_t row = 0; row < call.n; ++row) {
    const int64_t length = call.length(row);
    for (int64_t head = 0; head < call.kv_heads; ++head) {
      left[row * call.kv_heads + head] = call.pieces(row);
      for (int64_t begin = 0; begin < length; begin += kPiece) {
        pieces.push_back({row, head, begin, static_cast<int>(std::min<int64_t>(kPiece, length - begin)), nullptr});
      }
    }
    numbers += length * call.kv_heads * (call.d + call.dv);
  }
  const int64_t partial_size = call.group * (call.dv + 2);
  std::vector<float> partials(pieces.size() * partial_size);
  threads = std::min<int64_t>({threads, numbers / kNumbersPerThread, static_cast<int64_t>(pieces.size())});

  std::atomic<size_t> next{0};
  const auto drain = [&] {
    for (size_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < pieces.size();) {
      Piece& piece = pieces[index];
      piece.partial = &partials[index * partial_size];
      kernel(call, piece);
      if (left[piece.row * call.kv_heads + piece.kv_head].fetch_sub(1, std::memory_order_acq_rel) == 1) {
        combine(call, &piece - piece.begin / kPiece);
      }
    }
  };
  std::vector<std::thread> others;
  try {
    for (int64_t index = 1; index < threads; ++index) {
      others.emplace_back(drain);
    }
  } catch (const std::exception&) {
    // No more threads are to be had: those there are do all the work.
  }
  drain();
  for (auto& other : others) {
    other.join();
  }
}

// Sets a Python error and returns false where a row's keys lie out of bounds.
bool check(const Call& call) {
  for (int64_t row = 0; row < call.n; ++row) {
    const int64_t first = call.first(row);
    const int64_t end = first + call.length(row);
    if (first < 0 || end <= first || end > call.width * call.page) {
      PyErr_Format(
          PyExc_ValueError, "row %zd: expected first >= 0, length >= 1 and first + length <= %zd, got %zd and %zd",
          Py_ssize_t{row}, Py_ssize_t{call.width * call.page}, Py_ssize_t{first}, Py_ssize_t{call.length(row)});
      return false;
    }
    for (int64_t index = first / call.page; index * call.page < end; ++index) {
      const int64_t page = call.tables[row * call.width + index];
      if (page < 0 || page * call.page + std::min(call.page, end - index * call.page) > call.slots) {
        PyErr_Format(
            PyExc_ValueError, "row %zd: expected pages of %zd within a pool of %zd slots, got page %zd at %zd",
            Py_ssize_t{row}, Py_ssize_t{call.page}, Py_ssize_t{call.slots}, Py_ssize_t{page}, Py_ssize_t{index});
        return false;
      }
    }
  }
  return true;
}

PyObject* attend(PyObject*, PyObject* args) {
  unsigned long long q, keys, values, out, tables, rows;
  long long n, q_heads, kv_heads, d, dv, slots, page, width;
  int storage, threads, level = 2;
  double scale;
  if (!PyArg_ParseTuple(
          args, "KKKKKK(LLLLLLLLi)di|i", &q, &keys, &values, &out, &tables, &rows, &n, &q_heads, &kv_heads, &d, &dv,
          &slots, &page, &width, &storage, &scale, &threads, &level)) {
    return nullptr;
  }
  if (n < 0 || kv_heads < 1 || q_heads < 1 || q_heads % kv_heads != 0 || d < 1 || dv < 1 || page < 1 ||
      storage < kFloat || storage > kBFloat) {
    PyErr_SetString(PyExc_ValueError, "expected dims >= 1, whole groups of query heads and a storage of 0, 1 or 2");
    return nullptr;
  }
  Call call{
      nullptr, reinterpret_cast<const void*>(keys), reinterpret_cast<const void*>(values),
      reinterpret_cast<float*>(out), reinterpret_cast<const int32_t*>(tables), reinterpret_cast<const int32_t*>(rows),
      n, q_heads, kv_heads, d, dv, slots, page, width, storage, q_heads / kv_heads, (d + 15) / 16 * 16};
  if (!check(call)) {
    return nullptr;
  }
  bool has_memory = true;
  Py_BEGIN_ALLOW_THREADS;
  try {
    const auto* from = reinterpret_cast<const float*>(q);
    const float factor = static_cast<float>(scale * 1.4426950408889634); // log2(e)
    std::vector<float> queries(n * q_heads * call.q_size);
    for (int64_t head = 0; head < n * q_heads; ++head) {
      std::transform(from + head * d, from + (head + 1) * d, &queries[head * call.q_size], [=](float x) {
        return x * factor;
      });
    }
    call.q = queries.data();
    compute(call, choose_kernel(level), threads);
  } catch (const std::exception&) {
    has_memory = false;
  }
  Py_END_ALLOW_THREADS;
  if (!has_memory) {
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"attend", attend, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "_attention", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit__attention() {
  return PyModule_Create(&module_def);
}

#else // SIMD_NAME: a kernel

namespace {
namespace SIMD_NAME {

constexpr int kWidth = SIMD_BYTES / 4;
typedef float Floats __attribute__((vector_size(SIMD_BYTES)));
typedef int32_t Ints __attribute__((vector_size(SIMD_BYTES)));
typedef float Quad __attribute__((vector_size(16)));
[[maybe_unused]] typedef int32_t Indices __attribute__((vector_size(16)));

SIMD_TARGET inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// GCC makes several instructions of a __builtin_convertvector where x86 has one, and warns of what is in its own
// header without masks.
#if SIMD_BYTES == 64
SIMD_TARGET inline Ints widen(const void* from) {
  return (Ints)_mm512_maskz_cvtepu16_epi32(-1, _mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
SIMD_TARGET inline Floats load(const Half* from) {
  return (Floats)_mm512_maskz_cvtph_ps(-1, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
#elif SIMD_BYTES == 32
SIMD_TARGET inline Ints widen(const void* from) {
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
SIMD_TARGET inline Floats load(const Half* from) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
#else
SIMD_TARGET inline Ints widen(const void* from) {
  uint16_t x __attribute__((vector_size(SIMD_BYTES / 2)));
  std::memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, Ints);
}
SIMD_TARGET inline Floats load(const Half* from) {
  const Ints bits = widen(from);
  const Ints magnitude = (bits & 0x7fff) << 13;
  // The exponents' biases differ by 112; the product is exact, also for subnormal halves.
  const Ints finite = (Ints)((Floats)magnitude * 0x1p112f);
  const Ints special = (Ints)(magnitude >= 0x7c00 << 13) & 0x7f800000;
  return (Floats)(finite | special | (bits & 0x8000) << 16);
}
#endif

SIMD_TARGET inline Floats load(const BFloat* from) {
  return (Floats)(widen(from) << 16);
}

// The first `left` elements, then zeros.
template <typename T>
SIMD_TARGET inline Floats load(const T* from, int64_t left) {
  if (left >= kWidth) {
    return load(from);
  }
  T padded[kWidth] = {};
  std::memcpy(padded, from, left * sizeof(T));
  return load(padded);
}

// The sum of a vector's quads.
SIMD_TARGET inline Quad fold(Floats x) {
  Quad parts[kWidth / 4];
  std::memcpy(parts, &x, sizeof x);
  Quad sum = parts[0];
  for (int i = 1; i < kWidth / 4; ++i) {
    sum += parts[i];
  }
  return sum;
}

// 2^x for x <= 0; 0 where that is no normal number; NaN for NaN.
SIMD_TARGET inline Floats exp2_of_negative(Floats x) {
  // Adding 1.5 * 2^23 leaves the nearest integer in the sum's low bits.
  const Floats shifted = x + 0x1.8p23f;
  const Floats r = x - (shifted - 0x1.8p23f);
  Floats p = 0.000153533518f * r + 0.00133988773f; // a least-squares fit on [-1/2, 1/2]
  p = p * r + 0.00961843785f;
  p = p * r + 0.0555033237f;
  p = p * r + 0.240226477f;
  p = p * r + 0.693147182f;
  p = p * r + 1.0f;
  const Floats power = (Floats)(((Ints)shifted + 127) << 23);
  return (Floats)((Ints)(p * power) & ~(Ints)(x < -126.0f));
}

template <typename T>
SIMD_TARGET inline void prefetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) {
    __builtin_prefetch(from + i);
  }
}

// The products of Heads queries with a piece's keys; what follows them, up to a multiple of 4, may be anything.
template <typename T, int Heads>
SIMD_TARGET void score(
    const Call& call, const float* q, const T* keys, const T* values, const int64_t* slots, int count,
    float (*scores)[kPiece]) {
  const int64_t d = call.d;
  Quad quads[Heads][kPiece];
  for (int key = 0; key < count; key += 2) {
    for (int ahead = key + kAhead; ahead < key + kAhead + 2; ++ahead) {
      if (ahead < count) {
        prefetch(keys + slots[ahead] * d, d);
      } else if (ahead < 2 * count) {
        prefetch(values + slots[ahead - count] * call.dv, call.dv);
      }
    }
    const int other = std::min(key + 1, count - 1); // an odd last key is computed twice
    const T* k0 = keys + slots[key] * d;
    const T* k1 = keys + slots[other] * d;
    Floats sums[Heads][2] = {};
    for (int64_t i = 0; i < d; i += kWidth) {
      const Floats x0 = load(k0 + i, d - i);
      const Floats x1 = load(k1 + i, d - i);
      for (int head = 0; head < Heads; ++head) {
        const Floats y = load(q + head * call.q_size + i);
        sums[head][0] += x0 * y;
        sums[head][1] += x1 * y;
      }
    }
    for (int head = 0; head < Heads; ++head) {
      quads[head][key] = fold(sums[head][0]);
      quads[head][other] = fold(sums[head][1]);
    }
  }
  for (int head = 0; head < Heads; ++head) {
    for (int key = 0; key < count; key += 4) {
      const Quad* x = &quads[head][key];
      const Quad low = SHUFFLE(x[0], x[1], 0, 4, 1, 5) + SHUFFLE(x[0], x[1], 2, 6, 3, 7);
      const Quad high = SHUFFLE(x[2], x[3], 0, 4, 1, 5) + SHUFFLE(x[2], x[3], 2, 6, 3, 7);
      const Quad sums = SHUFFLE(low, high, 0, 1, 4, 5) + SHUFFLE(low, high, 2, 3, 6, 7);
      std::memcpy(&scores[head][key], &sums, sizeof sums);
    }
  }
}

// Replaces `count` scores by weights.
SIMD_TARGET inline void weigh(float* scores, int count, float& greatest, float& sum) {
  for (int key = count; key % kWidth != 0; ++key) {
    scores[key] = -kInfinity;
  }
  Floats most = load(scores);
  for (int key = kWidth; key < count; key += kWidth) {
    const Floats x = load(scores + key);
    most = x > most ? x : most;
  }
  greatest = -kInfinity;
  for (int i = 0; i < kWidth; ++i) {
    greatest = most[i] > greatest ? most[i] : greatest;
  }
  const float shift = greatest == -kInfinity ? 0.0f : greatest;
  Floats sums = {};
  for (int key = 0; key < count; key += kWidth) {
    const Floats weights = exp2_of_negative(load(scores + key) - shift);
    sums += weights;
    std::memcpy(scores + key, &weights, sizeof weights);
  }
  sum = 0.0f;
  for (int i = 0; i < kWidth; ++i) {
    sum += sums[i];
  }
}

// The weighted sums, for Heads heads, of the values' Columns vectors at `values`; of the last, `size` elements.
template <typename T, int Heads, int Columns>
SIMD_TARGET void mix(
    const float (*weights)[kPiece], const T* values, const int64_t* slots, int count, int64_t dv, float* out,
    int64_t size = kWidth) {
  Floats sums[Heads][Columns] = {};
  for (int key = 0; key < count; ++key) {
    if (key + kAhead < count) {
      prefetch(values + slots[key + kAhead] * dv, size + (Columns - 1) * kWidth);
    }
    const T* from = values + slots[key] * dv;
    for (int column = 0; column < Columns; ++column) {
      const Floats x = load(from + column * kWidth, size);
      for (int head = 0; head < Heads; ++head) {
        sums[head][column] += weights[head][key] * x;
      }
    }
  }
  for (int head = 0; head < Heads; ++head) {
    std::memcpy(out + head * dv, &sums[head], ((Columns - 1) * kWidth + size) * sizeof(float));
  }
}

// Computes a piece for Heads of its query heads, from `head`, or for those that are left.
template <typename T, int Heads = kHeads>
SIMD_TARGET void attend_heads(const Call& call, const Piece& piece, const int64_t* slots, int64_t head) {
  const int64_t dv = call.dv;
  const int64_t group = call.group;
  if constexpr (Heads > 1) {
    if (group - head < Heads) {
      return attend_heads<T, Heads - 1>(call, piece, slots, head);
    }
  }
  const float* q = call.q + (piece.row * call.q_heads + piece.kv_head * group + head) * call.q_size;
  const T* keys = static_cast<const T*>(call.keys) + piece.kv_head * call.slots * call.d;
  const T* values = static_cast<const T*>(call.values) + piece.kv_head * call.slots * dv;
  float weights[Heads][kPiece];
  score<T, Heads>(call, q, keys, values, slots, piece.count, weights);
  for (int i = 0; i < Heads; ++i) {
    weigh(weights[i], piece.count, piece.partial[head + i], piece.partial[group + head + i]);
  }
  // AVX2 has 16 registers, of which the sums must leave a few.
  constexpr int kColumns = SIMD_BYTES == 64 || Heads < 4 ? 4 : 3;
  float* out = piece.partial + 2 * group + head * dv;
  int64_t column = 0;
  for (; column + kColumns * kWidth <= dv; column += kColumns * kWidth) {
    mix<T, Heads, kColumns>(weights, values + column, slots, piece.count, dv, out + column);
  }
  for (; column < dv; column += kWidth) {
    const int64_t size = std::min<int64_t>(kWidth, dv - column);
    mix<T, Heads, 1>(weights, values + column, slots, piece.count, dv, out + column, size);
  }
}

SIMD_TARGET void attend_piece(const Call& call, const Piece& piece) {
  int64_t slots[kPiece];
  const int32_t* table = call.tables + piece.row * call.width;
  int64_t at = call.first(piece.row) + piece.begin;
  for (int key = 0; key < piece.count;) {
    const int64_t start = table[at / call.page] * call.page;
    for (int64_t i = at % call.page; i < call.page && key < piece.count; ++i, ++at) {
      slots[key++] = start + i;
    }
  }
  for (int64_t head = 0; head < call.group; head += kHeads) {
    if (call.storage == kHalf) {
      attend_heads<Half>(call, piece, slots, head);
    } else if (call.storage == kBFloat) {
      attend_heads<BFloat>(call, piece, slots, head);
    } else {
      attend_heads<float>(call, piece, slots, head);
    }
  }
}

} // namespace SIMD_NAME
} // namespace

#undef SIMD_NAME
#undef SIMD_BYTES
#undef SIMD_TARGET
#endif
