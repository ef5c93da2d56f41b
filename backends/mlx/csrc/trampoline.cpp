// Forwards ExecuTorch's delegate calls (init, execute, destroy) to Python.
//
// There is no policy here: what a payload means, which cache a program uses and
// how errors are reported is decided by the Python callables given to
// `register_backend`. Written against the limited API (abi3), so one binary
// serves every supported Python version.
//
// Ownership of what Python sees:
//   Tensor     read-only view of memory, exported through DLPack. A constant
//   owns
//              its FreeableBuffer and lives as long as any DLPack consumer
//              does; an argument borrows ExecuTorch's memory and is closed when
//              the call returns.
//   NamedData  borrows the program's named data map during init.
//   Arguments  borrows the delegate call's EValues during execute.

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

namespace {

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::runtime::ArrayRef;
using executorch::runtime::Backend;
using executorch::runtime::BackendExecutionContext;
using executorch::runtime::BackendInitContext;
using executorch::runtime::BackendInterface;
using executorch::runtime::CompileSpec;
using executorch::runtime::DelegateHandle;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::NamedDataMap;
using executorch::runtime::Result;
using executorch::runtime::Span;

// Set when the interpreter is about to exit; from then on handles are leaked.
std::atomic<bool> closing{false};

// ---------------------------------------------------------------------------
// DLPack (https://dmlc.github.io/dlpack), the unversioned ABI
// ---------------------------------------------------------------------------

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

constexpr int32_t kDLCPU = 1, kDLCUDAHost = 3, kDLCUDAManaged = 13;

struct DTypeRow {
  ScalarType scalar_type;
  DLDataType dl;
};

constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6;

constexpr DTypeRow kDTypes[] = {
    {ScalarType::Byte, {kUInt, 8, 1}},
    {ScalarType::Char, {kInt, 8, 1}},
    {ScalarType::Short, {kInt, 16, 1}},
    {ScalarType::Int, {kInt, 32, 1}},
    {ScalarType::Long, {kInt, 64, 1}},
    {ScalarType::Half, {kFloat, 16, 1}},
    {ScalarType::Float, {kFloat, 32, 1}},
    {ScalarType::Double, {kFloat, 64, 1}},
    {ScalarType::Bool, {kBool, 8, 1}},
    {ScalarType::BFloat16, {kBfloat, 16, 1}},
    {ScalarType::UInt16, {kUInt, 16, 1}},
    {ScalarType::UInt32, {kUInt, 32, 1}},
    {ScalarType::UInt64, {kUInt, 64, 1}},
};

const DTypeRow* find_dtype(int scalar_type) {
  for (const DTypeRow& row : kDTypes) {
    if (static_cast<int>(row.scalar_type) == scalar_type) {
      return &row;
    }
  }
  return nullptr;
}

// Owns a Python reference; the GIL must be held where it is used.
class Ref {
 public:
  explicit Ref(PyObject* object = nullptr) : object_(object) {
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() {
    Py_XDECREF(object_);
  }
  PyObject* get() const {
    return object_;
  }
  PyObject* release() {
    return std::exchange(object_, nullptr);
  }
  explicit operator bool() const {
    return object_ != nullptr;
  }

 private:
  PyObject* object_;
};

// C++ exceptions must not pass through CPython's frames.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

class GilGuard {
 public:
  GilGuard() : state_(PyGILState_Ensure()) {
  }
  ~GilGuard() {
    PyGILState_Release(state_);
  }

