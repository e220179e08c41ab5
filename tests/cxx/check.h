// A test framework, as small as these tests need: a failed check says where and ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <source_location>

inline void check(bool holds, const char* what, std::source_location where = std::source_location::current()) {
  if (holds) return;
  std::fprintf(stderr, "%s:%u: %s: expected %s\n", where.file_name(), where.line(), where.function_name(), what);
  std::exit(1);
}
