"""CUDA C++ sources and their loader."""