 private:
  PyGILState_STATE state_;
};

// ---------------------------------------------------------------------------
// Tensor
// ---------------------------------------------------------------------------

PyObject* tensor_type = nullptr;
PyObject* named_data_type = nullptr;
PyObject* arguments_type = nullptr;

struct TensorObject {
  PyObject_HEAD PyObject* shape;  // tuple[int, ...]
  const DTypeRow* dtype;
  void* data;  // nullptr once closed
  bool open;
  FreeableBuffer* buffer;  // owned; nullptr for a borrowed view
};

PyObject* make_tensor(
    PyObject* shape,
    const DTypeRow* dtype,
    const void* data,
    FreeableBuffer* buffer) {
  auto* self =
      PyObject_New(TensorObject, reinterpret_cast<PyTypeObject*>(tensor_type));
  if (self == nullptr) {
    delete buffer;
    return nullptr;
  }
  Py_INCREF(shape);
  self->shape = shape;
  self->dtype = dtype;
  self->data = const_cast<void*>(data);
  self->open = true;
  self->buffer = buffer;
  return reinterpret_cast<PyObject*>(self);
}

template <typename Object>
void free_object(Object* self) {
  PyTypeObject* type = Py_TYPE(reinterpret_cast<PyObject*>(self));
  PyObject_Free(self);
  Py_DECREF(type);
}

void tensor_dealloc(TensorObject* self) {
  Py_XDECREF(self->shape);
  delete self->buffer;
  free_object(self);
}

struct ExportedTensor {
  DLManagedTensor managed;
  std::vector<int64_t> shape;
  PyObject* owner;
};

void exported_deleter(DLManagedTensor* managed) {
  auto* exported = static_cast<ExportedTensor*>(managed->manager_ctx);
  if (Py_IsInitialized() && !closing) {
    GilGuard gil;
    Py_DECREF(exported->owner);
  }
  delete exported;
}

void exported_capsule_destructor(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor")) {
    auto* managed = static_cast<DLManagedTensor*>(
        PyCapsule_GetPointer(capsule, "dltensor"));
    managed->deleter(managed);
  }
}

bool shape_from_tuple(PyObject* tuple, std::vector<int64_t>& shape) {
  Py_ssize_t rank = PyTuple_Size(tuple);
  if (rank < 0) {
    return false;
  }
  for (Py_ssize_t i = 0; i < rank; ++i) {
    int64_t dim = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    if (dim == -1 && PyErr_Occurred()) {
      return false;
    }
    shape.push_back(dim);
  }
  return true;
}

PyObject* tensor_dlpack(TensorObject* self, PyObject*, PyObject*) {
  if (!self->open) {
    PyErr_SetString(
        PyExc_RuntimeError,
        "this tensor belonged to a delegate call that has returned");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    auto exported = std::make_unique<ExportedTensor>();
    if (!shape_from_tuple(self->shape, exported->shape)) {
      return nullptr;
    }
    exported->owner = reinterpret_cast<PyObject*>(self);
    exported->managed.manager_ctx = exported.get();
    exported->managed.deleter = exported_deleter;
    exported->managed.dl_tensor = {
        self->data,
        {kDLCPU, 0},
        static_cast<int32_t>(exported->shape.size()),
        self->dtype->dl,
        exported->shape.data(),
        nullptr,
        0};
    PyObject* capsule = PyCapsule_New(
        &exported->managed, "dltensor", exported_capsule_destructor);
    if (capsule == nullptr) {
      return nullptr;
    }
    exported.release();  // the capsule's deleter frees it
    Py_INCREF(self);
    return capsule;
  });
}

PyObject* tensor_dlpack_device(TensorObject*, PyObject*) {
  return Py_BuildValue("(ii)", kDLCPU, 0);
}

PyObject* tensor_get_shape(TensorObject* self, void*) {
  Py_INCREF(self->shape);
  return self->shape;
}

PyObject* tensor_get_scalar_type(TensorObject* self, void*) {
  return PyLong_FromLong(static_cast<long>(self->dtype->scalar_type));
}

PyMethodDef tensor_methods[] = {
    {"__dlpack__",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(tensor_dlpack)),
     METH_VARARGS | METH_KEYWORDS,
     nullptr},
    {"__dlpack_device__",
     reinterpret_cast<PyCFunction>(tensor_dlpack_device),
     METH_NOARGS,
     nullptr},
    {}};

PyGetSetDef tensor_getset[] = {
    {"shape",
     reinterpret_cast<getter>(tensor_get_shape),
     nullptr,
     nullptr,
     nullptr},
    {"scalar_type",
     reinterpret_cast<getter>(tensor_get_scalar_type),
     nullptr,
     nullptr,
     nullptr},
    {}};

PyType_Slot tensor_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(tensor_dealloc)},
    {Py_tp_methods, tensor_methods},
    {Py_tp_getset, tensor_getset},
    {0, nullptr}};

constexpr unsigned kTypeFlags =
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;

PyType_Spec tensor_spec = {
    "executorch_mlx.backends.mlx.runtime._trampoline.Tensor",
    sizeof(TensorObject),
    0,
    kTypeFlags,
    tensor_slots};

