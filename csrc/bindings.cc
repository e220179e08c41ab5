// The only file that knows nanobind: adaptra._C.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_C, m) { m.doc() = "Event simulation and list scheduling of pipeline programs."; }
