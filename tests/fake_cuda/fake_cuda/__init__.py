"""A stand-in for CUDA on a torch built for CPUs: tensors say "cuda", and streams, events and memory behave as CUDA's do.

Ops run by the CPU's kernels. They run at once as long as nothing holds their stream back. Else a thread of the device runs them
in the stream's order. So what uses a result too early finds other values, as on a GPU. Vector clocks watch streams, events and
host threads. They report each use that nothing orders, also where this run happened to be right.

:mod:`fake_cuda.loading` has torch take the stand-in, :mod:`fake_cuda.machine` is the devices, :mod:`fake_cuda.detector` what is
reported, and :mod:`fake_cuda.nccl` a backend of torch.distributed that behaves as NCCL's.

Not modelled: hardware queues, the number of kernels that fit, speed, and the bits of CUDA's kernels.
"""
