"""Responses to lost workers over the life of a job, and what each costs. Imports no torch."""