// ---------------------------------------------------------------------------
// NamedData
// ---------------------------------------------------------------------------

struct NamedDataObject {
  PyObject_HEAD const NamedDataMap* map;  // nullptr once init has returned
};

void named_data_dealloc(NamedDataObject* self) {
  free_object(self);
}

// tensor(key: str, shape: tuple[int, ...], scalar_type: int) -> Tensor
PyObject* named_data_tensor(NamedDataObject* self, PyObject* args) {
  const char* key = nullptr;
  Py_ssize_t key_size = 0;
  PyObject* shape_tuple = nullptr;
  int scalar_type = 0;
  if (!PyArg_ParseTuple(
          args,
          "s#O!i:tensor",
          &key,
          &key_size,
          &PyTuple_Type,
          &shape_tuple,
          &scalar_type)) {
    return nullptr;
  }
  const DTypeRow* dtype = find_dtype(scalar_type);
  if (dtype == nullptr) {
    return PyErr_Format(
        PyExc_ValueError,
        "constant '%s' has scalar type %d, which has no DLPack form",
        key,
        scalar_type);
  }
  return guarded([&]() -> PyObject* {
    std::vector<int64_t> shape;
    if (!shape_from_tuple(shape_tuple, shape)) {
      return nullptr;
    }
    if (self->map == nullptr) {
      return PyErr_Format(
          PyExc_ValueError,
          "constant '%s' was asked for, but the program carries no named data",
          key);
    }
    auto found = self->map->get_data(std::string_view(key, key_size));
    if (!found.ok()) {
      return PyErr_Format(
          PyExc_ValueError,
          "constant '%s' is not in the program's named data (error 0x%x)",
          key,
          static_cast<unsigned>(found.error()));
    }
    // The verifier has bounded every dimension and their product.
    uint64_t expected = dtype->dl.bits / 8;
    for (int64_t dim : shape) {
      expected *= static_cast<uint64_t>(dim);
    }
    auto* buffer = new FreeableBuffer(std::move(found.get()));
    if (buffer->size() != expected) {
      PyErr_Format(
          PyExc_ValueError,
          "constant '%s' holds %zu bytes, but its shape and dtype need %llu",
          key,
          buffer->size(),
          static_cast<unsigned long long>(expected));
      delete buffer;
      return nullptr;
    }
    return make_tensor(shape_tuple, dtype, buffer->data(), buffer);
  });
}

PyMethodDef named_data_methods[] = {
    {"tensor",
     reinterpret_cast<PyCFunction>(named_data_tensor),
     METH_VARARGS,
     nullptr},
    {}};

PyType_Slot named_data_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(named_data_dealloc)},
    {Py_tp_methods, named_data_methods},
    {0, nullptr}};

PyType_Spec named_data_spec = {
    "executorch_mlx.backends.mlx.runtime._trampoline.NamedData",
    sizeof(NamedDataObject),
    0,
    kTypeFlags,
    named_data_slots};

// ---------------------------------------------------------------------------
// Arguments
// ---------------------------------------------------------------------------

struct ArgumentsObject {
  PyObject_HEAD Span<EValue*>* values;  // nullptr once execute has returned
  std::vector<TensorObject*>* views;    // strong references, closed on return
};

void arguments_close(ArgumentsObject* self) {
  self->values = nullptr;
  for (TensorObject* view : *self->views) {
    view->open = false;
    view->data = nullptr;
    Py_DECREF(view);
  }
  self->views->clear();
}

void arguments_dealloc(ArgumentsObject* self) {
  arguments_close(self);
  delete self->views;
  free_object(self);
}

EValue* arguments_at(ArgumentsObject* self, Py_ssize_t index) {
  if (self->values == nullptr) {
    PyErr_SetString(
        PyExc_RuntimeError,
        "these arguments belonged to a delegate call that has returned");
    return nullptr;
  }
  if (index < 0 || static_cast<size_t>(index) >= self->values->size()) {
    PyErr_Format(
        PyExc_IndexError,
        "argument %zd of a delegate call with %zu arguments",
        index,
        self->values->size());
    return nullptr;
  }
  return (*self->values)[index];
}

