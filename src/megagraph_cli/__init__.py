"""mgraph: an auto-parallel launcher for graph transformers (MegaGraph, arXiv 2609.34420)."""

__version__ = "0.1.0"
