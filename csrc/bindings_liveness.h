#pragma once

#include <nanobind/nanobind.h>

void bind_liveness(nanobind::module_& m);