PyObject* sizes_tuple(const executorch::aten::Tensor& tensor) {
  Ref shape(PyTuple_New(tensor.dim()));
  if (!shape) {
    return nullptr;
  }
  for (ssize_t i = 0; i < tensor.dim(); ++i) {
    PyObject* dim = PyLong_FromLongLong(tensor.size(i));
    if (dim == nullptr || PyTuple_SetItem(shape.get(), i, dim) < 0) {
      return nullptr;
    }
  }
  return shape.release();
}

// get(index) -> Tensor | int | float | bool | None
// Sets ValueError and returns false unless a tensor's elements lie in row-major
// order.
bool check_row_major(const executorch::aten::Tensor& tensor, Py_ssize_t index) {
  int64_t expected_stride = 1;
  bool is_row_major = true;
  for (ssize_t i = tensor.dim() - 1; i >= 0; --i) {
    is_row_major &=
        tensor.size(i) == 1 || tensor.strides()[i] == expected_stride;
    expected_stride *= tensor.size(i);
  }
  if (!is_row_major && tensor.numel() > 0) {
    PyErr_Format(
        PyExc_ValueError,
        "argument %zd of the delegate lies in memory in channels_last order, "
        "and is read and written in row-major order: give a contiguous tensor, "
        "or export the model without channels_last",
        index);
    return false;
  }
  return true;
}

PyObject* arguments_get(ArgumentsObject* self, PyObject* arg) {
  Py_ssize_t index = PyLong_AsSsize_t(arg);
  if (index == -1 && PyErr_Occurred()) {
    return nullptr;
  }
  EValue* value = arguments_at(self, index);
  if (value == nullptr) {
    return nullptr;
  }
  if (value->isInt()) {
    return PyLong_FromLongLong(value->toInt());
  }
  if (value->isDouble()) {
    return PyFloat_FromDouble(value->toDouble());
  }
  if (value->isBool()) {
    return PyBool_FromLong(value->toBool());
  }
  if (value->isNone()) {
    Py_RETURN_NONE;
  }
  if (!value->isTensor()) {
    return PyErr_Format(
        PyExc_TypeError,
        "argument %zd is neither a tensor nor a scalar",
        index);
  }
  const auto& tensor = value->toTensor();
  if (!check_row_major(tensor, index)) {
    return nullptr;
  }
  const DTypeRow* dtype = find_dtype(static_cast<int>(tensor.scalar_type()));
  if (dtype == nullptr) {
    return PyErr_Format(
        PyExc_TypeError,
        "argument %zd has scalar type %d, which has no DLPack form",
        index,
        static_cast<int>(tensor.scalar_type()));
  }
  Ref shape(sizes_tuple(tensor));
  if (!shape) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    self->views->reserve(self->views->size() + 1);
    PyObject* view =
        make_tensor(shape.get(), dtype, tensor.const_data_ptr(), nullptr);
    if (view != nullptr) {
      Py_INCREF(view);
      self->views->push_back(reinterpret_cast<TensorObject*>(view));
    }
    return view;
  });
}

