// The liveness listener's part of adaptra._C.
#include "bindings_liveness.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <span>
#include <string>

#include "liveness/listener.h"

namespace nb = nanobind;
using adaptra::liveness::Listener;

void bind_liveness(nb::module_& m) {
  nb::class_<Listener>(m, "LivenessListener")
      .def(nb::new_([](const std::string& address, const nb::bytes& key) {
             const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(key.c_str()), key.size());
             return std::shared_ptr<Listener>(new Listener(address, bytes), [](Listener* listener) {
               if (!listener->is_copy()) delete listener;
             });
           }),
           nb::arg("address"), nb::arg("key"))
      .def_prop_ro("port", &Listener::port)
      .def("close", &Listener::close, nb::call_guard<nb::gil_scoped_release>());
}
