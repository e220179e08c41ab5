#pragma once

#include <nanobind/nanobind.h>

// Adds the simulator of several replicas to the extension.
void bind_replicas(nanobind::module_& m);
