"""Messages from host memory by an engine in C++, over TCP or RDMA."""
