"""Operations with kernels: one folder each, and the arithmetic that they share."""
