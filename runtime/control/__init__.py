"""How the ranks agree on plans: measure, propose, confirm, switch at one step."""
