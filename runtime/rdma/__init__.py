"""RDMA devices of this host: found, described and watched."""
