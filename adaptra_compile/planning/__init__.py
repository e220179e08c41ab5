"""Planning: the search for a plan, its distance from the bound, and the changes that would shorten it. Imports no torch."""
