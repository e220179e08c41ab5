"""The control plane, by which ranks agree on plans: measure, propose, confirm, and switch at the same step."""
