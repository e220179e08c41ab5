"""Output for people: timelines, traces, tables and the explanation of a plan."""