bool write_tensor(Py_ssize_t index, EValue* value, PyObject* array) {
  Ref capsule(PyObject_CallMethod(array, "__dlpack__", nullptr));
  if (!capsule) {
    return false;
  }
  auto* managed = static_cast<DLManagedTensor*>(
      PyCapsule_GetPointer(capsule.get(), "dltensor"));
  if (managed == nullptr) {
    return false;
  }
  const DLTensor& source = managed->dl_tensor;
  if (source.device.device_type != kDLCPU &&
      source.device.device_type != kDLCUDAHost &&
      source.device.device_type != kDLCUDAManaged) {
    PyErr_Format(
        PyExc_ValueError,
        "output argument %zd lies in memory of DLPack device type %d, which "
        "the "
        "host cannot read",
        index,
        source.device.device_type);
    return false;
  }
  auto& target = value->toTensor();
  const DTypeRow* dtype = find_dtype(static_cast<int>(target.scalar_type()));
  if (dtype == nullptr || dtype->dl.code != source.dtype.code ||
      dtype->dl.bits != source.dtype.bits || source.dtype.lanes != 1) {
    PyErr_Format(
        PyExc_TypeError,
        "output argument %zd has scalar type %d, got DLPack code %d with %d "
        "bits",
        index,
        static_cast<int>(target.scalar_type()),
        source.dtype.code,
        source.dtype.bits);
    return false;
  }
  std::vector<SizesType> sizes;
  int64_t expected_stride = 1;
  for (int32_t i = source.ndim - 1; i >= 0; --i) {
    if (source.strides != nullptr && source.shape[i] != 1 &&
        source.strides[i] != expected_stride) {
      PyErr_Format(
          PyExc_ValueError, "output argument %zd is not contiguous", index);
      return false;
    }
    expected_stride *= source.shape[i];
  }
  for (int32_t i = 0; i < source.ndim; ++i) {
    sizes.push_back(static_cast<SizesType>(source.shape[i]));
  }
  Error error = executorch::runtime::resize_tensor(
      target, ArrayRef<SizesType>(sizes.data(), sizes.size()));
  size_t nbytes =
      static_cast<size_t>(expected_stride) * (source.dtype.bits / 8);
  if (error != Error::Ok || target.nbytes() != nbytes) {
    PyErr_Format(
        PyExc_ValueError,
        "output argument %zd cannot hold %zu bytes in %d dimensions: the shape "
        "is outside what the program was exported for",
        index,
        nbytes,
        source.ndim);
    return false;
  }
  if (!check_row_major(target, index)) {
    return false;
  }
  if (nbytes > 0) {
    std::memcpy(
        target.mutable_data_ptr(),
        static_cast<const char*>(source.data) + source.byte_offset,
        nbytes);
  }
  return true;
}

// set(index, value): copies a DLPack array (or a scalar) into an output.
PyObject* arguments_set(ArgumentsObject* self, PyObject* args) {
  Py_ssize_t index = 0;
  PyObject* source = nullptr;
  if (!PyArg_ParseTuple(args, "nO:set", &index, &source)) {
    return nullptr;
  }
  EValue* value = arguments_at(self, index);
  if (value == nullptr) {
    return nullptr;
  }
  if (value->isTensor()) {
    return guarded([&]() -> PyObject* {
      if (!write_tensor(index, value, source)) {
        return nullptr;
      }
      Py_RETURN_NONE;
    });
  }
  if (PyBool_Check(source)) {
    *value = EValue(PyObject_IsTrue(source) == 1);
  } else if (PyLong_Check(source)) {
    int64_t number = PyLong_AsLongLong(source);
    if (number == -1 && PyErr_Occurred()) {
      return nullptr;
    }
    *value = EValue(number);
  } else if (PyFloat_Check(source)) {
    *value = EValue(PyFloat_AsDouble(source));
  } else {
    return PyErr_Format(
        PyExc_TypeError,
        "output argument %zd is a scalar, got %R",
        index,
        reinterpret_cast<PyObject*>(Py_TYPE(source)));
  }
  Py_RETURN_NONE;
}

Py_ssize_t arguments_len(ArgumentsObject* self) {
  return self->values == nullptr ? 0 : self->values->size();
}

PyMethodDef arguments_methods[] = {
    {"get", reinterpret_cast<PyCFunction>(arguments_get), METH_O, nullptr},
    {"set",
     reinterpret_cast<PyCFunction>(arguments_set),
     METH_VARARGS,
     nullptr},
    {}};

PyType_Slot arguments_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(arguments_dealloc)},
    {Py_tp_methods, arguments_methods},
    {Py_sq_length, reinterpret_cast<void*>(arguments_len)},
    {0, nullptr}};

PyType_Spec arguments_spec = {
    "executorch_mlx.backends.mlx.runtime._trampoline.Arguments",
    sizeof(ArgumentsObject),
    0,
    kTypeFlags,
    arguments_slots};

// ---------------------------------------------------------------------------
// The backend
// ---------------------------------------------------------------------------

// The Python side catches its own errors and returns an error code; an
// exception that still arrives here is printed, never left set (it would abort
// the process).
Error report_unexpected(PyObject* callable) {
  PyErr_WriteUnraisable(callable);
  return Error::Internal;
}

class PythonBackend final : public BackendInterface {
 public:
  PythonBackend(PyObject* init, PyObject* execute)
      : init_(init), execute_(execute) {
    Py_INCREF(init_);
    Py_INCREF(execute_);
  }

