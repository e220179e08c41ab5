// The delegate's part of adaptra._C, apart from the rest because it is long.
#pragma once

#include <nanobind/nanobind.h>

void bind_delegate(nanobind::module_& m);
