#pragma once

#include <nanobind/nanobind.h>

#include "schedule/replicas/job.h"

// adaptra.program.dependencies.RULE without the rows of messages.
[[nodiscard]] adaptra::schedule::JobRule to_job_rule(const nanobind::dict& table);

// Adds the simulator of several replicas to the extension.
void bind_replicas(nanobind::module_& m);
