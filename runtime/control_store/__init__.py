"""The key-value store that carries the control plane: its clients, its secret and its signed records."""
