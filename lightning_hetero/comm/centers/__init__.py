"""Parameter centers: in shared memory, in a thread of one rank, in an MPI window."""