  bool is_available() const override {
    return true;
  }

  Result<DelegateHandle*> init(
      BackendInitContext& context,
      FreeableBuffer* processed,
      ArrayRef<CompileSpec>) const override {
    GilGuard gil;
    Ref payload(PyBytes_FromStringAndSize(
        static_cast<const char*>(processed->data()), processed->size()));
    auto* named_data = PyObject_New(
        NamedDataObject, reinterpret_cast<PyTypeObject*>(named_data_type));
    if (!payload || named_data == nullptr) {
      Py_XDECREF(reinterpret_cast<PyObject*>(named_data));
      return report_unexpected(init_);
    }
    processed->Free();
    named_data->map = context.get_named_data_map();
    Ref result(PyObject_CallFunctionObjArgs(
        init_,
        payload.get(),
        reinterpret_cast<PyObject*>(named_data),
        nullptr));
    named_data->map = nullptr;
    Py_DECREF(reinterpret_cast<PyObject*>(named_data));
    if (!result) {
      return report_unexpected(init_);
    }
    if (PyLong_Check(result.get())) {
      return static_cast<Error>(PyLong_AsLong(result.get()));
    }
    return static_cast<DelegateHandle*>(result.release());
  }

  Error execute(
      BackendExecutionContext&,
      DelegateHandle* handle,
      Span<EValue*> args) const override {
    GilGuard gil;
    auto* arguments = PyObject_New(
        ArgumentsObject, reinterpret_cast<PyTypeObject*>(arguments_type));
    if (arguments == nullptr) {
      return report_unexpected(execute_);
    }
    arguments->values = &args;
    arguments->views = new (std::nothrow) std::vector<TensorObject*>();
    if (arguments->views == nullptr) {
      free_object(arguments);
      return Error::MemoryAllocationFailed;
    }
    Ref result(PyObject_CallFunctionObjArgs(
        execute_,
        static_cast<PyObject*>(handle),
        reinterpret_cast<PyObject*>(arguments),
        nullptr));
    arguments_close(arguments);
    Py_DECREF(reinterpret_cast<PyObject*>(arguments));
    if (!result || !PyLong_Check(result.get())) {
      return report_unexpected(execute_);
    }
    return static_cast<Error>(PyLong_AsLong(result.get()));
  }

  void destroy(DelegateHandle* handle) const override {
    if (closing || !Py_IsInitialized()) {
      return;
    }
    GilGuard gil;
    Py_XDECREF(static_cast<PyObject*>(handle));
  }

 private:
  PyObject* init_;
  PyObject* execute_;
};

// register_backend(name, init, execute) -> int: ExecuTorch's error code, 0 for
// ok. The registry keeps the name and the backend for the life of the process.
PyObject* register_backend(PyObject*, PyObject* args) {
  const char* name = nullptr;
  PyObject* init = nullptr;
  PyObject* execute = nullptr;
  if (!PyArg_ParseTuple(args, "sOO:register_backend", &name, &init, &execute)) {
    return nullptr;
  }
  if (executorch::runtime::get_backend_class(name) != nullptr) {
    return PyLong_FromLong(
        static_cast<long>(Error::RegistrationAlreadyRegistered));
  }
  return guarded([&]() -> PyObject* {
    auto* kept_name = new std::string(name);
    auto* backend = new PythonBackend(init, execute);
    Error error =
        executorch::runtime::register_backend({kept_name->c_str(), backend});
    return PyLong_FromLong(static_cast<long>(error));
  });
}

PyObject* close_trampoline(PyObject*, PyObject*) {
  closing = true;
  Py_RETURN_NONE;
}

PyMethodDef module_methods[] = {
    {"register_backend", register_backend, METH_VARARGS, nullptr},
    {"close", close_trampoline, METH_NOARGS, nullptr},
    {}};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    "_trampoline",
    "Forwards ExecuTorch's delegate calls to Python.",
    -1,
    module_methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__trampoline() {
  tensor_type = PyType_FromSpec(&tensor_spec);
  named_data_type = PyType_FromSpec(&named_data_spec);
  arguments_type = PyType_FromSpec(&arguments_spec);
  if (!tensor_type || !named_data_type || !arguments_type) {
    return nullptr;
  }
  return PyModule_Create(&module_def);
}
