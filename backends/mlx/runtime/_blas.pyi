"""csrc/blas.cpp: MLX's matrix products by another BLAS. Built on Linux only."""

def install(
    library: str, cblas_sgemm: int, cblas_sgemv: int, cblas_dgemm: int, cblas_dgemv: int, cblas_cgemm: int, /
) -> bool:
    """Redirect a loaded library's calls to functions at these addresses; False, and nothing changed, if it makes none.

    The library is named by how its path ends, such as "/libmlx.so"; the functions are CBLAS's, with 32-bit integers.
    """
