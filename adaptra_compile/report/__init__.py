"""What people look at: timelines, traces, tables and the explanation of a plan."""
