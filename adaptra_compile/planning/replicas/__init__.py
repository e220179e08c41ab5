"""Plans for several replicas: routes around what is lost, slow or narrow, what else helps, and what each costs."""
