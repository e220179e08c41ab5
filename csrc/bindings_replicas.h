#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "schedule/simulate/job.h"

// adaptra.program.dependencies.RULE without the rows of messages.
[[nodiscard]] adaptra::schedule::JobRule to_job_rule(const nanobind::dict& table);

// adaptra.simulation.cost.Blocking's value.
[[nodiscard]] adaptra::schedule::Blocking to_blocking(const std::string& value);

// Adds the search for orders of several replicas to the extension.
void bind_replicas(nanobind::module_& m);
