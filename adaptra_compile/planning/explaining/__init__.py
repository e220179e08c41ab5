"""Why a plan is as it is: its limits, its numbers, and its comparison with other plans. Imports no torch."""
