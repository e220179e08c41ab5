"""The transport over NCCL, for ranks that have a GPU each."""
