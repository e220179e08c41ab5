"""The delegate: a transport from host memory by an engine in C++, over TCP or RDMA."""
