"""What helps where no order does: wider paths, rounding, shares and detours. Imports no torch."""
