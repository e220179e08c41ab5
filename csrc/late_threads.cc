#include "late_threads.h"

#include <Python.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>

namespace adaptra {
namespace {

std::terminate_handler otherwise = nullptr;

bool interpreter_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

[[noreturn]] void rest_or_terminate() {
  // The unwinding of pthread_exit is no exception of C++. The main thread is the one that ends the interpreter.
  if (interpreter_is_ending() && !std::current_exception() && gettid() != getpid()) {
    while (true) pause();
  }
  otherwise();
  std::abort();
}

}  // namespace

void rest_late_threads() {
  if (otherwise == nullptr) otherwise = std::set_terminate(&rest_or_terminate);
}

}  // namespace adaptra
