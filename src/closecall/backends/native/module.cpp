// The Python module: unpacks a struct from bytes, releases the interpreter, runs a driver. Stable ABI, no torch.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <exception>

#include "drivers.h"
#include "pool.h"

namespace {

// Whether the bytes were such a struct; if not, Python's error is set.
template <class Args>
bool unpack(PyObject* packed, Args& args) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(packed, &data, &size) < 0) return false;
  if (size != (Py_ssize_t)sizeof(Args)) {
    PyErr_Format(PyExc_SystemError, "expected %zd bytes of arguments, got %zd", (Py_ssize_t)sizeof(Args), size);
    return false;
  }
  std::memcpy(&args, data, sizeof args);
  return true;
}

template <class Args, const char* (*Run)(const Args&)>
PyObject* call(PyObject*, PyObject* packed) {
  Args args;
  if (!unpack(packed, args)) return nullptr;
  const char* problem = nullptr;
  bool no_memory = false;
  Py_BEGIN_ALLOW_THREADS;
  try {
    problem = Run(args);
  } catch (const std::exception&) {
    no_memory = true;  // the drivers throw nothing else
  }
  Py_END_ALLOW_THREADS;
  if (no_memory) return PyErr_NoMemory();
  if (problem) return PyErr_Format(PyExc_RuntimeError, "closecall native: %s", problem);
  Py_RETURN_NONE;
}

PyObject* summary_bytes(PyObject*, PyObject* packed) {
  RankArgs args;
  return unpack(packed, args) ? PyLong_FromLongLong(run_summary_bytes(args)) : nullptr;
}

PyObject* tiers(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  for (int i = 0; list && i < tier_count(); ++i) {
    PyObject* name = PyUnicode_FromString(tier_name(i));
    if (!name || PyList_Append(list, name) < 0) Py_CLEAR(list);
    Py_XDECREF(name);
  }
  return list;
}

PyObject* peak(PyObject*, PyObject* args) {
  long long tier, dtype;
  double seconds, rate;
  if (!PyArg_ParseTuple(args, "LLd", &tier, &dtype, &seconds)) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  rate = run_peak(tier, dtype, seconds);
  Py_END_ALLOW_THREADS;
  return PyFloat_FromDouble(rate);
}

PyObject* share(PyObject*, PyObject* address) {
  void* gomp_parallel = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return nullptr;
  share_team(gomp_parallel);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"attend", call<AttendArgs, run_attend>, METH_O, "attend(packed AttendArgs)"},
    {"rank", call<RankArgs, run_rank>, METH_O, "rank(packed RankArgs)"},
    {"update", call<RankArgs, run_update>, METH_O, "update(packed RankArgs): only the summaries, into pages"},
    {"summary_bytes", summary_bytes, METH_O, "summary_bytes(packed RankArgs): of one block"},
    {"gather", call<GatherArgs, run_gather>, METH_O, "gather(packed GatherArgs)"},
    {"tiers", tiers, METH_NOARGS, "Names of the tiers this machine can run, best first."},
    {"peak", peak, METH_VARARGS, "peak(tier, dtype, seconds): FLOP/s of one core from registers."},
    {"share_team", share, METH_O, "share_team(address of GOMP_parallel, or 0 for our own threads)"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "closecall's CPU kernels.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&module); }
