"""Every rule of the kernels in plain Python: twins with their counts, and peers' rules."""
