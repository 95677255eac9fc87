"""Import the package under test first: it chooses Triton's mode, which is fixed once Triton is imported."""

import optimized  # noqa: F401
