// Points libmlx's matrix products at another BLAS, in the running process.
//
// MLX's Linux wheels bundle the reference BLAS and import from it, by name,
// cblas_sgemm, cblas_dgemm and cblas_cgemm. `install` overwrites these three
// entries of libmlx's global offset table, so that import order does not
// matter. Products with a vector go to gemv: gemm packs its operands first,
// which for a vector costs more than the product.

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace {

// The CBLAS interface with 32-bit integers (https://netlib.org/blas).
constexpr int kRowMajor = 101;
constexpr int kNoTrans = 111;
constexpr int kTrans = 112;

template <typename T>
using Gemv = void (*)(
    int order,
    int trans,
    int m,
    int n,
    T alpha,
    const T* a,
    int lda,
    const T* x,
    int incx,
    T beta,
    T* y,
    int incy);

// The functions that the replacements call; gemm's type is that of its
// replacement, below.
template <typename T>
struct Library {
  static void* gemm;
  static Gemv<T> gemv;
};
template <typename T>
void* Library<T>::gemm = nullptr;
template <typename T>
Gemv<T> Library<T>::gemv = nullptr;

// y = alpha op(A) x + beta y, with op(A) of m by k.
template <typename T>
void matrix_by_vector(
    bool transposed,
    int m,
    int k,
    T alpha,
    const T* a,
    int lda,
    const T* x,
    int incx,
    T beta,
    T* y,
    int incy) {
  if (beta == T(0)) {
    // y may hold anything, NaN included.
    for (int i = 0; i < m; ++i) {
      y[static_cast<int64_t>(i) * incy] = T(0);
    }
  }
  Library<T>::gemv(
      kRowMajor,
      transposed ? kTrans : kNoTrans,
      transposed ? k : m,
      transposed ? m : k,
      alpha,
      a,
      lda,
      x,
      incx,
      beta,
      y,
      incy);
}

template <typename T>
void gemm(
    int order,
    int trans_a,
    int trans_b,
    int m,
    int n,
    int k,
    T alpha,
    const T* a,
    int lda,
    const T* b,
    int ldb,
    T beta,
    T* c,
    int ldc) {
  if (order == kRowMajor && k > 0 && m == 1) {
    // c = a op(B) is the transpose of op(B)^T a^T.
    matrix_by_vector<T>(
        trans_b == kNoTrans,
        n,
        k,
        alpha,
        b,
        ldb,
        a,
        trans_a == kNoTrans ? 1 : lda,
        beta,
        c,
        1);
  } else if (order == kRowMajor && k > 0 && n == 1) {
    matrix_by_vector<T>(
        trans_a != kNoTrans,
        m,
        k,
        alpha,
        a,
        lda,
        b,
        trans_b == kNoTrans ? ldb : 1,
        beta,
        c,
        ldc);
  } else {
    reinterpret_cast<decltype(&gemm<T>)>(Library<T>::gemm)(
        order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  }
}

struct Replacement {
  const char* name;
  void* function;
};

struct Patch {
  const char* library;  // the end of its path
  Replacement* replacements;
  int count;
  int found;
  void** slots[3];
};

// Finds the offset table's entries for the replaced names.
void find_slots(Patch& patch, ElfW(Addr) base, const ElfW(Dyn) * dynamic) {
  const char* strings = nullptr;
  const ElfW(Sym)* symbols = nullptr;
  const ElfW(Rela) * tables[2] = {nullptr, nullptr};
  size_t bytes[2] = {0, 0};
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    const auto address = dynamic->d_un.d_ptr;
    switch (dynamic->d_tag) {
      case DT_STRTAB:
        strings = reinterpret_cast<const char*>(address);
        break;
      case DT_SYMTAB:
        symbols = reinterpret_cast<const ElfW(Sym)*>(address);
        break;
      case DT_JMPREL:
        tables[0] = reinterpret_cast<const ElfW(Rela)*>(address);
        break;
      case DT_PLTRELSZ:
        bytes[0] = dynamic->d_un.d_val;
        break;
      case DT_RELA:
        tables[1] = reinterpret_cast<const ElfW(Rela)*>(address);
        break;
      case DT_RELASZ:
        bytes[1] = dynamic->d_un.d_val;
        break;
      default:
        break;
    }
  }
  if (strings == nullptr || symbols == nullptr) {
    return;
  }
  for (int table = 0; table < 2; ++table) {
    const size_t count = bytes[table] / sizeof(ElfW(Rela));
    for (size_t i = 0; i < count && tables[table] != nullptr; ++i) {
      const ElfW(Rela) & entry = tables[table][i];
      const char* name = strings + symbols[ELF64_R_SYM(entry.r_info)].st_name;
      for (int which = 0; which < patch.count; ++which) {
        if (patch.slots[which] == nullptr &&
            std::strcmp(name, patch.replacements[which].name) == 0) {
          patch.slots[which] = reinterpret_cast<void**>(base + entry.r_offset);
          ++patch.found;
        }
      }
    }
  }
}

int visit_library(dl_phdr_info* info, size_t, void* data) {
  Patch& patch = *static_cast<Patch*>(data);
  const size_t length = std::strlen(info->dlpi_name);
  const size_t wanted = std::strlen(patch.library);
  if (length < wanted ||
      std::strcmp(info->dlpi_name + length - wanted, patch.library) != 0) {
    return 0;
  }
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info->dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) {
      find_slots(
          patch,
          info->dlpi_addr,
          reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + header.p_vaddr));
    }
  }
  return 1;
}

bool make_writable(void** slot) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(slot) & ~(page - 1);
  return mprotect(
             reinterpret_cast<void*>(start), page, PROT_READ | PROT_WRITE) == 0;
}

PyObject* install(PyObject*, PyObject* args) {
  const char* library = nullptr;
  unsigned long long sgemm = 0, sgemv = 0, dgemm = 0, dgemv = 0, cgemm = 0;
  if (!PyArg_ParseTuple(
          args, "sKKKKK", &library, &sgemm, &sgemv, &dgemm, &dgemv, &cgemm)) {
    return nullptr;
  }
  Replacement replacements[] = {
      {"cblas_sgemm", reinterpret_cast<void*>(&gemm<float>)},
      {"cblas_dgemm", reinterpret_cast<void*>(&gemm<double>)},
      {"cblas_cgemm", reinterpret_cast<void*>(cgemm)},
  };
  Patch patch{library, replacements, 3, 0, {nullptr, nullptr, nullptr}};
  dl_iterate_phdr(visit_library, &patch);
  if (patch.found != patch.count) {
    Py_RETURN_FALSE;
  }
  for (void** slot : patch.slots) {
    if (!make_writable(slot)) {
      Py_RETURN_FALSE;
    }
  }
  Library<float>::gemm = reinterpret_cast<void*>(sgemm);
  Library<float>::gemv = reinterpret_cast<Gemv<float>>(sgemv);
  Library<double>::gemm = reinterpret_cast<void*>(dgemm);
  Library<double>::gemv = reinterpret_cast<Gemv<double>>(dgemv);
  for (int which = 0; which < patch.count; ++which) {
    __atomic_store_n(
        patch.slots[which], replacements[which].function, __ATOMIC_RELEASE);
  }
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {
    {"install", install, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    "_blas",
    nullptr,
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__blas() {
  return PyModule_Create(&module_def);
}
